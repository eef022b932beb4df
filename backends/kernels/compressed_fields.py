"""Lengths, write locations and page lists of the two compressed pools, from each row's context. One launch.

A token that completes a block of 4 (128) tokens writes one compressed entry; a page of 256 tokens holds two of the
128-fold pool's pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import floor_div
from .launch import launch


@triton.jit
def store_compressed(
    row, context, slot, out_loc, lengths, lengths_clamp1, RATIO: tl.constexpr
):  # fmt: skip
    """The scalar fields of one pool for one row; placeholder location 0 where no entry is completed."""
    whole = floor_div(context, RATIO)
    ends = whole * RATIO == context
    tl.store(out_loc + row, tl.where(ends, floor_div(slot.to(tl.int64), RATIO), 0))
    tl.store(lengths + row, whole)
    tl.store(lengths_clamp1 + row, tl.maximum(whole, 1))


@triton.jit
def store_c128_pages(pages_out, page, c, entries, columns):
    """The two 128-fold pages of each 256-token page, -1 from `entries` on."""
    tl.store(pages_out + 2 * c, tl.where(2 * c < entries, page * 2, -1), mask=2 * c < columns)
    tl.store(pages_out + 2 * c + 1, tl.where(2 * c + 1 < entries, page * 2 + 1, -1), mask=2 * c + 1 < columns)


@triton.jit(do_not_specialize=["pages", "columns"])
def _compressed_fields_kernel(
    context_lens, raw_out_loc, page_table,
    c4_out_loc, c4_positions, c4_lengths, c4_clamp1,
    c128_out_loc, c128_positions, c128_lengths, c128_clamp1, c128_pages,
    pages, columns, page_table_stride, c128_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    context = tl.load(context_lens + row)
    slot = tl.load(raw_out_loc + row)
    store_compressed(row, context, slot, c4_out_loc, c4_lengths, c4_clamp1, 4)
    store_compressed(row, context, slot, c128_out_loc, c128_lengths, c128_clamp1, 128)
    tl.store(c4_positions + row, floor_div(context - 1, 4) * 4)
    tl.store(c128_positions + row, floor_div(context - 1, 128) * 128)
    at = row.to(tl.int64)
    for start in range(0, (columns + 1) // 2, BLOCK):
        c = start + tl.arange(0, BLOCK)
        page = tl.load(page_table + at * page_table_stride + c, mask=c < pages, other=0)
        store_c128_pages(c128_pages + at * c128_stride, page, c, context // 128, columns)


def build_compressed_fields(
    context_lens: torch.Tensor,
    raw_out_loc: torch.Tensor,
    page_table: torch.Tensor,
    c4: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    c128: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    c128_pages: torch.Tensor,
) -> None:
    """Fill the fields of both pools.

    Args:
        context_lens: [T] int32, >= 0. raw_out_loc: [T] int32 or int64. page_table: [T, pages] int32.
        c4, c128: out: write location [T] int64, first position of the block, length and length of at least 1, all
            [T] int32.
        c128_pages: [T, 2 * pages or more] int32, out.
    """
    columns = c128_pages.shape[1]
    launch(
        _compressed_fields_kernel,
        (context_lens.shape[0],),
        (
            context_lens, raw_out_loc, page_table, *c4, *c128, c128_pages,
            page_table.shape[1], columns, page_table.stride(0), c128_pages.stride(0),
        ),
        {"BLOCK": min(128, max(16, triton.next_power_of_2(columns // 2))), "num_warps": 1},
    )  # fmt: skip
