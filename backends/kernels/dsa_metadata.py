"""Metadata of sparse MLA in one launch: lengths of every query row, prefix sums, both tables, and the schedules.

Programs, in order: one for lengths and prefix sums; the paged-MQA schedule; the top-k plan; the split-KV walk; then
`programs_per_row` for each request, which read its slots once and write them for each of its N query rows. All read
lengths straight from seq_lens, so none waits for another. The grid depends on captured sizes only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..modes import TailPolicy
from .decode_metadata import DecodeMetadataConfig
from .device import ceil_pages, floor_div, query_lengths
from .launch import launch
from .paged_mqa_schedule import ENTRIES, schedule_entries, schedule_programs, schedule_scan
from .split_kv_schedule import split_kv_walk, split_scan
from .topk_plan import plan_scan, topk_plan

SCAN = 1024
"""Rows scanned at once by the prefix-sum program."""


@triton.jit(do_not_specialize=["bs", "added", "width", "pages", "num_sms", "parts"])
def _dsa_metadata_kernel(
    req_pool_indices, seq_lens, req_to_token,
    cache_seqlens, cu_seqlens_k, expanded, dsa_cache_seqlens, dsa_cu_seqlens_k, ctx_lens_2d,
    schedule, plan, split_schedule, num_splits, page_table, real_page_table,
    bs, added, width, pages, num_sms, parts,
    req_to_token_stride, page_table_stride, real_page_table_stride,
    N: tl.constexpr, TOPK: tl.constexpr, PAGE_SIZE: tl.constexpr, MQA_2D: tl.constexpr,
    HAS_WIDE: tl.constexpr, HAS_REAL: tl.constexpr, STATIC_FULL: tl.constexpr,
    SCHEDULE_PROGRAMS: tl.constexpr, PLAN_PROGRAMS: tl.constexpr, SPLIT_PROGRAMS: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
    SCAN: tl.constexpr, SCHEDULE_SCAN: tl.constexpr, PLAN_SCAN: tl.constexpr, SPLIT_SCAN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    rows = bs * N
    added_row = added + 1 - N  # query row j of a request sees all but the N - 1 - j last tokens
    if pid == 0:
        _lengths(
            seq_lens, cache_seqlens, cu_seqlens_k, expanded, dsa_cache_seqlens, dsa_cu_seqlens_k, ctx_lens_2d,
            bs, added, N, TOPK, MQA_2D, SCAN,
        )  # fmt: skip
    elif pid < 1 + SCHEDULE_PROGRAMS:
        if MQA_2D:
            schedule_entries(seq_lens, added, bs, schedule, num_sms, pid - 1, 1, 1, ENTRIES, SCHEDULE_SCAN)
        else:
            schedule_entries(seq_lens, added_row, rows, schedule, num_sms, pid - 1, N, 1, ENTRIES, SCHEDULE_SCAN)
    elif pid < 1 + SCHEDULE_PROGRAMS + PLAN_PROGRAMS:
        topk_plan(seq_lens, added_row, rows, plan, N, 1, PLAN_SCAN)
    elif pid < 1 + SCHEDULE_PROGRAMS + PLAN_PROGRAMS + SPLIT_PROGRAMS:
        split_kv_walk(seq_lens, added_row, TOPK, rows, split_schedule, num_splits, parts, N, SPLIT_SCAN)
    else:
        part = pid - 1 - SCHEDULE_PROGRAMS - PLAN_PROGRAMS - SPLIT_PROGRAMS
        b = part // PROGRAMS_PER_ROW
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        step: tl.constexpr = PROGRAMS_PER_ROW * BLOCK
        tokens = req_to_token + tl.load(req_pool_indices + b).to(tl.int64) * req_to_token_stride
        length = tl.minimum(tl.maximum(tl.load(seq_lens + b).to(tl.int32) + added, 0), width)
        out = page_table + b.to(tl.int64) * N * page_table_stride
        real = real_page_table + b.to(tl.int64) * N * real_page_table_stride
        if HAS_WIDE:
            filled = width if STATIC_FULL else length
            for start in range(first, filled, step):
                columns = start + tl.arange(0, BLOCK)
                slot = tl.load(tokens + columns, mask=columns < filled, other=0)
                _store_slots(
                    out, real, slot, columns, filled, page_table_stride, real_page_table_stride, N, PAGE_SIZE, HAS_REAL
                )
        else:
            filled = pages if STATIC_FULL else ceil_pages(length, PAGE_SIZE)
            for start in range(first, filled, step):
                columns = start + tl.arange(0, BLOCK)
                slot = tl.load(tokens + columns.to(tl.int64) * PAGE_SIZE, mask=columns < filled, other=0)
                tl.store(real + columns, floor_div(slot, PAGE_SIZE), mask=columns < filled)


@triton.jit
def _store_slots(
    out, real, slot, columns, filled, stride, real_stride,
    N: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_REAL: tl.constexpr,
):  # fmt: skip
    """One tile of a request's slots into each of its N rows, and the pages that start in it."""
    mask = columns < filled
    for j in tl.static_range(N):
        tl.store(out + j * stride + columns, slot, mask=mask)
    if HAS_REAL:
        starts = mask & (columns % PAGE_SIZE == 0)
        for j in tl.static_range(N):
            tl.store(real + j * real_stride + columns // PAGE_SIZE, floor_div(slot, PAGE_SIZE), mask=starts)


@triton.jit
def _lengths(
    seq_lens, cache_seqlens, cu_seqlens_k, expanded, dsa_cache_seqlens, dsa_cu_seqlens_k, ctx_lens_2d,
    bs, added, N: tl.constexpr, TOPK: tl.constexpr, MQA_2D: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    total = tl.full((), 0, tl.int32)
    for start in range(0, bs, SCAN):
        b = start + tl.arange(0, SCAN)
        mask = b < bs
        lens = query_lengths(seq_lens, b, mask, added, 1)
        tl.store(cache_seqlens + b, lens, mask=mask)
        tl.store(cu_seqlens_k + 1 + b, total + tl.cumsum(lens, 0), mask=mask)
        total += tl.sum(lens, 0)
    sparse = tl.full((), 0, tl.int32)
    for start in range(0, bs * N, SCAN):
        row = start + tl.arange(0, SCAN)
        mask = row < bs * N
        lens = query_lengths(seq_lens, row, mask, added + 1 - N, N)
        if N > 1:  # with one query a request, expanded is cache_seqlens itself
            lens = tl.maximum(lens, 0)
            tl.store(expanded + row, lens, mask=mask)
        kept = tl.minimum(lens, TOPK)
        tl.store(dsa_cache_seqlens + row, kept, mask=mask)
        tl.store(dsa_cu_seqlens_k + 1 + row, sparse + tl.cumsum(kept, 0), mask=mask)
        sparse += tl.sum(kept, 0)
        if MQA_2D:
            tl.store(ctx_lens_2d + row, query_lengths(seq_lens, row // N, mask, added, 1), mask=mask)


def launch_dsa_metadata(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    md,
    bs: int,
    added: int,
    queries: int,
    topk: int,
    tail: TailPolicy,
    config: DecodeMetadataConfig,
) -> None:
    """Rebuild `md`, a `dsa.DsaMetadata` whose buffers were checked when they were bound, in one launch.

    Args:
        req_pool_indices, seq_lens: [>=bs] int32 or int64.
        added: tokens added to seq_lens, those of the draft in verify.
        queries: N, query rows of each request.
        topk: KV tokens that the indexer keeps.
        tail: LIVE_ONLY or STATIC_FULL.
    """
    schedule, plan, split = md.paged_mqa_schedule_metadata, md.topk_v2_plan, md.flashmla_metadata
    wide, real = md.page_table_1, md.real_page_table
    width = req_to_token.shape[1]
    num_sms = schedule.shape[0] - 1
    mqa_2d = md.paged_mqa_ctx_lens_2d.shape[1] > 1
    schedule_rows = bs if mqa_2d else bs * queries
    absent = md.cache_seqlens_int32  # any valid pointer; the compiled variant never touches it
    programs = schedule_programs(num_sms)
    launch(
        _dsa_metadata_kernel,
        (1 + programs + (plan is not None) + (split is not None) + bs * config.programs_per_row,),
        (
            req_pool_indices, seq_lens, req_to_token,
            md.cache_seqlens_int32, md.cu_seqlens_k, md.dsa_seqlens_expanded, md.dsa_cache_seqlens_int32,
            md.dsa_cu_seqlens_k, md.paged_mqa_ctx_lens_2d, schedule,
            absent if plan is None else plan,
            absent if split is None else split.flashmla_metadata,
            absent if split is None else split.num_splits,
            absent if wide is None else wide, real,
            bs, added, width, real.shape[1], num_sms, 0 if split is None else split.flashmla_metadata.shape[0],
            req_to_token.stride(0), 0 if wide is None else wide.stride(0), real.stride(0),
        ),
        {
            "N": queries,
            "TOPK": topk,
            "PAGE_SIZE": md.page_size,
            "MQA_2D": mqa_2d,
            "HAS_WIDE": wide is not None,
            "HAS_REAL": md.page_size > 1,
            "STATIC_FULL": tail is TailPolicy.STATIC_FULL,
            "SCHEDULE_PROGRAMS": programs,
            "PLAN_PROGRAMS": int(plan is not None),
            "SPLIT_PROGRAMS": int(split is not None),
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "ENTRIES": ENTRIES,
            "SCAN": min(SCAN, max(16, triton.next_power_of_2(bs * queries))),
            "SCHEDULE_SCAN": schedule_scan(schedule_rows),
            "PLAN_SCAN": plan_scan(bs * queries),
            "SPLIT_SCAN": split_scan(bs * queries),
            # Fewer warps would spill the schedule's tile.
            "num_warps": max(config.num_warps, 4),
        },
    )  # fmt: skip
