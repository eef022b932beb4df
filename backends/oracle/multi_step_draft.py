"""What the shared tables of a multi-step draft must hold: index lists of each step, and one vector of split counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from . import Expected, HostBatch, HostPools
from .triton import split_counts


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    shapes: Mapping[str, tuple[tuple[int, ...], type]],
    step: int,
    topk: int,
    steps: int,
    page_size: int,
    splits: Mapping[str, int] | None,
) -> dict[str, Expected]:
    """One step's kv_indptr and kv_indices, wherever its metadata has them, its split counts and its constants.

    Padding rows are written too, but indptr follows positions (0 there) and the lists follow seq_lens (the fill), so
    only the live rows' entries mean anything to a kernel.

    Args:
        shapes: shape and dtype of each tensor that the metadata has.
        topk, steps, page_size: K, S, P.
        splits: arguments of `split_counts` but the lengths, or None without split counts.
    """
    fields, rows = {}, len(batch.seq_lens) * topk
    for path in shapes:
        if not path.endswith("kv_indptr"):
            continue
        lists = path.removesuffix("kv_indptr") + "kv_indices"
        (capacity,), dtype = shapes[lists]
        entries, live = _list(batch, pools, step, topk, steps, page_size)
        values, at = np.zeros(capacity, dtype=dtype), np.arange(capacity)
        values[: len(entries)] = entries
        fields[path] = Expected.prefix_sum([int(p) + step + 1 for p in batch.positions])
        fields[lists] = Expected(values, at < len(entries), at < live)
    if "kv_last_page_len" in shapes:
        fields["kv_last_page_len"] = Expected.preset(np.ones(rows, dtype=np.int32))
    if "qo_indptr" in shapes:  # one query a branch
        fields["qo_indptr"] = Expected.preset(np.arange(rows + 1, dtype=np.int32))
    if splits is not None:
        (size,), _ = shapes["num_kv_splits"]
        counts = split_counts([int(n) for n in batch.seq_lens], branches=topk, **splits)
        cells, counted = np.zeros(size, dtype=np.int32), np.arange(size) < rows
        cells[:rows] = counts
        fields["num_kv_splits"] = Expected(cells, counted, counted)
    return fields


def batch_of_step(batch: HostBatch, step: int, steps: int) -> HostBatch:
    """The batch with the write slots of one step, if it has those of all: request by request, steps innermost."""
    slots = batch.out_cache_loc
    if len(slots) not in (len(batch.seq_lens) * steps, batch.live_requests * steps):
        return batch
    return replace(batch, out_cache_loc=slots.reshape(-1, steps)[:, step])


def _list(
    batch: HostBatch, pools: HostPools, step: int, topk: int, steps: int, page_size: int
) -> tuple[list[int], int]:
    """One step's entries, and how many of them belong to live requests."""
    entries: list[int] = []
    live = 0
    for r, (row, length) in enumerate(zip(batch.req_pool_indices, batch.seq_lens, strict=True)):
        n = int(length)
        slots = pools.req_to_token[row]
        for branch in range(topk):
            entries += slots[:n].tolist()
            entries += [int(slots[_column(n, branch, e, topk, steps, page_size)]) for e in range(step + 1)]
        if r < batch.live_requests:
            live = len(entries)
    return entries, live


def _column(length: int, branch: int, entry: int, topk: int, steps: int, page_size: int) -> int:
    """Where draft token `entry` of a branch lies: behind the prefix, or in the branch's own pages."""
    if page_size == 1 or topk == 1:
        return length + branch * steps + entry
    partial = length % page_size
    pages = -(-(partial + steps) // page_size)
    return length - partial + branch * pages * page_size + partial + entry
