"""What trtllm_mha metadata must hold, by mode."""

from __future__ import annotations

import numpy as np

from ..modes import TailPolicy
from . import Expected, HostBatch, HostPools, page_table, write_slots


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    page_size: int,
    width: int,
    step_id: int = 0,
    tail: TailPolicy,
) -> dict[str, Expected]:
    """Every metadata field by name. `width` is the table's columns."""
    b, tokens = len(batch.seq_lens), batch.tokens_per_req
    added = {"draft_decode": step_id + 1, "target_verify": tokens}.get(batch.mode, 0)
    lengths = (batch.seq_lens + added).astype(np.int32)
    rows = batch.req_pool_indices
    fields = {
        "cache_seqlens_int32": Expected.whole(lengths),
        "cu_seqlens_q": _queries(batch, b, tokens),
        "cu_seqlens_k": Expected.prefix_sum(lengths),
        "page_table": page_table(rows, lengths, pools, page_size, width, tail),
    }
    if pools.full_to_swa is not None:
        fields["swa_page_table"] = page_table(rows, lengths, pools, page_size, width, tail, swa=True)
        if pools.swa_write:
            fields["swa_out_cache_loc"] = write_slots(batch.out_cache_loc, b * tokens, pools.full_to_swa)
    return fields


def _queries(batch: HostBatch, b: int, tokens: int) -> Expected:
    if batch.mode == "draft_extend":
        return Expected.prefix_sum(batch.num_accept_tokens)
    strided = np.array([i * tokens for i in range(b + 1)], dtype=np.int32)
    return Expected.prefix_sum(np.full(b, tokens)) if batch.mode == "draft_extend_v2" else Expected.preset(strided)
