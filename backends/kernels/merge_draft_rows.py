"""One table row per draft token: the request's prefix slots, then the draft slots that the token sees. One launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch

BLOCK = 256


@triton.jit(do_not_specialize=["columns"])
def _merge_draft_rows_kernel(
    prefix, prefix_lens, draft, draft_lens, merged, columns, prefix_stride, draft_stride, merged_stride,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(prefix_lens + row // N)
    total = tl.minimum(before + tl.load(draft_lens + row), columns)
    first = prefix + (row // N).to(tl.int64) * prefix_stride
    second = draft + row.to(tl.int64) * draft_stride
    slot = tl.load(first + at, mask=at < tl.minimum(before, total), other=0)
    drafted = tl.load(second + at - before, mask=(at >= before) & (at < total), other=0)
    out = merged + row.to(tl.int64) * merged_stride + at
    tl.store(out, tl.where(at < before, slot, drafted), mask=at < total)


def merge_draft_rows(
    prefix: torch.Tensor,
    prefix_lens: torch.Tensor,
    draft: torch.Tensor,
    draft_lens: torch.Tensor,
    merged: torch.Tensor,
) -> None:
    """merged[r * N + i] = prefix[r, :prefix_lens[r]] + draft[r * N + i, :draft_lens[r * N + i]]; the rest is kept.

    Args:
        prefix: [B, >=longest] int32, row-contiguous, slots. prefix_lens: [B] int32.
        draft: [B * N, N] int32, row-contiguous, slots. draft_lens: [B * N] int32.
        merged: [B * N, columns] int32, row-contiguous, out. What does not fit is dropped.
    """
    rows, columns = merged.shape
    launch(
        _merge_draft_rows_kernel,
        (rows, -(-columns // BLOCK)),
        (
            prefix, prefix_lens, draft, draft_lens, merged, columns,
            prefix.stride(0), draft.stride(0), merged.stride(0),
        ),
        {"N": rows // prefix_lens.shape[0], "BLOCK": BLOCK, "num_warps": 4},
    )  # fmt: skip
