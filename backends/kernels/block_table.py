"""Block tables in one launch: page ids of each row's live prefix, and the lengths they were built for.

`programs_per_row` programs share a row and stride over its column blocks. The classic builder (K2) is the same kernel
with one program per block and no lengths written: that grid launches a program for every block a row could have, most
of which find that their row is shorter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_metadata import DecodeMetadataConfig, default_config
from .device import ceil_pages, floor_div
from .launch import PreparedLaunch, launch

K2_TOKENS = 4096
"""Tokens whose pages one program of the classic builder writes."""


def k2_pages(page_size: int) -> int:
    """Pages per program of the classic builder, a power of two."""
    return 1 << max(K2_TOKENS // page_size - 1, 0).bit_length()


def reachable_columns(table: torch.Tensor, req_to_token: torch.Tensor, page_size: int) -> int:
    """Columns that both the block table and the slot table have: what no length may exceed."""
    return min(table.shape[1], -(-req_to_token.shape[1] // page_size))


def fused_config(bs: int, columns: int) -> DecodeMetadataConfig:
    """Block sizes from what is known at capture; see `decode_metadata.default_config`."""
    return default_config(bs, columns)


@triton.jit
def write_block_row(
    req_pool_indices, seq_lens, req_to_token, lens, table, row, first, offset, columns,
    req_to_token_stride, table_stride,
    PAGE_SIZE: tl.constexpr, WRITE_LENS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Page ids of row `row` from column `first` on, every STEP columns, up to the live prefix.

    A length past `columns` pages loses its last pages; it never reaches the next row.
    """
    pool = tl.load(req_pool_indices + row).to(tl.int64)
    length = tl.load(seq_lens + row).to(tl.int32) + offset
    tokens = req_to_token + pool * req_to_token_stride
    pages = table + row.to(tl.int64) * table_stride
    live = tl.minimum(ceil_pages(length, PAGE_SIZE), columns)
    if WRITE_LENS:
        tl.store(lens + row, length, mask=first == 0)
    last = tl.maximum(live - 1, 0)  # what lanes past the row read, instead of a mask: see load_below
    for block in range(first, live, STEP):
        at = block + tl.arange(0, BLOCK)
        slot = tl.load(tokens + tl.minimum(at, last).to(tl.int64) * PAGE_SIZE)
        tl.store(pages + at, floor_div(slot, PAGE_SIZE), mask=at < live)


@triton.jit(do_not_specialize=["offset", "columns", "req_to_token_stride", "table_stride"])  # see decode_metadata
def _block_table_kernel(
    req_pool_indices, seq_lens, req_to_token, lens, table, offset, columns, req_to_token_stride, table_stride,
    PAGE_SIZE: tl.constexpr, WRITE_LENS: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    write_block_row(
        req_pool_indices, seq_lens, req_to_token, lens, table,
        pid // PROGRAMS_PER_ROW, (pid % PROGRAMS_PER_ROW) * BLOCK, offset, columns, req_to_token_stride, table_stride,
        PAGE_SIZE, WRITE_LENS, PROGRAMS_PER_ROW * BLOCK, BLOCK,
    )  # fmt: skip


def build_block_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    bs: int,
    page_size: int,
) -> None:
    """Page ids of each row's first ceil(seq_lens / page_size) pages, in place: K2 of the classic engines.

    Args:
        req_to_token: [rows, width] int32, row-contiguous. -1 gives page -1.
        req_pool_indices: [>=bs] int32 or int64. Row of req_to_token for each request.
        seq_lens: [>=bs] int32 or int64, in tokens.
        table: [>=bs, columns] int32, row-contiguous. Columns right of a row's live prefix keep what they hold.
        bs: rows to build.
        page_size: in tokens.

    Not checked: that lengths fit (reading them would stall the stream); pages that do not fit are dropped.
    Cost: one launch, no allocation; no recompilation when only lengths change.
    """
    block = k2_pages(page_size)
    blocks = -(-table.shape[1] // block)
    absent = table
    launch(
        _block_table_kernel,
        *_launch_of(
            req_to_token, req_pool_indices, seq_lens, absent, table, bs, page_size, 0, False,
            DecodeMetadataConfig(blocks, block, 4),
        ),
    )  # fmt: skip


def prepare_block_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    lens: torch.Tensor | None,
    table: torch.Tensor,
    bs: int,
    page_size: int,
    offset: int,
    config: DecodeMetadataConfig,
) -> PreparedLaunch:
    """`build_block_table` for lengths seq_lens + offset, which are stored too; call it with (pool indices, seq_lens).

    Args:
        lens: [>=bs] int32, out: seq_lens + offset; None stores no lengths.
        offset: tokens added to each length.
        config: block sizes; `fused_config` for the default.
    """
    stored = table if lens is None else lens
    return PreparedLaunch(
        _block_table_kernel,
        *_launch_of(
            req_to_token, req_pool_indices, seq_lens, stored, table, bs, page_size, offset, lens is not None,
            config,
        ),
        varying=(0, 1),
    )  # fmt: skip


def _launch_of(
    req_to_token, req_pool_indices, seq_lens, lens, table, bs, page_size, offset, write_lens, config
) -> tuple[tuple[int, ...], tuple, dict]:
    """Grid, arguments and constants."""
    args = (
        req_pool_indices, seq_lens, req_to_token, lens, table,
        offset, reachable_columns(table, req_to_token, page_size), req_to_token.stride(0), table.stride(0),
    )  # fmt: skip
    options = {
        "PAGE_SIZE": page_size,
        "WRITE_LENS": write_lens,
        "PROGRAMS_PER_ROW": config.programs_per_row,
        "BLOCK": config.block,
        "num_warps": config.num_warps,
    }
    return (bs * config.programs_per_row,), args, options
