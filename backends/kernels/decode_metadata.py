"""Page-table attention metadata in one launch: lengths, both prefix sums, page tables, sliding-window write slots.

Programs, in order: one for the lengths and their sums; ceil(T / SLOT_BLOCK) for write slots; `programs_per_row` for
each group of rows, striding over column blocks. The grid depends on captured sizes only, lengths are read on the
device.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl

from ..base import too_many_slots
from ..modes import TailPolicy
from .device import batch_max, ceil_pages, floor_div, load_below, swa_slot, write_swa_slots
from .kv_indices import check_vector
from .launch import PreparedLaunch, launch

SLOT_BLOCK = 512
SCAN_BLOCK = 1024
"""Rows scanned at once by the prefix-sum program; larger batches are carried over chunks."""


class QueryMode(IntEnum):
    """How cu_seqlens_q comes about: preset at capture, running sum of qlens, or a fixed stride."""

    PRESET = 0
    CUMSUM = 1
    STRIDED = 2


_TAILS = {
    TailPolicy.LIVE_ONLY: 0,
    TailPolicy.STATIC_FULL: 1,
    TailPolicy.ZERO_TAIL: 2,
    TailPolicy.BATCH_MAX: 3,
}


@dataclass(frozen=True, slots=True)
class DecodeMetadataConfig:
    """Block sizes, the tunable part. Powers of two, but for programs_per_row.

    Attributes:
        programs_per_row: programs that share one group of rows of the page table.
        block: page columns of each row per program and turn.
        num_warps: warps per program.
        rows: rows of one program. Kernels that build on this one and take one row at a time leave it unread.
        early: columns that a group's first program reads before it knows the lengths; 0 reads live columns only.
    """

    programs_per_row: int
    block: int
    num_warps: int
    rows: int = 1
    early: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


FEWEST_COLUMNS, MOST_COLUMNS = 64, 1024
"""Columns of a program's turn: below, programs cost more than they bring; above, registers run out."""
EARLY_TABLE = 4096
"""Columns of the widest table that is read before the lengths are known."""
ROW_PROGRAMS = 256
MOST_PROGRAMS = 256


