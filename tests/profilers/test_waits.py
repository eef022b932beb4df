"""wait.csv, predict.csv and inject.csv from samples whose truth is known."""

from __future__ import annotations

from pathlib import Path

import made_up_waits as made_up
import numpy as np
import pandas as pd
import pytest
from attn_graph.profilers.inject import Injection, parse_injection
from attn_graph.profilers.waits import INJECT, LONGEST, PREDICT, WAIT, write_waits

STEPS = 300


def jitter(ranks: int, scale: float = 20.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(np.log(scale), 0.5, (STEPS, ranks))


def tables(folder: Path, *counts: int) -> dict[str, pd.DataFrame]:
    return {path.name: pd.read_csv(path, dtype={"rank": str}) for path in write_waits(folder, counts)}


def test_the_longest_wait_less_the_exchange_is_the_skew_of_launch_ends(tmp_path):
    ends = jitter(4)
    found = tables(made_up.write_run(tmp_path / "run", {4: {"aten-eager": ends}}))[WAIT]
    measured = found[(found["source"] == "measured")].set_index("rank")
    assert measured.loc[LONGEST, "excess_p99_us"] == pytest.approx(np.quantile(np.ptp(ends, axis=1), 0.99), abs=1e-3)
    waited = ends.max(axis=1) - ends[:, 2] + made_up.EXCHANGE_US
    assert measured.loc["2", "sum_us"] == pytest.approx(waited.sum(), rel=1e-6)
    assert set(measured["culprit"]) == {"rotates"}


def test_a_rank_that_is_always_late_is_told_from_jitter_that_rotates(tmp_path):
    ends = jitter(4)
    ends[:, 3] += 15.0
    found = tables(made_up.write_run(tmp_path / "run", {4: {"aten-eager": ends}}))[WAIT]
    assert set(found["culprit"]) == {"rank 3 recurs"}


def test_one_rank_predicts_what_two_independent_ones_then_measure(tmp_path):
    run = made_up.write_run(tmp_path / "run", {1: {"aten-eager": jitter(1)}, 2: {"aten-eager": jitter(2, seed=1)}})
    found = tables(run)[PREDICT]
    assert set(found["n_ranks"]) == {2}
    from_one = found[(found["basis_ranks"] == 1) & (found["source"] == "extrapolated")]
    assert list(from_one["model"]) == ["independent"]
    assert abs(from_one["error_p50"].item()) < 0.2
    same_steps = found[found["source"] == "predicted"]
    assert same_steps["error_p99_us"].item() == pytest.approx(0, abs=1e-3)


def test_a_device_that_starts_late_spoils_the_raw_prediction_and_the_other_arms_mend_it(tmp_path):
    ends = {"aten-eager": jitter(3), "fused-graph": jitter(3, scale=4.0, seed=1)}
    run = made_up.write_run(tmp_path / "run", {3: ends}, device_delays_us=(0.0, 6.0, -3.0))
    found = tables(run)[PREDICT]
    predicted = found[(found["source"] == "predicted") & (found["arm"] == "fused-graph")].fillna({"model": "raw"})
    errors = predicted.set_index("model")[["error_p50", "error_p99"]].abs()
    assert (errors.loc["calibrated"] < 1e-3).all()
    assert errors.loc["raw", "error_p50"] > 0.2


def test_without_another_arm_nothing_is_calibrated(tmp_path):
    found = tables(made_up.write_run(tmp_path / "run", {2: {"aten-eager": jitter(2)}}))[PREDICT]
    assert list(found.loc[found["source"] == "predicted", "model"].isna()) == [True]


def test_jitter_that_moves_all_ranks_shows_as_an_error_of_the_independent_model(tmp_path):
    common = jitter(1) + np.zeros((1, 2))
    apart = common + jitter(2, scale=0.5, seed=1)
    found = tables(made_up.write_run(tmp_path / "run", {2: {"aten-eager": apart}}), 2)[PREDICT]
    error = found[found["source"] == "extrapolated"].set_index("model")["error_p50"]
    assert abs(error["correlated"]) < 0.1
    assert error["independent"] > 0.5


def test_waits_are_predicted_to_grow_with_the_ranks(tmp_path):
    run = made_up.write_run(tmp_path / "run", {1: {"fused-graph": jitter(1)}})
    found = tables(run, 2, 8, 32)[PREDICT]
    assert list(found["n_ranks"]) == [2, 8, 32]
    assert found["p50_us"].is_monotonic_increasing
    assert (found["source"] == "extrapolated").all()
    assert ((found["p50_low_us"] <= found["p50_us"]) & (found["p50_us"] <= found["p50_high_us"])).all()


@pytest.mark.parametrize(("gain", "right"), [(1.0, True), (0.9, False)])
def test_an_injected_delay_comes_back_one_for_one_and_a_ruler_that_loses_some_is_seen(tmp_path, gain, right):
    delays = parse_injection("each:50,100,200")
    run = made_up.write_run(tmp_path / "run", {2: {"fused-graph": jitter(2, scale=2.0)}}, delays, gain)
    found = tables(run)
    assert set(found) == {INJECT}  # waits with a delay in them are not the arm's own
    each = found[INJECT][found[INJECT]["injected_rank"] == "each"]
    assert list(each["dose_us"]) == [0, 50, 100, 200]
    assert (abs(each["slope"] - 1) < 0.03).all() == right
    assert (each["slope_stderr"] < 0.01).all()


def test_doses_smaller_than_the_jitter_do_not_bend_the_slope(tmp_path):
    run = made_up.write_run(tmp_path / "run", {4: {"aten-eager": jitter(4, scale=40.0)}}, parse_injection("1:20,40"))
    row = tables(run)[INJECT].iloc[0]
    assert abs(row["slope"] - 1) < 3 * row["slope_stderr"]
    assert row["slope_others"] < 0.9


def test_a_delay_goes_to_one_rank_at_a_time_and_0_is_always_a_dose():
    found = parse_injection("each:100")
    assert found == Injection(None, (0.0, 100.0))
    turns = [[found.delay_us(step, rank, 2) for rank in range(2)] for step in range(4)]
    assert turns == [[0.0, None], [100.0, None], [None, 0.0], [None, 100.0]]


@pytest.mark.parametrize("text", ["100", "1:", "-1:5", "1:2000000", "all:5", "1:-5", "1:nan"])
def test_an_injection_that_cannot_be_is_refused_with_its_own_text(text):
    with pytest.raises(ValueError, match="RANK:US") as raised:
        parse_injection(text)
    assert repr(text) in str(raised.value)
