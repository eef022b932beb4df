"""FlashMLA split-KV schedule: which blocks of which requests each part walks. One launch, one program.

The walk is serial by nature: where a part ends depends on what every part before it left over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..schedules import SplitLayout
from .launch import launch

CURRENT = tl.constexpr(int(SplitLayout.CURRENT))
TOKENS = tl.constexpr(int(SplitLayout.TOKENS))

SPLIT_SCAN = 1024
"""Requests summed at once."""


def split_scan(bs: int) -> int:
    return min(SPLIT_SCAN, max(16, triton.next_power_of_2(bs)))


@triton.jit
def _length(seq_lens, request, added, most, N: tl.constexpr):
    return tl.minimum(tl.maximum(tl.load(seq_lens + request // N).to(tl.int32) + added + request % N, 0), most)


@triton.jit
def split_kv_walk(
    seq_lens, added, most, bs, schedule, num_splits, parts, N: tl.constexpr, SCAN: tl.constexpr,
    LAYOUT: tl.constexpr = CURRENT,
):  # fmt: skip
    """Schedule of lengths clamp(seq_lens[e // N] + added + e % N, 0, most), e < bs, bs >= 1.

    schedule: int32 [parts, 8]; num_splits: int32 [bs + 1]; both contiguous and written entirely. LAYOUT: SplitLayout.
    """
    LEAST: tl.constexpr = 0 if LAYOUT == TOKENS else 1  # what a request of length 0 counts as
    total = tl.full((), 0, tl.int32)
    for start in range(0, bs, SCAN):
        i = start + tl.arange(0, SCAN)
        mask = i < bs
        lens = tl.load(seq_lens + i // N, mask=mask, other=0).to(tl.int32) + added + i % N
        lens = tl.minimum(tl.maximum(lens, LEAST), tl.maximum(most, LEAST))
        total += tl.sum(tl.where(mask, (lens + 63) // 64 + 5, 0), 0)
    payload = (total + parts - 1) // parts + 5
    request = tl.full((), 0, tl.int32)
    block = tl.full((), 0, tl.int32)
    split = tl.full((), 0, tl.int32)
    splits = tl.full((), 0, tl.int32)
    tl.store(num_splits, splits)
    for part in range(0, parts):
        begin = request
        begin_block = block
        begin_split = split
        left = payload
        walking = request < bs
        while walking:
            rest = (tl.maximum(_length(seq_lens, request, added, most, N), LEAST) + 63) // 64 - block
            finish = left >= rest + 5
            opens = (left > 5) & (finish == 0)
            splits = tl.where(finish, splits + split + 1, splits)
            tl.store(num_splits + request + 1, splits, mask=finish)
            block = tl.where(finish, 0, tl.where(opens, block + left - 5, block))
            split = tl.where(finish, 0, tl.where(opens, split + 1, split))
            left = tl.where(finish, left - rest - 5, left)
            request = tl.where(finish, request + 1, request)
            walking = finish & (request < bs)
        last = tl.where(block > 0, request, request - 1)
        length = _length(seq_lens, last, added, most, N)
        blocks = (tl.maximum(length, LEAST) + 63) // 64
        end = tl.where(block > 0, block, tl.where(length == 0, 0, blocks))
        first_open = begin_block != 0
        last_open = (end != blocks) & (length != 0)
        both = (begin == last) & (first_open | last_open)
        first_flag = (first_open | both).to(tl.int32)
        last_flag = (last_open | both).to(tl.int32)
        if LAYOUT == TOKENS:
            begin_block *= 64
            end = tl.where(block > 0, block * 64, length)
        row = schedule + part * 8
        tl.store(row, begin)
        tl.store(row + (1 if LAYOUT == CURRENT else 2), last)
        tl.store(row + (2 if LAYOUT == CURRENT else 1), begin_block)
        tl.store(row + 3, end)
        tl.store(row + 4, begin_split)
        tl.store(row + 5, first_flag if LAYOUT == CURRENT else tl.full((), 0, tl.int32))
        tl.store(row + 6, last_flag if LAYOUT == CURRENT else tl.full((), 0, tl.int32))
        tl.store(row + 7, tl.full((), 0, tl.int32))


@triton.jit(do_not_specialize=["added", "bs", "parts"])
def _split_kv_kernel(lens, schedule, num_splits, added, bs, parts, SCAN: tl.constexpr, LAYOUT: tl.constexpr):
    split_kv_walk(lens, added, 2147483647, bs, schedule, num_splits, parts, 1, SCAN, LAYOUT)


def split_kv_schedule(
    lens: torch.Tensor,
    schedule: torch.Tensor,
    num_splits: torch.Tensor,
    added: int = 0,
    layout: SplitLayout = SplitLayout.CURRENT,
) -> None:
    """Fill a split-KV schedule, in place. See `schedules.split_kv` for the columns.

    Args:
        lens: [bs] int32 or int64, contiguous, bs >= 1, in tokens.
        schedule: [parts, 8] int32, contiguous, out.
        num_splits: [bs + 1] int32, out.
        added: tokens added to each length.
        layout: what the columns are.
    """
    bs = lens.shape[0]
    launch(
        _split_kv_kernel,
        (1,),
        (lens, schedule, num_splits, added, bs, schedule.shape[0]),
        {"SCAN": split_scan(bs), "LAYOUT": int(layout), "num_warps": 1},
    )
