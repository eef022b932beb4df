"""Page-table decode metadata with what only some models have, in one launch: chunked local attention or an encoder.

Programs, in order: one for the prefix sums; ceil(T / SLOT_BLOCK) for write slots; `programs_per_row` for each request's
tables. Live cells only. A local table is the part of the page table that holds the last token's chunk; an encoder's
tokens lie at the front of the request's row, and the text behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .block_table import reachable_columns
from .decode_metadata import SCAN_BLOCK, SLOT_BLOCK, DecodeMetadataConfig, lengths_and_sums, store_pages
from .device import ceil_pages, floor_div, swa_slot, write_swa_slots
from .launch import PreparedLaunch


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """What one captured size rebuilds; None is not rebuilt. All int32 but where said, tables row-contiguous.

    Attributes:
        cache_seqlens, cu_seqlens_k, page_table: [B], [B + 1], [B, columns].
        swa_mapping, swa_page_table: [slots + 1] int64, [B, columns]; the local table then holds mapped pages.
        swa_out_cache_loc: [T] int64.
        local_lens, local_table: [B], [B, chunk / page_size].
        encoder_lens, encoder_cu, encoder_table: [B], [B + 1], [B, columns].
    """

    cache_seqlens: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    swa_mapping: torch.Tensor | None = None
    swa_page_table: torch.Tensor | None = None
    swa_out_cache_loc: torch.Tensor | None = None
    local_lens: torch.Tensor | None = None
    local_table: torch.Tensor | None = None
    encoder_lens: torch.Tensor | None = None
    encoder_cu: torch.Tensor | None = None
    encoder_table: torch.Tensor | None = None


@triton.jit
def _local_row(
    tokens, swa_mapping, local_lens, local_table, row, length, columns, local_stride,
    PAGE_SIZE: tl.constexpr, HAS_SWA: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The chunk of the last token: its length, up to the token, and its pages."""
    start = floor_div(length - 1, CHUNK) * CHUNK
    used = length - start
    tl.store(local_lens + row, used)
    first = floor_div(start, PAGE_SIZE)
    live = tl.minimum(ceil_pages(used, PAGE_SIZE), columns - first)
    out = local_table + row.to(tl.int64) * local_stride
    for begin in range(0, live, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        slot = tl.load(tokens + (first + j).to(tl.int64) * PAGE_SIZE, mask=j < live, other=0)
        if HAS_SWA:
            slot = swa_slot(swa_mapping, slot, j < live).to(tl.int32)
        tl.store(out + j, floor_div(slot, PAGE_SIZE), mask=j < live)


@triton.jit(do_not_specialize=["bs", "columns", "width", "n_loc", "n_swa_out", "loc_stride"])
def _flash_decode_kernel(
    req_pool_indices, seq_lens, req_to_token, out_cache_loc, encoder_seq_lens, swa_mapping,
    cache_seqlens, cu_seqlens_k, page_table, swa_page_table, swa_out_cache_loc,
    local_lens, local_table, encoder_lens, encoder_cu, encoder_table,
    bs, columns, width, n_loc, n_swa_out, loc_stride,
    req_to_token_stride, page_table_stride, swa_page_table_stride, local_stride, encoder_stride,
    PAGE_SIZE: tl.constexpr, HAS_SWA: tl.constexpr, CHUNK: tl.constexpr, ENCODER: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid == 0:
        lengths_and_sums(
            seq_lens, encoder_seq_lens, cache_seqlens, encoder_cu, cu_seqlens_k, bs, 0, 0,
            1 if ENCODER else 0, True, SCAN,
        )  # fmt: skip
    elif pid <= SLOT_PROGRAMS:
        write_swa_slots(swa_mapping, out_cache_loc, swa_out_cache_loc, n_loc, n_swa_out, loc_stride, pid - 1, SLOTS)
    else:
        part = pid - 1 - SLOT_PROGRAMS
        row = part // PROGRAMS_PER_ROW
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        pool = tl.load(req_pool_indices + row).to(tl.int64)
        length = tl.load(seq_lens + row).to(tl.int32)
        encoded = tl.full((), 0, tl.int32)
        if ENCODER:
            encoded = tl.load(encoder_seq_lens + row).to(tl.int32)
        tokens = req_to_token + pool * req_to_token_stride
        text = tokens + encoded
        live = tl.minimum(ceil_pages(length, PAGE_SIZE), tl.minimum(columns, ceil_pages(width - encoded, PAGE_SIZE)))
        pages = page_table + row.to(tl.int64) * page_table_stride
        swa_pages = swa_page_table + row.to(tl.int64) * swa_page_table_stride
        STEP: tl.constexpr = PROGRAMS_PER_ROW * BLOCK
        for start in range(first, live, STEP):
            at = start + tl.arange(0, BLOCK)
            slot = tl.load(text + at.to(tl.int64) * PAGE_SIZE, mask=at < live, other=0)
            store_pages(pages, swa_pages, swa_mapping, slot, at, live, PAGE_SIZE, HAS_SWA)
        if ENCODER:
            encoder_row = encoder_table + row.to(tl.int64) * encoder_stride
            for start in range(first, tl.minimum(encoded, encoder_stride), STEP):
                at = start + tl.arange(0, BLOCK)
                inside = at < tl.minimum(encoded, encoder_stride)
                tl.store(encoder_row + at, tl.load(tokens + at, mask=inside, other=0), mask=inside)
        if first == 0:
            if ENCODER:
                tl.store(encoder_lens + row, encoded)
            if CHUNK > 0:
                _local_row(
                    tokens, swa_mapping, local_lens, local_table, row, length, columns, local_stride,
                    PAGE_SIZE, HAS_SWA, CHUNK, BLOCK,
                )  # fmt: skip


def prepare_flash_decode(
    tables: DecodeTables,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    encoder_lens: torch.Tensor | None,
    page_size: int,
    chunk: int,
    config: DecodeMetadataConfig,
) -> Callable[..., None]:
    """The rebuild, in place; call it with (req_pool_indices, seq_lens, out_cache_loc, encoder_lens).

    Args:
        req_to_token: [rows, width] int32, row-contiguous.
        req_pool_indices, seq_lens: [>=B] int32 or int64; lengths of the text, at least 1.
        out_cache_loc: [<=T] int64, read if there are write slots.
        encoder_lens: [>=B] int32, in tokens, at most the encoder table's columns; None without an encoder.
        page_size: in tokens; 1 with an encoder.
        chunk: tokens of a local chunk, whole pages; 0 without.

    Cost: one launch, no allocation, no synchronisation; no recompilation when only lengths change.
    """
    t, absent = tables, tables.cache_seqlens  # any valid pointer; the compiled variant never touches it
    bs = t.cache_seqlens.shape[0]
    n_out = 0 if t.swa_out_cache_loc is None else t.swa_out_cache_loc.shape[0]
    slot_programs = -(-n_out // SLOT_BLOCK)

    def given(x: torch.Tensor | None) -> torch.Tensor:
        return absent if x is None else x

    def stride(x: torch.Tensor | None) -> int:
        return 0 if x is None else x.stride(0)

    launch = PreparedLaunch(
        _flash_decode_kernel,
        (1 + slot_programs + bs * config.programs_per_row,),
        (
            req_pool_indices, seq_lens, req_to_token, out_cache_loc, given(encoder_lens), given(t.swa_mapping),
            t.cache_seqlens, t.cu_seqlens_k, t.page_table, given(t.swa_page_table), given(t.swa_out_cache_loc),
            given(t.local_lens), given(t.local_table), given(t.encoder_lens), given(t.encoder_cu),
            given(t.encoder_table),
            bs, reachable_columns(t.page_table, req_to_token, page_size), req_to_token.shape[1],
            out_cache_loc.shape[0], n_out, out_cache_loc.stride(0),
            req_to_token.stride(0), t.page_table.stride(0), stride(t.swa_page_table), stride(t.local_table),
            stride(t.encoder_table),
        ),
        {
            "PAGE_SIZE": page_size,
            "HAS_SWA": t.swa_page_table is not None,
            "CHUNK": chunk,
            "ENCODER": encoder_lens is not None,
            "SLOT_PROGRAMS": slot_programs,
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "SCAN": min(SCAN_BLOCK, max(16, 1 << max(bs - 1, 0).bit_length())),
            "SLOTS": SLOT_BLOCK,
            "num_warps": config.num_warps,
        },
        varying=(0, 1, 3, 4, 19, 21),
    )  # fmt: skip

    def rebuild(req_pool_indices, seq_lens, out_cache_loc, encoder_lens) -> None:
        launch(
            req_pool_indices, seq_lens, out_cache_loc, given(encoder_lens),
            out_cache_loc.shape[0], out_cache_loc.stride(0),
        )  # fmt: skip

    return rebuild
