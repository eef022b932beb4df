"""Index streams of a unified KV buffer: window tokens first, oldest first, then compressed entries behind them.

A request owns a ring of `ring` rows, so token p of it lives in row pool * ring + p % ring; the `swa_pages` rows of all
rings come before the compressed region. Three streams share the window part: without compression (swa), with 128-fold
entries (hca) and with the 4-fold entries that each layer appends after its top-k (csa).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .deepseek_v4_metadata import prepared, write_metadata
from .device import floor_div
from .launch import launch

SCAN = 256
"""Rows summed at once."""


@triton.jit
def _store_window(stream, pool, context, window, ring):
    k = tl.arange(0, 128)
    token = context - window + k
    tl.store(stream + k, pool * ring + token % ring, mask=k < window)


@triton.jit
def _window_kernel(
    pools, contexts, requests, swa_indptr, hca_indptr, csa_indptr, swa_indices, hca_indices, csa_indices, ring
):  # fmt: skip
    row = tl.program_id(0)
    pool = tl.load(pools + tl.load(requests + row))
    context = tl.load(contexts + row)
    window = tl.minimum(context, 128)
    _store_window(swa_indices + tl.load(swa_indptr + row), pool, context, window, ring)
    _store_window(hca_indices + tl.load(hca_indptr + row), pool, context, window, ring)
    _store_window(csa_indices + tl.load(csa_indptr + row), pool, context, window, ring)


@triton.jit
def _tail_kernel(pages, lengths, windows, hca_indptr, hca_indices, swa_pages, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    out = hca_indices + tl.load(hca_indptr + row) + tl.load(windows + row)
    for start in range(0, length, BLOCK):
        k = start + tl.arange(0, BLOCK)
        page = tl.load(pages + row.to(tl.int64) * width + k, mask=k < length, other=0)
        tl.store(out + k, tl.where(page == -1, -1, page + swa_pages), mask=k < length)


def build_window_indices(
    pools: torch.Tensor,
    contexts: torch.Tensor,
    requests: torch.Tensor,
    indptrs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ring: int,
) -> None:
    """Window part of the three streams. pools [B], contexts [T], requests [T] (row -> request), indptrs [T + 1]."""
    launch(
        _window_kernel, (contexts.shape[0],), (pools, contexts, requests, *indptrs, *indices, ring), {"num_warps": 4}
    )


def append_compressed(
    pages: torch.Tensor,
    lengths: torch.Tensor,
    windows: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    swa_pages: int,
    width: int,
) -> None:
    """128-fold entries behind the windows. pages [T * width], lengths and windows [T], indptr [T + 1]; -1 stays -1."""
    launch(
        _tail_kernel,
        (lengths.shape[0],),
        (pages, lengths, windows, indptr, indices, swa_pages, width),
        {"BLOCK": 128, "num_warps": 4},
    )


@triton.jit(do_not_specialize=["bs", "added", "n_loc", "pages", "c128_columns", "num_sms", "ring", "swa_pages"])
def _unified_kernel(
    req_pool_indices, seq_lens, req_to_token, swa_mapping, out_cache_loc,
    raw_out_loc, seq_lens_casual, positions, page_table, swa_page_indices, swa_topk_lengths, swa_out_cache_loc,
    c4_out_loc, c4_lengths, c4_clamp1, c4_sparse_lengths, c4_sparse_lengths_raw, c4_sparse_pages,
    c128_out_loc, c128_lengths, c128_clamp1, c128_pages,
    schedule, plan, c4_plan, c4_write_plan, c128_plan, c128_write_plan,
    bs, added, n_loc, pages, c128_columns, num_sms,
    req_to_token_stride, loc_stride, page_table_stride, swa_stride, c128_stride, sparse_stride,
    swa_indptr, hca_indptr, csa_indptr, swa_indices, hca_indices, swa_loc, csa_indices,
    unified_c4_loc, unified_c128_loc, state_slot, chunk_start, first_query, final_position,
    ring, swa_pages,
    STREAMS: tl.constexpr, UNIFIED_SCAN: tl.constexpr,
    N: tl.constexpr, TOPK: tl.constexpr, COMPRESSED: tl.constexpr, RAW_LENGTHS: tl.constexpr, VERIFY: tl.constexpr,
    RING4: tl.constexpr, RING128: tl.constexpr, KEEP_DRAFT: tl.constexpr,
    SCHEDULE_PROGRAMS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
    SCHEDULE_SCAN: tl.constexpr, PLAN_SCAN: tl.constexpr, COMPRESS_SCAN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    write_metadata(
        pid,
        req_pool_indices, seq_lens, req_to_token, swa_mapping, out_cache_loc,
        raw_out_loc, seq_lens_casual, positions, page_table, swa_page_indices, swa_topk_lengths, swa_out_cache_loc,
        c4_out_loc, c4_lengths, c4_clamp1, c4_sparse_lengths, c4_sparse_lengths_raw, c4_sparse_pages,
        c128_out_loc, c128_lengths, c128_clamp1, c128_pages,
        schedule, plan, c4_plan, c4_write_plan, c128_plan, c128_write_plan,
        bs, added, n_loc, pages, c128_columns, num_sms,
        req_to_token_stride, loc_stride, page_table_stride, swa_stride, c128_stride, sparse_stride,
        N, TOPK, COMPRESSED, RAW_LENGTHS, VERIFY, RING4, RING128, KEEP_DRAFT,
        SCHEDULE_PROGRAMS, PARTS, BLOCK, ENTRIES, SCHEDULE_SCAN, PLAN_SCAN, COMPRESS_SCAN,
    )  # fmt: skip
    planners: tl.constexpr = SCHEDULE_PROGRAMS + 3 if COMPRESSED else 0
    if pid >= planners:
        row = (pid - planners) // PARTS
        part = (pid - planners) % PARTS
        pool = tl.load(req_pool_indices + row // N)
        context = tl.load(seq_lens + row // N).to(tl.int32) + added + row % N
        if part == 0 and COMPRESSED:
            slot = tl.load(out_cache_loc + row.to(tl.int64) * loc_stride, mask=row < n_loc, other=0).to(tl.int64)
            c4 = tl.where(floor_div(context, 4) * 4 == context, floor_div(slot, 4), 0)
            c128 = tl.where(floor_div(context, 128) * 128 == context, floor_div(slot, 128), 0)
            tl.store(unified_c4_loc + row, c4 + swa_pages)
            tl.store(unified_c128_loc + row, c128 + swa_pages)
        if STREAMS:
            _write_streams(
                seq_lens, req_to_token, row, part, pool, context,
                swa_indptr, hca_indptr, csa_indptr, swa_indices, hca_indices, csa_indices, swa_loc,
                pages, req_to_token_stride, ring, swa_pages, TOPK, PARTS, BLOCK, UNIFIED_SCAN,
            )  # fmt: skip
        elif part == 0:
            total = context + N - 1 - row % N
            tl.store(state_slot + row, pool.to(tl.int64))
            tl.store(chunk_start + row, (total - N).to(tl.int64))
            tl.store(first_query + row, (row - row % N).to(tl.int64))
            tl.store(final_position + row, (total - 1).to(tl.int64))


@triton.jit
def _write_streams(
    seq_lens, req_to_token, row, part, pool, context,
    swa_indptr, hca_indptr, csa_indptr, swa_indices, hca_indices, csa_indices, swa_loc,
    pages, stride, ring, swa_pages,
    TOPK: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """One row's segments of the three streams. Where they start is summed over the rows before it, by every program:
    that takes one short loop and no second launch."""
    swa_start = tl.full((), 0, tl.int32)
    c128_before = tl.full((), 0, tl.int32)
    c4_before = tl.full((), 0, tl.int32)
    for start in range(0, row, SCAN):
        t = start + tl.arange(0, SCAN)
        lens = tl.load(seq_lens + t, mask=t < row, other=0).to(tl.int32)
        swa_start += tl.sum(tl.minimum(lens, 128), 0)
        c128_before += tl.sum(lens // 128, 0)
        c4_before += tl.sum(tl.minimum(lens // 4, TOPK), 0)
    window = tl.minimum(context, 128)
    entries = context // 128
    hca_start = swa_start + c128_before
    csa_start = swa_start + c4_before
    request = pool.to(tl.int32)
    if part == 0:
        tl.store(swa_indptr + row + 1, swa_start + window)
        tl.store(hca_indptr + row + 1, hca_start + window + entries)
        tl.store(csa_indptr + row + 1, csa_start + window + tl.minimum(context // 4, TOPK))
        _store_window(swa_indices + swa_start, request, context, window, ring)
        _store_window(hca_indices + hca_start, request, context, window, ring)
        _store_window(csa_indices + csa_start, request, context, window, ring)
        tl.store(swa_loc + row, request * ring + (context - 1) % ring)
    tokens = req_to_token + pool.to(tl.int64) * stride
    out = hca_indices + hca_start + window
    for start in range(part * BLOCK, (entries + 1) // 2, PARTS * BLOCK):
        c = start + tl.arange(0, BLOCK)
        page = floor_div(tl.load(tokens + c.to(tl.int64) * 256, mask=c < pages, other=0), 256) * 2
        tl.store(out + 2 * c, tl.where(page == -1, -1, page + swa_pages), mask=2 * c < entries)
        tl.store(out + 2 * c + 1, tl.where(page + 1 == -1, -1, page + 1 + swa_pages), mask=2 * c + 1 < entries)


def launch_unified_metadata(md, *batch: object, ring: int, swa_pages: int) -> None:
    """Rebuild `md`, a `deepseek_v4_hip_radix.HipRadixMetadata` with unified streams, in one launch.

    Args:
        batch: arguments of `deepseek_v4_metadata.prepared`.
        ring: rows of the unified buffer that a request owns. swa_pages: rows before the compressed region.
    """
    grid, args, options = prepared(md, *batch)
    u, absent = md.unified, md.positions_casual
    outputs = (
        u.swa_indptr, u.hca_indptr, u.csa_indptr, u.swa_indices, u.hca_indices, u.swa_loc, u.csa_indices,
        u.c4_out_loc, u.c128_out_loc, u.pf_state_slot, u.pf_chunk_start, u.pf_cu_q, u.pf_final_pos,
    )  # fmt: skip
    rows = md.seq_lens_casual.shape[0]
    launch(
        _unified_kernel,
        grid,
        (*args, *(absent if t is None else t for t in outputs), ring, swa_pages),
        {
            **options,
            "STREAMS": u.swa_indptr is not None,
            "UNIFIED_SCAN": min(SCAN, max(16, triton.next_power_of_2(rows))),
        },
    )
