from __future__ import annotations

import numpy as np
import pytest
from attn_graph.profilers.collective import (
    CORRELATED,
    INDEPENDENT,
    MODELS,
    analyse_collectives,
    duration_spread,
    extrapolate,
    predict_first_wait,
    skew,
)


def test_the_first_rank_waits_for_the_last_and_the_last_for_nobody():
    ends = np.array([[10.0, 25.0, 13.0], [7.0, 7.0, 7.0]])
    np.testing.assert_array_equal(predict_first_wait(ends), [[15, 0, 12], [0, 0, 0]])
    np.testing.assert_array_equal(skew(ends), [15, 0])


def test_a_start_lag_moves_the_skew_but_not_the_spread_of_own_durations():
    durations = np.array([[30.0, 32.0], [31.0, 31.0]])
    lag = np.array([[0.0, 9.0], [4.0, 0.0]])
    np.testing.assert_array_equal(duration_spread(durations), [2, 0])
    np.testing.assert_array_equal(skew(durations + lag), [11, 4])


@pytest.mark.parametrize("broken", [np.zeros(3), np.zeros((0, 2)), np.array([[1.0, np.nan]])])
@pytest.mark.parametrize("of", [predict_first_wait, skew, duration_spread])
def test_prediction_refuses_what_is_not_one_number_per_step_and_rank(of, broken: np.ndarray):
    with pytest.raises(ValueError, match=r"must be|not finite"):
        of(broken)


# --- records of collectives -------------------------------------------------------------------------------------


