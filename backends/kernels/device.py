"""Device functions shared by the kernels. Every one is plain index arithmetic, valid for any warp size."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def floor_div(x, D: tl.constexpr):
    """x / D rounded down, D a positive constant. Triton's ``//`` truncates, which sends slot -1 to page 0."""
    if D == 1:
        return x
    if (D & (D - 1)) == 0:
        return (x - (x & (D - 1))) // D  # exact division: the low bits are the floor remainder, also below zero
    q = x // D
    return q - (x - q * D < 0).to(x.dtype)


@triton.jit
def load_below(x, i, n):
    """x[i], and x[n - 1] for i >= n >= 1: for sums that leave those lanes out themselves.

    Loads with a mask each wait for a free predicate, of which there are seven, and then several of one lane follow each
    other: eight memory round trips instead of one where 128 lanes add up 1,024 lengths.
    """
    return tl.load(x + tl.minimum(i, n - 1))


@triton.jit
def swa_slot(mapping, slot, mask):
    """Slot in the sliding-window pool; -1 stays -1. mapping: int64, slot: any integer; returns int64."""
    known = slot >= 0
    # Lanes without a slot read slot 0's entry: see load_below.
    mapped = tl.load(mapping + tl.where(mask & known, slot, 0).to(tl.int64))
    return tl.where(known, mapped, -1)


@triton.jit
def ceil_pages(length, P: tl.constexpr):
    """Pages that `length` tokens occupy; 0 for length <= 0."""
    return floor_div(length + (P - 1), P)


@triton.jit
def batch_max(lens, offset, n, BLOCK: tl.constexpr):
    """max(lens[:n]) + offset as int32, in chunks of BLOCK."""
    top = tl.full((), -2147483648, tl.int32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(load_below(lens, i, n).to(tl.int32), 0))  # one twice changes no maximum
    return top + offset


@triton.jit
def query_lengths(seq_lens, row, mask, added, N: tl.constexpr):
    """Context of query row b * N + j as int32: seq_lens[b] + added + j. 0 where masked, not clamped elsewhere."""
    lens = tl.load(seq_lens + row // N, mask=mask, other=0).to(tl.int32) + added + row % N
    return tl.where(mask, lens, 0)


@triton.jit
def write_swa_slots(
    swa_mapping, out_cache_loc, swa_out_cache_loc, n_loc, n_swa_out, loc_stride, block, SLOTS: tl.constexpr
):
    """Block `block` of SLOTS write slots: swa_out_cache_loc[i] = swa_slot(out_cache_loc[i]), zeros from n_loc on."""
    i = block * SLOTS + tl.arange(0, SLOTS)
    given = i < tl.minimum(n_loc, n_swa_out)
    loc = tl.load(out_cache_loc + i.to(tl.int64) * loc_stride, mask=given, other=0)
    slots = tl.where(given, swa_slot(swa_mapping, loc, given), 0)
    tl.store(swa_out_cache_loc + i, slots, mask=i < n_swa_out)
