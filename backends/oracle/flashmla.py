"""What flashmla metadata must hold, by mode."""

from __future__ import annotations

import numpy as np

from ..modes import TailPolicy
from ..schedules import SplitLayout, split_kv
from . import Expected, HostBatch, HostPools, page_table


def expected(
    batch: HostBatch, pools: HostPools, *, width: int, parts: int, draft_tokens: int, layout: SplitLayout
) -> dict[str, Expected]:
    """Every metadata field by name.

    Args:
        width: the table's columns.
        parts, layout: rows and columns of the schedule.
    """
    added = draft_tokens if batch.mode == "target_verify" else 0
    lengths = np.array([int(n) + added for n in batch.seq_lens], dtype=np.int32)
    plan = split_kv(lengths.tolist(), parts, layout)
    fields = {
        "block_kv_indices": page_table(batch.req_pool_indices, lengths, pools, 64, width, TailPolicy.LIVE_ONLY),
        "flashmla_metadata": _schedule(plan.parts, len(lengths), layout),
        "num_splits": Expected.whole(np.array(plan.num_splits, dtype=np.int32)),
    }
    if batch.mode == "draft_extend_v2":
        fields["seq_lens_k"] = Expected.whole(lengths)
    return fields


def _schedule(parts: list[tuple[int, ...]], requests: int, layout: SplitLayout) -> Expected:
    """[parts, 8]; nobody reads the last columns, nor where a part without work would begin."""
    current = layout is SplitLayout.CURRENT
    values = np.array(parts, dtype=np.int32)
    live = np.ones(values.shape, dtype=bool)
    live[:, 7 if current else 5 :] = False
    live[values[:, 0] == requests, 2 if current else 1] = False
    return Expected(values, np.ones(values.shape, dtype=bool), live)
