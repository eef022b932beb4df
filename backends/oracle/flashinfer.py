"""What FlashInfer's wrappers must find, by mode, on the device and in the host plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from . import Expected, HostBatch, HostPools, index_list, write_slots


def kv_ranges(
    batch: HostBatch, kind: str, *, offset: int, window: int | None, queries: Sequence[int]
) -> list[tuple[int, int]]:
    """(first token, tokens) that one wrapper reads of each request.

    Args:
        kind: FULL, WINDOW, AFTER_ENCODER or ENCODER.
        offset: tokens on top of seq_lens.
        queries: the requests' own tokens of this step: a window begins `window` tokens before the first of them.
    """
    ranges = []
    for r, seq_len in enumerate(batch.seq_lens):
        total = int(seq_len) + offset
        if kind == "WINDOW":
            first_query = total - int(queries[r])
            start = max(first_query - window, 0)
            ranges.append((start, total - start))
        elif kind == "AFTER_ENCODER":
            ranges.append((int(batch.encoder_lens[r]), total))
        elif kind == "ENCODER":
            ranges.append((0, int(batch.encoder_lens[r])))
        else:
            ranges.append((0, total))
    return ranges


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    shapes: Mapping[str, tuple[tuple[int, ...], type]],
    ranges: Sequence[str],
    offset: int,
    window: int | None,
    queries: int,
) -> dict[str, Expected]:
    """Every tensor that a rebuild of this mode touches, by path.

    Args:
        shapes: shape and dtype of each tensor that the metadata has.
        ranges: what each wrapper reads, see `kv_ranges`.
        queries: tokens per request of the captured shape.
    """
    b = len(batch.seq_lens)
    own = query_counts(batch, queries)
    fields = {"kv_last_page_len": Expected.preset(np.ones(b, dtype=np.int32))}
    if "qo_indptr" in shapes:
        fields["qo_indptr"] = Expected.prefix_sum(own)
    for i, kind in enumerate(ranges):
        at = f"wrappers.{i}."
        found = kv_ranges(batch, kind, offset=offset, window=window, queries=own)
        starts, lengths = [s for s, _ in found], [n for _, n in found]
        fields[at + "kv_indptr"] = Expected.prefix_sum(lengths)
        swa = kind == "WINDOW" and pools.full_to_swa is not None
        (size,), dtype = shapes[at + "kv_indices"]
        fields[at + "kv_indices"] = index_list(batch.req_pool_indices, starts, lengths, pools, size, dtype, swa=swa)
        if at + "custom_mask" in shapes:
            packed = packed_masks(batch, found, offset, queries)
            fields[at + "mask_indptr"] = Expected.prefix_sum([len(p) for p in packed])
            cells = np.zeros(shapes[at + "custom_mask"][0], dtype=np.uint8)
            flat = np.concatenate(packed)
            cells[: len(flat)] = flat
            written = np.arange(len(cells)) < len(flat)
            fields[at + "custom_mask"] = Expected(cells, written, written)
    if "swa_out_cache_loc" in shapes:
        (size,), _ = shapes["swa_out_cache_loc"]
        fields["swa_out_cache_loc"] = write_slots(batch.out_cache_loc, size, pools.full_to_swa)
    return fields


def query_counts(batch: HostBatch, queries: int) -> list[int]:
    """Each request's own tokens of this step: the accepted ones in draft extend v1, else as many as captured."""
    if batch.mode == "draft_extend":
        return [int(n) for n in batch.num_accept_tokens]
    return [queries] * len(batch.seq_lens)


def packed_masks(batch: HostBatch, ranges: Sequence[tuple[int, int]], offset: int, queries: int) -> list[np.ndarray]:
    """Each request's mask columns within its range, row by row, 8 cells to a byte, the first in the lowest bit.

    Requests without cells in the given mask (padding, an idle step) see everything.
    """
    packed, at = [], 0
    for r, (start, length) in enumerate(ranges):
        total = int(batch.seq_lens[r]) + offset
        rows = np.ones((queries, total), dtype=bool)
        if r < batch.live_requests:
            rows = np.asarray(batch.custom_mask[at : at + rows.size], dtype=bool).reshape(queries, total)
            at += rows.size
        packed.append(np.packbits(rows[:, start : start + length].ravel(), bitorder="little"))
    return packed


def plan_arrays(
    batch: HostBatch, kind: str, *, offset: int, window: int | None, queries: int
) -> tuple[list[int], list[int]]:
    """(qo_indptr, kv_indptr) that one wrapper's planner must be given, [B + 1] each."""
    own = query_counts(batch, queries)
    found = kv_ranges(batch, kind, offset=offset, window=window, queries=own)
    qo, kv = [0], [0]
    for n, (_, length) in zip(own, found, strict=True):
        qo.append(qo[-1] + n)
        kv.append(kv[-1] + length)
    return qo, kv
