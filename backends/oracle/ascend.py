"""What ascend metadata must hold, by mode."""

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
    step_id: int,
    draft_tokens: int,
    mask_window: int | None,
    mask_cells: int,
) -> dict[str, Expected]:
    """Every metadata field by name.

    Args:
        width: the tables' columns.
        mask_window, mask_cells: window and width of the mask; window None without one.
    """
    b, tokens = len(batch.seq_lens), batch.tokens_per_req
    added = {"draft_decode": step_id + 1, "target_verify": draft_tokens}.get(batch.mode, 0)
    wide = batch.mode in ("target_verify", "draft_extend", "draft_extend_v2")
    lengths = np.array([int(n) + added for n in batch.seq_lens], dtype=np.int32)
    ends = [(i + 1) * (draft_tokens if wide else 1) for i in range(b)]
    fields = {
        "block_tables": _table(batch, lengths, pools, page_size, width, swa=False),
        "seq_lens": Expected.whole(lengths),
        "actual_seq_lengths_q": Expected.preset(np.array(ends, dtype=np.int32)),
    }
    if pools.full_to_swa is not None:
        fields["block_tables_swa"] = _table(batch, lengths, pools, page_size, width, swa=True)
        if pools.swa_write:
            fields["swa_out_cache_loc"] = write_slots(batch.out_cache_loc, b * tokens, pools.full_to_swa)
    if mask_window is not None:
        hidden = np.ones((b, 1, mask_cells), dtype=bool)
        for r, length in enumerate(lengths):
            hidden[r, 0, max(int(length) - mask_window, 0) : length] = False
        fields["swa_mask"] = Expected.whole(hidden)
    return fields


def host_lengths(batch: HostBatch, added: int) -> list[int]:
    """The list a replay hands to the attention op: live lengths with `added` tokens, zeros for padding."""
    padding = len(batch.seq_lens) - batch.live_requests
    return [int(n) + added for n in batch.seq_lens[: batch.live_requests]] + [0] * padding


def _table(batch, lengths, pools, page_size, width, *, swa) -> Expected:
    """Every row up to the longest row's last page, zeros behind it: no cell keeps what it held."""
    table = page_table(batch.req_pool_indices, lengths, pools, page_size, width, TailPolicy.BATCH_MAX, swa=swa)
    return Expected(table.values, np.ones_like(table.written), np.ones_like(table.live), table.overflow)
