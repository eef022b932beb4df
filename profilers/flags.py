"""The flag exchange: one Triton program per rank that meets its peers in memory which all of them can write.

Each launch has a number, kept on the device, so that a captured graph counts by itself. A rank stores the number into
its own slot on every peer and then waits until all its slots hold it: what an all-reduce's first barrier does. The
device's clock is read right before and right after.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

if torch.version.hip:
    from triton.language.extra.hip import memrealtime as _ticks

    TICK_NS = 10  # 100 MHz on every CDNA
else:
    from triton.language.extra.cuda import globaltimer as _ticks

    TICK_NS = 1

EPOCH, ARMED, BEGAN = 0, 1, 2
"""Words of `control`: launches so far, whether to take part at all, and a time kept between two stamps."""

GAVE_UP = -1
"""Instead of a time: a peer did not come within the limit. A graph that waits for a dead peer must end."""


@triton.jit
def flag_exchange(control, waits, peers, rank, capacity, limit, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Meet the peers, and leave in `waits` how long that took.

    Args:
        control: [3] int64 on this rank's device.
        waits: [capacity] int64, in ticks.
        peers: [SIZE] int64, addresses of every rank's slots; slots are [SIZE] int32.
        limit: ticks after which to give up.
        LANES: power of two, at least SIZE and 32, so that with one warp no lane is a copy of another.
    """
    if tl.load(control + 1) != 0:
        epoch = tl.load(control) + 1
        tl.store(control, epoch)
        lanes = tl.arange(0, LANES)
        present = lanes < SIZE
        theirs = tl.load(peers + lanes, mask=present, other=0).to(tl.pointer_type(tl.int32))
        mine = tl.load(peers + rank).to(tl.pointer_type(tl.int32))
        flag = tl.full([LANES], 0, tl.int32) + epoch.to(tl.int32)
        began = _ticks()
        now = began
        tl.atomic_xchg(theirs + rank, flag, mask=present, sem="release", scope="sys")
        here = 0
        while (here < SIZE) & (now - began < limit):
            seen = tl.atomic_add(mine + lanes, tl.zeros([LANES], tl.int32), mask=present, sem="acquire", scope="sys")
            here = tl.sum((present & (seen >= flag)).to(tl.int32))
            now = _ticks()
        tl.store(waits + (epoch - 1) % capacity, tl.where(here < SIZE, -1, now - began))


@triton.jit
def stamp(control, waits, capacity, AFTER: tl.constexpr):
    """Read the clock before and after something that somebody else's kernel does in between."""
    if tl.load(control + 1) != 0:
        if AFTER:
            epoch = tl.load(control) + 1
            tl.store(control, epoch)
            tl.store(waits + (epoch - 1) % capacity, _ticks() - tl.load(control + 2))
        else:
            tl.store(control + 2, _ticks())
