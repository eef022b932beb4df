"""Page tables out of ragged token lists: ``table[r, j] = floor(list[indptr[r] + j * P] / P)``, and the window's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_metadata import DecodeMetadataConfig, store_pages
from .device import ceil_pages, write_swa_slots
from .launch import PreparedLaunch, launch

SLOT_BLOCK = 512


@triton.jit(do_not_specialize=["columns", "n_loc", "n_swa_out", "loc_stride"])
def _ragged_pages_kernel(
    kv_indptr, kv_indices, mapping, out_cache_loc, table, swa_table, swa_out_cache_loc,
    columns, n_loc, n_swa_out, loc_stride, table_stride, swa_table_stride,
    PAGE_SIZE: tl.constexpr, HAS_SWA: tl.constexpr, SLOT_PROGRAMS: tl.constexpr, PROGRAMS_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < SLOT_PROGRAMS:
        write_swa_slots(mapping, out_cache_loc, swa_out_cache_loc, n_loc, n_swa_out, loc_stride, pid, SLOTS)
    else:
        part = pid - SLOT_PROGRAMS
        row = part // PROGRAMS_PER_ROW
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        begin = tl.load(kv_indptr + row).to(tl.int64)
        length = (tl.load(kv_indptr + row + 1) - begin).to(tl.int32)
        filled = tl.minimum(ceil_pages(length, PAGE_SIZE), columns)
        pages = table + row.to(tl.int64) * table_stride
        swa_pages = swa_table + row.to(tl.int64) * swa_table_stride
        for start in range(first, filled, PROGRAMS_PER_ROW * BLOCK):
            column = start + tl.arange(0, BLOCK)
            slot = tl.load(kv_indices + begin + column.to(tl.int64) * PAGE_SIZE, mask=column < filled, other=0)
            store_pages(pages, swa_pages, mapping, slot, column, filled, PAGE_SIZE, HAS_SWA)


def _arguments(config, bs, page_size, kv_indptr, kv_indices, table, mapping, swa_table, swa_out_cache_loc):
    n_out = 0 if swa_out_cache_loc is None else swa_out_cache_loc.shape[0]
    slot_programs = -(-n_out // SLOT_BLOCK)
    absent = kv_indptr  # any valid pointer; the compiled variant never touches it
    args = (
        kv_indptr, kv_indices, absent if mapping is None else mapping, absent,
        table, absent if swa_table is None else swa_table,
        absent if swa_out_cache_loc is None else swa_out_cache_loc,
        table.shape[1], 0, n_out, 1, table.stride(0), 0 if swa_table is None else swa_table.stride(0),
    )  # fmt: skip
    options = {
        "PAGE_SIZE": page_size,
        "HAS_SWA": swa_table is not None,
        "SLOT_PROGRAMS": slot_programs,
        "PROGRAMS_PER_ROW": config.programs_per_row,
        "BLOCK": config.block,
        "SLOTS": SLOT_BLOCK,
        "num_warps": config.num_warps,
    }
    return (slot_programs + bs * config.programs_per_row,), args, options


def launch_ragged_pages(
    config: DecodeMetadataConfig,
    bs: int,
    page_size: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    table: torch.Tensor,
    mapping: torch.Tensor | None = None,
    swa_table: torch.Tensor | None = None,
) -> None:
    """Fill the first bs rows up to their live prefix, in one launch.

    Args:
        kv_indptr: [>=bs + 1] int32; kv_indices: [entries] int32 or int64, one slot for each token.
        table, swa_table: [>=bs, columns] int32, row-contiguous, out; the second one through `mapping`.
    """
    grid, args, options = _arguments(config, bs, page_size, kv_indptr, kv_indices, table, mapping, swa_table, None)
    launch(_ragged_pages_kernel, grid, args, options)


class RaggedPages:
    """`launch_ragged_pages` with write slots, bound to its buffers; a call brings out_cache_loc."""

    def __init__(
        self,
        config: DecodeMetadataConfig,
        bs: int,
        page_size: int,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        table: torch.Tensor,
        mapping: torch.Tensor | None = None,
        swa_table: torch.Tensor | None = None,
        swa_out_cache_loc: torch.Tensor | None = None,
    ) -> None:
        self._absent = kv_indptr
        call = _arguments(
            config, bs, page_size, kv_indptr, kv_indices, table, mapping, swa_table, swa_out_cache_loc
        )  # fmt: skip
        self._launch = PreparedLaunch(_ragged_pages_kernel, *call, varying=(3, 8, 10))

    def __call__(self, out_cache_loc: torch.Tensor | None) -> None:
        """Rebuild in place. out_cache_loc: [n] int32 or int64, n <= T, or None without write slots."""
        if out_cache_loc is None:
            self._launch(self._absent, 0, 1)
        else:
            self._launch(out_cache_loc, out_cache_loc.shape[0], out_cache_loc.stride(0))