def two_ranks(gaps_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Durations and arrivals of collectives that take 15 us once both ranks are in; rank 1 comes `gaps_us` late."""
    start = np.arange(len(gaps_us)) * 10_000.0
    arrivals = np.stack([start, start + gaps_us], axis=1)
    return np.stack([gaps_us + 15, np.full(len(gaps_us), 15.0)], axis=1), arrivals


def test_slow_communication_is_told_apart_from_a_late_rank():
    report = analyse_collectives(*two_ranks(np.full(100, 150.0)))
    assert report.one_clock and report.late_rank == 1 and report.earliest_rank == 0
    assert report.spread.p50 == 150
    assert [waits.sum for waits in report.rank_waits] == [15_000, 0]
    assert report.cost.sum == 1_500
    assert report.waiting_ranks == (0,) and report.recurring
    for said in ("rank 1 is last in 100 of 100", "150.0 us at p50", "15000.0 us in sum"):
        assert said in report.describe()


def test_rare_long_gaps_show_in_tail_and_sum_where_the_median_hides_them():
    gaps = np.where(np.arange(100) % 10 == 0, 5_000.0, 150.0)
    report = analyse_collectives(*two_ranks(gaps))
    assert report.spread.p50 == 150 and report.spread.p99 == 5_000
    assert report.spread.sum == 90 * 150 + 10 * 5_000
    for said in ("150.0 us at p50", "5000.0 us at p99", "63500.0 us in sum"):
        assert said in report.describe()


ARRIVALS = np.array([[64.0, 62, 45, 0, 63, 51, 53, 64]])
DURATIONS = np.array([[10.0, 11, 31, 72, 11, 23, 21, 12]])


def test_one_collective_of_eight_ranks_splits_into_waiting_and_exchange():
    report = analyse_collectives(DURATIONS, ARRIVALS)
    assert report.earliest_rank == 3 and report.spread.p50 == 64 and report.cost.p50 == 10
    assert report.waiting_us == 111 and round(report.waiting_share * 100) == 58
    assert not report.recurring  # one collective cannot show a habit


def test_without_one_clock_the_report_says_so_and_keeps_what_durations_tell():
    for arrivals in (None, ARRIVALS + np.arange(8) * 1_000.0):
        report = analyse_collectives(DURATIONS, arrivals)
        assert not report.one_clock and report.spread is None
        assert report.earliest_rank == 3 and report.late_rank == 0 and report.waiting_us == 111
        assert "clocks are not aligned" in report.describe()


def test_a_rank_released_late_is_named_and_the_other_three_are_waiting():
    jitter = np.random.default_rng(0).exponential(5, (200, 4))
    ends = 40 + jitter
    ends[:, 2] += 300
    report = analyse_collectives(predict_first_wait(ends) + 3.4, ends)
    assert report.late_rank == 2 and report.waiting_ranks == (0, 1, 3) and report.recurring


def test_jitter_that_rotates_is_not_blamed_on_a_rank():
    rng = np.random.default_rng(1)
    ends = rng.exponential(20, (400, 4))
    report = analyse_collectives(predict_first_wait(ends) + 3.4, ends)
    assert not report.recurring and "not more often than chance" in report.describe()
    ends[rng.random(400) < 0.15, 3] += 200  # a culprit in one step of seven
    assert analyse_collectives(predict_first_wait(ends) + 3.4, ends).recurring


def test_records_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match=r"\[1, 7\].*\[1, 8\]"):
        analyse_collectives(DURATIONS, ARRIVALS[:, :7])
    with pytest.raises(ValueError, match="at least 2 ranks"):
        analyse_collectives(DURATIONS[:, :1])


# --- more ranks than were measured ------------------------------------------------------------------------------


def jittery(steps: int, ranks: int, common_us: float = 0.0, seed: int = 0) -> np.ndarray:
    """Launch ends whose jitter is exponential with mean 50 us by rank, plus one of `common_us` by step."""
    rng = np.random.default_rng(seed)
    return 400 + rng.exponential(50, (steps, ranks)) + rng.exponential(1, (steps, 1)) * common_us


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n_ranks", [2, 16])
def test_independent_jitter_is_predicted_from_four_ranks_within_its_interval(model: str, n_ranks: int):
    truth = skew(jittery(20_000, n_ranks, seed=1))
    guess = extrapolate(jittery(2_000, 4), n_ranks, model=model)
    # The correlated model laid out from four ranks is a lower end: centring takes a quarter of the variance.
    slack = 0.02 if model == INDEPENDENT else 0.1
    assert guess.p50_low_us * (1 - slack) <= np.median(truth) <= guess.p50_high_us * (1 + slack)
    assert guess.source == "extrapolated" and (guess.measured_steps, guess.measured_ranks) == (2_000, 4)


def test_for_as_many_ranks_as_measured_the_correlated_model_gives_the_measurement():
    ends = jittery(2_000, 4, common_us=200)
    measured = np.quantile(skew(ends), (0.5, 0.99))
    same = extrapolate(ends, 4, model=CORRELATED)
    np.testing.assert_allclose((same.p50_us, same.p99_us), measured, rtol=0.06)
    assert same.p50_low_us <= measured[0] <= same.p50_high_us


def test_jitter_common_to_all_ranks_sets_the_two_models_apart():
    common = jittery(1_000, 4, common_us=200)
    independent, correlated = (extrapolate(common, 8, model=model).p50_us for model in MODELS)
    truth = np.median(skew(jittery(20_000, 8, common_us=200, seed=1)))
    assert abs(correlated / truth - 1) < 0.15 < 0.5 < independent / truth - 1
    private = jittery(1_000, 4)
    independent, correlated = (extrapolate(private, 8, model=model).p50_us for model in MODELS)
    assert independent < 1.2 * correlated


@pytest.mark.parametrize("model", MODELS)
def test_the_slowest_of_more_ranks_is_slower(model: str):
    ends = jittery(500, 4)
    waits = [extrapolate(ends, n, model=model).p50_us for n in (2, 8, 32)]
    assert waits == sorted(waits) and waits[-1] > 1.5 * waits[0]


@pytest.mark.parametrize("model", MODELS)
def test_more_measured_steps_narrow_the_interval_and_a_seed_fixes_it(model: str):
    few, many = (extrapolate(jittery(steps, 4), 8, model=model, seed=3) for steps in (50, 5_000))
    assert many.p50_high_us - many.p50_low_us < (few.p50_high_us - few.p50_low_us) / 3
    assert few == extrapolate(jittery(50, 4), 8, model=model, seed=3)
    assert few != extrapolate(jittery(50, 4), 8, model=model, seed=4)


@pytest.mark.parametrize(
    ("ends", "options"),
    [
        (jittery(1, 4), {"n_ranks": 8, "model": INDEPENDENT}),
        (jittery(10, 4), {"n_ranks": 1, "model": INDEPENDENT}),
        (jittery(10, 4), {"n_ranks": 8, "model": "gaussian"}),
    ],
)
def test_extrapolation_refuses_what_it_cannot_do(ends: np.ndarray, options: dict):
    with pytest.raises(ValueError, match=r"at least 2|unknown model"):
        extrapolate(ends, **options)
