"""What the halves of a batch need that no view of it gives: live tokens of each, and the second half's tree mask."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_metadata import SCAN_BLOCK
from .draft_kv_indices import sum_before
from .launch import PreparedLaunch

CELLS = 4096
MASK_PROGRAMS = 64


@triton.jit(do_not_specialize=["split", "queries", "capacity"])
def _batch_halves_kernel(
    live_tokens, seq_lens, mask, halves_live, half_mask, split, queries, capacity,
    HAS_MASK: tl.constexpr, PROGRAMS: tl.constexpr, CELLS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    live = tl.load(live_tokens).to(tl.int32)
    if pid == 0:
        tl.store(halves_live, tl.minimum(live, split * queries))
        tl.store(halves_live + 1, tl.maximum(live - split * queries, 0))
    if HAS_MASK:
        n, rows = queries.to(tl.int64), live // queries
        before = (sum_before(seq_lens, split, SCAN) + split * n) * n
        until = (sum_before(seq_lens, rows, SCAN) + rows * n) * n
        cells = tl.minimum(until - before, capacity)
        for begin in range(pid * CELLS, cells, PROGRAMS * CELLS):
            i = begin + tl.arange(0, CELLS)
            tl.store(half_mask + i, tl.load(mask + before + i, mask=i < cells, other=0), mask=i < cells)


def prepare_batch_halves(
    live_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    mask: torch.Tensor | None,
    halves_live: torch.Tensor,
    half_mask: torch.Tensor | None,
    bs: int,
    split: int,
    queries: int,
) -> PreparedLaunch:
    """One launch that fills both; call it without arguments.

    Args:
        live_tokens: [1] int32, queries of live requests in the batch.
        seq_lens: [>=bs] int32 or int64.
        mask: [cells] bool, tree mask of the live requests: queries rows of seq_len + queries cells each; or None.
        halves_live: [2] int32, out: live queries before and from request `split` on.
        half_mask: [capacity] bool, out: cells of the live requests from `split` on; what is behind them is kept.
        bs, split, queries: requests, first request of the second half, queries per request.
    """
    has_mask = mask is not None
    programs = min(MASK_PROGRAMS, -(-half_mask.shape[0] // CELLS)) if has_mask else 1
    bytes_of = lambda t: t.view(torch.uint8) if has_mask else halves_live  # noqa: E731
    return PreparedLaunch(
        _batch_halves_kernel,
        (programs,),
        (
            live_tokens, seq_lens, bytes_of(mask), halves_live, bytes_of(half_mask), split, queries,
            half_mask.shape[0] if has_mask else 0,
        ),
        {
            "HAS_MASK": has_mask,
            "PROGRAMS": programs,
            "CELLS": CELLS,
            "SCAN": min(SCAN_BLOCK, max(16, 1 << max(bs - 1, 0).bit_length())),
            "num_warps": 4,
        },
        varying=(),
    )  # fmt: skip
