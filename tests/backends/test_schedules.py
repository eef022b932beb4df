"""Schedulers: every unit of work exactly once, shares even, device kernels equal to the plain-Python reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_graph.backends import schedules
from attn_graph.backends.kernels.paged_mqa_schedule import paged_mqa_schedule
from attn_graph.backends.kernels.split_kv_schedule import split_kv_schedule
from attn_graph.backends.kernels.topk_plan import topk_v2_plan
from attn_graph.backends.schedules import SplitLayout
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = st.lists(st.sampled_from([0, 1, 63, 64, 65, 255, 256, 257, 1000, 70000, 400000]), min_size=1, max_size=40)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXES = [[0], [1], [0, 0, 0], [256, 257, 0, 1], [8192, 100], [5] * 33, [100000, 1, 1, 70000], list(range(0, 4000, 13))]


@given(LENGTHS, st.sampled_from([1, 7, 132]))
@settings(max_examples=60, deadline=None)
def test_paged_mqa_deals_out_every_unit_once_and_evenly(lens, num_sms):
    entries = schedules.paged_mqa_schedule(lens, num_sms)
    starts = np.concatenate([[0], np.cumsum([-(-n // 256) for n in lens])])
    at = [starts[row] + unit for row, unit in entries]
    assert at[0] == 0 and at[-1] == starts[-1]
    shares = np.diff(at)
    assert shares.min() >= 0 and shares.max() - shares.min() <= 1
    assert all(row == len(lens) or starts[row] + unit < starts[row + 1] for row, unit in entries)


@given(LENGTHS, st.sampled_from([1, 3, 66, 132]))
@settings(max_examples=60, deadline=None)
def test_split_kv_covers_every_block_once_and_no_part_exceeds_its_payload(lens, parts):
    plan = schedules.split_kv(lens, parts)
    blocks = [max(n - 1, 0) // 64 + 1 for n in lens]
    payload = -(-sum(b + 5 for b in blocks) // parts) + 5
    covered = [[] for _ in lens]
    for begin, last, begin_block, end_block, begin_split, *_ in plan.parts:
        cost = 0
        for request in range(begin, last + 1):
            first = begin_block if request == begin else 0
            end = end_block if request == last and end_block else blocks[request]
            covered[request].append((first, end, begin_split if request == begin else 0))
            cost += end - first + 5
        assert cost <= payload
    for request, pieces in enumerate(covered):
        assert [p[0] for p in pieces] == [0, *(p[1] for p in pieces[:-1])] and pieces[-1][1] == blocks[request]
        assert [p[2] for p in pieces] == list(range(len(pieces)))
        assert len(pieces) == plan.num_splits[request + 1] - plan.num_splits[request]
    assert plan.num_splits[-1] <= len(lens) + parts - 1


@given(LENGTHS, st.sampled_from([1, 3, 66, 132]))
@settings(max_examples=60, deadline=None)
def test_older_columns_are_the_current_ones_in_another_order(lens, parts):
    current, older = (schedules.split_kv(lens, parts, layout) for layout in (SplitLayout.CURRENT, SplitLayout.OLDER))
    assert older.num_splits == current.num_splits
    assert older.parts == [(p[0], p[2], p[1], p[3], p[4], 0, 0, 0) for p in current.parts]


@given(LENGTHS, st.sampled_from([1, 3, 66, 132]))
@settings(max_examples=60, deadline=None)
def test_split_kv_of_dense_8_bit_covers_every_token_once(lens, parts):
    plan = schedules.split_kv(lens, parts, SplitLayout.TOKENS)
    covered = [[] for _ in lens]
    for begin, first_token, last, end_token, begin_split, *_ in plan.parts:
        for request in range(begin, last + 1):
            first = first_token if request == begin else 0
            end = end_token if request == last else lens[request]
            covered[request].append((first, end, begin_split if request == begin else 0))
    for request, pieces in enumerate(covered):
        assert [p[0] for p in pieces] == [0, *(p[1] for p in pieces[:-1])] and pieces[-1][1] == lens[request]
        assert all(first % 64 == 0 for first, _, _ in pieces)
        assert [p[2] for p in pieces] == list(range(len(pieces)))
        assert len(pieces) == plan.num_splits[request + 1] - plan.num_splits[request]


def test_split_kv_of_the_published_example():
    plan = schedules.split_kv([8192, 100], 16)
    assert plan.num_splits == [0, 15, 16]
    assert [p[2:4] for p in plan.parts[:14]] == [(9 * i, 9 * i + 9) for i in range(14)]
    assert plan.parts[14][:4] == (0, 1, 126, 2) and plan.parts[15][0] == 2


@given(st.lists(st.sampled_from([0, 60000, 65537, 100000, 140000, 200000, 300000, 400000]), max_size=160))
@settings(max_examples=60, deadline=None)
def test_topk_plan_lists_exactly_the_rows_above_its_threshold_and_never_more_than_the_level_takes(lens):
    (threshold, count), *rows = schedules.topk_v2_plan(lens)
    assert rows == [(i, n) for i, n in enumerate(lens) if n > threshold] and count == len(rows)
    most = dict(schedules.TOPK_LEVELS)[threshold]
    assert count <= most or threshold == 393216
    lower = [level for level in schedules.TOPK_LEVELS if level[0] < threshold]
    if lower and count <= most:  # it stopped there because the next level down has too many rows
        assert sum(n > lower[-1][0] for n in lens) > lower[-1][1]


@pytest.mark.parametrize("lens", MIXES, ids=len)
@pytest.mark.parametrize("num_sms", [1, 5, 132])
def test_paged_mqa_kernel_equals_the_reference(lens, num_sms):
    out = torch.full((num_sms + 1, 2), -7, dtype=torch.int32, device=DEVICE)
    paged_mqa_schedule(torch.tensor(lens, dtype=torch.int32, device=DEVICE), out)
    assert list(map(tuple, out.tolist())) == schedules.paged_mqa_schedule(lens, num_sms)


@pytest.mark.parametrize("lens", MIXES, ids=len)
@pytest.mark.parametrize("parts", [1, 16])
@pytest.mark.parametrize("layout", SplitLayout, ids=lambda layout: layout.name.lower())
def test_split_kv_kernel_equals_the_reference(lens, parts, layout):
    schedule = torch.full((parts, 8), -7, dtype=torch.int32, device=DEVICE)
    num_splits = torch.full((len(lens) + 1,), -7, dtype=torch.int32, device=DEVICE)
    split_kv_schedule(torch.tensor([n - 3 for n in lens], device=DEVICE), schedule, num_splits, added=3, layout=layout)
    wanted = schedules.split_kv(lens, parts, layout)
    assert list(map(tuple, schedule.tolist())) == wanted.parts and num_splits.tolist() == wanted.num_splits


@pytest.mark.parametrize("lens", [[1], [70000, 3, 65537], [70000] * 31, [100000] * 49 + [5], [400000] * 130], ids=len)
def test_topk_plan_kernel_equals_the_reference_and_leaves_the_rest(lens):
    plan = torch.full((len(lens) + 1, 2), -7, dtype=torch.int32, device=DEVICE)
    topk_v2_plan(torch.tensor(lens, dtype=torch.int32, device=DEVICE), plan)
    wanted = schedules.topk_v2_plan(lens)
    assert list(map(tuple, plan.tolist())) == wanted + [(-7, -7)] * (len(lens) + 1 - len(wanted))
