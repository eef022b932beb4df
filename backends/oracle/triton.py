"""What CSR metadata with KV splits must hold, by mode: the Triton backend's, and Wave's, which is a part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from . import Expected, HostBatch, HostPools, index_list, write_slots


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    shapes: Mapping[str, tuple[tuple[int, ...], type]],
    queries: int,
    window: int,
    splits: Mapping[str, int],
) -> dict[str, Expected]:
    """Every field that a rebuild of this mode touches, by name.

    Args:
        shapes: shape and dtype of each field that the metadata object has.
        queries: tokens per request of the captured shape; not used in decode.
        window: tokens of the sliding window, or 0.
        splits: arguments of `split_counts` but the lengths.
    """
    size = {name: shape[0] for name, (shape, _) in shapes.items()}
    dtype = {name: dtype for name, (_, dtype) in shapes.items()}
    rows, b = batch.req_pool_indices, len(batch.seq_lens)
    lengths = [int(n) for n in batch.seq_lens]
    if batch.mode == "draft_extend_v2":
        new = [queries] * b if batch.extend_seq_lens is None else batch.extend_seq_lens
        lengths = [max(n - int(e), 0) for n, e in zip(lengths, new, strict=True)]
    kept = [min(n, window) if window else n for n in lengths]
    starts = [n - k for n, k in zip(lengths, kept, strict=True)]
    fields = {
        "kv_indptr": Expected.prefix_sum(lengths),
        "kv_indices": index_list(rows, [0] * b, lengths, pools, size["kv_indices"], dtype["kv_indices"]),
    }
    if "num_kv_splits" in size:
        fields["num_kv_splits"] = front(split_counts(lengths, **splits), size["num_kv_splits"], np.int32)
    if "window_kv_indptr" in size:
        fields["window_kv_indptr"] = Expected.prefix_sum(kept)
        fields["window_kv_indices"] = index_list(
            rows, starts, kept, pools, size["window_kv_indices"], dtype["window_kv_indices"],
            swa=pools.full_to_swa is not None,
        )  # fmt: skip
    if "window_num_kv_splits" in size:
        fields["window_num_kv_splits"] = front(split_counts(kept, **splits), size["window_num_kv_splits"], np.int32)
    if "window_kv_offsets" in size:
        fields["window_kv_offsets"] = front(starts, size["window_kv_offsets"], np.int32)
    if "qo_indptr" in size:
        fields["qo_indptr"] = Expected.whole(np.array([i * queries for i in range(b + 1)], dtype=dtype["qo_indptr"]))
    if "mask_indptr" in size:
        cells = [queries * (int(n) + queries) for n in batch.seq_lens]
        fields["mask_indptr"] = Expected.prefix_sum(cells, np.int64)
    if "custom_mask" in size:
        # The live requests' cells; an idle step has padding only, which may see everything.
        idle = batch.live_requests == 0
        mask = np.ones(sum(cells), dtype=np.uint8) if idle else batch.custom_mask
        fields["custom_mask"] = front(mask, size["custom_mask"], np.uint8)
    if "swa_out_cache_loc" in size:
        fields["swa_out_cache_loc"] = write_slots(batch.out_cache_loc, size["swa_out_cache_loc"], pools.full_to_swa)
    return fields


def split_counts(
    lengths: list[int], *, max_splits: int, cores: int, num_heads: int, num_kv_heads: int, tile: int, branches: int = 1
) -> list[int]:
    """KV splits of each token, `branches` tokens a request.

    Args:
        max_splits: M.
        cores: multiprocessors; 0 gives everybody M splits.
        tile: tokens per split where that is fixed, else 0.
    """
    if tile:
        return [_ceil(n, tile) for n in lengths for _ in range(branches)]
    if cores == 0:
        return [max_splits] * (len(lengths) * branches)
    longest, shortest = max(lengths), max(min(lengths), 1)
    if 8 * longest < 10 * shortest:
        shortest = longest
    balanced = max(min(_ceil(longest, shortest), max_splits), 1)
    tokens = len(lengths) * branches
    group = num_heads // num_kv_heads
    grid = tokens * num_heads if group == 1 else tokens * _ceil(num_heads, min(16, group))
    depth = np.maximum(np.log2(np.float32(longest) / np.float32(64)), np.float32(1)) if longest else np.float32(1)
    filling = max(min(_ceil(int(np.float32(cores) * depth), grid), max_splits), 1)
    by_row, by_device = (max(_ceil(longest, n), 1) for n in (balanced, filling))
    return [max(_ceil(n, by_row), _ceil(n, by_device)) for n in lengths for _ in range(branches)]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def front(values: Sequence[int] | np.ndarray, size: int, dtype: type) -> Expected:
    """[size]: `values` at the front, the rest untouched."""
    cells = np.zeros(size, dtype=dtype)
    cells[: len(values)] = values
    written = np.arange(size) < len(values)
    return Expected(cells, written, written)
