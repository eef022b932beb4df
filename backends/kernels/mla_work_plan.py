"""Lists and work schedule of AITER's persistent MLA kernel in one launch; the schedule alone in another.

The schedule needs the lengths only, not the list, so one program makes it while the others fill the list. What it must
hold, `schedules.mla_work_even` and `schedules.mla_work_filling` say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .csr_metadata import CsrConfig
from .device import write_swa_slots
from .kv_indices import gather_slots, store_slots
from .launch import PreparedLaunch, launch
from .paged_lists import SLOT_BLOCK, prefix_sums, query_starts, scan_block


@dataclass(frozen=True, slots=True)
class MlaPlanBuffers:
    """Where a schedule goes, and how it is made.

    Attributes:
        work_indptr: [cus + 1] int32.
        work_info: [works, 8] int32, filled from the front.
        reduce_indptr: [tiles + 1] int32, its tail filled with the last sum.
        reduce_final_map: [tiles, 2] int32, filled from the front.
        reduce_partial_map: [works] int32, filled from the front.
        fold: tiles of each request.
        queries: query rows of a tile.
        cus, max_splits, fixed_splits, granularity: see `schedules.mla_work_even`.
        filling: fill multiprocessors one after the other instead of dealing works out evenly.
        ladder: the tiles of a request are its queries, each of which sees one token more than the one before.
    """

    work_indptr: torch.Tensor
    work_info: torch.Tensor
    reduce_indptr: torch.Tensor
    reduce_final_map: torch.Tensor
    reduce_partial_map: torch.Tensor
    fold: int
    queries: int
    cus: int
    max_splits: int
    fixed_splits: int
    granularity: int
    filling: bool
    ladder: bool = False


@triton.jit
def _tokens(source, request, mask, offset, FROM_INDPTR: tl.constexpr):
    """KV tokens of requests, from their lengths or from prefix sums of them."""
    here = tl.load(source + request, mask=mask, other=0).to(tl.int32)
    if FROM_INDPTR:
        return tl.load(source + request + 1, mask=mask, other=0).to(tl.int32) - here
    return tl.where(mask, here + offset, 0)


@triton.jit
def _reach(tokens, tile, fold, LADDER: tl.constexpr):
    """KV tokens that a tile reads of its request's: folded queries see one token more each."""
    if LADDER:
        return tl.maximum(tokens - (fold - 1 - tile % fold), 0)
    return tokens


@triton.jit
def _store_work(work_info, work, tile, partial, queries, begin, end, behind, mask):
    row = work_info + work * 8
    tl.store(row, tile, mask=mask)
    tl.store(row + 1, partial, mask=mask)
    tl.store(row + 2, tile * queries, mask=mask)
    tl.store(row + 3, (tile + 1) * queries, mask=mask)
    tl.store(row + 4, begin, mask=mask)
    tl.store(row + 5, end, mask=mask)
    tl.store(row + 6, behind, mask=mask)
    tl.store(row + 7, tile - tile, mask=mask)