def default_config(bs: int, max_seq_pages: int) -> DecodeMetadataConfig:
    """Block sizes from what is known at capture, when lengths are not.

    A program costs 0.6 to 1.7 ns on an H200 whether it has work or not, and a multiprocessor looks up one table line a
    cycle, so a full table is done soonest by about sqrt(cells * 2 / 3) programs; more than MOST_PROGRAMS would cost
    short batches more than they can bring long ones. Each takes a wide block rather than many turns, as loads of one
    turn are on their way together; more than four a lane, and the compiler no longer keeps them so. Many rows take
    eight warps for the sake of the one program that sums their lengths. Reading before the lengths are known saves
    short rows part of a memory round trip and wastes lines that are not live: few rows of a narrow table can afford
    it, with cold caches too.
    """
    rows = min(4, _power_of_two_up_to(max(bs // ROW_PROGRAMS, 1)))
    programs = min(MOST_PROGRAMS, math.isqrt(2 * bs * max_seq_pages // 3))
    programs_per_row = min(_power_of_two_up_to(max(programs * rows // bs, 1)), -(-max_seq_pages // FEWEST_COLUMNS))
    share = -(-max_seq_pages // programs_per_row)
    block = min(max(1 << (share - 1).bit_length(), FEWEST_COLUMNS), MOST_COLUMNS // rows)
    warps = 1 if block * rows <= 64 else 8 if block * rows == MOST_COLUMNS or bs > SCAN_BLOCK // 2 else 4
    early = min(block, 64) if bs <= 16 and max_seq_pages <= EARLY_TABLE else 0
    return DecodeMetadataConfig(programs_per_row, block, warps, rows, early)


def _power_of_two_up_to(n: int) -> int:
    return 1 << (n.bit_length() - 1)


# Strides too: a stride known to be divisible by 16 makes each lane own four neighbouring cells, and as a mask that ends
# anywhere forbids wide stores, a warp would write every sector four times.
# What the way to the first table load needs comes first: arguments are fetched by the cache line, anew at each launch.
@triton.jit(
    do_not_specialize=[
        "bs", "seqlen_offset", "max_seq_pages", "n_loc", "n_swa_out", "q_stride", "loc_stride", "req_to_token_stride",
        "page_table_stride", "swa_page_table_stride",
    ]
)  # fmt: skip
def _decode_metadata_kernel(
    req_pool_indices, seq_lens, req_to_token, page_table,
    bs, seqlen_offset, max_seq_pages, req_to_token_stride, page_table_stride, swa_page_table_stride,
    swa_mapping, swa_page_table, cache_seqlens, cu_seqlens_k, cu_seqlens_q, qlens, out_cache_loc, swa_out_cache_loc,
    q_stride, n_loc, n_swa_out, loc_stride,
    PAGE_SIZE: tl.constexpr, HAS_SWA: tl.constexpr, SLOT_PROGRAMS: tl.constexpr,
    Q_MODE: tl.constexpr, TAIL: tl.constexpr, WRITE_CU_ZERO: tl.constexpr, ONE_TURN: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
    SCAN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid == 0:
        lengths_and_sums(
            seq_lens, qlens, cache_seqlens, cu_seqlens_q, cu_seqlens_k, bs, seqlen_offset, q_stride,
            Q_MODE, WRITE_CU_ZERO, SCAN,
        )  # fmt: skip
    elif pid <= SLOT_PROGRAMS:
        write_swa_slots(swa_mapping, out_cache_loc, swa_out_cache_loc, n_loc, n_swa_out, loc_stride, pid - 1, SLOTS)
    else:
        part = pid - 1 - SLOT_PROGRAMS
        rows = part // PROGRAMS_PER_ROW * ROWS + tl.arange(0, ROWS)
        part = part % PROGRAMS_PER_ROW
        real = rows < bs
        pool = tl.load(req_pool_indices + rows, mask=real, other=0).to(tl.int64)
        length = tl.load(seq_lens + rows, mask=real, other=0).to(tl.int32) + seqlen_offset
        tokens = (req_to_token + pool * req_to_token_stride)[:, None]
        pages = (page_table + rows.to(tl.int64) * page_table_stride)[:, None]
        swa_pages = (swa_page_table + rows.to(tl.int64) * swa_page_table_stride)[:, None]
        if EARLY > 0:
            # Needs the pool rows only, so it need not wait for the later of two loads.
            ahead = tl.arange(0, EARLY)[None, :]
            mine = tl.where(part == 0, max_seq_pages, 0)
            early = tl.load(tokens + ahead * PAGE_SIZE, mask=real[:, None] & (ahead < mine), other=0)
        live = tl.minimum(ceil_pages(length, PAGE_SIZE), max_seq_pages)
        filled = live
        if TAIL == 1:
            filled = live * 0 + max_seq_pages
        if TAIL == 3:
            widest = batch_max(seq_lens, seqlen_offset, bs, SCAN)
            filled = live * 0 + tl.minimum(ceil_pages(widest, PAGE_SIZE), max_seq_pages)
        filled = tl.where(real, filled, 0)
        end = tl.max(filled, 0)

        # The first program has the early columns already, so that the last turn is its.
        turn = (part + PROGRAMS_PER_ROW - 1) % PROGRAMS_PER_ROW if EARLY > 0 else part
        step: tl.constexpr = PROGRAMS_PER_ROW * BLOCK
        last = tl.maximum(filled - 1, 0)[:, None]  # what lanes past a row read, instead of a mask: see load_below
        first = EARLY + turn * BLOCK
        if first < end:
            # The first turn by itself, on a straight way: most rows need no other.
            _fill_columns(
                tokens, pages, swa_pages, swa_mapping, first, last, filled[:, None], PAGE_SIZE, HAS_SWA, BLOCK
            )
            if not ONE_TURN:
                for start in range(first + step, end, step):
                    _fill_columns(
                        tokens, pages, swa_pages, swa_mapping, start, last, filled[:, None], PAGE_SIZE, HAS_SWA, BLOCK
                    )
        if EARLY > 0:  # noqa: SIM102 - a constant: where it is 0 there is no `early`
            if part == 0:  # behind the loop, whose loads would wait for these to arrive
                store_pages(pages, swa_pages, swa_mapping, early, ahead, filled[:, None], PAGE_SIZE, HAS_SWA)
        if TAIL == 2:
            for start in range(part * BLOCK, max_seq_pages, step):
                columns = start + tl.arange(0, BLOCK)[None, :]
                dead = real[:, None] & (columns >= filled[:, None]) & (columns < max_seq_pages)
                zero = tl.zeros([ROWS, BLOCK], tl.int32)
                tl.store(pages + columns, zero, mask=dead)
                if HAS_SWA:
                    tl.store(swa_pages + columns, zero, mask=dead)


@triton.jit
def _fill_columns(
    tokens, pages, swa_pages, swa_mapping, start, last, filled,
    PAGE_SIZE: tl.constexpr, HAS_SWA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = start + tl.arange(0, BLOCK)[None, :]
    # Read once a step: first to leave the L2 cache when the sliding window's random reads need the room.
    slot = tl.load(tokens + tl.minimum(columns, last) * PAGE_SIZE, eviction_policy="evict_first")
    store_pages(pages, swa_pages, swa_mapping, slot, columns, filled, PAGE_SIZE, HAS_SWA)


@triton.jit
def store_pages(pages, swa_pages, swa_mapping, slot, columns, filled, PAGE_SIZE: tl.constexpr, HAS_SWA: tl.constexpr):
    """Pages of `slot`, tiles of any shape, into columns below `filled`."""
    mask = columns < filled
    if HAS_SWA:
        swa = swa_slot(swa_mapping, slot, mask).to(tl.int32)
    # After the mapping's load: what is stored is what other lanes wait for least.
    tl.store(pages + columns, floor_div(slot, PAGE_SIZE), mask=mask)
    if HAS_SWA:
        tl.store(swa_pages + columns, floor_div(swa, PAGE_SIZE), mask=mask)


@triton.jit
def lengths_and_sums(
    seq_lens, qlens, cache_seqlens, cu_seqlens_q, cu_seqlens_k, bs, seqlen_offset, q_stride,
    Q_MODE: tl.constexpr, WRITE_CU_ZERO: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    total_k = tl.full((), 0, tl.int32)
    total_q = tl.full((), 0, tl.int32)
    for start in range(0, bs, SCAN):
        i = start + tl.arange(0, SCAN)
        mask = i < bs
        lens = tl.where(mask, load_below(seq_lens, i, bs).to(tl.int32) + seqlen_offset, 0)
        tl.store(cache_seqlens + i, lens, mask=mask)
        tl.store(cu_seqlens_k + 1 + i, total_k + tl.cumsum(lens, 0), mask=mask)
        total_k += tl.sum(lens, 0)
        if Q_MODE == 1:
            queries = tl.where(mask, load_below(qlens, i, bs).to(tl.int32), 0)
            tl.store(cu_seqlens_q + 1 + i, total_q + tl.cumsum(queries, 0), mask=mask)
            total_q += tl.sum(queries, 0)
        if Q_MODE == 2:
            tl.store(cu_seqlens_q + 1 + i, (i + 1) * q_stride, mask=mask)
    if WRITE_CU_ZERO:
        tl.store(cu_seqlens_k, tl.full((), 0, tl.int32))
        if Q_MODE != 0:
            tl.store(cu_seqlens_q, tl.full((), 0, tl.int32))


def update_decode_metadata(
    *,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor,
    bs: int,
    seqlen_offset: int = 0,
    max_seq_pages: int | None = None,
    page_size: int,
    swa_mapping: torch.Tensor | None = None,
    swa_page_table: torch.Tensor | None = None,
    out_cache_loc: torch.Tensor | None = None,
    swa_out_cache_loc: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    qlens: torch.Tensor | None = None,
    q_stride: int = 0,
    q_mode: int = QueryMode.PRESET,
    tail: TailPolicy = TailPolicy.LIVE_ONLY,
    write_cu_zero: bool = False,
    config: DecodeMetadataConfig | None = None,
) -> None:
    """Rebuild page-table attention metadata in place, in one launch. All tensors on one device.

    Args:
        req_pool_indices: [>=bs] int32 or int64. Row of req_to_token for each request.
        seq_lens: [>=bs] int32 or int64, in tokens.
        req_to_token: [rows, width] int32, row-contiguous, width > (max_seq_pages - 1) * page_size. -1 gives page -1.
        cache_seqlens: [>=bs] int32, out: seq_lens + seqlen_offset.
        cu_seqlens_k: [>=bs + 1] int32, out from index 1: running sum of cache_seqlens.
        page_table: [>=bs, >=max_seq_pages] int32, row-contiguous, out: floor(slot of a page's first token / P).
        bs: rows to rebuild; 0 does nothing.
        seqlen_offset: tokens added to each length.
        max_seq_pages: columns that may be written; the table's width if None.
        swa_mapping: [slots + 1] int64, full slot -> sliding-window slot; -1 stays -1.
        swa_page_table: like page_table, out: pages of the mapped slots. Needs swa_mapping.
        out_cache_loc: [n] int32 or int64, write slots of this step's tokens.
        swa_out_cache_loc: [T] int64, out: mapped out_cache_loc, then zeros. Needs swa_mapping and out_cache_loc.
        cu_seqlens_q: [>=bs + 1] int32, out from index 1 unless q_mode is PRESET.
        qlens: [>=bs] int32, queries per request, for q_mode CUMSUM.
        q_stride: queries per request, for q_mode STRIDED.
        q_mode: QueryMode.
        tail: what happens right of a row's live prefix.
        write_cu_zero: also write index 0 of the prefix sums.
        config: block sizes; `default_config` if None.

    Raises:
        ValueError: a dtype, shape or combination differs from the above; nothing is launched then.

    Not checked: that lengths fit the table (reading them would stall the stream). Columns past max_seq_pages are
    never written, so a length that is too long loses its last pages instead of overwriting the next row.
    Cost: one launch, no allocation, no synchronisation; no recompilation when only lengths change.
    """
    width = page_table.shape[1] if max_seq_pages is None else max_seq_pages
    if bs == 0:
        return
    check_vector("req_pool_indices", req_pool_indices, bs, (torch.int32, torch.int64))
    check_vector("seq_lens", seq_lens, bs, (torch.int32, torch.int64))
    check_vector("cache_seqlens", cache_seqlens, bs, (torch.int32,))
    check_vector("cu_seqlens_k", cu_seqlens_k, bs + 1, (torch.int32,))
    _check_table("page_table", page_table, bs, width)
    _check_source(req_to_token, width, page_size)
    has_swa = swa_page_table is not None
    if has_swa:
        _check_table("swa_page_table", swa_page_table, bs, width)
    has_slots = swa_out_cache_loc is not None
    if (has_swa or has_slots) and swa_mapping is None:
        raise ValueError("swa_page_table and swa_out_cache_loc need swa_mapping, got None")
    if has_slots:
        if out_cache_loc is None:
            raise ValueError("swa_out_cache_loc needs out_cache_loc, got None")
        check_vector("swa_out_cache_loc", swa_out_cache_loc, 0, (torch.int64,))
        if out_cache_loc.shape[0] > swa_out_cache_loc.shape[0]:
            raise ValueError(
                f"out_cache_loc has {out_cache_loc.shape[0]} slots, swa_out_cache_loc only "
                f"{swa_out_cache_loc.shape[0]}: pass the slots this step writes"
            )
    if q_mode != QueryMode.PRESET:
        if cu_seqlens_q is None:
            raise ValueError(f"q_mode {QueryMode(q_mode).name} needs cu_seqlens_q, got None")
        check_vector("cu_seqlens_q", cu_seqlens_q, bs + 1, (torch.int32,))
    if q_mode == QueryMode.CUMSUM:
        if qlens is None:
            raise ValueError("q_mode CUMSUM needs qlens, got None")
        check_vector("qlens", qlens, bs, (torch.int32,))
    call = _launch_of(
        req_pool_indices, seq_lens, req_to_token, cache_seqlens, cu_seqlens_k, page_table, bs, seqlen_offset,
        width, page_size, swa_mapping, swa_page_table, out_cache_loc, swa_out_cache_loc, cu_seqlens_q, qlens,
        q_stride, int(q_mode), tail, write_cu_zero, config or default_config(bs, width),
    )  # fmt: skip
    launch(_decode_metadata_kernel, *call)


VARYING = (0, 1, 16, 19, 21)
"""Kernel arguments that change from replay to replay. In mode CUMSUM qlens do, too: it comes last then."""
QLENS = 15


class PreparedDecodeMetadata:
    """`update_decode_metadata` bound to its output buffers: a call only brings what changes.

    Args: those of `update_decode_metadata`, every one of them; the caller has checked them.

    Attributes:
        launch: what a call goes through; takes the arguments at VARYING.
    """

    def __init__(self, **arguments) -> None:
        slots = arguments["swa_out_cache_loc"]
        self._room = None if slots is None else slots.shape[0]
        self._absent = arguments["cache_seqlens"]
        self._sums_queries = arguments["q_mode"] == QueryMode.CUMSUM
        varying = (*VARYING, QLENS) if self._sums_queries else VARYING
        self.launch = PreparedLaunch(_decode_metadata_kernel, *_launch_of(**arguments), varying=varying)

    def __call__(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor | None,
        qlens: torch.Tensor | None,
    ) -> None:
        """Rebuild for these inputs; the layout of each as in `update_decode_metadata`.

        Raises:
            ConfigError: out_cache_loc is longer than the bound buffer.
        """
        if self._room is None or out_cache_loc is None:
            values = (req_pool_indices, seq_lens, self._absent, 0, 1)
        else:
            n, (stride,) = out_cache_loc.numel(), out_cache_loc.stride()
            if n > self._room:
                raise too_many_slots(n, self._room)
            values = (req_pool_indices, seq_lens, out_cache_loc, n, stride)
        self.launch.repeat((*values, qlens) if self._sums_queries else values)


def _launch_of(
    req_pool_indices, seq_lens, req_to_token, cache_seqlens, cu_seqlens_k, page_table, bs, seqlen_offset,
    max_seq_pages, page_size, swa_mapping, swa_page_table, out_cache_loc, swa_out_cache_loc, cu_seqlens_q, qlens,
    q_stride, q_mode, tail, write_cu_zero, config,
) -> tuple[tuple[int, ...], tuple, dict]:  # fmt: skip
    """Grid, arguments and constants of one launch."""
    n_out = 0 if swa_out_cache_loc is None else swa_out_cache_loc.shape[0]
    # Plain integers: triton.cdiv and next_power_of_2 take 3 us each on the host.
    slot_programs = -(-n_out // SLOT_BLOCK)
    absent = cache_seqlens  # any valid pointer; the compiled variant never touches it
    loc = absent if out_cache_loc is None else out_cache_loc
    args = (
        req_pool_indices, seq_lens, req_to_token, page_table,
        bs, seqlen_offset, max_seq_pages,
        req_to_token.stride(0), page_table.stride(0), 0 if swa_page_table is None else swa_page_table.stride(0),
        absent if swa_mapping is None else swa_mapping,
        absent if swa_page_table is None else swa_page_table,
        cache_seqlens, cu_seqlens_k,
        absent if cu_seqlens_q is None else cu_seqlens_q,
        absent if qlens is None else qlens,
        loc,
        absent if swa_out_cache_loc is None else swa_out_cache_loc,
        q_stride,
        0 if out_cache_loc is None else loc.shape[0],
        n_out,
        loc.stride(0),
    )  # fmt: skip
    options = {
        "PAGE_SIZE": page_size,
        "HAS_SWA": swa_page_table is not None,
        "SLOT_PROGRAMS": slot_programs,
        "Q_MODE": q_mode,
        "TAIL": _TAILS[tail],
        "WRITE_CU_ZERO": write_cu_zero,
        "ONE_TURN": config.early + config.programs_per_row * config.block >= max_seq_pages,
        "PROGRAMS_PER_ROW": config.programs_per_row,
        "ROWS": config.rows,
        "EARLY": config.early,
        "BLOCK": config.block,
        "SCAN": min(SCAN_BLOCK, max(16, 1 << (bs - 1).bit_length())),
        "SLOTS": SLOT_BLOCK,
        "num_warps": config.num_warps,
    }
    return (programs(config, bs, n_out),), args, options


def programs(config: DecodeMetadataConfig, bs: int, n_slots: int) -> int:
    """Programs of one launch for bs rows and n_slots sliding-window write slots."""
    return 1 - (-n_slots // SLOT_BLOCK) - (-bs // config.rows) * config.programs_per_row


def _check_table(name: str, x: torch.Tensor, rows: int, columns: int) -> None:
    if x.dim() != 2 or x.shape[0] < rows or x.shape[1] < columns or x.dtype is not torch.int32:
        raise ValueError(f"{name} must be int32 of at least [{rows}, {columns}], got {x.dtype} {list(x.shape)}")
    if x.stride(1) != 1:
        raise ValueError(f"{name} must be row-contiguous, got strides {list(x.stride())}")


def _check_source(req_to_token: torch.Tensor, columns: int, page_size: int) -> None:
    _check_table("req_to_token", req_to_token, 1, (columns - 1) * page_size + 1)
