"""What cutlass_mla metadata must hold."""

from __future__ import annotations

from ..modes import TailPolicy
from . import Expected, HostBatch, HostPools, page_table


def expected(batch: HostBatch, pools: HostPools, *, width: int) -> dict[str, Expected]:
    """The one field. `width` is the table's columns."""
    table = page_table(batch.req_pool_indices, batch.seq_lens, pools, 128, width, TailPolicy.LIVE_ONLY)
    return {"block_kv_indices": table}