@triton.jit
def _plan_even(
    source, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map, bs, offset, queries, fold,
    cus, max_splits, fixed_splits, FROM_INDPTR: tl.constexpr, LADDER: tl.constexpr, G: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Number of reductions and of works."""
    tiles = bs * fold
    works = tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int32)
    for begin in range(0, tiles, SCAN):
        tile = begin + tl.arange(0, SCAN)
        mask = tile < tiles
        tokens = _tokens(source, tile // fold, mask, offset, FROM_INDPTR)
        once = tl.where((tile % fold == 0) & mask, tokens, 0)
        # A chunk of tiles may begin inside a request, whose tokens have been counted then.
        start = passed + tl.cumsum(once, 0) - tokens
        passed += tl.sum(once, 0)
        tokens = _reach(tokens, tile, fold, LADDER)
        length = tl.maximum(tokens, 1)
        blocks = (length + G - 1) // G
        wanted = tl.minimum(tl.minimum(length // 196, (cus + tiles - 1) // tiles), max_splits)
        splits = tl.where(fixed_splits > 0, fixed_splits, tl.maximum(wanted, 1))
        chunk = (blocks + splits - 1) // splits * G
        cuts = (length + chunk - 1) // chunk
        tail = length % chunk
        cuts -= ((cuts > 1) & (tail > 0) & (tail <= 4)).to(tl.int32)
        cuts = tl.where(mask, cuts, 0)
        first = works + tl.cumsum(cuts, 0) - cuts
        works += tl.sum(cuts, 0)
        tl.store(reduce_indptr + 1 + tile, first + cuts, mask=mask)
        tl.store(reduce_final_map + tile * 2, tile * queries, mask=mask)
        tl.store(reduce_final_map + tile * 2 + 1, (tile + 1) * queries, mask=mask)
        for i in range(0, tl.max(cuts, 0)):
            mine = i < cuts
            here = start + i * chunk
            end = tl.where(i == cuts - 1, start + tokens, here + chunk)
            partial = tl.where(cuts == 1, -1, (first + i) * queries)
            _store_work(work_info, first + i, tile, partial, queries, here, end, start + tokens - end, mine)
            tl.store(reduce_partial_map + first + i, partial, mask=mine)
    each = works // cus
    larger = works - each * cus
    for begin in range(0, cus + 1, SCAN):
        c = begin + tl.arange(0, SCAN)
        tl.store(work_indptr + c, c * each + tl.minimum(c, larger), mask=c <= cus)
    return tiles, works


@triton.jit
def _plan_filling(
    source, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map, bs, offset, queries, fold,
    cus, max_splits, FROM_INDPTR: tl.constexpr, LADDER: tl.constexpr, G: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Number of reductions and of partial results. Serial by nature: a part ends where those before it have left."""
    tiles = bs * fold
    total = tl.full((), 0, tl.int32)
    for begin in range(0, tiles, SCAN):
        tile = begin + tl.arange(0, SCAN)
        mask = tile < tiles
        tokens = _reach(_tokens(source, tile // fold, mask, offset, FROM_INDPTR), tile, fold, LADDER)
        length = tl.maximum(tokens, 1)
        total += tl.sum(tl.where(mask, (length + G - 1) // G + 16, 0), 0)
    parts = tl.minimum(cus, max_splits * tiles)
    payload = (total + parts - 1) // parts + 16
    tile = tl.full((), 0, tl.int32)
    block = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    works = tl.full((), 0, tl.int32)
    groups = tl.full((), 0, tl.int32)
    partials = tl.full((), 0, tl.int32)
    tl.store(work_indptr, works)
    for c in range(0, cus):
        left = payload
        walking = tile < tiles
        while walking:
            whole = _tokens(source, tile // fold, tile < tiles, offset, FROM_INDPTR)
            tokens = _reach(whole, tile, fold, LADDER)
            rest = (tl.maximum(tokens, 1) + G - 1) // G - block
            taken = left - 16
            finish = taken >= rest
            opens = (taken > 0) & (finish == 0)
            end = tl.where(finish, tokens, (block + taken) * G)
            absorbs = opens & (tokens - end < queries)
            finish = finish | absorbs
            end = tl.where(absorbs, tokens, end)
            emits = finish | opens
            split = emits & ((block > 0) | (finish == 0))
            partial = tl.where(split, partials * queries, -1)
            _store_work(work_info, works, tile, partial, queries, start + block * G, start + end, tokens - end, emits)
            tl.store(reduce_partial_map + partials, partial, mask=split)
            partials += split.to(tl.int32)
            works += emits.to(tl.int32)
            closes = finish & (block > 0)
            groups += closes.to(tl.int32)
            tl.store(reduce_indptr + groups, partials, mask=closes)
            tl.store(reduce_final_map + groups * 2 - 2, tile * queries, mask=closes)
            tl.store(reduce_final_map + groups * 2 - 1, (tile + 1) * queries, mask=closes)
            block = tl.where(finish, 0, tl.where(opens, block + taken, block))
            left = tl.where(finish, left - rest - 16, left)
            start = tl.where(finish & (tile % fold == fold - 1), start + whole, start)
            tile = tl.where(finish, tile + 1, tile)
            walking = finish & (tile < tiles)
        tl.store(work_indptr + c + 1, works)
    return groups, partials


@triton.jit
def _plan(
    source, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map, bs, offset, queries, fold,
    cus, max_splits, fixed_splits, reduce_size,
    FILLING: tl.constexpr, FROM_INDPTR: tl.constexpr, LADDER: tl.constexpr, G: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    if FILLING:
        used, total = _plan_filling(
            source, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map, bs, offset, queries,
            fold, cus, max_splits, FROM_INDPTR, LADDER, G, SCAN,
        )  # fmt: skip
    else:
        used, total = _plan_even(
            source, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map, bs, offset, queries,
            fold, cus, max_splits, fixed_splits, FROM_INDPTR, LADDER, G, SCAN,
        )  # fmt: skip
    tl.store(reduce_indptr, tl.full((), 0, tl.int32))
    for begin in range(used + 1, reduce_size, SCAN):
        i = begin + tl.arange(0, SCAN)
        tl.store(reduce_indptr + i, tl.zeros([SCAN], tl.int32) + total, mask=i < reduce_size)


PLAN_SCALARS = ["bs", "offset", "tile_queries", "fold", "cus", "max_splits", "fixed_splits", "reduce_size"]


@triton.jit(do_not_specialize=PLAN_SCALARS)
def _plan_kernel(
    kv_indptr, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map,
    bs, offset, tile_queries, fold, cus, max_splits, fixed_splits, reduce_size,
    FILLING: tl.constexpr, LADDER: tl.constexpr, G: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    _plan(
        kv_indptr, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map, bs, offset,
        tile_queries, fold, cus, max_splits, fixed_splits, reduce_size, FILLING, True, LADDER, G, SCAN,
    )  # fmt: skip


def launch_mla_plan(kv_indptr: torch.Tensor, buffers: MlaPlanBuffers, bs: int) -> None:
    """The schedule alone, one launch of one program, from kv_indptr ([>=bs + 1] int32)."""
    launch(
        _plan_kernel,
        (1,),
        (kv_indptr, *_pointers(buffers), bs, 0, *_scalars(buffers)),
        {
            "FILLING": buffers.filling,
            "LADDER": buffers.ladder,
            "G": buffers.granularity,
            "SCAN": scan_block(bs * buffers.fold),
            "num_warps": 1,
        },
    )


@triton.jit(
    do_not_specialize=[*PLAN_SCALARS, "queries", "n_loc", "n_swa_out", "width", "capacity", "loc_stride"]
)  # fmt: skip
def _mla_lists_kernel(
    req_pool_indices, seq_lens, own_queries, req_to_token, mapping, out_cache_loc, kv_indptr, kv_indices, qo_indptr,
    swa_out_cache_loc, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map,
    bs, offset, tile_queries, fold, cus, max_splits, fixed_splits, reduce_size,
    queries, n_loc, n_swa_out, width, capacity, req_to_token_stride, loc_stride,
    OWN_QUERIES: tl.constexpr, FILLING: tl.constexpr, LADDER: tl.constexpr, G: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid == 0:
        # First, as it takes longest.
        _plan(
            seq_lens, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map, bs, offset,
            tile_queries, fold, cus, max_splits, fixed_splits, reduce_size, FILLING, False, LADDER, G, SCAN,
        )  # fmt: skip
    elif pid == 1:
        prefix_sums(
            seq_lens, seq_lens, kv_indptr, kv_indptr, kv_indptr, bs, offset, 0, queries, 0, False, False, False, SCAN
        )
        query_starts(qo_indptr, own_queries, bs, queries, OWN_QUERIES, SCAN)
    elif pid < 2 + SLOT_PROGRAMS:
        write_swa_slots(mapping, out_cache_loc, swa_out_cache_loc, n_loc, n_swa_out, loc_stride, pid - 2, SLOTS)
    else:
        part = pid - 2 - SLOT_PROGRAMS
        row = part // PROGRAMS_PER_ROW
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        step: tl.constexpr = PROGRAMS_PER_ROW * BLOCK
        pool = tl.load(req_pool_indices + row).to(tl.int64)
        tokens = req_to_token + pool * req_to_token_stride
        t = first + tl.arange(0, BLOCK)
        slot = tl.load(tokens + t, mask=t < width, other=0)
        length = _tokens(seq_lens, row, row < bs, offset, False)
        base = tl.full((), 0, tl.int64)
        for begin in range(0, row, SCAN):
            i = begin + tl.arange(0, SCAN)
            base += tl.sum(_tokens(seq_lens, i, i < row, offset, False), 0)
        store_slots(kv_indices, base, t, slot, t < length, mapping, capacity, False)
        gather_slots(tokens, kv_indices, base, first + step, length, step, mapping, capacity, False, BLOCK)


class MlaLists:
    """The rebuild of one captured shape, lists and schedule, bound to its buffers.

    Args:
        kv_indptr, qo_indptr: [B + 1] int32, from index 1.
        kv_indices: [capacity] int32.
        buffers: the schedule's.
        bs, offset, queries: requests; tokens added to every length; tokens per request.
        own_queries: calls bring the requests' own query counts, of which qo_indptr is the running sum.
        mapping, swa_out_cache_loc: see `PagedLists`.

    Cost of a call: one launch, no allocation, no synchronisation; no recompilation when only lengths change.
    """

    def __init__(
        self,
        config: CsrConfig,
        req_to_token: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        qo_indptr: torch.Tensor,
        buffers: MlaPlanBuffers,
        bs: int,
        *,
        offset: int = 0,
        queries: int = 1,
        own_queries: bool = False,
        mapping: torch.Tensor | None = None,
        swa_out_cache_loc: torch.Tensor | None = None,
    ) -> None:
        self._absent = absent = kv_indptr
        n_out = 0 if swa_out_cache_loc is None else swa_out_cache_loc.shape[0]
        slot_programs = -(-n_out // SLOT_BLOCK)
        args = (
            absent, absent, absent, req_to_token, absent if mapping is None else mapping, absent,
            kv_indptr, kv_indices, qo_indptr, absent if swa_out_cache_loc is None else swa_out_cache_loc,
            *_pointers(buffers), bs, offset, *_scalars(buffers), queries, 0, n_out, req_to_token.shape[1],
            kv_indices.shape[0], req_to_token.stride(0), 1,
        )  # fmt: skip
        options = {
            "OWN_QUERIES": own_queries,
            "FILLING": buffers.filling,
            "LADDER": buffers.ladder,
            "G": buffers.granularity,
            "SLOT_PROGRAMS": slot_programs,
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "SCAN": scan_block(bs * buffers.fold),
            "SLOTS": SLOT_BLOCK,
            "num_warps": config.num_warps,
        }
        grid = (2 + slot_programs + bs * config.programs_per_row,)
        self._launch = PreparedLaunch(_mla_lists_kernel, grid, args, options, varying=(0, 1, 2, 5, 24, 29))

    def __call__(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        aux: torch.Tensor | None = None,
        out_cache_loc: torch.Tensor | None = None,
    ) -> None:
        """Rebuild in place; arguments as for `PagedLists`, aux being the requests' own query counts."""
        absent = self._absent
        self._launch(
            req_pool_indices,
            seq_lens,
            absent if aux is None else aux,
            absent if out_cache_loc is None else out_cache_loc,
            0 if out_cache_loc is None else out_cache_loc.shape[0],
            1 if out_cache_loc is None else out_cache_loc.stride(0),
        )


def _pointers(b: MlaPlanBuffers) -> tuple[torch.Tensor, ...]:
    return b.work_indptr, b.work_info, b.reduce_indptr, b.reduce_final_map, b.reduce_partial_map


def _scalars(b: MlaPlanBuffers) -> tuple[int, ...]:
    return b.queries, b.fold, b.cus, b.max_splits, b.fixed_splits, b.reduce_indptr.shape[0]
