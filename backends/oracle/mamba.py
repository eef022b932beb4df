"""What the metadata of recurrent layers must hold, by mode."""

from __future__ import annotations

import numpy as np

from . import Expected, HostBatch, HostPools
from .linear import query_starts, state_indices, track_indices, tree_links, untouched

SKIPPED = -1


def expected(
    batch: HostBatch, pools: HostPools, *, draft_tokens: int, topk: int, variant: str = "kda"
) -> dict[str, Expected]:
    """Every metadata field by name. `draft_tokens`: N, tokens that the buffers have for each request."""
    b, verify = len(batch.seq_lens), batch.mode == "target_verify"
    fields = {
        "mamba_cache_indices": state_indices(batch, pools, padding_slot=SKIPPED),
        "query_start_loc": query_starts(batch, draft_tokens if verify else 1),
    }
    if verify and topk > 1:
        fields["retrieve_next_token"] = tree_links(batch.retrieve_next_token, b, draft_tokens)
        fields["retrieve_next_sibling"] = tree_links(batch.retrieve_next_sibling, b, draft_tokens)
        fields["retrieve_parent_token"] = untouched(b, draft_tokens)
    if batch.mamba_track_indices is not None:
        fields["mamba_track_indices"] = track_indices(batch, pools)
    if verify and variant == "gdn":
        fields["intermediate_state_indices"] = Expected.preset(np.arange(b, dtype=np.int32))
    return fields
