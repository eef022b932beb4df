"""Token-granular KV lists of one or two paged attention wrappers in one launch, with packed tree masks and write slots.

Each wrapper reads a range of every request's tokens (`KvRange`): all, the last ones, those of the encoder or those
behind them. Programs, in order: one for all prefix sums; ceil(T / SLOT_BLOCK) for write slots; `mask_programs` for each
request and packed mask; `programs_per_row` for each request's lists. Nobody waits for the prefix sums: a program that
needs where its request starts adds up what comes before it. The grid depends on captured sizes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl

from .csr_metadata import CsrConfig
from .device import load_below, write_swa_slots
from .kv_indices import gather_slots, store_slots
from .launch import PreparedLaunch, launch

SLOT_BLOCK = 512
SCAN_BLOCK = 1024
"""Requests summed at once; larger batches are carried over chunks."""
MASK_BYTES = 128
"""Packed bytes per program and turn."""


class KvRange(IntEnum):
    """Which tokens of a request a wrapper reads, of `length` = seq_len + offset."""

    NONE = -1
    FULL = 0  # all of them
    WINDOW = 1  # the last min(length, keep), keep the same for all or plus the request's own queries
    AFTER_ENCODER = 2  # `length` tokens from encoder_len on
    ENCODER = 3  # the first encoder_len


class QueryStarts(IntEnum):
    """How qo_indptr comes about: not at all, a fixed stride, or the running sum of the requests' own queries."""

    NONE = 0
    STRIDED = 1
    CUMSUM = 2


@dataclass(frozen=True, slots=True)
class PagedList:
    """What one wrapper reads. B requests.

    Attributes:
        range: which tokens.
        kv_indptr: [B + 1] int32, from index 1: running sum of the ranges' lengths.
        kv_indices: [capacity] int32: the ranges' slots, request behind request.
        mask_indptr: [B + 1] int32, from index 1: running sum of packed mask bytes, or None.
        custom_mask: [bytes] uint8: queries x range cells of each request, packed little-endian, or None.
    """

    range: KvRange
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    mask_indptr: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None


@triton.jit
def _kv_range(seq_lens, aux, i, n, offset, keep, RANGE: tl.constexpr, OWN_QUERIES: tl.constexpr):
    """(tokens, first token) of requests i as int32; no tokens from n >= 1 on."""
    length = load_below(seq_lens, i, n).to(tl.int32) + offset
    start = length - length
    if RANGE == 1:
        kept = keep
        if OWN_QUERIES:
            kept += load_below(aux, i, n).to(tl.int32)
        kept = tl.minimum(length, kept)
        start = length - kept
        length = kept
    if RANGE == 2:
        start = load_below(aux, i, n).to(tl.int32)
    if RANGE == 3:
        length = load_below(aux, i, n).to(tl.int32)
    return tl.where(i < n, length, 0), start


