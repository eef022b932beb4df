"""Metadata of DeepSeek-V4 in one launch, for T query rows.

Programs, in order: the indexer's paged-MQA schedule; its top-k plan; the two compressor plans; then `parts` programs
for each row, of which the first also writes the row's scalars and sliding window. All read lengths and rows straight
from the runner's slots, so none waits for another. The grid depends on captured sizes only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .compress_plan import decode_plan, verify_plan
from .compress_plan import plan_scan as compress_scan
from .compressed_fields import store_c128_pages, store_compressed
from .device import floor_div, swa_slot
from .launch import launch
from .paged_mqa_schedule import ENTRIES, schedule_entries, schedule_programs, schedule_scan
from .topk_plan import plan_scan, topk_plan

BLOCK = 128
"""Page columns per program and turn."""


def row_parts(rows: int, columns: int) -> int:
    """Programs that share a row's page list: enough for a long list of few rows, one for many rows."""
    return max(1, min(triton.cdiv(columns, BLOCK), 256 // max(rows, 1)))


@triton.jit
def write_metadata(
    pid,
    req_pool_indices, seq_lens, req_to_token, swa_mapping, out_cache_loc,
    raw_out_loc, seq_lens_casual, positions, page_table, swa_page_indices, swa_topk_lengths, swa_out_cache_loc,
    c4_out_loc, c4_lengths, c4_clamp1, c4_sparse_lengths, c4_sparse_lengths_raw, c4_sparse_pages,
    c128_out_loc, c128_lengths, c128_clamp1, c128_pages,
    schedule, plan, c4_plan, c4_write_plan, c128_plan, c128_write_plan,
    bs, added, n_loc, pages, c128_columns, num_sms,
    req_to_token_stride, loc_stride, page_table_stride, swa_stride, c128_stride, sparse_stride,
    N: tl.constexpr, TOPK: tl.constexpr, COMPRESSED: tl.constexpr, RAW_LENGTHS: tl.constexpr, VERIFY: tl.constexpr,
    RING4: tl.constexpr, RING128: tl.constexpr, KEEP_DRAFT: tl.constexpr,
    SCHEDULE_PROGRAMS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
    SCHEDULE_SCAN: tl.constexpr, PLAN_SCAN: tl.constexpr, COMPRESS_SCAN: tl.constexpr,
):  # fmt: skip
    """Everything that program `pid` writes."""
    planners: tl.constexpr = SCHEDULE_PROGRAMS + 3 if COMPRESSED else 0
    if pid < planners:
        if pid < SCHEDULE_PROGRAMS:
            schedule_entries(seq_lens, added, bs * N, schedule, num_sms, pid, N, 4, ENTRIES, SCHEDULE_SCAN)
        elif pid == SCHEDULE_PROGRAMS:
            topk_plan(seq_lens, added, bs * N, plan, N, 4, PLAN_SCAN)
        elif pid == SCHEDULE_PROGRAMS + 1:
            compressor_plan(
                req_pool_indices, seq_lens, req_to_token, swa_mapping, c4_plan, c4_write_plan, bs,
                req_to_token_stride, N, VERIFY, 4, RING4, KEEP_DRAFT, COMPRESS_SCAN,
            )  # fmt: skip
        else:
            compressor_plan(
                req_pool_indices, seq_lens, req_to_token, swa_mapping, c128_plan, c128_write_plan, bs,
                req_to_token_stride, N, VERIFY, 128, RING128, KEEP_DRAFT, COMPRESS_SCAN,
            )  # fmt: skip
    else:
        row = (pid - planners) // PARTS
        part = (pid - planners) % PARTS
        at = row.to(tl.int64)
        tokens = req_to_token + tl.load(req_pool_indices + row // N).to(tl.int64) * req_to_token_stride
        context = tl.load(seq_lens + row // N).to(tl.int32) + added + row % N
        if part == 0:
            slot = tl.load(out_cache_loc + at * loc_stride, mask=row < n_loc, other=0)
            tl.store(raw_out_loc + row, slot)
            tl.store(seq_lens_casual + row, context)
            tl.store(positions + row, context - 1)
            tl.store(swa_topk_lengths + row, tl.minimum(context, 128))
            tl.store(swa_out_cache_loc + row, swa_slot(swa_mapping, slot, row >= 0).to(tl.int32))
            k = tl.arange(0, 128)
            position = context - 1 - k  # newest first
            seen = position >= 0
            window = swa_slot(swa_mapping, tl.load(tokens + position, mask=seen, other=0), seen).to(tl.int32)
            tl.store(swa_page_indices + at * swa_stride + k, tl.where(seen, window, -1))
            if COMPRESSED:
                store_compressed(row, context, slot, c4_out_loc, c4_lengths, c4_clamp1, 4)
                whole = floor_div(context, 128)
                ends = whole * 128 == context
                tl.store(c128_out_loc + row, tl.where(ends, floor_div(slot.to(tl.int64), 128), 0))
                tl.store(c128_clamp1 + row, tl.maximum(whole, 1))
                c4 = floor_div(context, 4)
                tl.store(c4_sparse_lengths + row, tl.minimum(tl.maximum(c4, 1), TOPK))
                if RAW_LENGTHS:
                    tl.store(c128_lengths + row, whole)
                    tl.store(c4_sparse_lengths_raw + row, tl.minimum(c4, TOPK))
                tl.store(c4_sparse_pages + at * sparse_stride + tl.arange(0, TOPK), tl.full([TOPK], -1, tl.int32))
        columns = tl.maximum(pages, (c128_columns + 1) // 2) if COMPRESSED else pages
        for start in range(part * BLOCK, columns, PARTS * BLOCK):
            c = start + tl.arange(0, BLOCK)
            slots = tl.load(tokens + c.to(tl.int64) * 256, mask=c < pages, other=0)
            page = floor_div(slots, 256)
            tl.store(page_table + at * page_table_stride + c, page, mask=c < pages)
            if COMPRESSED:
                store_c128_pages(c128_pages + at * c128_stride, page, c, floor_div(context, 128), c128_columns)


@triton.jit
def compressor_plan(
    req_pool_indices, seq_lens, req_to_token, swa_mapping, plan, write_plan, bs, stride,
    N: tl.constexpr, VERIFY: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, KEEP_DRAFT: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """The plan that one compressor gets in this mode."""
    if VERIFY:
        verify_plan(
            req_pool_indices, seq_lens, req_to_token, swa_mapping, plan, write_plan, bs * N, stride,
            N, RATIO, RING, KEEP_DRAFT, SCAN,
        )  # fmt: skip
    else:
        decode_plan(req_pool_indices, seq_lens, req_to_token, swa_mapping, plan, bs, stride, RATIO, RING, SCAN)


@triton.jit(do_not_specialize=["bs", "added", "n_loc", "pages", "c128_columns", "num_sms"])
def _deepseek_v4_kernel(
    req_pool_indices, seq_lens, req_to_token, swa_mapping, out_cache_loc,
    raw_out_loc, seq_lens_casual, positions, page_table, swa_page_indices, swa_topk_lengths, swa_out_cache_loc,
    c4_out_loc, c4_lengths, c4_clamp1, c4_sparse_lengths, c4_sparse_lengths_raw, c4_sparse_pages,
    c128_out_loc, c128_lengths, c128_clamp1, c128_pages,
    schedule, plan, c4_plan, c4_write_plan, c128_plan, c128_write_plan,
    bs, added, n_loc, pages, c128_columns, num_sms,
    req_to_token_stride, loc_stride, page_table_stride, swa_stride, c128_stride, sparse_stride,
    N: tl.constexpr, TOPK: tl.constexpr, COMPRESSED: tl.constexpr, RAW_LENGTHS: tl.constexpr, VERIFY: tl.constexpr,
    RING4: tl.constexpr, RING128: tl.constexpr, KEEP_DRAFT: tl.constexpr,
    SCHEDULE_PROGRAMS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
    SCHEDULE_SCAN: tl.constexpr, PLAN_SCAN: tl.constexpr, COMPRESS_SCAN: tl.constexpr,
):  # fmt: skip
    write_metadata(
        tl.program_id(0),
        req_pool_indices, seq_lens, req_to_token, swa_mapping, out_cache_loc,
        raw_out_loc, seq_lens_casual, positions, page_table, swa_page_indices, swa_topk_lengths, swa_out_cache_loc,
        c4_out_loc, c4_lengths, c4_clamp1, c4_sparse_lengths, c4_sparse_lengths_raw, c4_sparse_pages,
        c128_out_loc, c128_lengths, c128_clamp1, c128_pages,
        schedule, plan, c4_plan, c4_write_plan, c128_plan, c128_write_plan,
        bs, added, n_loc, pages, c128_columns, num_sms,
        req_to_token_stride, loc_stride, page_table_stride, swa_stride, c128_stride, sparse_stride,
        N, TOPK, COMPRESSED, RAW_LENGTHS, VERIFY,
        RING4, RING128, KEEP_DRAFT,
        SCHEDULE_PROGRAMS, PARTS, BLOCK, ENTRIES,
        SCHEDULE_SCAN, PLAN_SCAN, COMPRESS_SCAN,
    )  # fmt: skip


def launch_deepseek_v4_metadata(md, *batch) -> None:
    """Rebuild `md`, a `deepseek_v4.DeepseekV4Metadata`, in one launch; arguments as of `prepared`."""
    launch(_deepseek_v4_kernel, *prepared(md, *batch))


def prepared(
    md,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa: torch.Tensor,
    out_cache_loc: torch.Tensor,
    bs: int,
    added: int,
    queries: int,
    rings: tuple[int, int],
    keep_draft: bool = True,
) -> tuple[tuple[int, ...], tuple, dict]:
    """Grid, arguments and options of a launch that rebuilds `md`, whose buffers were checked when they were bound.

    Args:
        req_pool_indices, seq_lens: [>=bs] int32 or int64.
        out_cache_loc: [n] int32 or int64, write slots of the live tokens; 0 is written for the rest.
        added: tokens by which a request's first row sees more than seq_lens.
        queries: N, query rows of each request.
        rings: states kept per request, for ratios 4 and 128.
        keep_draft: see `compress_plan.build_verify_plan`.
    """
    rows, compressed = bs * queries, md.indexer is not None
    absent = md.positions_casual  # any valid pointer; the compiled variant never touches it
    or_absent = lambda t: absent if t is None else t  # noqa: E731
    if compressed:
        c4, c128 = md.c4_plan.tensors(), md.c128_plan.tensors()
        verify = len(c4) > 1
        planned = (md.indexer.schedule, md.indexer.topk_plan, c4[0], c4[-1], c128[0], c128[-1])
    else:
        verify, planned = False, (absent,) * 6
    raw_lengths = getattr(md, "c128_topk_lengths_raw", None)
    num_sms = planned[0].shape[0] - 1
    pages = md.page_table.shape[1]
    c128_columns = md.c128_page_indices.shape[1] if compressed else 0
    programs = schedule_programs(num_sms) if compressed else 0
    parts = row_parts(rows, max(pages, c128_columns // 2))
    return (
        ((programs + 3 if compressed else 0) + rows * parts,),
        (
            req_pool_indices, seq_lens, req_to_token, full_to_swa, out_cache_loc,
            md.raw_out_loc, md.seq_lens_casual, md.positions_casual, md.page_table, md.swa_page_indices,
            md.swa_topk_lengths, md.swa_out_cache_loc,
            or_absent(md.c4_out_loc), or_absent(md.c4_topk_lengths_raw), or_absent(md.c4_topk_lengths_clamp1),
            or_absent(md.c4_sparse_topk_lengths), or_absent(getattr(md, "c4_sparse_topk_lengths_raw", None)),
            or_absent(md.c4_sparse_page_indices), or_absent(md.c128_out_loc), or_absent(raw_lengths),
            or_absent(md.c128_topk_lengths_clamp1), or_absent(md.c128_page_indices),
            *planned,
            bs, added, out_cache_loc.shape[0], pages, c128_columns, num_sms,
            req_to_token.stride(0), out_cache_loc.stride(0), md.page_table.stride(0), md.swa_page_indices.stride(0),
            md.c128_page_indices.stride(0) if compressed else 0,
            md.c4_sparse_page_indices.stride(0) if compressed else 0,
        ),
        {
            "N": queries,
            "TOPK": md.c4_sparse_topk,
            "COMPRESSED": compressed,
            "RAW_LENGTHS": raw_lengths is not None,
            "VERIFY": verify,
            "RING4": rings[0],
            "RING128": rings[1],
            "KEEP_DRAFT": keep_draft,
            "SCHEDULE_PROGRAMS": programs,
            "PARTS": parts,
            "BLOCK": BLOCK,
            "ENTRIES": ENTRIES,
            "SCHEDULE_SCAN": schedule_scan(rows),
            "PLAN_SCAN": plan_scan(rows),
            "COMPRESS_SCAN": compress_scan(rows),
            "num_warps": 4,
        },
    )  # fmt: skip
