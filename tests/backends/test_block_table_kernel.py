"""The block-table kernel alone: page counts, edges of its blocks, far rows, and what lies beside a row."""

from __future__ import annotations

import mmap

import pytest
import torch
from attn_graph.backends.kernels.block_table import build_block_table, k2_pages, prepare_block_table
from attn_graph.backends.kernels.decode_metadata import DecodeMetadataConfig

POISON = -7
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; Python has the name from 3.13 on


def table_of_pages(rows: int, pages: int, page_size: int) -> torch.Tensor:
    """req_to_token whose page p of row r is r * 10000 + p."""
    ids = torch.arange(rows)[:, None] * 10000 + torch.arange(pages)
    return (ids * page_size).repeat_interleave(page_size, 1).to(torch.int32)


def built(config: DecodeMetadataConfig | None, source, rows, lens, page_size: int, columns: int) -> torch.Tensor:
    """The table by the classic builder (no config) or the fused one, with a guard row behind it."""
    pool, lengths = torch.tensor(rows), torch.tensor(lens)
    table = torch.full((len(rows) + 1, columns), POISON, dtype=torch.int32)
    if config is None:
        build_block_table(source, pool, lengths, table, len(rows), page_size)
    else:
        prepare_block_table(source, pool, lengths, None, table, len(rows), page_size, 0, config)(pool, lengths)
    return table


CONFIGS = [None, DecodeMetadataConfig(1, 16, 1), DecodeMetadataConfig(3, 16, 1), DecodeMetadataConfig(16, 64, 4)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("length", [2048, 2049, 4095, 4096, 4097, 6000])
def test_every_live_page_is_written_and_none_behind_it(length, config):
    # Page size 32: a loop that takes 64 pages for 4096 tokens misses those from the 65th on (field report A14).
    columns, page_size = 192, 32
    table = built(config, table_of_pages(3, columns, page_size), [2], [length], page_size, columns)
    live = -(-length // page_size)
    assert table[0, :live].tolist() == list(range(20000, 20000 + live))
    assert (table[0, live:] == POISON).all() and (table[1] == POISON).all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("columns", [3, 16, 17])
def test_a_length_past_the_table_loses_its_last_pages_and_spares_the_next_row(columns, config):
    table = built(config, table_of_pages(3, columns + 9, 16), [1, 2], [(columns + 9) * 16, 1], 16, columns)
    assert table[0].tolist() == list(range(10000, 10000 + columns))
    assert table[1].tolist() == [20000] + [POISON] * (columns - 1) and (table[2] == POISON).all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_slots_past_the_end_of_req_to_token_are_never_read(config):
    source = table_of_pages(2, 5, 16)[:, :70]  # the fifth page has six slots
    assert built(config, source, [1], [128], 16, 8)[0].tolist() == [10000 + p for p in range(5)] + [POISON] * 3


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_unassigned_slots_are_page_minus_one(config):
    source = torch.tensor([[0] * 8, [-1, -1, -1, -1, 12, 13, 14, 15]], dtype=torch.int32)
    assert built(config, source, [1], [8], 4, 2)[0].tolist() == [-1, 3]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_two_to_the_31_elements_apart_are_found(config):
    stride = 2**30
    try:  # address space only: pages that nobody touches are never backed
        room = mmap.mmap(-1, (2 * stride + 64) * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        pytest.skip(f"no address space: {error}")
    source = torch.frombuffer(room, dtype=torch.int32).as_strided((3, 64), (stride, 1))
    source[2] = torch.arange(640, 704)
    assert built(config, source, [2], [64], 64, 1)[0].tolist() == [10]


@pytest.mark.parametrize(("page_size", "pages"), [(1, 4096), (16, 256), (64, 64), (128, 32), (48, 128), (8192, 1)])
def test_the_classic_builder_takes_4096_tokens_a_program(page_size, pages):
    assert k2_pages(page_size) == pages
