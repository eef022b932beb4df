"""Top-k v2 plan: which rows are so long that the two-pass kernel takes them. One launch, in row order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import query_lengths
from .launch import launch

PLAN_SCAN = 1024
"""Rows per turn."""


def plan_scan(rows: int) -> int:
    return min(PLAN_SCAN, max(16, triton.next_power_of_2(rows)))


@triton.jit
def _lengths(seq_lens, row, rows, added, N: tl.constexpr, RATIO: tl.constexpr):
    # The top-k kernel reads lengths as unsigned, so a negative one would be the longest of all.
    return tl.maximum(query_lengths(seq_lens, row, row < rows, added, N), 0) // RATIO


@triton.jit
def _few_above(
    seq_lens, added, rows, threshold, most, N: tl.constexpr, RATIO: tl.constexpr, SCAN: tl.constexpr
):  # fmt: skip
    above = tl.full((), 0, tl.int32)
    for start in range(0, rows, SCAN):
        lens = _lengths(seq_lens, start + tl.arange(0, SCAN), rows, added, N, RATIO)
        above += tl.sum((lens > threshold).to(tl.int32), 0)
    return above <= most


@triton.jit
def topk_plan(seq_lens, added, rows, plan, N: tl.constexpr, RATIO: tl.constexpr, SCAN: tl.constexpr):
    """The plan of lengths max(seq_lens[e // N] + added + e % N, 0) // RATIO. plan: int32 [rows + 1, 2], contiguous."""
    ok = _few_above(seq_lens, added, rows, 393216, 128, N, RATIO, SCAN)
    threshold = tl.full((), 393216, tl.int32)
    ok = ok & _few_above(seq_lens, added, rows, 262144, 112, N, RATIO, SCAN)
    threshold = tl.where(ok, 262144, threshold)
    ok = ok & _few_above(seq_lens, added, rows, 196608, 80, N, RATIO, SCAN)
    threshold = tl.where(ok, 196608, threshold)
    ok = ok & _few_above(seq_lens, added, rows, 131072, 60, N, RATIO, SCAN)
    threshold = tl.where(ok, 131072, threshold)
    ok = ok & _few_above(seq_lens, added, rows, 98304, 48, N, RATIO, SCAN)
    threshold = tl.where(ok, 98304, threshold)
    ok = ok & _few_above(seq_lens, added, rows, 65536, 30, N, RATIO, SCAN)
    threshold = tl.where(ok, 65536, threshold)
    count = tl.full((), 0, tl.int32)
    for start in range(0, rows, SCAN):
        row = start + tl.arange(0, SCAN)
        lens = _lengths(seq_lens, row, rows, added, N, RATIO)
        chosen = lens > threshold
        slot = count + tl.cumsum(chosen.to(tl.int32), 0)
        tl.store(plan + slot * 2, row, mask=chosen)
        tl.store(plan + slot * 2 + 1, lens, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
    tl.store(plan, threshold)
    tl.store(plan + 1, count)


@triton.jit(do_not_specialize=["rows"])
def _topk_plan_kernel(lens, plan, rows, SCAN: tl.constexpr):
    topk_plan(lens, 0, rows, plan, 1, 1, SCAN)


def topk_v2_plan(lens: torch.Tensor, plan: torch.Tensor) -> None:
    """Fill `plan` for these lengths, in place; rows past the count keep their content.

    Args:
        lens: [rows] int32, contiguous, in tokens.
        plan: [rows + 1, 2] int32, contiguous, out: (threshold, count), then (row, length) of the rows above it.
    """
    rows = lens.shape[0]
    launch(_topk_plan_kernel, (1,), (lens, plan, rows), {"SCAN": plan_scan(rows), "num_warps": 4})
