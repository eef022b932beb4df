"""What flashmla metadata must hold, by mode."""

from __future__ import annotations

import numpy as np

from ..modes import TailPolicy
from ..schedules import split_kv
from . import Expected, HostBatch, HostPools, page_table


def expected(batch: HostBatch, pools: HostPools, *, width: int, parts: int, draft_tokens: int) -> dict[str, Expected]:
    """Every metadata field by name. `width`: the table's columns. `parts`: rows of the schedule."""
    added = draft_tokens if batch.mode == "target_verify" else 0
    lengths = np.array([int(n) + added for n in batch.seq_lens], dtype=np.int32)
    plan = split_kv(lengths.tolist(), parts)
    fields = {
        "block_kv_indices": page_table(batch.req_pool_indices, lengths, pools, 64, width, TailPolicy.LIVE_ONLY),
        "flashmla_metadata": _schedule(plan.parts, len(lengths)),
        "num_splits": Expected.whole(np.array(plan.num_splits, dtype=np.int32)),
    }
    if batch.mode == "draft_extend_v2":
        fields["seq_lens_k"] = Expected.whole(lengths)
    return fields


def _schedule(parts: list[tuple[int, ...]], requests: int) -> Expected:
    """[parts, 8]; nobody reads the last column, nor where a part without work would begin."""
    values = np.array(parts, dtype=np.int32)
    live = np.ones(values.shape, dtype=bool)
    live[:, 7] = False
    live[values[:, 0] == requests, 2] = False
    return Expected(values, np.ones(values.shape, dtype=bool), live)
