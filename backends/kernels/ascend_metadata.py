"""Ascend attention metadata in one launch: lengths, page tables of one width for the whole batch, slots and masks.

Programs, in order: write slots; mask tiles of each row; `programs_per_row` for each row's tables. Columns up to the
longest row's last page are filled for every row, padding too, and zeroed behind it: each program finds that width
itself, so nothing waits and no host length is needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_metadata import SCAN_BLOCK, SLOT_BLOCK, DecodeMetadataConfig
from .device import batch_max, ceil_pages, floor_div, swa_slot, write_swa_slots
from .launch import PreparedLaunch

MASK_BLOCK = 1024
"""Mask cells per program."""


@triton.jit(do_not_specialize=["bs", "offset", "columns", "window", "mask_width", "n_loc", "n_swa_out", "loc_stride"])
def _ascend_kernel(
    req_pool_indices, seq_lens, req_to_token, swa_mapping, out_cache_loc,
    lens, tables, swa_tables, swa_out_cache_loc, swa_mask,
    bs, offset, columns, window, mask_width, n_loc, n_swa_out,
    req_to_token_stride, table_stride, swa_table_stride, mask_stride, loc_stride,
    PAGE_SIZE: tl.constexpr, HAS_SWA: tl.constexpr, SLOT_PROGRAMS: tl.constexpr, MASK_PROGRAMS: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr, SLOTS: tl.constexpr,
    MASK_CELLS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < SLOT_PROGRAMS:
        write_swa_slots(swa_mapping, out_cache_loc, swa_out_cache_loc, n_loc, n_swa_out, loc_stride, pid, SLOTS)
    elif pid < SLOT_PROGRAMS + bs * MASK_PROGRAMS:
        part = pid - SLOT_PROGRAMS
        row = part // MASK_PROGRAMS
        length = tl.load(seq_lens + row).to(tl.int32) + offset
        token = (part % MASK_PROGRAMS) * MASK_CELLS + tl.arange(0, MASK_CELLS)
        hidden = (token < length - window) | (token >= length)
        tl.store(swa_mask + row.to(tl.int64) * mask_stride + token, hidden, mask=token < mask_width)
    else:
        part = pid - SLOT_PROGRAMS - bs * MASK_PROGRAMS
        row = part // PROGRAMS_PER_ROW
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        pool = tl.load(req_pool_indices + row).to(tl.int64)
        length = tl.load(seq_lens + row).to(tl.int32) + offset
        tokens = req_to_token + pool * req_to_token_stride
        widest = batch_max(seq_lens, offset, bs, SCAN)
        filled = tl.minimum(ceil_pages(widest, PAGE_SIZE), columns)
        tl.store(lens + row, length, mask=first == 0)
        pages = tables + row.to(tl.int64) * table_stride
        swa_pages = swa_tables + row.to(tl.int64) * swa_table_stride
        for start in range(first, columns, PROGRAMS_PER_ROW * BLOCK):
            at = start + tl.arange(0, BLOCK)
            given = at < filled
            slot = tl.load(tokens + at.to(tl.int64) * PAGE_SIZE, mask=given, other=0)
            tl.store(pages + at, floor_div(slot, PAGE_SIZE), mask=at < columns)
            if HAS_SWA:
                swa = tl.where(given, swa_slot(swa_mapping, slot, given), 0).to(tl.int32)
                tl.store(swa_pages + at, floor_div(swa, PAGE_SIZE), mask=at < columns)


class PreparedAscendMetadata:
    """The rebuild for lengths L = seq_lens + offset, bound to its output buffers. w = pages of the longest row.

    Args:
        req_to_token: [rows, width] int32, row-contiguous, width > (columns - 1) * page_size. -1 gives page -1.
        req_pool_indices, seq_lens: [>=bs] int32 or int64.
        lens: [bs] int32, out: L.
        tables: [bs, columns] int32, row-contiguous, out: page ids of every row's first w pages, then zeros.
        full_to_swa: [slots + 1] int64, for the three below.
        swa_tables: like tables, out: pages of the mapped slots.
        swa_out_cache_loc: [T] int64, out: the mapped write slots of a call, then zeros.
        swa_mask: [bs, 1, cells] bool, out: True where a token is not attended: behind L or before L - window.
        window: in tokens.
    """

    def __init__(
        self,
        *,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        lens: torch.Tensor,
        tables: torch.Tensor,
        bs: int,
        page_size: int,
        offset: int,
        config: DecodeMetadataConfig,
        full_to_swa: torch.Tensor | None = None,
        swa_tables: torch.Tensor | None = None,
        swa_out_cache_loc: torch.Tensor | None = None,
        swa_mask: torch.Tensor | None = None,
        window: int = 0,
    ) -> None:
        n_out = 0 if swa_out_cache_loc is None else swa_out_cache_loc.shape[0]
        cells = 0 if swa_mask is None else swa_mask.shape[2]
        slot_programs, mask_programs = -(-n_out // SLOT_BLOCK), -(-cells // MASK_BLOCK)
        absent = lens  # any valid pointer; the compiled variant never touches it
        self._absent = None if swa_out_cache_loc is not None else absent
        args = (
            req_pool_indices, seq_lens, req_to_token,
            absent if full_to_swa is None else full_to_swa,
            absent,
            lens, tables,
            absent if swa_tables is None else swa_tables,
            absent if swa_out_cache_loc is None else swa_out_cache_loc,
            absent if swa_mask is None else swa_mask,
            bs, offset, tables.shape[1], window, cells, 0, n_out,
            req_to_token.stride(0), tables.stride(0),
            0 if swa_tables is None else swa_tables.stride(0),
            0 if swa_mask is None else swa_mask.stride(0),
            1,
        )  # fmt: skip
        options = {
            "PAGE_SIZE": page_size,
            "HAS_SWA": swa_tables is not None,
            "SLOT_PROGRAMS": slot_programs,
            "MASK_PROGRAMS": mask_programs,
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "SCAN": min(SCAN_BLOCK, max(16, 1 << (bs - 1).bit_length())),
            "SLOTS": SLOT_BLOCK,
            "MASK_CELLS": MASK_BLOCK,
            "num_warps": config.num_warps,
        }
        grid = (slot_programs + bs * (mask_programs + config.programs_per_row),)
        self._launch = PreparedLaunch(_ascend_kernel, grid, args, options, varying=(0, 1, 4, 15, 21))

    def __call__(self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        """Rebuild for these inputs."""
        loc = out_cache_loc if self._absent is None else self._absent
        self._launch(req_pool_indices, seq_lens, loc, loc.shape[0], loc.stride(0))
