"""Dual-chunk metadata in one launch: whole, intra-chunk and previous-chunk tables, and the lengths into them.

`programs_per_row` programs share a row and stride over its columns, all of which they write. Every program looks at all
lengths itself: they decide how far rows are filled and whether any has a second chunk. Tables are read from
req_to_token each, so no program waits for another's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_metadata import SCAN_BLOCK, DecodeMetadataConfig
from .device import batch_max, ceil_pages, floor_div
from .launch import PreparedLaunch


@triton.jit
def _store_chunk(
    tokens, out, first, count, column, columns, PAGE_SIZE: tl.constexpr
):  # fmt: skip
    """out[column] = page of tokens' column first + column, below count; 0 up to the table's width."""
    slot = tl.load(tokens + (first + column).to(tl.int64) * PAGE_SIZE, mask=column < count, other=0)
    tl.store(out + column, floor_div(slot, PAGE_SIZE), mask=column < columns)


@triton.jit(do_not_specialize=["bs", "columns", "chunk"])
def _dual_chunk_kernel(
    req_pool_indices, seq_lens, req_to_token, scale,
    lens, orig_lens, scaling, intra_lens, succ_lens, inter_lens, table, intra_table, succ_table,
    bs, columns, chunk, req_to_token_stride, table_stride,
    PAGE_SIZE: tl.constexpr, HAS_SCALE: tl.constexpr, PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = part // PROGRAMS_PER_ROW
    begin = (part % PROGRAMS_PER_ROW) * BLOCK
    pool = tl.load(req_pool_indices + row).to(tl.int64)
    length = tl.load(seq_lens + row).to(tl.int32)
    longest = batch_max(seq_lens, 0, bs, SCAN)
    widest = tl.minimum(ceil_pages(longest, PAGE_SIZE), columns)
    own = tl.minimum(ceil_pages(length, PAGE_SIZE), columns)
    index = (length - 1) // chunk
    previous = tl.maximum(index - 1, 0)
    first = floor_div(index * chunk, PAGE_SIZE)
    before = floor_div(previous * chunk, PAGE_SIZE)
    until = tl.minimum(before + floor_div(chunk, PAGE_SIZE), own)
    tokens = req_to_token + pool * req_to_token_stride
    at = row.to(tl.int64) * table_stride
    for start in range(begin, columns, PROGRAMS_PER_ROW * BLOCK):
        column = start + tl.arange(0, BLOCK)
        _store_chunk(tokens, table + at, 0, widest, column, columns, PAGE_SIZE)
        _store_chunk(tokens, intra_table + at, first, own - first, column, columns, PAGE_SIZE)
        if longest > chunk:
            _store_chunk(tokens, succ_table + at, before, until - before, column, columns, PAGE_SIZE)
    if begin == 0:
        tl.store(lens + row, length)
        tl.store(orig_lens + row, length)
        tl.store(intra_lens + row, length - index * chunk)
        tl.store(succ_lens + row, tl.where(index > 0, chunk, 0))
        tl.store(inter_lens + row, previous * chunk)
        if HAS_SCALE:
            tl.store(scaling + row, tl.load(scale + length))


def prepare_dual_chunk(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    lens: torch.Tensor,
    orig_lens: torch.Tensor,
    intra_lens: torch.Tensor,
    succ_lens: torch.Tensor,
    inter_lens: torch.Tensor,
    table: torch.Tensor,
    intra_table: torch.Tensor,
    succ_table: torch.Tensor,
    scaling: torch.Tensor | None,
    scale: torch.Tensor | None,
    page_size: int,
    chunk: int,
    config: DecodeMetadataConfig,
) -> PreparedLaunch:
    """The rebuild, in place; call it with (req_pool_indices, seq_lens).

    Args:
        req_to_token: [rows, width] int32, row-contiguous, width > (columns - 1) * page_size.
        req_pool_indices, seq_lens: [>=B] int32 or int64; lengths within 1..columns * page_size.
        lens, orig_lens, intra_lens, succ_lens, inter_lens: [B] int32, out.
        table, intra_table, succ_table: [B, columns] int32, of one row stride, out, every column. succ_table only if a
            length exceeds one chunk.
        scaling: [B] float32, out: scale[length]; None without scaling.
        chunk: tokens, whole pages.

    Cost: one launch, no allocation, no synchronisation; no recompilation when only lengths change.
    """
    bs, columns = table.shape
    return PreparedLaunch(
        _dual_chunk_kernel,
        (bs * config.programs_per_row,),
        (
            req_pool_indices, seq_lens, req_to_token, lens if scale is None else scale,
            lens, orig_lens, lens if scaling is None else scaling, intra_lens, succ_lens, inter_lens,
            table, intra_table, succ_table, bs, columns, chunk, req_to_token.stride(0), table.stride(0),
        ),
        {
            "PAGE_SIZE": page_size,
            "HAS_SCALE": scaling is not None,
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "SCAN": min(SCAN_BLOCK, max(16, 1 << max(bs - 1, 0).bit_length())),
            "num_warps": config.num_warps,
        },
        varying=(0, 1),
    )  # fmt: skip
