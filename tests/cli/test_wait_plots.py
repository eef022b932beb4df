"""Plots of waits, from a made-up run on several GPUs."""

from __future__ import annotations

import made_up_waits as made_up
import numpy as np
import pytest
from attn_graph.cli.plots import save_plots
from attn_graph.profilers.inject import parse_injection
from attn_graph.profilers.waits import write_waits


def ends(ranks: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"aten-eager": rng.lognormal(4, 0.5, (100, ranks)), "fused-graph": rng.lognormal(0, 0.5, (100, ranks))}


def drawn(folder) -> set[str]:
    return {plot.name for plot in save_plots(folder) if plot.path is not None}


def test_waits_by_arm_and_by_number_of_ranks_are_drawn(tmp_path):
    run = made_up.write_run(tmp_path / "run", {1: ends(1), 2: ends(2)})
    write_waits(run, (2, 4))
    assert {"first_wait", "first_wait_ranks"} <= drawn(run)


def test_a_run_with_an_injected_delay_draws_its_dose_response_and_no_wait_of_an_arm(tmp_path):
    run = made_up.write_run(tmp_path / "run", {2: ends(2)}, parse_injection("each:50,100"))
    write_waits(run)
    assert drawn(run) == {"dose_response"}


@pytest.mark.parametrize("counts", [(), (2,)])
def test_growth_with_ranks_needs_two_rank_counts(tmp_path, counts):
    run = made_up.write_run(tmp_path / "run", {1: ends(1)})
    write_waits(run, counts)
    assert "first_wait_ranks" not in drawn(run)
