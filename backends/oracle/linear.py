"""What linear-attention metadata must hold: pieces that its backends share."""

from __future__ import annotations

import numpy as np

from . import Expected, HostBatch, HostPools


def state_indices(batch: HostBatch, pools: HostPools, padding_slot: int) -> Expected:
    """int32 [B]: the state slot of each live request's row, where it lies by now, `padding_slot` behind."""
    values = np.full(len(batch.seq_lens), padding_slot, dtype=np.int32)
    for b in range(batch.live_requests):
        values[b] = _physical(pools.state_slots[batch.req_pool_indices[b]], pools)
    return Expected.whole(values)


def track_indices(batch: HostBatch, pools: HostPools) -> Expected:
    """int64 [B]: where each request's state is cached."""
    return Expected.whole(np.array([_physical(slot, pools) for slot in batch.mamba_track_indices], dtype=np.int64))


def _physical(slot: int, pools: HostPools) -> int:
    return slot if pools.physical_slots is None else pools.physical_slots[slot]


def query_starts(batch: HostBatch, width: int) -> Expected:
    """int32 [B + 1]: where each request's queries start; padding has none."""
    starts = [min(b, batch.live_requests) * width for b in range(len(batch.seq_lens) + 1)]
    return Expected.whole(np.array(starts, dtype=np.int32))


def tree_links(links: np.ndarray | None, requests: int, width: int) -> Expected:
    """int32 [B, width]: the links of live requests; rows behind them, and all where there is no tree, stay."""
    values, written = np.zeros((requests, width), dtype=np.int32), np.zeros((requests, width), dtype=bool)
    if links is not None:
        values[: len(links)] = links
        written[: len(links)] = True
    return Expected(values, written, written)


def untouched(*shape: int) -> Expected:
    """int32: a buffer that this rebuild neither writes nor promises anything about."""
    never = np.zeros(shape, dtype=bool)
    return Expected(np.zeros(shape, dtype=np.int32), never, never)
