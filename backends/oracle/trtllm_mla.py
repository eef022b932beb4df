"""What trtllm_mla metadata must hold, by mode."""

from __future__ import annotations

import numpy as np

from ..modes import TailPolicy
from . import Expected, HostBatch, HostPools, page_table


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    page_size: int,
    width: int,
    draft_tokens: int,
    own_seq_lens: bool = False,
    draft_offset: int = 0,
) -> dict[str, Expected]:
    """Every metadata field by name.

    Args:
        width: the table's columns.
        draft_tokens: N.
        own_seq_lens: decode has lengths of its own.
        draft_offset: tokens that draft decode counts on top.
    """
    added = {"target_verify": draft_tokens, "draft_decode": draft_offset}.get(batch.mode, 0)
    lengths = np.array([int(n) + added for n in batch.seq_lens], dtype=np.int32)
    table = page_table(batch.req_pool_indices, lengths, pools, page_size, width, TailPolicy.LIVE_ONLY)
    fields = {"block_kv_indices": table}
    decodes = batch.mode in ("decode", "draft_decode")
    if not decodes or own_seq_lens or added:
        fields["seq_lens_k"] = Expected.whole(lengths)
    if batch.mode in ("draft_extend", "draft_extend_v2"):
        b = len(lengths)
        starts = [i * draft_tokens for i in range(b + 1)]
        fields["cu_seqlens_q"] = Expected.preset(np.array(starts, dtype=np.int32))
        fields["seq_lens_q"] = Expected.preset(np.full(b, draft_tokens, dtype=np.int32))
    return fields
