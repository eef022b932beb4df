"""What the shared tables of a multi-step draft must hold: index lists of every step, and one vector of split counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from . import Expected, HostBatch, HostPools
from .triton import split_counts


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    topk: int,
    steps: int,
    page_size: int,
    capacity: int,
    split_size: int,
    splits: Mapping[str, int],
) -> dict[str, Expected]:
    """Fields ``stepI.kv_indptr``, ``stepI.kv_indices`` and ``stepI.num_kv_splits`` of the S - 1 served steps.

    Padding rows are written too, but indptr follows positions (0 there) and the lists follow seq_lens (the fill), so
    only the live rows' entries mean anything to a kernel.

    Args:
        topk, steps, page_size: K, S, P.
        capacity: entries of each step's list.
        split_size: entries of the split vector.
        splits: arguments of `split_counts` but the lengths.
    """
    b = len(batch.seq_lens)
    counts = split_counts([int(n) for n in batch.seq_lens], branches=topk, **splits)
    cells = np.zeros(split_size, dtype=np.int32)
    cells[: b * topk] = counts
    counted = np.arange(split_size) < b * topk
    fields = {}
    for step in range(steps - 1):
        entries, live = _list(batch, pools, step, topk, steps, page_size)
        values = np.zeros(capacity, dtype=np.int64)
        values[: len(entries)] = entries
        at = np.arange(capacity)
        fields[f"step{step}.kv_indptr"] = Expected.prefix_sum([int(p) + step + 1 for p in batch.positions])
        fields[f"step{step}.kv_indices"] = Expected(values, at < len(entries), at < live)
        fields[f"step{step}.num_kv_splits"] = Expected(cells, counted, counted)
    return fields


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
