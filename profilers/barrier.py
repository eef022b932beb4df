"""A barrier that lets N processes start within a fraction of a microsecond of each other.

A lock or a counter wakes its waiters one after another (tens to hundreds of us apart). Here the last arrival wakes
nobody: the leader sees that all have arrived, publishes a deadline a little ahead, and every rank spins on the clock
until then. What remains is the time of one clock reading, and whatever the operating system does to a rank.

Memory order: a message is one aligned 64-bit word that carries its whole meaning (an arrival, a deadline), has one
writer, and only grows. No reader combines two words that must be seen in order, so plain loads and stores are enough
on x86 and on weakly ordered ARM alike; both make aligned 64-bit accesses atomic.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from multiprocessing.context import BaseContext

from .clock import Clock, monotonic_ns

LEADER = 0

# 128 bytes a word, not 64: x86 prefetches lines in pairs, and some ARM cores have 128-byte lines.
_LINE = 16
_DEADLINE, _ABORT, _FIRST_RANK = 0, 1, 2

_STEP_BITS = 32

_yield_core = getattr(os, "sched_yield", lambda: None)


class BarrierError(RuntimeError):
    """A wait that cannot succeed."""


class BarrierTimeout(BarrierError):
    """Some ranks did not arrive in time; `missing` lists them."""

    def __init__(self, missing: list[int], timeout_s: float) -> None:
        super().__init__(f"rank {', '.join(map(str, missing))} did not reach the barrier within {timeout_s:g} s")
        self.missing = missing
        self.timeout_s = timeout_s


class BarrierMismatch(BarrierError):
    """Ranks arrived with different steps; `odd` lists those that differ from the most common one (or the leader's)."""

    def __init__(self, steps: list[int]) -> None:
        usual = max(steps, key=steps.count)
        self.odd = [rank for rank, step in enumerate(steps) if step != usual]
        found = ", ".join(f"rank {rank} at {steps[rank]}" for rank in self.odd)
        super().__init__(f"ranks are not at the same step: {found}, the others at {usual}")


class BarrierAborted(BarrierError):
    """Somebody ended all waits with `abort`."""


def barrier_memory(size: int, context: BaseContext) -> ctypes.Array:
    """Zeroed words for `size` ranks, shared with the processes that `context` starts with it as an argument.

    The memory has no name (its file is unlinked as it is made), so no crash can leave it behind.
    """
    return context.RawArray("q", _memory_words(size))


def mapped_barrier_memory(size: int, path: str) -> ctypes.Array:
    """The same in a file, for processes that nobody here starts: each maps it, and it may be unlinked then.

    Args:
        path: a file; grown to the size it needs.
    """
    length = _memory_words(size) * ctypes.sizeof(ctypes.c_longlong)
    with open(path, "r+b") as file:
        file.truncate(length)
        shared = mmap.mmap(file.fileno(), length)
    return (ctypes.c_longlong * _memory_words(size)).from_buffer(shared)


def abort(memory: ctypes.Array) -> None:
    """End every present and future wait on `memory` with `BarrierAborted`."""
    _words(memory)[_ABORT * _LINE] = 1


def arrivals(memory: ctypes.Array) -> list[int]:
    """How many waits each rank has entered so far."""
    size = len(memory) // _LINE - _FIRST_RANK - 1
    return [word >> _STEP_BITS for word in _arrival_words(memory, size).tolist()]


class DeadlineBarrier:
    """One rank's end of the barrier.

    Args:
        memory: of `barrier_memory(size, ...)`; all ranks hand in the same.
        rank, size: this rank, of how many.
        lead_us: how far ahead the leader puts the deadline. Must cover the time in which every rank notices it.
        timeout_s: longest wait for the other ranks.
        spin: hold the core until the deadline. False where ranks share cores: a spinning rank would keep the others
            from running until its time slice ends.
        clock: shared by all ranks.
        agree: called by the leader with the step once all its ranks are there, before it publishes the deadline: where
            leaders of several hosts meet.
    """

    def __init__(
        self,
        memory: ctypes.Array,
        rank: int,
        size: int,
        *,
        lead_us: float = 40.0,
        timeout_s: float = 60.0,
        spin: bool = True,
        clock: Clock = monotonic_ns,
        agree: Callable[[int], None] | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be within 0..{size - 1}, got {rank}")
        if lead_us <= 0:
            raise ValueError(f"lead_us must be above 0, got {lead_us}")
        self._words = _words(memory)
        self._arrivals = _arrival_words(memory, size)
        self._rank = rank
        self._size = size
        self._lead_ns = int(lead_us * 1000)
        self._timeout_s = timeout_s
        self._spin = spin
        self._clock = clock
        self._agree = agree
        self._waits = 0
        self._deadline = 0

    def wait(self, step: int = 0, in_lead: Callable[[], object] | None = None) -> int:
        """Return when all ranks start, and when that was meant to be, in ns of the clock.

        Start lag is the clock's next reading less the returned deadline. Warm-ups are collective too: every rank must
        call `wait` equally often.

        Args:
            step: any number below 2**32 on which all ranks must agree: a step, a checksum of a configuration.
            in_lead: called between learning the deadline and spinning for it, which is free time of `lead_us`.

        Raises:
            BarrierTimeout: ranks are missing after `timeout_s`.
            BarrierMismatch: ranks came with different steps (raised on the leader, the others see an abort).
            BarrierAborted: `abort` was called.
        """
        self._waits += 1
        word = self._waits << _STEP_BITS | step & 0xFFFF_FFFF
        self._arrivals[self._rank] = word
        if self._rank == LEADER:
            self._poll(self._all_arrived)
            self._check_steps(word)
            if self._agree is not None:
                self._agree(step & 0xFFFF_FFFF)
            self._words[_DEADLINE * _LINE] = self._clock() + self._lead_ns
        # A deadline lies after the one before it, so a new value alone says that it is new.
        self._poll(self._deadline_published)
        deadline = self._deadline = self._words[_DEADLINE * _LINE]
        if in_lead is not None:
            in_lead()
        clock = self._clock
        if self._spin:
            while clock() < deadline:
                pass
        else:
            while clock() < deadline:
                _yield_core()
        return deadline

    def abort(self) -> None:
        """End every wait of every rank."""
        self._words[_ABORT * _LINE] = 1

    def _all_arrived(self) -> bool:
        return min(self._arrivals.tolist()) >= self._waits << _STEP_BITS

    def _deadline_published(self) -> bool:
        return self._words[_DEADLINE * _LINE] != self._deadline

    def _check_steps(self, word: int) -> None:
        arrived = self._arrivals.tolist()
        if arrived.count(word) != self._size:
            self.abort()
            raise BarrierMismatch([other & 0xFFFF_FFFF for other in arrived])

    def _poll(self, ready: Callable[[], bool]) -> None:
        clock, words = self._clock, self._words
        limit = clock() + int(self._timeout_s * 1e9)
        while True:
            if words[_ABORT * _LINE]:
                raise BarrierAborted("the run was ended while this rank waited")
            if ready():
                return
            if clock() > limit:
                raise BarrierTimeout(self._missing(), self._timeout_s)
            # Always, also with a core to itself: the deadline's lead hides the 0.5 us of the call, and where ranks
            # share cores nobody else would arrive without it.
            _yield_core()

    def _missing(self) -> list[int]:
        absent = [rank for rank, word in enumerate(self._arrivals.tolist()) if word >> _STEP_BITS < self._waits]
        return absent or [LEADER]  # All here, no deadline: the leader stopped between the two.


def solitary_barrier() -> DeadlineBarrier:
    """For one rank that starts alone in the way it starts with others."""
    return DeadlineBarrier((ctypes.c_longlong * _memory_words(1))(), 0, 1)


def _memory_words(size: int) -> int:
    return (_FIRST_RANK + size + 1) * _LINE


def _words(memory: ctypes.Array) -> memoryview:
    """The memory as int64, from its first aligned line on.

    A memoryview, not an array: reading one word takes 43 ns instead of 75 and gives a plain int.
    """
    # Pages are mapped at page boundaries, so the offset is the same in every process.
    skip = -ctypes.addressof(memory) % (_LINE * 8) // 8
    return memoryview(memory).cast("B").cast("q")[skip:]


def _arrival_words(memory: ctypes.Array, size: int) -> memoryview:
    return _words(memory)[_FIRST_RANK * _LINE : (_FIRST_RANK + size) * _LINE : _LINE]
