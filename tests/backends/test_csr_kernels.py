"""The kernels that build ragged index lists and split counts: values, edges, bounds, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_graph.backends.kernels.csr_metadata import CsrConfig
from attn_graph.backends.kernels.draft_kv_indices import build_draft_kv_indices, launch_draft_kv_indices
from attn_graph.backends.kernels.draft_metadata import DraftMetadata
from attn_graph.backends.kernels.kv_indices import build_kv_indices
from attn_graph.backends.kernels.kv_splits import SplitRule, build_kv_splits, head_programs, launch_kv_splits
from attn_graph.backends.oracle.triton import split_counts

POISON = -7


@pytest.fixture(autouse=True)
def on_the_device():
    """Every tensor made here lies on the GPU, if there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indptr_of(lens: torch.Tensor) -> torch.Tensor:
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(torch.int32)


def table(rows: int, width: int) -> torch.Tensor:
    """Every cell tells its row and column."""
    return (torch.arange(rows)[:, None] * 1000 + torch.arange(width)).to(torch.int32)


# One token either side of the block edge: the masked tail is where this kernel can go wrong.
@pytest.mark.parametrize("longest", [0, 1, 15, 16, 17, 33])
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_lists_hold_each_requests_tokens_and_keep_their_tail(longest, programs, dtype):
    source, pool, lens = table(6, 40), torch.tensor([5, 2, 2, 0]), int32(longest, 0, 3, 1)
    indptr, got = indptr_of(lens), torch.full((80,), POISON, dtype=dtype)
    build_kv_indices(
        req_to_token=source, req_pool_indices=pool, lens=lens, kv_indptr=indptr, kv_indices=got,
        programs_per_row=programs, block=16,
    )  # fmt: skip
    wanted = torch.full_like(got, POISON)
    for r, (row, n) in enumerate(zip(pool.tolist(), lens.tolist(), strict=True)):
        wanted[int(indptr[r]) : int(indptr[r]) + n] = source[row, :n]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_window_starts_where_it_is_told_and_maps_its_slots_but_not_the_missing_ones():
    source = table(3, 20)
    source[1, 7] = -1
    mapping = torch.arange(3001) * 2
    mapping[-1] = -1
    lens, start, got = int32(3, 2), int32(6, 0), torch.full((8,), POISON, dtype=torch.int64)
    build_kv_indices(
        req_to_token=source, req_pool_indices=torch.tensor([1, 2]), lens=lens, kv_indptr=indptr_of(lens),
        kv_indices=got, start=start, mapping=mapping,
    )  # fmt: skip
    assert got.tolist() == [2012, -1, 2016, 4000, 4002, POISON, POISON, POISON]


def test_entries_past_the_buffer_are_dropped_and_the_neighbour_stays_intact():
    """A09: a list of 1,111 tokens in 1,024 entries."""
    store = torch.full((1100,), POISON, dtype=torch.int64)
    lens = int32(700, 400, 10, 1)
    build_kv_indices(
        req_to_token=table(5, 700), req_pool_indices=torch.tensor([1, 2, 3, 4]), lens=lens,
        kv_indptr=indptr_of(lens), kv_indices=store[:1024],
    )  # fmt: skip
    assert store[:1024].tolist()[699:702] == [1699, 2000, 2001] and (store[1024:] == POISON).all()


def test_a_row_offset_past_int32_is_not_wrapped():
    """A15: row 2 of a table with rows 2**30 apart begins at 2**31. Untouched memory of 8 GiB costs nothing here."""
    stride = 2**30
    store = torch.empty(2 * stride + 8, dtype=torch.int32)
    store[2 * stride :] = int32(9, 8, 7, 6, 5, 4, 3, 2)
    source = store.as_strided((3, 8), (stride, 1))
    got = torch.full((1, 6), POISON, dtype=torch.int64)
    pool, lens = int32(2), int32(4)
    build_kv_indices(
        req_to_token=source, req_pool_indices=pool, lens=lens, kv_indptr=int32(0, 4), kv_indices=got[0]
    )  # fmt: skip
    assert got.tolist() == [[9, 8, 7, 6, POISON, POISON]]
    indptr = torch.zeros(1, 2, dtype=torch.int32)
    for launch in (classic_draft, fused_draft):
        got.fill_(POISON)
        launch(pool, source, lens, lens, got, indptr, 1, 1, steps=1)
        assert got.tolist() == [[9, 8, 7, 6, 5, POISON]]


