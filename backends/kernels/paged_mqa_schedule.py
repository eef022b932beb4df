"""Paged-MQA schedule: where each multiprocessor starts in the rows' KV, dealt out evenly. One launch.

The indexer's logits kernel takes its work decomposition from here, so it must be rebuilt for every batch: a stale one
leaves multiprocessors waiting for work that never comes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import query_lengths
from .launch import launch

ENTRIES = 32
"""Entries per program; each program scans all rows, so few entries keep the tile small."""
SCHEDULE_SCAN = 256
"""Rows per turn."""


def schedule_programs(num_sms: int) -> int:
    """Programs that `schedule_entries` needs for a schedule of num_sms + 1 entries."""
    return triton.cdiv(num_sms + 1, ENTRIES)


def schedule_scan(rows: int) -> int:
    return min(SCHEDULE_SCAN, max(16, triton.next_power_of_2(rows)))


@triton.jit
def _work(seq_lens, row, rows, added, N: tl.constexpr, RATIO: tl.constexpr):
    lens = tl.maximum(query_lengths(seq_lens, row, row < rows, added, N), 0) // RATIO
    return (lens + 255) // 256  # lengths are not negative here, so truncation is floor


@triton.jit
def schedule_entries(
    seq_lens, added, rows, schedule, num_sms, program,
    N: tl.constexpr, RATIO: tl.constexpr, ENTRIES: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Entries [program * ENTRIES ...) of the schedule of lengths max(seq_lens[e // N] + added + e % N, 0) // RATIO.

    schedule: int32 [num_sms + 1, 2], contiguous.
    """
    total = tl.full((), 0, tl.int32)
    for start in range(0, rows, SCAN):
        total += tl.sum(_work(seq_lens, start + tl.arange(0, SCAN), rows, added, N, RATIO), 0)
    sm = program * ENTRIES + tl.arange(0, ENTRIES)
    target = sm * (total // num_sms) + tl.minimum(sm, total % num_sms)
    # The row is the number of rows that end at or before the target; work before it is the largest such end.
    found = tl.zeros([ENTRIES], tl.int32)
    before = tl.zeros([ENTRIES], tl.int32)
    carry = tl.full((), 0, tl.int32)
    for start in range(0, rows, SCAN):
        row = start + tl.arange(0, SCAN)
        work = _work(seq_lens, row, rows, added, N, RATIO)
        end = carry + tl.cumsum(work, 0)
        done = (end[None, :] <= target[:, None]) & (row < rows)[None, :]
        found += tl.sum(done.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(done, end[None, :], 0), 1))
        carry += tl.sum(work, 0)
    mask = sm <= num_sms
    tl.store(schedule + sm * 2, found, mask=mask)
    tl.store(schedule + sm * 2 + 1, tl.where(found < rows, target - before, 0), mask=mask)


@triton.jit(do_not_specialize=["rows", "num_sms"])
def _paged_mqa_schedule_kernel(ctx_lens, schedule, rows, num_sms, ENTRIES: tl.constexpr, SCAN: tl.constexpr):
    schedule_entries(ctx_lens, 0, rows, schedule, num_sms, tl.program_id(0), 1, 1, ENTRIES, SCAN)


def paged_mqa_schedule(ctx_lens: torch.Tensor, schedule: torch.Tensor) -> None:
    """Fill `schedule` for these contexts, in place.

    Args:
        ctx_lens: int32, contiguous, flattened: KV tokens of each row, >= 0.
        schedule: [num_sms + 1, 2] int32, contiguous, out: (row, unit of 256 tokens) where each multiprocessor starts.
    """
    rows, num_sms = ctx_lens.numel(), schedule.shape[0] - 1
    launch(
        _paged_mqa_schedule_kernel,
        (schedule_programs(num_sms),),
        (ctx_lens, schedule, rows, num_sms),
        {"ENTRIES": ENTRIES, "SCAN": schedule_scan(rows), "num_warps": 4},
    )
