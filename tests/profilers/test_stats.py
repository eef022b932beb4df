"""Summaries, intervals, verdicts in words, and waiting taken apart from communicating."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attn_graph.profilers.stats import (
    VERDICTS,
    bootstrap_medians,
    count_verdict,
    exit_code,
    median_paired_ratio,
    paired_verdict,
    runs_verdict,
    summarise,
    unpaired_verdict,
)
from scipy import stats as reference


def noisy(median: float, n: int, spread: float = 0.05, seed: int = 0) -> np.ndarray:
    """Right-skewed, as host times are."""
    return median * np.random.default_rng(seed).lognormal(0, spread, n)


def test_a_summary_holds_the_plain_figures():
    found = summarise([4.0, 1.0, 3.0, 2.0, 10.0])
    assert (found.n, found.p50, found.min, found.max, found.sum, found.mean) == (5, 3.0, 1.0, 10.0, 20.0, 4.0)
    assert found.p90 == pytest.approx(7.6)
    assert found.p99 == pytest.approx(9.76)
    assert 1.0 <= found.p50_low <= 3.0 <= found.p50_high <= 10.0


def test_blanks_and_nans_are_left_out_and_counted():
    found = summarise([1.0, None, math.nan, 3.0])
    assert (found.n, found.missing, found.sum) == (2, 2, 4.0)
    assert (summarise([None]).n, summarise([None]).p50, summarise([None]).missing) == (0, None, 1)


@pytest.mark.parametrize("values", [[7.5], [7.5] * 2, [7.5] * 50])
def test_the_interval_of_one_value_or_of_equal_values_is_that_value(values):
    found = summarise(values)
    assert (found.p50_low, found.p50, found.p50_high) == (7.5, 7.5, 7.5)


@pytest.mark.parametrize("n", [2, 9, 10, 57, 200])
def test_bootstrap_medians_are_distributed_as_those_of_drawn_resamples(n):
    values = noisy(100, n, spread=0.3)
    drawn = reference.bootstrap(
        (values,), np.median, n_resamples=2000, method="percentile", random_state=np.random.default_rng(1)
    ).bootstrap_distribution
    ours = bootstrap_medians(values)
    assert reference.ks_2samp(ours, drawn).statistic < 0.06  # two samples of 2,000: 0.06 is beyond p = 0.001
    # One observation less moves the distribution by more than that, at least where n is small.
    if n < 10:
        assert reference.ks_2samp(bootstrap_medians(np.sort(values)[1:]), drawn).statistic > 0.06


def test_the_interval_holds_the_true_median_nineteen_times_in_twenty():
    inside = 0
    for seed in range(400):
        found = summarise(noisy(100, 40, spread=0.5, seed=seed))
        inside += found.p50_low <= 100 <= found.p50_high
    assert 0.91 <= inside / 400 <= 0.99


def test_the_same_values_give_the_same_interval():
    assert summarise(noisy(9, 31)) == summarise(noisy(9, 31))


@pytest.mark.parametrize(
    ("factor", "spread", "word"),
    [(0.12, 0.05, "faster"), (1.3, 0.05, "slower"), (1.001, 0.01, "same"), (1.0, 0.8, "undecided")],
)
@pytest.mark.parametrize("verdict", [paired_verdict, unpaired_verdict])
def test_every_word_is_reached(verdict, factor, spread, word):
    found = verdict(noisy(340, 200, spread, seed=1), factor * noisy(340, 200, spread, seed=2))
    assert found.word == word
    assert found.ratio_low <= found.ratio <= found.ratio_high
    assert found.ratio == pytest.approx(found.candidate / found.baseline)


def test_noise_that_both_arms_of_a_step_share_cancels_in_pairs_only():
    steps = noisy(300, 200, spread=0.6)
    assert paired_verdict(steps, 0.95 * steps).word == "faster"
    assert unpaired_verdict(steps, 0.95 * steps).word == "undecided"


def test_a_small_difference_that_is_certain_is_none_within_the_tolerance():
    steps = noisy(300, 200)
    assert paired_verdict(steps, 1.01 * steps).word == "same"
    assert paired_verdict(steps, 1.01 * steps, tolerance=0.005).word == "slower"


def test_a_difference_below_the_floor_is_none():
    before, after = noisy(0.3, 100, seed=1), noisy(0.4, 100, seed=2)
    assert unpaired_verdict(before, after).word == "slower"
    assert unpaired_verdict(before, after, floor=0.5).word == "same"
    assert unpaired_verdict(1000 * before, 1000 * after, floor=0.5).word == "slower"


def test_a_pair_that_lacks_a_side_is_dropped_and_counted():
    before, after = list(noisy(300, 50)), list(noisy(200, 50))
    before[3], after[7], after[8] = None, math.nan, None
    found = paired_verdict(before, after)
    assert (found.word, found.n, found.missing) == ("faster", 47, 3)


def test_pairs_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="3 and 2"):
        paired_verdict([1.0, 2.0, 3.0], [1.0, 2.0])


@pytest.mark.parametrize("verdict", [paired_verdict, unpaired_verdict])
def test_too_few_values_decide_nothing_and_none_cannot_be_compared(verdict):
    assert verdict([10.0] * 5, [1.0] * 5).word == "undecided"
    assert verdict([10.0] * 6, [1.0] * 6).word == "faster"
    assert verdict([None] * 6, [1.0] * 6).word == "not comparable"


def test_a_baseline_of_zero_gives_a_word_and_no_ratio():
    assert unpaired_verdict([0.0] * 9, [0.0] * 9).word == "same"
    slower = unpaired_verdict([0.0] * 9, [2.0] * 9)
    assert (slower.word, slower.ratio, slower.candidate) == ("slower", None, 2.0)


def test_only_runs_whose_ranges_do_not_overlap_differ():
    assert runs_verdict([470, 472, 475], [461, 463, 465]).word == "faster"
    assert runs_verdict([461, 463, 465], [470, 472, 475]).word == "slower"
    overlapping = runs_verdict([461, 465, 470], [464, 468, 472])
    assert (overlapping.word, overlapping.sentence) == ("same", "no difference shown")
    assert runs_verdict([464, 468, 472], [461, 465, 470]).word == "same"
    assert runs_verdict([400, 465, 500], [430, 520, 560]).word == "undecided"
    assert runs_verdict([470, 472], [461, 463]).word == "undecided"


def test_one_more_dispatch_is_slower_without_any_interval():
    assert count_verdict([28.0], [28.0]).word == "same"
    assert count_verdict([28.0], [29.0]).word == "slower"
    assert count_verdict([28.0, 28.0], [1.0]).word == "faster"
    assert count_verdict([0.0], [1.0]).word == "slower"
    assert count_verdict([], [1.0]).word == "not comparable"


def test_the_worst_verdict_gives_the_exit_code():
    assert exit_code(["faster", "same"]) == 0
    assert exit_code(["faster", "undecided"]) == 3
    assert exit_code(["undecided", "not comparable", "same"]) == 4
    assert exit_code(["undecided", "not comparable", "slower"]) == 1
    assert exit_code(["faster", "not equal"]) == 1
    assert exit_code([]) == 4
    assert {code for code, _ in VERDICTS.values()} == {0, 1, 3, 4}


def test_the_paired_ratio_is_of_the_same_step():
    assert median_paired_ratio([10.0, 100.0, 0.0, None], [5.0, 20.0, 1.0, 1.0]) == pytest.approx(0.35)
    assert median_paired_ratio([0.0], [1.0]) is None