def classic_draft(pool, source, lens, positions, indices, indptr, topk, page_size, steps):
    launch_draft_kv_indices(pool, source, lens, positions, indices, indptr, topk, page_size)


def fused_draft(pool, source, lens, positions, indices, indptr, topk, page_size, steps):
    config = CsrConfig(2, 16, 4)
    DraftMetadata(config, source, indices, indptr, lens.shape[0], topk, page_size, steps)(pool, lens, positions)


DRAFTS = pytest.mark.parametrize("launch", [classic_draft, fused_draft], ids=["classic", "fused"])


def draft_lists(source, pool, lens, topk, page_size, steps, step) -> list[int]:
    """The list of one step, a branch at a time."""
    entries: list[int] = []
    for row, n in zip(pool.tolist(), lens.tolist(), strict=True):
        for branch in range(topk):
            entries += source[row, :n].tolist()
            for e in range(step + 1):
                column = n + branch * steps + e
                if page_size > 1 and topk > 1:
                    last = n % page_size
                    pages = -(-(last + steps) // page_size)
                    column = n // page_size * page_size + branch * pages * page_size + last + e
                entries.append(int(source[row, column]))
    return entries


@DRAFTS
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("steps", [2, 4])
def test_draft_lists_hold_the_prefix_and_the_branchs_own_tokens(launch, page_size, topk, steps):
    source, pool = table(5, 90), torch.tensor([3, 1, 4])
    for lens in (int32(1, 7, 8), int32(9, 17, 40), int32(0, 33, 1)):
        indices = torch.full((steps, 400), POISON, dtype=torch.int64)
        indptr = torch.full((steps, 3 * topk + 2), POISON, dtype=torch.int32)
        launch(pool, source, lens, lens.repeat_interleave(topk), indices, indptr, topk, page_size, steps)
        for step in range(steps):
            wanted = draft_lists(source, pool, lens, topk, page_size, steps, step)
            assert indices[step].tolist() == wanted + [POISON] * (400 - len(wanted))
            ends = np.cumsum(np.repeat(np.array(lens.tolist()) + step + 1, topk)).tolist()
            assert indptr[step].tolist() == [POISON, *ends, POISON]


@DRAFTS
def test_indptr_follows_positions_and_lists_follow_lengths_on_padding(launch):
    """The mismatch engines have and rely on nowhere: padding has position 0 and the fill length."""
    lens, positions, pool = int32(5, 1, 1), int32(5, 0, 0), torch.tensor([1, 0, 0])
    source, indptr = table(2, 10), torch.zeros(1, 4, dtype=torch.int32)
    source[0] = 0
    indices = torch.full((1, 16), POISON, dtype=torch.int64)
    launch(pool, source, lens, positions, indices, indptr, 1, 1, steps=1)
    assert indptr.tolist() == [[0, 6, 7, 8]]
    assert indices[0, :11].tolist() == [1000, 1001, 1002, 1003, 1004, 1005, 0, 0, 0, 0, POISON]


@DRAFTS
def test_draft_entries_past_a_row_are_dropped_and_the_next_step_stays_intact(launch):
    """A08: rows sized without the topk factor overflow into the next step's row."""
    store = torch.full((3, 100), POISON, dtype=torch.int64)
    lens = int32(20, 15)
    launch(
        torch.tensor([1, 2]), table(3, 60), lens, lens.repeat_interleave(4), store[:2, :80],
        torch.zeros(2, 9, dtype=torch.int32), 4, 1, steps=2,
    )  # fmt: skip
    assert (store[:2, 80:] == POISON).all() and (store[2] == POISON).all() and (store[:2, :80] != POISON).all()


LENGTHS = ([1], [1, 1, 1, 256], [255, 91, 109, 1], [131, 238, 134, 235], [4000] * 5, [1, 131072], list(range(1, 300)))


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)}x{max(x)}")
@pytest.mark.parametrize(("cores", "heads", "kv_heads"), [(132, 32, 8), (304, 16, 16), (8, 128, 1)])
@pytest.mark.parametrize("branches", [1, 3])
def test_split_counts_are_the_oracles_and_leave_their_neighbour_alone(lengths, cores, heads, kv_heads, branches):
    lens = torch.tensor(lengths)
    got = torch.full((len(lengths) * branches + 2,), POISON, dtype=torch.int32)
    build_kv_splits(
        lens=lens, num_kv_splits=got[:-2], cores=cores, num_heads=heads, num_kv_heads=kv_heads, max_kv_splits=16
    )
    wanted = split_counts(
        lengths, max_splits=16, cores=cores, num_heads=heads, num_kv_heads=kv_heads, tile=0, branches=branches
    )
    assert got.tolist() == [*wanted, POISON, POISON] and 1 <= min(wanted) <= max(wanted) <= 16


