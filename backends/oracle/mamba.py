"""What the metadata of recurrent layers must hold, by mode."""

from __future__ import annotations

import numpy as np

from . import Expected, HostBatch, HostPools
from .linear import query_starts, state_indices, track_indices, tree_links, untouched

SKIPPED = -1


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    draft_tokens: int,
    topk: int,
    variant: str = "kda",
    ring_interval: int = 0,
    ring_in_verify: bool = False,
) -> dict[str, Expected]:
    """Every metadata field by name.

    Args:
        draft_tokens: N, tokens that the buffers have for each request.
        ring_interval: tokens between flushes of a replay ring; 0 without one.
        ring_in_verify: whether verify moves cursors.
    """
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
    if ring_interval:
        slots = fields["mamba_cache_indices"].values
        flush = np.zeros(b, dtype=np.int32)
        if not verify and variant != "kda":
            flush[:] = [length % ring_interval == 0 for length in batch.seq_lens]
        after = pools.ring_cursors.copy()
        if not verify or ring_in_verify:
            after = moved_cursors(slots, flush, pools)
        fields["write_pos"] = Expected.whole(np.array([pools.ring_cursors[max(s, 0)] for s in slots], dtype=np.int32))
        fields["force_flush"] = Expected.whole(flush)
        fields["ring_cursors"] = Expected.state(after)
    return fields


def moved_cursors(slots: np.ndarray, flush: np.ndarray, pools: HostPools) -> np.ndarray:
    """int32 [slots]: cursors behind a step, each distinct slot's moved once."""
    after = pools.ring_cursors.copy()
    for slot in set(slots.tolist()) - {SKIPPED}:
        last = pools.ring_cursors[slot] == pools.ring_length - 1
        after[slot] = 0 if last or flush[slots == slot].any() else pools.ring_cursors[slot] + 1
    return after
