"""The oracle's arrays against the formulas written out cell by cell."""

from __future__ import annotations

import numpy as np
import pytest
from attn_graph.backends.modes import TailPolicy
from attn_graph.backends.oracle import Expected, HostBatch, HostPools, page_table, trtllm_mha, write_slots
from hypothesis import given, settings
from hypothesis import strategies as st

WIDTH = 6


def plain_table(rows, lengths, pools, page_size, tail, swa):
    """values, written, live of a page table, one cell after the other."""
    values = np.zeros((len(rows), WIDTH), dtype=np.int32)
    written, live = np.zeros(values.shape, dtype=bool), np.zeros(values.shape, dtype=bool)
    needed = [min(-(-int(length) // page_size), WIDTH) for length in lengths]
    for r, row in enumerate(rows):
        for p in range(WIDTH):
            live[r, p] = p < needed[r]
            written[r, p] = {
                TailPolicy.LIVE_ONLY: p < needed[r],
                TailPolicy.BATCH_MAX: p < max(needed),
                TailPolicy.STATIC_FULL: True,
                TailPolicy.ZERO_TAIL: True,
            }[tail]
            if not written[r, p] or (tail is TailPolicy.ZERO_TAIL and not live[r, p]):
                continue
            slot = int(pools.req_to_token[row, p * page_size])
            if swa and slot != -1:
                slot = int(pools.full_to_swa[slot])
            values[r, p] = slot // page_size
    return values, written, live


@st.composite
def tables(draw):
    page_size = draw(st.sampled_from([1, 2, 3, 16]))
    rows, slots = draw(st.integers(1, 5)), 40 * page_size
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pools = HostPools(
        rng.integers(-1, slots, (rows, WIDTH * page_size)).astype(np.int32),
        np.append(rng.integers(0, slots, slots), -1),
    )
    n = draw(st.integers(0, 4))
    return page_size, pools, rng.integers(0, rows, n), rng.integers(0, WIDTH * page_size + 1, n).astype(np.int32)


@settings(max_examples=200, deadline=None)
@given(tables(), st.sampled_from(list(TailPolicy)), st.booleans())
def test_page_tables_are_the_formula_cell_by_cell(table, tail, swa):
    page_size, pools, rows, lengths = table
    word = page_table(rows, lengths, pools, page_size, WIDTH, tail, swa=swa)
    for found, plain in zip(
        (word.values, word.written, word.live), plain_table(rows, lengths, pools, page_size, tail, swa), strict=True
    ):
        np.testing.assert_array_equal(found, plain)
    assert not word.overflow


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_prefix_sums_add_up_and_leave_the_first_entry_alone(counts):
    word = Expected.prefix_sum(np.array(counts, dtype=np.int32))
    total, sums = 0, [0]
    for n in counts:
        total += n
        sums.append(total)
    assert word.values.tolist() == sums
    assert word.written.tolist() == [False] + [True] * len(counts)
    assert word.live.all()


@given(st.lists(st.integers(-1, 9), max_size=6), st.integers(0, 3))
def test_write_slots_are_mapped_one_by_one_and_zeros_follow(loc, more):
    full_to_swa = np.array([0, 7, 3, 0, 9, 1, 2, 8, 5, 6, -1])
    word = write_slots(np.array(loc, dtype=np.int64), len(loc) + more, full_to_swa)
    assert word.values.tolist() == [-1 if slot == -1 else full_to_swa[slot] for slot in loc] + [0] * more


def test_a_length_with_no_column_for_its_last_page_is_told():
    pools = HostPools(np.zeros((1, 32), dtype=np.int32))
    word = page_table(np.array([0]), np.array([33]), pools, 16, 2, TailPolicy.LIVE_ONLY)
    assert word.overflow == "a length needs 3 columns, the table has 2"
    assert word.written.all()


@pytest.mark.parametrize(
    ("mode", "lengths", "queries"),
    [
        ("decode", [5, 17], [0, 1, 2]),
        ("draft_decode", [5 + 2, 17 + 2], [0, 1, 2]),
        ("target_verify", [5 + 4, 17 + 4], [0, 4, 8]),
        ("draft_extend", [5, 17], [0, 3, 4]),
        ("draft_extend_v2", [5, 17], [0, 4, 8]),
    ],
)
def test_lengths_and_queries_of_each_mode(mode, lengths, queries):
    tokens = 1 if mode in ("decode", "draft_decode") else 4
    batch = HostBatch(
        mode=mode,
        req_pool_indices=np.array([0, 1]),
        seq_lens=np.array([5, 17]),
        out_cache_loc=np.zeros(2 * tokens, dtype=np.int64),
        tokens_per_req=tokens,
        num_accept_tokens=np.array([3, 1], dtype=np.int32),
    )
    pools = HostPools(np.arange(64, dtype=np.int32).reshape(2, 32))
    word = trtllm_mha.expected(batch, pools, page_size=16, width=2, step_id=1, tail=TailPolicy.LIVE_ONLY)
    assert word["cache_seqlens_int32"].values.tolist() == lengths
    assert word["cu_seqlens_k"].values.tolist() == [0, lengths[0], sum(lengths)]
    assert word["cu_seqlens_q"].values.tolist() == queries
    assert word["cu_seqlens_q"].written.any() == (mode in ("draft_extend", "draft_extend_v2"))
