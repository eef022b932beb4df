"""CSR attention metadata in one launch: prefix sums, KV index lists (full and window), split counts, masks, slots.

Programs, in order: one for all prefix sums; one per vector of split counts; ceil(T / SLOT_BLOCK) for write slots; up
to MASK_PROGRAMS for the tree mask; `programs_per_row` for each request's index lists. Nobody waits for the prefix
sums: a program that needs where its request starts adds up the lengths before it. The grid depends on captured sizes
only; lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from .device import load_below, write_swa_slots
from .kv_indices import gather_slots, store_slots
from .kv_splits import NO_LIMIT, SplitRule, write_splits
from .launch import PreparedLaunch

SLOT_BLOCK = 512
MASK_BLOCK = 4096
MASK_PROGRAMS = 128
SCAN_BLOCK = 1024
"""Requests summed at once; larger batches are carried over chunks."""


@dataclass(frozen=True, slots=True)
class CsrConfig:
    """Block sizes, the tunable part.

    Attributes:
        programs_per_row: programs that share one request's index list.
        block: tokens per program and turn.
        num_warps: warps per program.
    """

    programs_per_row: int
    block: int
    num_warps: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


FEWEST_TOKENS, MOST_TOKENS = 256, 2048
"""Tokens of a program's turn: eight a lane are on their way together, at most."""
PROGRAMS = 1024
"""Programs for the lists of one launch: enough for one long request among short ones, few enough to start at once."""