@triton.jit
def prefix_sums(
    seq_lens, aux, kv_indptr, kv_lens, mask_indptr, bs, offset, keep, queries, RANGE: tl.constexpr,
    OWN_QUERIES: tl.constexpr, HAS_LENS: tl.constexpr, HAS_MASK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    total = tl.full((), 0, tl.int32)
    total_bytes = tl.full((), 0, tl.int32)
    for begin in range(0, bs, SCAN):
        i = begin + tl.arange(0, SCAN)
        mask = i < bs
        length, _ = _kv_range(seq_lens, aux, i, bs, offset, keep, RANGE, OWN_QUERIES)
        tl.store(kv_indptr + 1 + i, total + tl.cumsum(length, 0), mask=mask)
        total += tl.sum(length, 0)
        if HAS_LENS:
            tl.store(kv_lens + i, length, mask=mask)
        if HAS_MASK:
            packed = (length * queries + 7) // 8
            tl.store(mask_indptr + 1 + i, total_bytes + tl.cumsum(packed, 0), mask=mask)
            total_bytes += tl.sum(packed, 0)


@triton.jit
def query_starts(qo_indptr, aux, bs, queries, OWN_QUERIES: tl.constexpr, SCAN: tl.constexpr):
    total = tl.full((), 0, tl.int32)
    for begin in range(0, bs, SCAN):
        i = begin + tl.arange(0, SCAN)
        mask = i < bs
        if OWN_QUERIES:
            own = tl.load(aux + i, mask=mask, other=0).to(tl.int32)
            tl.store(qo_indptr + 1 + i, total + tl.cumsum(own, 0), mask=mask)
            total += tl.sum(own, 0)
        else:
            tl.store(qo_indptr + 1 + i, (i + 1) * queries, mask=mask)


@triton.jit
def _pack_mask(
    seq_lens, aux, mask_in, live_tokens, out, row, part, offset, keep, queries, n_mask, capacity,
    RANGE: tl.constexpr, OWN_QUERIES: tl.constexpr, COUNT_MASK: tl.constexpr, PARTS: tl.constexpr,
    BYTES: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """One request's mask cells within its range, 8 to a byte. Requests that the given mask does not have see all."""
    cells_before = tl.full((), 0, tl.int64)
    bytes_before = tl.full((), 0, tl.int64)
    for begin in range(0, row, SCAN):
        i = begin + tl.arange(0, SCAN)
        whole, _ = _kv_range(seq_lens, aux, i, row, offset, keep, 0, False)
        length, _ = _kv_range(seq_lens, aux, i, row, offset, keep, RANGE, OWN_QUERIES)
        cells_before += tl.sum(whole.to(tl.int64) * queries, 0)
        bytes_before += tl.sum(((length * queries + 7) // 8).to(tl.int64), 0)
    whole, _ = _kv_range(seq_lens, aux, row, row + 1, offset, keep, 0, False)
    length, start = _kv_range(seq_lens, aux, row, row + 1, offset, keep, RANGE, OWN_QUERIES)
    cells = length * queries
    given = n_mask.to(tl.int64)
    if COUNT_MASK:
        # Recorded work sees a static mask of fixed size: how much of it is this batch's, its live tokens say.
        live = row < tl.load(live_tokens).to(tl.int32) // queries
        given = tl.where(live, tl.full((), 1, tl.int64) << 62, tl.full((), 0, tl.int64))
    bit = tl.arange(0, 8)
    for begin in range(part * BYTES, (cells + 7) // 8, PARTS * BYTES):
        byte = begin + tl.arange(0, BYTES)
        cell = byte[:, None] * 8 + bit[None, :]
        query = cell // length
        source = cells_before + query.to(tl.int64) * whole + start + (cell - query * length)
        inside = cell < cells
        sees = tl.load(mask_in + source, mask=inside & (source < given), other=1).to(tl.int32)
        packed = tl.sum(tl.where(inside, sees, 0) << bit[None, :], 1)
        at = bytes_before + byte
        tl.store(out + at, packed.to(tl.uint8), mask=(byte * 8 < cells) & (at < capacity))


@triton.jit
def _fill_list(
    tokens, slot, t, out, base, start, length, first, step, mapping, capacity,
    RANGE: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A request's range into its list; `slot` is the tile at `t`, read before the length was known."""
    if RANGE == 0:
        store_slots(out, base, t, slot, t < length, mapping, capacity, False)
        gather_slots(tokens, out, base, first + step, length, step, mapping, capacity, False, BLOCK)
    else:
        gather_slots(tokens + start, out, base, first, length, step, mapping, capacity, HAS_MAP, BLOCK)


@triton.jit(
    do_not_specialize=[
        "bs", "offset", "keep", "queries", "n_loc", "n_swa_out", "n_mask", "width", "capacity", "second_capacity",
        "mask_capacity", "second_mask_capacity", "req_to_token_stride", "loc_stride",
    ]
)  # fmt: skip
def _paged_lists_kernel(
    req_pool_indices, seq_lens, aux, req_to_token, mapping, out_cache_loc, mask_in, live_tokens,
    kv_indptr, kv_indices, mask_indptr, custom_mask,
    second_kv_indptr, second_kv_indices, second_mask_indptr, second_custom_mask, qo_indptr, swa_out_cache_loc, kv_lens,
    bs, offset, keep, queries, n_loc, n_swa_out, n_mask, width, capacity, second_capacity, mask_capacity,
    second_mask_capacity, req_to_token_stride, loc_stride,
    RANGE: tl.constexpr, SECOND: tl.constexpr, QUERY_STARTS: tl.constexpr, HAS_MAP: tl.constexpr,
    HAS_LENS: tl.constexpr, COUNT_MASK: tl.constexpr, SLOT_PROGRAMS: tl.constexpr, MASK_PROGRAMS: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr, SLOTS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    OWN_QUERIES: tl.constexpr = QUERY_STARTS == 2
    HAS_MASK: tl.constexpr = MASK_PROGRAMS > 0
    LISTS: tl.constexpr = 1 if SECOND == -1 else 2
    pid = tl.program_id(0)
    first_row = 1 + SLOT_PROGRAMS + bs * MASK_PROGRAMS * LISTS
    if pid == 0:
        prefix_sums(
            seq_lens, aux, kv_indptr, kv_lens, mask_indptr, bs, offset, keep, queries, RANGE, OWN_QUERIES, HAS_LENS,
            HAS_MASK, SCAN,
        )  # fmt: skip
        if SECOND != -1:
            prefix_sums(
                seq_lens, aux, second_kv_indptr, kv_lens, second_mask_indptr, bs, offset, keep, queries, SECOND,
                OWN_QUERIES, False, HAS_MASK, SCAN,
            )  # fmt: skip
        if QUERY_STARTS != 0:
            query_starts(qo_indptr, aux, bs, queries, OWN_QUERIES, SCAN)
    elif pid <= SLOT_PROGRAMS:
        write_swa_slots(mapping, out_cache_loc, swa_out_cache_loc, n_loc, n_swa_out, loc_stride, pid - 1, SLOTS)
    elif pid < first_row:
        if HAS_MASK:
            part = pid - 1 - SLOT_PROGRAMS
            row = part // (MASK_PROGRAMS * LISTS)
            which = part % (MASK_PROGRAMS * LISTS) // MASK_PROGRAMS
            if which == 0:
                _pack_mask(
                    seq_lens, aux, mask_in, live_tokens, custom_mask, row, part % MASK_PROGRAMS, offset, keep, queries,
                    n_mask, mask_capacity, RANGE, OWN_QUERIES, COUNT_MASK, MASK_PROGRAMS, BYTES, SCAN,
                )  # fmt: skip
            elif SECOND != -1:
                _pack_mask(
                    seq_lens, aux, mask_in, live_tokens, second_custom_mask, row, part % MASK_PROGRAMS, offset, keep,
                    queries, n_mask, second_mask_capacity, SECOND, OWN_QUERIES, COUNT_MASK, MASK_PROGRAMS, BYTES, SCAN,
                )  # fmt: skip
    else:
        part = pid - first_row
        row = part // PROGRAMS_PER_ROW
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        step: tl.constexpr = PROGRAMS_PER_ROW * BLOCK
        # The first table load goes out before the lengths of the requests ahead are summed up: they take as long.
        pool = tl.load(req_pool_indices + row).to(tl.int64)
        whole, start = _kv_range(seq_lens, aux, row, bs, offset, keep, 0, False)
        tokens = req_to_token + pool * req_to_token_stride
        t = first + tl.arange(0, BLOCK)
        slot = t
        if RANGE == 0 or SECOND == 0:
            slot = tl.load(tokens + t, mask=t < tl.minimum(whole, width), other=0)
        length, start = _kv_range(seq_lens, aux, row, bs, offset, keep, RANGE, OWN_QUERIES)
        base = tl.full((), 0, tl.int64)
        second_base = tl.full((), 0, tl.int64)
        for begin in range(0, row, SCAN):
            i = begin + tl.arange(0, SCAN)
            before, _ = _kv_range(seq_lens, aux, i, row, offset, keep, RANGE, OWN_QUERIES)
            base += tl.sum(before, 0)
            if SECOND != -1:
                before, _ = _kv_range(seq_lens, aux, i, row, offset, keep, SECOND, OWN_QUERIES)
                second_base += tl.sum(before, 0)
        _fill_list(
            tokens, slot, t, kv_indices, base, start, length, first, step, mapping, capacity, RANGE, HAS_MAP, BLOCK
        )
        if SECOND != -1:
            length, start = _kv_range(seq_lens, aux, row, bs, offset, keep, SECOND, OWN_QUERIES)
            _fill_list(
                tokens, slot, t, second_kv_indices, second_base, start, length, first, step, mapping, second_capacity,
                SECOND, False, BLOCK,
            )  # fmt: skip


VARYING = (0, 1, 2, 5, 6, 7, 23, 25, 32)
"""Kernel arguments that change from replay to replay: what `PagedLists` is called with, and their sizes."""


class PagedLists:
    """The rebuild of one captured shape, bound to its buffers: each call brings what the next batch changes.

    Args:
        lists: one or two; the sliding window or the encoder's neighbour comes first. All tensors on one device.
        config: block sizes.
        req_to_token: [rows, width] int32, row-contiguous, wide enough for every range.
        bs: requests.
        offset: tokens added to every length.
        keep: tokens of a window, the requests' queries included unless these are their own (QueryStarts.CUMSUM).
        queries: tokens per request and step.
        query_starts, qo_indptr: how qo_indptr, [B + 1] int32 from index 1, comes about.
        mapping: [slots + 1] int64, full slot -> sliding-window slot, for a window's list and the write slots.
        swa_out_cache_loc: [T] int64: mapped write slots, then zeros.
        kv_lens: [>=B] int32: tokens of the first list's ranges.
        counts_mask: of a given mask only the live requests' cells count, which `live_tokens` tells on the device.

    Cost of a call: one launch, no allocation, no synchronisation; no recompilation when only lengths change.
    """

    def __init__(
        self,
        lists: tuple[PagedList, ...],
        config: CsrConfig,
        req_to_token: torch.Tensor,
        bs: int,
        *,
        offset: int = 0,
        keep: int = 0,
        queries: int = 1,
        query_starts: QueryStarts = QueryStarts.NONE,
        qo_indptr: torch.Tensor | None = None,
        mapping: torch.Tensor | None = None,
        swa_out_cache_loc: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        counts_mask: bool = False,
    ) -> None:
        first, second = lists[0], lists[1] if len(lists) > 1 else None
        self._absent = absent = first.kv_indptr  # any valid pointer; the compiled variant never touches it
        n_out = 0 if swa_out_cache_loc is None else swa_out_cache_loc.shape[0]
        slot_programs = -(-n_out // SLOT_BLOCK)
        mask_programs = 0 if first.custom_mask is None else mask_programs_of(first.custom_mask.shape[0], bs)

        def given(x: torch.Tensor | None) -> torch.Tensor:
            return absent if x is None else x

        def pointers(x: PagedList | None) -> tuple[torch.Tensor, ...]:
            if x is None:
                return (absent,) * 4
            return x.kv_indptr, x.kv_indices, given(x.mask_indptr), given(x.custom_mask)

        args = (
            absent, absent, absent, req_to_token, given(mapping), absent, absent, absent,
            *pointers(first), *pointers(second), given(qo_indptr), given(swa_out_cache_loc), given(kv_lens),
            bs, offset, keep, queries, 0, n_out, 0, req_to_token.shape[1],
            first.kv_indices.shape[0], 0 if second is None else second.kv_indices.shape[0],
            _size(first.custom_mask), 0 if second is None else _size(second.custom_mask),
            req_to_token.stride(0), 1,
        )  # fmt: skip
        options = {
            "RANGE": int(first.range),
            "SECOND": int(KvRange.NONE if second is None else second.range),
            "QUERY_STARTS": int(query_starts),
            "HAS_MAP": mapping is not None,
            "HAS_LENS": kv_lens is not None,
            "COUNT_MASK": counts_mask,
            "SLOT_PROGRAMS": slot_programs,
            "MASK_PROGRAMS": mask_programs,
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "SCAN": scan_block(bs),
            "SLOTS": SLOT_BLOCK,
            "BYTES": MASK_BYTES,
            "num_warps": config.num_warps,
        }
        grid = (1 + slot_programs + bs * (mask_programs * len(lists) + config.programs_per_row),)
        self._launch = PreparedLaunch(_paged_lists_kernel, grid, args, options, VARYING)

    def __call__(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        aux: torch.Tensor | None = None,
        out_cache_loc: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        live_tokens: torch.Tensor | None = None,
    ) -> None:
        """Rebuild in place.

        Args:
            req_pool_indices, seq_lens: [>=B] int32 or int64, padding included.
            aux: [>=B] int32, the requests' own queries or their encoder lengths, where either is needed.
            out_cache_loc: [n] int32 or int64, n <= T; needed for swa_out_cache_loc.
            mask: flat bool, the tree mask, queries x (seq_len + offset) cells a request; needed for packed masks.
            live_tokens: [1] int32, live tokens of the batch on the device.
        """
        absent = self._absent
        self._launch(
            req_pool_indices,
            seq_lens,
            absent if aux is None else aux,
            absent if out_cache_loc is None else out_cache_loc,
            absent if mask is None else mask,
            absent if live_tokens is None else live_tokens,
            0 if out_cache_loc is None else out_cache_loc.shape[0],
            0 if mask is None else mask.shape[0],
            1 if out_cache_loc is None else out_cache_loc.stride(0),
        )


@triton.jit(do_not_specialize=["offset", "keep", "queries", "n_mask", "capacity"])
def _pack_mask_kernel(
    seq_lens, mask_in, live_tokens, out, offset, keep, queries, n_mask, capacity,
    RANGE: tl.constexpr, COUNT_MASK: tl.constexpr, PARTS: tl.constexpr, BYTES: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    _pack_mask(
        seq_lens, seq_lens, mask_in, live_tokens, out, tl.program_id(0), tl.program_id(1), offset, keep, queries,
        n_mask, capacity, RANGE, False, COUNT_MASK, PARTS, BYTES, SCAN,
    )  # fmt: skip


def launch_pack_mask(
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    packed: torch.Tensor,
    bs: int,
    queries: int,
    keep: int | None = None,
    live_tokens: torch.Tensor | None = None,
) -> None:
    """The packed masks alone, one launch: queries x (seq_len + queries) cells a request, 8 to a byte.

    keep: pack the columns of the last `keep` tokens only. live_tokens: see `PagedLists`.
    """
    parts = mask_programs_of(packed.shape[0], bs)
    launch(
        _pack_mask_kernel,
        (bs, parts),
        (
            seq_lens, mask, seq_lens if live_tokens is None else live_tokens, packed, queries, keep or 0, queries,
            mask.shape[0], packed.shape[0],
        ),
        {
            "RANGE": int(KvRange.FULL if keep is None else KvRange.WINDOW),
            "COUNT_MASK": live_tokens is not None,
            "PARTS": parts,
            "BYTES": MASK_BYTES,
            "SCAN": scan_block(bs),
            "num_warps": 4,
        },
    )  # fmt: skip


def mask_programs_of(packed_bytes: int, bs: int) -> int:
    """Programs that share one request's mask, from the bytes that the buffer holds for all requests."""
    return max(1, min(-(-packed_bytes // (bs * MASK_BYTES)), 256 // bs))


def scan_block(n: int) -> int:
    """Requests summed at once: all of them up to SCAN_BLOCK."""
    return min(SCAN_BLOCK, max(16, 1 << (n - 1).bit_length()))


def _size(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.shape[0]
