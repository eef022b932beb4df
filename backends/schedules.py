"""Reference schedulers of the attention kernels that divide their work beforehand, in plain Python.

Vendor packages plan on the device; these say what such a plan must hold, cell by cell. The device versions are
`kernels/paged_mqa_schedule.py`, `kernels/topk_plan.py` and `kernels/split_kv_schedule.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

MQA_SPLIT = 256
"""KV tokens of one unit of paged-MQA work."""

TOPK_LEVELS = ((65536, 30), (98304, 48), (131072, 60), (196608, 80), (262144, 112), (393216, 128))
"""(threshold in tokens, most rows above it that the two-pass top-k kernel takes)."""

SPLIT_KV_BLOCK = 64
SPLIT_KV_OVERHEAD = 5
"""Fixed cost of touching a request, in blocks of SPLIT_KV_BLOCK tokens."""

REFERENCE_SMS = 132
"""Multiprocessors assumed where there is no GPU: those of an H100 or H200."""


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors (compute units) that a schedule divides its work over."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return REFERENCE_SMS


def split_kv_parts(num_sms: int, query_rows: int, num_kv_heads: int = 1) -> int:
    """Parts of a split-KV schedule: one per multiprocessor that 64 query rows of one KV head leave free."""
    return max(num_sms // num_kv_heads // -(-query_rows // 64), 1)


def paged_mqa_schedule(ctx_lens: Sequence[int], num_sms: int) -> list[tuple[int, int]]:
    """Where each multiprocessor starts: (row, unit within the row), num_sms + 1 entries, the last one the end.

    Units of MQA_SPLIT tokens are dealt out evenly in row order, the first `total % num_sms` shares one larger.
    """
    work = [-(-int(n) // MQA_SPLIT) for n in ctx_lens]
    average, larger = divmod(sum(work), num_sms)
    entries = []
    for sm in range(num_sms + 1):
        left = sm * average + min(sm, larger)
        row = 0
        while row < len(work) and left >= work[row]:
            left -= work[row]
            row += 1
        entries.append((row, left if row < len(work) else 0))
    return entries


def topk_v2_plan(lens: Sequence[int]) -> list[tuple[int, int]]:
    """[(threshold, M)] and then M entries (row, length) of the rows above the threshold.

    The threshold is the lowest level down to which no level has more rows above it than it can take. Upstream fills
    the entries in atomic order: a set. Ours are in row order.
    """
    chosen = TOPK_LEVELS[-1][0]
    for threshold, most in reversed(TOPK_LEVELS):
        if sum(n > threshold for n in lens) > most:
            break
        chosen = threshold
    long_rows = [(row, int(n)) for row, n in enumerate(lens) if n > chosen]
    return [(chosen, len(long_rows)), *long_rows]


class SplitLayout(IntEnum):
    """Columns of a split-KV schedule; a part with begin request = number of requests is idle.

    CURRENT: begin request, end request inclusive, begin block, end block exclusive, begin split, first-split flag,
        last-split flag, 0.
    OLDER: begin request, begin block, end request, end block, begin split, 0, 0, 0, as earlier releases have it.
    TOKENS: OLDER with begin and end in tokens, for dense 8-bit KV. A request of length 0 has no block there.
    """

    CURRENT = 2
    OLDER = 1
    TOKENS = 8


@dataclass(frozen=True, slots=True)
class SplitKV:
    """A split-KV schedule.

    Attributes:
        parts: the columns of each part, see `SplitLayout`.
        num_splits: running count of splits over requests, one more entry than requests.
    """

    parts: list[tuple[int, ...]]
    num_splits: list[int]


def split_kv(lens: Sequence[int], parts: int, layout: SplitLayout = SplitLayout.CURRENT) -> SplitKV:
    """The greedy walk: each part takes requests until its payload is used up, leaving the last one open.

    A request of length 0 still costs one block, but for TOKENS. The flags say whether the first or last request of a
    part is split.
    """
    tokens = layout is SplitLayout.TOKENS
    blocks = [-(-max(int(n), 0 if tokens else 1) // SPLIT_KV_BLOCK) for n in lens]
    bs, overhead = len(blocks), SPLIT_KV_OVERHEAD
    payload = -(-sum(b + overhead for b in blocks) // parts) + overhead
    rows, num_splits = [], [0]
    request = block = split = 0
    for _ in range(parts):
        begin, left = (request, block, split), payload
        while request < bs:
            rest = blocks[request] - block
            if left >= rest + overhead:
                num_splits.append(num_splits[-1] + split + 1)
                left -= rest + overhead
                request, block, split = request + 1, 0, 0
                continue
            if left > overhead:
                block += left - overhead
                split += 1
            break
        last = request if block > 0 else request - 1
        end = block if block > 0 else (0 if lens[last] == 0 else blocks[last])
        first_open = begin[1] != 0
        last_open = end != blocks[last] and lens[last] != 0
        if begin[0] == last:
            first_open = last_open = first_open or last_open
        if tokens:
            end = block * SPLIT_KV_BLOCK if block > 0 else int(lens[last])
            rows.append((begin[0], begin[1] * SPLIT_KV_BLOCK, last, end, begin[2], 0, 0, 0))
        elif layout is SplitLayout.OLDER:
            rows.append((begin[0], begin[1], last, end, begin[2], 0, 0, 0))
        else:
            rows.append((begin[0], last, begin[1], end, begin[2], int(first_open), int(last_open), 0))
    return SplitKV(rows, num_splits)


MIN_KV_TILE = 128
"""Fewest KV tokens worth a tile of their own."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Work of a paged attention kernel: a tile is a block of a request's query rows against one chunk of its KV.

    Attributes:
        chunk: KV tokens of a tile; the last one of a request may have fewer.
        request, query_tile, kv_tile: [tiles] int32, request behind request, query tile by query tile.
    """

    chunk: int
    request: np.ndarray
    query_tile: np.ndarray
    kv_tile: np.ndarray


def query_tile_rows(queries: int, group: int) -> int:
    """Query rows of a tile, for requests of `queries` tokens whose `group` heads share a KV head."""
    rows = queries * group
    return 128 if rows > 64 else 64 if rows > 16 else 16


def divide_kv(kv_lens: np.ndarray, query_tiles: np.ndarray, most: int, split: bool = True) -> TilePlan:
    """Divide the KV of each request into the smallest chunks whose tiles are at most `most`, as FlashInfer's host
    planner does.

    Args:
        kv_lens: [B] tokens; an empty request still takes one tile for each of its query tiles.
        query_tiles: [B], how often each request's KV is read.
        most: tiles that the device takes at once.
        split: False gives every request one chunk, so that results do not depend on the batch.
    """
    kv = np.maximum(kv_lens, 1)
    low = high = int(kv.max())
    if split and int(query_tiles.sum()) < most:
        low = max(MIN_KV_TILE, -(-int((kv * query_tiles).sum()) // most))  # no smaller chunk can do
    while low < high:
        middle = (low + high) // 2
        if int((-(-kv // middle) * query_tiles).sum()) > most:
            low = middle + 1
        else:
            high = middle
    chunks = -(-kv // low)
    tiles = chunks * query_tiles
    request = np.repeat(np.arange(len(kv)), tiles)
    within = np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    query_tile, kv_tile = np.divmod(within, chunks[request])
    return TilePlan(low, request.astype(np.int32), query_tile.astype(np.int32), kv_tile.astype(np.int32))


MLA_GRANULARITY = 16
"""KV tokens of a block of AITER's MLA work, at least; the page size where that is larger."""
MLA_TAIL = 4
"""A last chunk of this many tokens or fewer joins the one before it."""
MLA_OVERHEAD = 16
"""Fixed cost of touching a tile, in blocks, for the plan that fills multiprocessors one after the other."""


