"""Metadata of cascade attention over a draft tree in one launch: prefix attention, draft attention, and their merger.

The prefix is attended to once for all draft tokens of a request, page by page; what differs between them is a short
table of its own, one row per query, and the two results are merged. Programs of both kernels, in order: prefix sums
and write slots (verify only); one per request for its draft rows; `programs_per_row` for each row of the prefix table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .block_table import reachable_columns, write_block_row
from .decode_metadata import SCAN_BLOCK, SLOT_BLOCK, DecodeMetadataConfig
from .device import floor_div, swa_slot, write_swa_slots
from .draft_kv_indices import sum_before
from .launch import PreparedLaunch


@dataclass(frozen=True, slots=True)
class CascadeTables:
    """What a cascade rebuild writes. B requests, n queries each.

    Attributes:
        prefix_lens: [B] int32.
        prefix_cu: [B + 1] int32, from index 1, or None.
        prefix_table: [B, columns] int32, row-contiguous, live pages.
        draft_lens: [B * n] int32, or None where they are preset.
        draft_cu: [B * n + 1] int32, from index 1, or None.
        draft_table: [B * n, width] int32, row-contiguous.
        merged_lens, merged_cu, merged_table: [B * n], [B * n + 1], [B * n, columns] int32, or None: prefix and draft
            slots of each query in one row, for layers with a window.
        swa_mapping: [slots + 1] int64 or None, for the merged rows and the write slots.
        swa_out_cache_loc: [T] int64 or None.
    """

    prefix_lens: torch.Tensor
    prefix_cu: torch.Tensor | None
    prefix_table: torch.Tensor
    draft_lens: torch.Tensor | None
    draft_cu: torch.Tensor | None
    draft_table: torch.Tensor
    merged_lens: torch.Tensor | None = None
    merged_cu: torch.Tensor | None = None
    merged_table: torch.Tensor | None = None
    swa_mapping: torch.Tensor | None = None
    swa_out_cache_loc: torch.Tensor | None = None


@triton.jit
def _running_sums(lens, lens_cu, n, FIRST: tl.constexpr, SCAN: tl.constexpr):
    """lens_cu[1:] = running sum of lens[:n]; index 0 too if FIRST. Reads what other programs have just written."""
    total = tl.full((), 0, tl.int32)
    for begin in range(0, n, SCAN):
        i = begin + tl.arange(0, SCAN)
        counts = tl.load(lens + i, mask=i < n, other=0, cache_modifier=".cg").to(tl.int32)
        tl.store(lens_cu + 1 + i, total + tl.cumsum(counts, 0), mask=i < n)
        total += tl.sum(counts, 0)
    if FIRST:
        tl.store(lens_cu, tl.full((), 0, tl.int32))


@triton.jit
def _merge_prefix(
    tokens, merged, swa_mapping, length, first, merged_stride, columns,
    N: tl.constexpr, HAS_MAP: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The prefix slots at the front of N merged rows. merged: the first of them."""
    for begin in range(first, tl.minimum(length, columns), STEP):
        t = begin + tl.arange(0, BLOCK)
        mask = t < tl.minimum(length, columns)
        slot = tl.load(tokens + t, mask=mask, other=0)
        if HAS_MAP:
            slot = swa_slot(swa_mapping, slot, mask).to(tl.int32)
        for i in range(0, N):
            tl.store(merged + i * merged_stride + t, slot, mask=mask)