def test_split_counts_of_a_worked_example():
    got = torch.zeros(3, dtype=torch.int32)
    launch_kv_splits(torch.tensor([1000, 2000, 4000]), got, 304, head_programs(32, 8), 8)
    assert got.tolist() == [2, 4, 8]


def test_a_limit_cuts_lengths_before_anything_is_counted():
    cut, limited = torch.zeros(2, 3, dtype=torch.int32)
    launch_kv_splits(torch.tensor([48, 40, 2]), cut, 132, 8, 8)
    launch_kv_splits(torch.tensor([4000, 40, 2]), limited, 132, 8, 8, limit=48)
    assert cut.tolist() == limited.tolist()


def test_empty_rows_get_no_split_and_divide_by_nothing():
    got = torch.full((3,), POISON, dtype=torch.int32)
    launch_kv_splits(torch.tensor([0, 100, 0]), got, 132, 8, 8)
    assert got[[0, 2]].tolist() == [0, 0] and got[1] > 0
    launch_kv_splits(torch.tensor([0, 0, 0]), got, 132, 8, 8)
    assert got.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("rule", "mode"), [(SplitRule(8), 2), (SplitRule(8, 132), 1), (SplitRule(8, 132, 1, 64), 3)])
def test_a_fixed_tile_wins_over_the_heuristic_and_no_core_count_means_the_constant(rule, mode):
    assert rule.mode == mode


def test_tensors_of_another_kind_are_refused_by_name():
    source, pool, lens = table(3, 8), torch.tensor([1, 2]), int32(3, 4)
    good = dict(
        req_to_token=source, req_pool_indices=pool, lens=lens, kv_indptr=int32(0, 3, 7),
        kv_indices=torch.zeros(8, dtype=torch.int64),
    )  # fmt: skip
    for change, words in (
        ({"lens": lens.float()}, "lens must be torch.int32 or torch.int64, got torch.float32"),
        ({"kv_indptr": int32(0, 3)}, "kv_indptr must be a vector of at least 3, got shape .2."),
        ({"req_to_token": source.T}, "req_to_token must be a row-contiguous int32 table"),
        ({"mapping": lens}, "mapping must be torch.int64"),
        ({"req_pool_indices": torch.zeros(4, dtype=torch.int64)[::2]}, "req_pool_indices must be contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            build_kv_indices(**good | change)
    splits = dict(lens=lens, cores=132, num_heads=8, num_kv_heads=8, max_kv_splits=8)
    with pytest.raises(ValueError, match="3 tokens, not a multiple of the 2 requests"):
        build_kv_splits(num_kv_splits=int32(0, 0, 0), **splits)
    with pytest.raises(ValueError, match="cores must be at least 1, got 0"):
        build_kv_splits(num_kv_splits=int32(0, 0), **splits | {"cores": 0})
    draft = dict(
        req_pool_indices=pool, req_to_token=source, lens=lens, positions=lens, topk=1, page_size=1,
        kv_indices=torch.zeros(2, 9, dtype=torch.int64), kv_indptr=torch.zeros(2, 3, dtype=torch.int32),
    )  # fmt: skip
    for change, words in (
        ({"topk": 2}, "positions must be a vector of at least 4"),
        ({"kv_indptr": torch.zeros(2, 2, dtype=torch.int32)}, "kv_indptr must be .* at least 3 columns"),
        ({"kv_indptr": torch.zeros(3, 3, dtype=torch.int32)}, "kv_indices has 2 steps, kv_indptr 3"),
    ):
        with pytest.raises(ValueError, match=words):
            build_draft_kv_indices(**draft | change)