@dataclass(frozen=True, slots=True)
class MlaWork:
    """Work of AITER's persistent MLA kernel. A tile is one request's queries, or a fold of its heads.

    Attributes:
        info: per work (tile, partial slot or -1, query start, query end, KV start, KV end, KV tokens behind it, 0).
        indptr: works before each multiprocessor, one more entry than there are.
        reduce_indptr: partial results before each reduction, one more entry than there are.
        reduce_final: (query start, query end) of each reduction.
        reduce_partial: partial slots, reduction behind reduction.
    """

    info: list[tuple[int, ...]]
    indptr: list[int]
    reduce_indptr: list[int]
    reduce_final: list[tuple[int, int]]
    reduce_partial: list[int]


def mla_work_even(
    kv_lens: Sequence[int], queries: int, cus: int, max_splits: int, *, fold: int = 1, fixed_splits: int = 0,
    granularity: int = MLA_GRANULARITY, ladder: bool = False,
) -> MlaWork:  # fmt: skip
    """Every tile is cut into chunks of its own size, works are dealt out evenly.

    Args:
        kv_lens: tokens of each request.
        queries: query rows of a tile.
        cus: multiprocessors.
        fold: tiles of each request.
        fixed_splits: chunks to aim at, or 0 to choose by length and by how many tiles there are.
        ladder: a request's tiles are its queries, each of which sees one token more than the one before.
    """
    info, reduce_indptr, final, partial_map = [], [0], [], []
    tiles, starts, reach = _mla_tiles(kv_lens, fold, ladder)
    for tile in range(tiles):
        start, tokens = starts[tile], reach[tile]
        length = max(tokens, 1)
        blocks = -(-length // granularity)
        splits = fixed_splits or max(1, min(length // 196, -(-cus // tiles), max_splits))
        chunk = -(-blocks // splits) * granularity
        cuts = -(-length // chunk)
        if cuts > 1 and 0 < length % chunk <= MLA_TAIL:
            cuts -= 1
        for i in range(cuts):
            begin = start + i * chunk
            end = start + tokens if i == cuts - 1 else begin + chunk
            partial = -1 if cuts == 1 else len(info) * queries
            rows = tile * queries, (tile + 1) * queries
            info.append((tile, partial, *rows, begin, end, start + tokens - end, 0))
            partial_map.append(partial)
        reduce_indptr.append(len(info))
        final.append((tile * queries, (tile + 1) * queries))
    each, larger = divmod(len(info), cus)
    indptr = [c * each + min(c, larger) for c in range(cus + 1)]
    return MlaWork(info, indptr, reduce_indptr, final, partial_map)


def mla_work_filling(
    kv_lens: Sequence[int], queries: int, cus: int, max_splits: int, *, fold: int = 1,
    granularity: int = MLA_GRANULARITY, ladder: bool = False,
) -> MlaWork:  # fmt: skip
    """Multiprocessors are filled one after the other up to the same payload; a tile is cut where one is full.

    No cut leaves a tail shorter than the tile's queries. Only cut tiles are reduced. Arguments as for
    `mla_work_even`.
    """
    tiles, starts, reach = _mla_tiles(kv_lens, fold, ladder)
    blocks = [-(-max(n, 1) // granularity) for n in reach]
    parts = min(cus, max_splits * tiles)
    payload = -(-sum(b + MLA_OVERHEAD for b in blocks) // parts) + MLA_OVERHEAD
    info, indptr, reduce_indptr, final, partial_map = [], [0], [0], [], []
    tile = block = 0
    for _ in range(cus):
        left = payload
        while tile < tiles:
            tokens, rest = reach[tile], blocks[tile] - block
            taken = left - MLA_OVERHEAD
            finish = taken >= rest
            if not finish and taken <= 0:
                break
            end = tokens if finish else (block + taken) * granularity
            if tokens - end < queries:
                finish, end = True, tokens
            partial = -1
            if block > 0 or not finish:
                partial = len(partial_map) * queries
                partial_map.append(partial)
            begin = starts[tile] + block * granularity
            rows = tile * queries, (tile + 1) * queries
            info.append((tile, partial, *rows, begin, starts[tile] + end, tokens - end, 0))
            if not finish:
                block += taken
                break
            if block > 0:
                reduce_indptr.append(len(partial_map))
                final.append(rows)
            left -= rest + MLA_OVERHEAD
            tile, block = tile + 1, 0
        indptr.append(len(info))
    return MlaWork(info, indptr, reduce_indptr, final, partial_map)


def _mla_tiles(kv_lens: Sequence[int], fold: int, ladder: bool) -> tuple[int, list[int], list[int]]:
    """(tiles, where the KV of each begins, how many tokens of it each reads)."""
    starts, reach, at = [], [], 0
    for n in map(int, kv_lens):
        starts += [at] * fold
        reach += [max(n - (fold - 1 - i), 0) if ladder else n for i in range(fold)]
        at += n
    return len(starts), starts, reach