def default_config(bs: int, max_context: int) -> CsrConfig:
    """Block sizes from what is known at capture.

    Index lists move 8 or 12 bytes a token, so long batches are bound by memory, and unlike requests by the longest:
    wide blocks first, then as many programs as PROGRAMS allows.
    """
    programs_per_row = max(PROGRAMS // max(bs, 1), 1)
    share = -(-max_context // programs_per_row)
    block = min(max(1 << (share - 1).bit_length(), FEWEST_TOKENS), MOST_TOKENS)
    return CsrConfig(min(programs_per_row, -(-max_context // block)), block, 8 if block == MOST_TOKENS else 4)


@dataclass(frozen=True, slots=True)
class CsrTables:
    """What one captured shape rebuilds; None is not rebuilt. B requests, T tokens, q queries per request.

    Attributes:
        kv_indptr: [B + 1] int32, from index 1: running sum of the KV lengths.
        kv_indices: [capacity] int32 or int64: the index lists.
        window: tokens of a sliding window, for the window tables.
        window_kv_indptr, window_kv_indices: the same for the last min(length, window) tokens.
        window_kv_offsets: [>=B] int32: first token of each window.
        mapping: [slots + 1] int64, full slot -> sliding-window slot, for the window list and the write slots.
        num_kv_splits, window_num_kv_splits: [>=B] int32; need `splits`.
        splits: SplitRule.
        queries: q.
        qo_indptr: [B + 1] int32 or int64: i * q.
        mask_indptr: [B + 1] int64, from index 1: running sum of q * (seq_len + q).
        custom_mask: [cells] uint8: the tree mask.
        swa_out_cache_loc: [T] int64: mapped write slots, then zeros.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    window: int = 0
    window_kv_indptr: torch.Tensor | None = None
    window_kv_indices: torch.Tensor | None = None
    window_kv_offsets: torch.Tensor | None = None
    mapping: torch.Tensor | None = None
    num_kv_splits: torch.Tensor | None = None
    window_num_kv_splits: torch.Tensor | None = None
    splits: SplitRule | None = None
    queries: int = 0
    qo_indptr: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    swa_out_cache_loc: torch.Tensor | None = None


@triton.jit
def _kv_lengths(seq_lens, extend_lens, i, n, offset, HAS_EXTEND: tl.constexpr):
    """KV tokens of requests i as int32; 0 from n >= 1 on. Draft extend stores its own tokens apart: they come off."""
    length = load_below(seq_lens, i, n).to(tl.int32) + offset
    if HAS_EXTEND:
        length = tl.maximum(length - load_below(extend_lens, i, n).to(tl.int32), 0)
    return tl.where(i < n, length, 0)


# The stride too: with rows known to begin at 16 bytes a lane would load four tokens at once, but lists begin anywhere,
# so the stores want one; bringing the loads into their order takes a trip through shared memory.
@triton.jit(
    do_not_specialize=[
        "bs", "offset", "window", "queries", "n_loc", "n_swa_out", "n_mask", "cores", "head_programs", "max_splits",
        "tile", "capacity", "window_capacity", "mask_capacity", "req_to_token_stride", "loc_stride",
    ]
)  # fmt: skip
def _csr_metadata_kernel(
    req_pool_indices, seq_lens, extend_lens, req_to_token, mapping, out_cache_loc, mask_in, live_tokens,
    kv_indptr, kv_indices, window_kv_indptr, window_kv_indices, window_kv_offsets, num_kv_splits,
    window_num_kv_splits, qo_indptr, mask_indptr, custom_mask, swa_out_cache_loc,
    bs, offset, window, queries, n_loc, n_swa_out, n_mask, cores, head_programs, max_splits, tile,
    capacity, window_capacity, mask_capacity, req_to_token_stride, loc_stride,
    HAS_EXTEND: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_MAP: tl.constexpr,
    HAS_QO: tl.constexpr, HAS_MASK_INDPTR: tl.constexpr, COUNT_MASK: tl.constexpr, SPLIT_MODE: tl.constexpr,
    SPLIT_PROGRAMS: tl.constexpr, SLOT_PROGRAMS: tl.constexpr, MASK_PROGRAMS: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr, SLOTS: tl.constexpr,
    MASK_CELLS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid == 0:
        _prefix_sums(
            seq_lens, extend_lens, kv_indptr, window_kv_indptr, window_kv_offsets, qo_indptr, mask_indptr, bs,
            offset, window, queries, HAS_EXTEND, HAS_WINDOW, HAS_OFFSETS, HAS_QO, HAS_MASK_INDPTR, SCAN,
        )  # fmt: skip
    elif pid <= SPLIT_PROGRAMS:
        if pid == 1:
            write_splits(
                seq_lens, num_kv_splits, bs, 2147483647, 1, cores, head_programs, max_splits, tile, SPLIT_MODE, SCAN
            )
        else:
            write_splits(
                seq_lens, window_num_kv_splits, bs, window, 1, cores, head_programs, max_splits, tile, SPLIT_MODE, SCAN
            )
    elif pid <= SPLIT_PROGRAMS + SLOT_PROGRAMS:
        block = pid - 1 - SPLIT_PROGRAMS
        write_swa_slots(mapping, out_cache_loc, swa_out_cache_loc, n_loc, n_swa_out, loc_stride, block, SLOTS)
    elif pid <= SPLIT_PROGRAMS + SLOT_PROGRAMS + MASK_PROGRAMS:
        _copy_mask(
            seq_lens, mask_in, live_tokens, custom_mask, bs, n_mask, queries, mask_capacity,
            pid - 1 - SPLIT_PROGRAMS - SLOT_PROGRAMS, COUNT_MASK, MASK_PROGRAMS, MASK_CELLS, SCAN,
        )  # fmt: skip
    else:
        part = pid - 1 - SPLIT_PROGRAMS - SLOT_PROGRAMS - MASK_PROGRAMS
        row = part // PROGRAMS_PER_ROW
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        step: tl.constexpr = PROGRAMS_PER_ROW * BLOCK
        # The first table load goes out before the lengths of the requests ahead are summed up: they take as long.
        pool = tl.load(req_pool_indices + row).to(tl.int64)
        length = _kv_lengths(seq_lens, extend_lens, row, bs, offset, HAS_EXTEND)
        tokens = req_to_token + pool * req_to_token_stride
        t = first + tl.arange(0, BLOCK)
        slot = tl.load(tokens + t, mask=t < length, other=0)

        base = tl.full((), 0, tl.int64)
        window_base = tl.full((), 0, tl.int64)
        for begin in range(0, row, SCAN):
            i = begin + tl.arange(0, SCAN)
            before = _kv_lengths(seq_lens, extend_lens, i, row, offset, HAS_EXTEND)
            base += tl.sum(before, 0)
            if HAS_WINDOW:
                window_base += tl.sum(tl.minimum(before, window), 0)

        store_slots(kv_indices, base, t, slot, t < length, mapping, capacity, False)
        gather_slots(tokens, kv_indices, base, first + step, length, step, mapping, capacity, False, BLOCK)
        if HAS_WINDOW:
            kept = tl.minimum(length, window)
            gather_slots(
                tokens + (length - kept), window_kv_indices, window_base, first, kept, step, mapping,
                window_capacity, HAS_MAP, BLOCK,
            )  # fmt: skip


@triton.jit
def _prefix_sums(
    seq_lens, extend_lens, kv_indptr, window_kv_indptr, window_kv_offsets, qo_indptr, mask_indptr, bs, offset, window,
    queries, HAS_EXTEND: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_QO: tl.constexpr,
    HAS_MASK_INDPTR: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    total = tl.full((), 0, tl.int32)
    window_total = tl.full((), 0, tl.int32)
    mask_total = tl.full((), 0, tl.int64)
    for begin in range(0, bs, SCAN):
        i = begin + tl.arange(0, SCAN)
        mask = i < bs
        lens = _kv_lengths(seq_lens, extend_lens, i, bs, offset, HAS_EXTEND)
        tl.store(kv_indptr + 1 + i, total + tl.cumsum(lens, 0), mask=mask)
        total += tl.sum(lens, 0)
        if HAS_WINDOW:
            kept = tl.minimum(lens, window)
            tl.store(window_kv_indptr + 1 + i, window_total + tl.cumsum(kept, 0), mask=mask)
            window_total += tl.sum(kept, 0)
            if HAS_OFFSETS:
                tl.store(window_kv_offsets + i, lens - kept, mask=mask)
        if HAS_MASK_INDPTR:
            cells = _mask_rows(seq_lens, i, mask, queries)
            tl.store(mask_indptr + 1 + i, mask_total + tl.cumsum(cells, 0), mask=mask)
            mask_total += tl.sum(cells, 0)
        if HAS_QO:
            tl.store(qo_indptr + 1 + i, ((i + 1) * queries).to(qo_indptr.dtype.element_ty), mask=mask)
    if HAS_QO:
        tl.store(qo_indptr, tl.full((), 0, qo_indptr.dtype.element_ty))


@triton.jit
def _copy_mask(
    seq_lens, mask_in, live_tokens, custom_mask, bs, n_mask, queries, capacity, block,
    COUNT_MASK: tl.constexpr, PROGRAMS: tl.constexpr, CELLS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    cells = n_mask.to(tl.int64)
    idle = cells < 0
    if COUNT_MASK:
        # Recorded work cannot know how long the live mask is: its requests say, and padding has no cells. An idle
        # step has padding only, which may see everything.
        live = tl.load(live_tokens).to(tl.int32) // queries
        idle = live == 0
        cells = _mask_cells(seq_lens, tl.where(idle, bs, live), queries, SCAN)
    cells = tl.minimum(cells, capacity)
    for begin in range(block * CELLS, cells, PROGRAMS * CELLS):
        i = begin + tl.arange(0, CELLS)
        seen = tl.load(mask_in + i, mask=i < cells, other=0).to(tl.uint8)
        if COUNT_MASK:
            seen = tl.where(idle, 1, seen).to(tl.uint8)
        tl.store(custom_mask + i, seen, mask=i < cells)


@triton.jit
def _mask_rows(seq_lens, i, mask, queries):
    """Mask cells of requests i as int64: q rows of seq_len + q cells. A long batch has more than 2**31."""
    length = tl.load(seq_lens + i, mask=mask, other=0).to(tl.int64)
    return tl.where(mask, (length + queries) * queries, 0)


@triton.jit
def _mask_cells(seq_lens, n, queries, SCAN: tl.constexpr):
    cells = tl.full((), 0, tl.int64)
    for begin in range(0, n, SCAN):
        i = begin + tl.arange(0, SCAN)
        cells += tl.sum(_mask_rows(seq_lens, i, i < n, queries), 0)
    return cells


VARYING = (0, 1, 2, 5, 6, 7, 23, 25, 34)
"""Kernel arguments that change from replay to replay: what `CsrMetadata` is called with, and their sizes."""


class CsrMetadata:
    """The rebuild of one captured shape, bound to its tables: each call brings what the next batch changes.

    Args:
        tables: what to rebuild, bound and checked by the caller. All tensors on one device.
        config: block sizes.
        req_to_token: [rows, width] int32, row-contiguous, width at least the longest KV length.
        bs: requests.
        offset: tokens added to every length.
        takes_off: calls bring extend_lens.
        counts_mask: calls bring live_tokens, and of the mask only the live requests' cells are copied. Recorded work
            needs this, as it sees a static mask of fixed size.

    Cost of a call: one launch, no allocation, no synchronisation; no recompilation when only lengths change.
    """

    def __init__(
        self,
        tables: CsrTables,
        config: CsrConfig,
        req_to_token: torch.Tensor,
        bs: int,
        *,
        offset: int = 0,
        takes_off: bool = False,
        counts_mask: bool = False,
    ) -> None:
        self.tables = tables
        self._absent = absent = tables.kv_indptr  # any valid pointer; the compiled variant never touches it
        has_window = tables.window_kv_indptr is not None
        splits = (tables.num_kv_splits is not None) + (tables.window_num_kv_splits is not None)
        rule = tables.splits or SplitRule(1)
        n_out = 0 if tables.swa_out_cache_loc is None else tables.swa_out_cache_loc.shape[0]
        slot_programs = triton.cdiv(n_out, SLOT_BLOCK)
        mask_capacity = 0 if tables.custom_mask is None else tables.custom_mask.shape[0]
        mask_programs = min(MASK_PROGRAMS, triton.cdiv(mask_capacity, MASK_BLOCK))

        def given(x: torch.Tensor | None) -> torch.Tensor:
            return absent if x is None else x

        args = (
            absent, absent, absent, req_to_token, given(tables.mapping), absent, absent, absent,
            tables.kv_indptr, tables.kv_indices, given(tables.window_kv_indptr), given(tables.window_kv_indices),
            given(tables.window_kv_offsets), given(tables.num_kv_splits), given(tables.window_num_kv_splits),
            given(tables.qo_indptr), given(tables.mask_indptr), given(tables.custom_mask),
            given(tables.swa_out_cache_loc),
            bs, offset, tables.window if has_window else NO_LIMIT, tables.queries, 0, n_out, 0,
            rule.cores, rule.head_programs, rule.max_splits, rule.tile,
            tables.kv_indices.shape[0],
            tables.window_kv_indices.shape[0] if has_window else 0, mask_capacity, req_to_token.stride(0), 1,
        )  # fmt: skip
        options = {
            "HAS_EXTEND": takes_off,
            "HAS_WINDOW": has_window,
            "HAS_OFFSETS": tables.window_kv_offsets is not None,
            "HAS_MAP": tables.mapping is not None,
            "HAS_QO": tables.qo_indptr is not None,
            "HAS_MASK_INDPTR": tables.mask_indptr is not None,
            "COUNT_MASK": counts_mask,
            "SPLIT_MODE": rule.mode,
            "SPLIT_PROGRAMS": splits,
            "SLOT_PROGRAMS": slot_programs,
            "MASK_PROGRAMS": mask_programs,
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "SCAN": min(SCAN_BLOCK, max(16, triton.next_power_of_2(bs))),
            "SLOTS": SLOT_BLOCK,
            "MASK_CELLS": MASK_BLOCK,
            "num_warps": config.num_warps,
        }
        grid = (1 + splits + slot_programs + mask_programs + bs * config.programs_per_row,)
        self._launch = PreparedLaunch(_csr_metadata_kernel, grid, args, options, VARYING)

    def __call__(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        extend_lens: torch.Tensor | None = None,
        out_cache_loc: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        live_tokens: torch.Tensor | None = None,
    ) -> None:
        """Rebuild in place.

        Args:
            req_pool_indices, seq_lens: [>=B] int32 or int64, padding included.
            extend_lens: [>=B] int32, tokens taken off every length (never below 0).
            out_cache_loc: [n] int32 or int64, n <= T; needed for swa_out_cache_loc.
            mask: flat bool, the tree mask; needed for custom_mask.
            live_tokens: [1] int32, live tokens of the batch on the device.
        """
        absent = self._absent
        self._launch(
            req_pool_indices,
            seq_lens,
            absent if extend_lens is None else extend_lens,
            absent if out_cache_loc is None else out_cache_loc,
            absent if mask is None else mask,
            absent if live_tokens is None else live_tokens,
            0 if out_cache_loc is None else out_cache_loc.shape[0],
            0 if mask is None else mask.shape[0],
            1 if out_cache_loc is None else out_cache_loc.stride(0),
        )
