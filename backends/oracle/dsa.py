"""What sparse MLA (DSA) metadata must hold, by mode."""

from __future__ import annotations

import numpy as np

from .. import schedules
from ..modes import TailPolicy
from . import Expected, HostBatch, HostPools, page_table


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    page_size: int,
    topk: int,
    num_sms: int,
    tail: TailPolicy,
    wide_table: bool = True,
    mqa_2d: bool = False,
    topk_v2: bool = False,
    split_parts: int = 0,
) -> dict[str, Expected]:
    """Every metadata field by name. Options as `dsa.DsaOptions`; split_parts 0 without FlashMLA."""
    n = batch.tokens_per_req if batch.mode in ("target_verify", "draft_extend_v2") else 1
    added = n if batch.mode == "target_verify" else 0
    lengths = [int(s) + added for s in batch.seq_lens]
    # Query j of a request sees the prefix and the draft tokens up to itself.
    expanded = [max(length - n + 1 + j, 0) for length in lengths for j in range(n)]
    kept = [min(length, topk) for length in expanded]
    row_lengths = np.repeat(lengths, n)
    rows = np.repeat(batch.req_pool_indices, n)
    width = pools.req_to_token.shape[1]
    vector = lambda values: Expected.whole(np.array(values, dtype=np.int32))  # noqa: E731
    counting = Expected.preset(np.arange(len(expanded) + 1, dtype=np.int32))
    fields = {
        "cache_seqlens_int32": vector(lengths),
        "cu_seqlens_q": counting,
        "cu_seqlens_k": Expected.prefix_sum(lengths),
        "dsa_seqlens_expanded": vector(expanded),
        "dsa_cache_seqlens_int32": vector(kept),
        "dsa_cu_seqlens_q": counting,
        "dsa_cu_seqlens_k": Expected.prefix_sum(kept),
        "real_page_table": page_table(rows, row_lengths, pools, page_size, -(-width // page_size), tail),
    }
    if wide_table:
        fields["page_table_1"] = page_table(rows, row_lengths, pools, 1, width, tail)
    two_d = mqa_2d and batch.mode == "target_verify" and n > 1
    fields["paged_mqa_ctx_lens_2d"] = vector([[s] * n for s in lengths] if two_d else [[s] for s in expanded])
    fields["paged_mqa_schedule_metadata"] = vector(
        schedules.paged_mqa_schedule(lengths if two_d else expanded, num_sms)
    )
    if topk_v2:
        fields["topk_v2_plan"] = plan_field(expanded)
    if split_parts:
        split = schedules.split_kv(kept, split_parts)
        fields["flashmla_metadata.flashmla_metadata"] = vector(split.parts)
        fields["flashmla_metadata.num_splits"] = vector(split.num_splits)
    return fields


def plan_field(lengths: list[int]) -> Expected:
    """int32 [rows + 1, 2]: the top-k v2 plan; rows past its count are not written."""
    entries = schedules.topk_v2_plan(lengths)
    values = np.zeros((len(lengths) + 1, 2), dtype=np.int32)
    values[: len(entries)] = entries
    written = np.zeros(values.shape, dtype=bool)
    written[: len(entries)] = True
    return Expected(values, written, written)
