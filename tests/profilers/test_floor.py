"""The floor harness: points, settings to try, bytes that cannot be saved, results compared before they are timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_graph.backends.kernels import launch as launch_module
from attn_graph.profilers import floor
from attn_graph.profilers.floor import CSR, DECODE, POINTS, Point, candidates

CPU = torch.device("cpu")
TABLES = Point(DECODE, 5, "loguniform:1:600", 16, 700, True)
LISTS = Point(CSR, 5, "loguniform:1:600", 1, 700, False)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_point_has_settings_to_try_that_are_powers_of_two(point):
    default, *others = candidates(point)
    assert len(set(others)) == len(others) >= 4 and default not in others
    for config in (default, *others):
        assert config.block & (config.block - 1) == 0 and config.programs_per_row >= 1 and config.num_warps >= 1


@pytest.mark.parametrize("point", [TABLES, replace(TABLES, swa=False), LISTS], ids=str)
def test_every_setting_gives_the_default_s_result(point):
    inputs = floor._INPUTS[point.kernel](point, CPU)
    default, *others = candidates(point)
    ours = inputs.ours(default)
    ours()
    for config in others:
        other = inputs.ours(config)
        other()
        inputs.check_equal(ours, other)


@pytest.mark.parametrize(
    ("point", "field"), [(TABLES, "swa_page_table"), (TABLES, "cu_seqlens_k"), (LISTS, "kv_indices")]
)
def test_a_result_that_differs_in_a_live_cell_is_not_timed(point, field):
    inputs = floor._INPUTS[point.kernel](point, CPU)
    one, other = (inputs.ours(candidates(point)[0]) for _ in range(2))
    one()
    other()
    other.arguments[field].view(-1)[0] += 1
    with pytest.raises(ValueError, match=f"differ in {field}"):
        inputs.check_equal(one, other)


@pytest.mark.parametrize("point", [TABLES, replace(TABLES, swa=False), LISTS], ids=str)
def test_the_programs_that_are_started_are_those_of_the_launch(point, monkeypatch):
    grids = []
    for module in (floor.decode_metadata, launch_module):
        monkeypatch.setattr(module, "launch", lambda kernel, grid, args, options: grids.append(grid))
    inputs = floor._INPUTS[point.kernel](point, CPU)
    for config in candidates(point):
        inputs.ours(config)()
        assert grids.pop() == (inputs.programs(config),)
    assert not grids


def test_least_bytes_count_a_sector_a_page_and_twelve_bytes_a_listed_token():
    tables = floor._PageTables(Point(DECODE, 3, "100", 64, 128, False), CPU)
    windows = floor._PageTables(Point(DECODE, 3, "100", 64, 128, True), CPU)
    small = floor._PageTables(Point(DECODE, 3, "100", 1, 128, False), CPU)
    lists = floor._IndexLists(Point(CSR, 3, "100", 1, 128, False), CPU)
    assert tables.least_bytes == 3 * 2 * (32 + 4)
    assert windows.least_bytes == tables.least_bytes + 3 * 2 * (32 + 4)
    assert (small.least_bytes, lists.least_bytes) == (300 * 8, 300 * 12)
