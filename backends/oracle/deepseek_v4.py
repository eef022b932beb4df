"""What DeepSeek-V4 metadata must hold, by mode."""

from __future__ import annotations

import numpy as np

from .. import schedules
from . import Expected, HostBatch, HostPools, swa_slot
from .dsa import plan_field

SWA_WINDOW = 128


def expected(
    batch: HostBatch, pools: HostPools, *, topk: int, num_sms: int, rings: tuple[int, int], keep_draft: bool = True
) -> dict[str, Expected]:
    """Every metadata field by name.

    Args:
        topk: compressed tokens that the ratio-4 indexer keeps.
        rings: states kept per request, for ratios 4 and 128.
        keep_draft: verify keeps the states of the last 4 tokens whatever the block edges.
    """
    context, rows = contexts(batch)
    slots = write_locations(batch, len(context))
    raw_dtype = np.int32 if batch.mode == "target_verify" else batch.seq_lens.dtype
    pages = page_ids(rows, pools)
    fields = {
        "raw_out_loc": slots.astype(raw_dtype),
        "seq_lens_casual": context,
        "positions_casual": [n - 1 for n in context],
        "page_table": pages,
        "swa_page_indices": [newest_first(row, n, pools) for row, n in zip(rows, context, strict=True)],
        "swa_topk_lengths": [min(n, SWA_WINDOW) for n in context],
        "swa_out_cache_loc": swa_slot(slots, pools.full_to_swa).astype(np.int32),
    }
    if batch.mode not in ("draft_extend", "draft_extend_v2"):
        fields |= compressed(context, slots, pages, topk)
        fields["indexer.page_table"] = pages
        fields["indexer.c4_seq_lens"] = [n // 4 for n in context]
        fields["indexer.schedule"] = schedules.paged_mqa_schedule([n // 4 for n in context], num_sms)
    whole = {name: Expected.whole(_int32(values)) for name, values in fields.items()}
    if "indexer.schedule" in fields:
        whole["indexer.topk_plan"] = plan_field([n // 4 for n in context])
        for name, ratio, ring in (("c4_plan", 4, rings[0]), ("c128_plan", 128, rings[1])):
            for part, plan in compressor_plan(batch, pools, ratio, ring, keep_draft).items():
                whole[f"{name}.{part}"] = Expected.whole(plan)
    return whole


def _int32(values) -> np.ndarray:
    """int64 only where the array says so itself."""
    wide = isinstance(values, np.ndarray) and values.dtype == np.int64
    return np.asarray(values) if wide else np.asarray(values, dtype=np.int32)


def contexts(batch: HostBatch) -> tuple[list[int], list[int]]:
    """Context of every query row, itself included, and its row of req_to_token."""
    n = 1 if batch.mode in ("decode", "draft_decode") else batch.tokens_per_req
    first = 1 if batch.mode == "target_verify" else 1 - n
    context = [int(s) + first + j for s in batch.seq_lens for j in range(n)]
    return context, [int(r) for r in batch.req_pool_indices for _ in range(n)]


def write_locations(batch: HostBatch, tokens: int) -> np.ndarray:
    """int64 [tokens]: zeros behind the live slots."""
    slots = np.zeros(tokens, dtype=np.int64)
    slots[: len(batch.out_cache_loc)] = batch.out_cache_loc
    return slots


def page_ids(rows: list[int], pools: HostPools) -> np.ndarray:
    return pools.req_to_token[rows, ::256] // 256


def newest_first(row: int, context: int, pools: HostPools) -> list[int]:
    """Sliding-window slots of the last SWA_WINDOW tokens; -1 before the first token."""
    positions = [context - 1 - k for k in range(SWA_WINDOW)]
    return [int(swa_slot(pools.req_to_token[row, p], pools.full_to_swa)) if p >= 0 else -1 for p in positions]


def compressed(context: list[int], slots: np.ndarray, pages: np.ndarray, topk: int) -> dict:
    """Fields of the two compressed pools."""
    width = -(-2 * pages.shape[1] // 64) * 64
    c128 = np.full((len(context), width), -1, dtype=np.int32)
    for t, n in enumerate(context):
        for q in range(n // 128):
            c128[t, q] = pages[t, q // 2] * 2 + q % 2
    at = lambda ratio: [o // ratio if n % ratio == 0 else 0 for n, o in zip(context, slots, strict=True)]  # noqa: E731
    return {
        "c4_out_loc": np.array(at(4), dtype=np.int64),
        "c4_topk_lengths_raw": [n // 4 for n in context],
        "c4_topk_lengths_clamp1": [max(n // 4, 1) for n in context],
        "c4_sparse_topk_lengths": [min(max(n // 4, 1), topk) for n in context],
        "c4_sparse_page_indices": np.full((len(context), -(-topk // 64) * 64), -1, dtype=np.int32),
        "c128_out_loc": np.array(at(128), dtype=np.int64),
        "c128_page_indices": c128,
        "c128_topk_lengths_clamp1": [max(n // 128, 1) for n in context],
    }


def compressor_plan(
    batch: HostBatch, pools: HostPools, ratio: int, ring: int, keep_draft: bool
) -> dict[str, np.ndarray]:
    """Plan bytes by part: ``plan_d`` in decode, ``plan_c`` and ``plan_w`` in verify."""

    def slot(row: int, position: int) -> int:
        if ratio == 128:
            return row * ring + position % ring
        state = int(swa_slot(pools.req_to_token[row, position], pools.full_to_swa))
        return state // 128 * ring + state % ring

    def read(row: int, position: int) -> tuple[int, int]:
        return slot(row, max(position - ratio, 0)) // ratio, slot(row, position) // ratio

    rows, lengths = [int(r) for r in batch.req_pool_indices], [int(s) for s in batch.seq_lens]
    if batch.mode != "target_verify":
        plan = [(s, slot(r, s - 1), *read(r, s - 1)) for r, s in zip(rows, lengths, strict=True)]
        return {"plan_d": _bytes(plan, "u4,i4,i4,i4")}
    n = batch.tokens_per_req
    window = 8 if ratio == 4 else 128
    compress, write = [], []
    for b, (row, length) in enumerate(zip(rows, (s + n for s in lengths), strict=True)):
        kept_from = length // ratio * ratio - (4 if ratio == 4 else 0)
        if keep_draft:
            kept_from = min(kept_from, length - min(ring - ratio, 4))
        for j in range(n):
            position, token = length - n + j, b * n + j
            if (position + 1) % ratio == 0:
                from_ring = window - min(j + 1, window)
                pages = read(row, position) if from_ring > 0 else (-1, b)
                compress.append((position + 1, token, from_ring, *pages))
            if position >= kept_from or (ratio == 4 and position % 128 >= 124):
                write.append((token, slot(row, position)))
    total, unused = len(rows) * n, 0xFFFFFFFF
    compress += [(unused, 0, 0, -1, -1)] * (total - len(compress))
    write += [(unused, -1)] * (total - len(write))
    return {"plan_c": _bytes(compress, "u4,u2,u2,i4,i4"), "plan_w": _bytes(write, "u4,i4")}


def _bytes(entries: list[tuple[int, ...]], layout: str) -> np.ndarray:
    packed = np.array(entries, dtype=layout)
    return packed.view(np.uint8).reshape(len(entries), packed.dtype.itemsize)
