"""Context of every draft token's query row, from ragged query counts. One launch, one program a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch


@triton.jit
def _expand_seqlens_kernel(query_lens, kv_lens, offsets, expanded, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    queries = tl.load(query_lens + b)
    length = tl.load(kv_lens + b).to(tl.int32)
    first = tl.load(offsets + b)
    for start in range(0, queries, BLOCK):
        j = start + tl.arange(0, BLOCK)
        # A padding row is shorter than its queries; the top-k planner reads lengths as unsigned.
        tl.store(expanded + first + j, tl.maximum(length - queries + 1 + j, 0), mask=j < queries)


def expand_seqlens(
    query_lens: torch.Tensor, kv_lens: torch.Tensor, offsets: torch.Tensor, expanded: torch.Tensor
) -> None:
    """expanded[offsets[b] + j] = max(kv_lens[b] - query_lens[b] + 1 + j, 0) for j < query_lens[b], in place.

    Args:
        query_lens: [B] int32, query rows of each request.
        kv_lens: [B] int32 or int64, KV tokens with those of the queries.
        offsets: [B + 1] int32, exclusive running sum of query_lens.
        expanded: [rows] int32, out.
    """
    launch(
        _expand_seqlens_kernel,
        (query_lens.shape[0],),
        (query_lens, kv_lens, offsets, expanded),
        {"BLOCK": 16, "num_warps": 1},
    )
