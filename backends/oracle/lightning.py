"""What lightning attention's metadata must hold, by mode."""

from __future__ import annotations

import numpy as np

from . import Expected, HostBatch, HostPools, mamba


def expected(batch: HostBatch, pools: HostPools, *, draft_tokens: int) -> dict[str, Expected]:
    """Every metadata field by name. `draft_tokens`: N, tokens that the buffers have for each request."""
    b, live = len(batch.seq_lens), batch.live_requests
    lengths = np.zeros(b, dtype=np.int32)
    lengths[:live] = draft_tokens if batch.mode == "target_verify" else 1
    return mamba.expected(batch, pools, draft_tokens=draft_tokens, topk=1) | {
        "q_lengths": Expected.whole(lengths),
        "has_initial_states": Expected.preset(np.ones(b, dtype=batch.seq_lens.dtype)),
    }