@triton.jit
def _verify_rows(
    req_pool_indices, seq_lens, req_to_token, custom_mask, live_tokens, swa_mapping,
    prefix_lens, draft_lens, draft_table, merged_lens, merged_table,
    row, width, columns, req_to_token_stride, draft_stride, merged_stride,
    N: tl.constexpr, NB: tl.constexpr, HAS_MERGED: tl.constexpr, HAS_MAP: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Draft rows of one request: slots that a token sees first, in order, then the others; how many it sees."""
    pool = tl.load(req_pool_indices + row).to(tl.int64)
    length = tl.load(seq_lens + row).to(tl.int32)
    live = tl.load(live_tokens).to(tl.int32)
    i = tl.arange(0, NB)[:, None]
    j = tl.arange(0, NB)[None, :]
    column = length + tl.arange(0, NB)
    inside = (i < N) & (j < N)
    slot = tl.load(
        req_to_token + pool * req_to_token_stride + column,
        mask=(tl.arange(0, NB) < N) & (column < width), other=0,
    )[None, :]  # fmt: skip
    # Masks of long batches have more than 2**31 cells.
    base = (sum_before(seq_lens, row, SCAN) + row.to(tl.int64) * N) * N
    cell = base + i * (length + N).to(tl.int64) + length + j
    # Padding has no cells: it repeats the first one.
    cell = tl.where(row * N + i < live, cell, 0)
    sees = tl.load(custom_mask + cell, mask=inside, other=0).to(tl.int32)
    before = tl.cumsum(sees, 1) - sees
    count = tl.sum(sees, 1)
    rank = tl.where(sees != 0, before, count[:, None] + j - before)
    query = row.to(tl.int64) * N + i
    slot = tl.broadcast_to(slot, (NB, NB))
    tl.store(draft_table + query * draft_stride + rank, slot, mask=inside)
    queries = row * N + tl.arange(0, NB)
    tl.store(draft_lens + queries, count, mask=tl.arange(0, NB) < N)
    tl.store(prefix_lens + row, length)
    if HAS_MERGED:
        seen = inside & (sees != 0) & (length + rank < columns)
        if HAS_MAP:
            slot = swa_slot(swa_mapping, slot, seen).to(tl.int32)
        tl.store(merged_table + query * merged_stride + length + rank, slot, mask=seen)
        tl.store(merged_lens + queries, length + count, mask=tl.arange(0, NB) < N)


@triton.jit(do_not_specialize=["bs", "columns", "merged_columns", "width", "n_loc", "n_swa_out", "loc_stride"])
def _verify_kernel(
    req_pool_indices, seq_lens, req_to_token, custom_mask, live_tokens, swa_mapping, out_cache_loc,
    prefix_lens, prefix_cu, prefix_table, draft_lens, draft_cu, draft_table, merged_lens, merged_cu, merged_table,
    swa_out_cache_loc, arrived,
    bs, columns, merged_columns, width, n_loc, n_swa_out, loc_stride,
    req_to_token_stride, prefix_stride, draft_stride, merged_stride,
    PAGE_SIZE: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, HAS_MERGED: tl.constexpr, HAS_MAP: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid == 0:
        _running_sums(seq_lens, prefix_cu, bs, False, SCAN)
    elif pid <= SLOT_PROGRAMS:
        write_swa_slots(swa_mapping, out_cache_loc, swa_out_cache_loc, n_loc, n_swa_out, loc_stride, pid - 1, SLOTS)
    elif pid <= SLOT_PROGRAMS + bs:
        _verify_rows(
            req_pool_indices, seq_lens, req_to_token, custom_mask, live_tokens, swa_mapping,
            prefix_lens, draft_lens, draft_table, merged_lens, merged_table,
            pid - 1 - SLOT_PROGRAMS, width, merged_columns, req_to_token_stride, draft_stride, merged_stride,
            N, NB, HAS_MERGED, HAS_MAP, SCAN,
        )  # fmt: skip
        # Sums over all queries need all masks counted. Whoever arrives last has them, and nobody waits. Each lane
        # announces the count that it has stored itself: its own release is then enough, whatever a barrier orders.
        i = tl.arange(0, NB)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tl.zeros([NB], tl.int32), 1, mask=i < N)
        if tl.max(tl.where(i < N, before, -1), 0) == bs * N - 1:
            _running_sums(draft_lens, draft_cu, bs * N, False, SCAN)
            if HAS_MERGED:
                _running_sums(merged_lens, merged_cu, bs * N, True, SCAN)
            tl.store(arrived, 0)
    else:
        part = pid - 1 - SLOT_PROGRAMS - bs
        row = part // PROGRAMS_PER_ROW
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        STEP: tl.constexpr = PROGRAMS_PER_ROW * BLOCK
        write_block_row(
            req_pool_indices, seq_lens, req_to_token, prefix_lens, prefix_table, row, first, 0, columns,
            req_to_token_stride, prefix_stride, PAGE_SIZE, False, STEP, BLOCK,
        )  # fmt: skip
        if HAS_MERGED:
            pool = tl.load(req_pool_indices + row).to(tl.int64)
            _merge_prefix(
                req_to_token + pool * req_to_token_stride, merged_table + row.to(tl.int64) * N * merged_stride,
                swa_mapping, tl.load(seq_lens + row).to(tl.int32), first, merged_stride, merged_columns,
                N, HAS_MAP, STEP, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["bs", "columns", "n_loc", "steps", "drafts"])
def _draft_kernel(
    req_pool_indices, seq_lens, req_to_token, out_cache_loc, prefix_lens, prefix_table, draft_lens, draft_table,
    bs, columns, n_loc, steps, drafts, req_to_token_stride, prefix_stride, draft_stride,
    PAGE_SIZE: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, DRAFTS: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < bs:
        length = tl.load(seq_lens + pid).to(tl.int32)
        partial = length - floor_div(length, PAGE_SIZE) * PAGE_SIZE
        tl.store(prefix_lens + pid, length - partial)
        branch = tl.arange(0, KB)
        e = tl.arange(0, DRAFTS)[None, :]
        query = pid * K + branch[:, None]
        at = query * steps + e
        given = (branch[:, None] < K) & (e < drafts)
        # A live batch may bring fewer rows than were captured; the others point at the padding page.
        page = floor_div(tl.load(out_cache_loc + at, mask=given & (at < n_loc), other=0), PAGE_SIZE)
        out = draft_table + query.to(tl.int64) * draft_stride
        if PAGE_SIZE == 1:
            tl.store(out + e, page.to(tl.int32), mask=given)
        else:
            left = floor_div(tl.load(out_cache_loc + at - 1, mask=given & (at < n_loc) & (e > 0), other=0), PAGE_SIZE)
            opens = given & ((e == 0) | (page != left))
            run = tl.cumsum(opens.to(tl.int32), 1) - 1
            tl.store(out + run, page.to(tl.int32), mask=opens)
            tl.store(draft_lens + pid * K + branch, tl.zeros([KB], tl.int32) + partial + drafts, mask=branch < K)
    else:
        part = pid - bs
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        write_block_row(
            req_pool_indices, seq_lens, req_to_token, prefix_lens, prefix_table, part // PROGRAMS_PER_ROW, first, 0,
            columns, req_to_token_stride, prefix_stride, PAGE_SIZE, False, PROGRAMS_PER_ROW * BLOCK, BLOCK,
        )  # fmt: skip


def prepare_verify_cascade(
    tables: CascadeTables,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    custom_mask: torch.Tensor,
    live_tokens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    arrived: torch.Tensor,
    page_size: int,
    config: DecodeMetadataConfig,
) -> Callable[..., None]:
    """The rebuild of target verify, in place; call it with (req_pool_indices, seq_lens, custom_mask, out_cache_loc).

    Args:
        tables: with every vector; merged rows need page_size 1.
        req_to_token: [rows, width] int32, row-contiguous, draft slots of a request behind its prefix.
        req_pool_indices, seq_lens: [>=B] int32 or int64; lengths without the draft tokens.
        custom_mask: flat bool; see `LiveBatch`.
        live_tokens: [1] int32; queries from here on are padding, which repeats the mask's first cell.
        out_cache_loc: [<=T] int64, read if there are write slots.
        arrived: [1] int32, zero, for this use only.
        config: block sizes.

    Cost: one launch, no allocation, no synchronisation; no recompilation when only lengths change.
    """
    t, absent = tables, tables.prefix_lens  # any valid pointer; the compiled variant never touches it
    bs = t.prefix_lens.shape[0]
    n = t.draft_lens.shape[0] // bs
    n_out = 0 if t.swa_out_cache_loc is None else t.swa_out_cache_loc.shape[0]
    slot_programs = -(-n_out // SLOT_BLOCK)

    def given(x: torch.Tensor | None) -> torch.Tensor:
        return absent if x is None else x

    merged = t.merged_table
    launch = PreparedLaunch(
        _verify_kernel,
        (1 + slot_programs + bs + bs * config.programs_per_row,),
        (
            req_pool_indices, seq_lens, req_to_token, custom_mask, live_tokens, given(t.swa_mapping), out_cache_loc,
            t.prefix_lens, t.prefix_cu, t.prefix_table, t.draft_lens, t.draft_cu, t.draft_table,
            given(t.merged_lens), given(t.merged_cu), given(merged), given(t.swa_out_cache_loc), arrived,
            bs, reachable_columns(t.prefix_table, req_to_token, page_size), 0 if merged is None else merged.shape[1],
            req_to_token.shape[1], out_cache_loc.shape[0], n_out, out_cache_loc.stride(0),
            req_to_token.stride(0), t.prefix_table.stride(0), t.draft_table.stride(0),
            0 if merged is None else merged.stride(0),
        ),
        {
            "PAGE_SIZE": page_size,
            "N": n,
            "NB": _block(n),
            "HAS_MERGED": merged is not None,
            "HAS_MAP": t.swa_mapping is not None,
            "SLOT_PROGRAMS": slot_programs,
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "SCAN": min(SCAN_BLOCK, max(16, _block(bs))),
            "SLOTS": SLOT_BLOCK,
            "num_warps": config.num_warps,
        },
        varying=(0, 1, 3, 6, 22, 24),
    )  # fmt: skip

    def rebuild(req_pool_indices, seq_lens, custom_mask, out_cache_loc) -> None:
        launch(req_pool_indices, seq_lens, custom_mask, out_cache_loc, out_cache_loc.shape[0], out_cache_loc.stride(0))

    return rebuild


def prepare_draft_cascade(
    tables: CascadeTables,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    steps: int,
    drafts: int,
    page_size: int,
    config: DecodeMetadataConfig,
) -> Callable[..., None]:
    """The rebuild of one draft step, in place; call it with (req_pool_indices, seq_lens, out_cache_loc).

    Args:
        tables: prefix_lens, prefix_table, draft_lens (with pages), draft_table of drafts + 1 columns.
        out_cache_loc: [<=B * topk * steps] int64, contiguous: the slots of all steps, steps innermost.
        topk, steps, drafts: K, S, and draft tokens attended to in this step.
        Otherwise as `prepare_verify_cascade`.
    """
    t = tables
    bs = t.prefix_lens.shape[0]
    launch = PreparedLaunch(
        _draft_kernel,
        (bs + bs * config.programs_per_row,),
        (
            req_pool_indices, seq_lens, req_to_token, out_cache_loc, t.prefix_lens, t.prefix_table,
            t.prefix_lens if t.draft_lens is None else t.draft_lens, t.draft_table,
            bs, reachable_columns(t.prefix_table, req_to_token, page_size), out_cache_loc.shape[0], steps, drafts,
            req_to_token.stride(0), t.prefix_table.stride(0), t.draft_table.stride(0),
        ),
        {
            "PAGE_SIZE": page_size,
            "K": topk,
            "KB": _block(topk),
            "DRAFTS": _block(drafts),
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "num_warps": config.num_warps,
        },
        varying=(0, 1, 3, 10),
    )  # fmt: skip

    def rebuild(req_pool_indices, seq_lens, out_cache_loc) -> None:
        launch(req_pool_indices, seq_lens, out_cache_loc, out_cache_loc.shape[0])

    return rebuild


def _block(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()
