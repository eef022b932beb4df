"""The choice among finalists, on made-up times."""

from __future__ import annotations

import numpy as np
import pytest
from attn_graph.tuning.decide import choose
from made_up_bench import candidate

A, B, C, D = map(candidate, (1, 2, 3, 4))


def around(us: float, spread: float = 0.002, n: int = 20, seed: int = 0) -> list[float]:
    return list(us * (1 + spread * np.random.default_rng(seed).standard_normal(n)))


def test_ranks_that_disagree_within_their_noise_get_one_choice_and_the_tie_is_shown():
    """Rank 0 alone would take A and rank 1 B; a rank's time is one value of the candidate."""
    ranks = {A: [10.00, 10.20], B: [10.05, 10.02], C: [12.0, 12.1]}
    assert min(ranks, key=lambda c: ranks[c][0]) is A
    assert min(ranks, key=lambda c: ranks[c][1]) is B
    choice = choose([A, B, C], B, ranks)
    assert choice.winner == B
    assert choice.tied == (A, B)
    assert choice.medians_us[A] / choice.medians_us[B] - 1 == pytest.approx(0.0065, abs=1e-4)


def test_a_tie_without_the_default_goes_to_the_first_in_the_spaces_order():
    times = {A: around(2.0), B: around(1.000, seed=1), C: around(0.999, seed=2)}
    assert choose([A, B, C], A, times).winner == B
    assert choose([A, C, B], A, times).winner == C
    assert set(choose([A, B, C], A, times).tied) == {B, C}


@pytest.mark.parametrize("spread", [0.005, 0.05, 0.3])
def test_the_same_case_five_times_gives_the_same_winner(spread):
    """Three settings of one speed: whatever the noise makes the fastest, the choice stays."""
    winners = []
    for run in range(5):
        times = {c: around(1.0, spread, seed=10 * run + i) for i, c in enumerate((A, B, C))}
        choice = choose([A, B, C], A, times)
        winners.append(choice.winner)
        assert A in choice.tied
    assert winners == [A] * 5


def test_taking_the_fastest_median_would_change_from_run_to_run():
    fastest = set()
    for run in range(5):
        times = {c: around(1.0, 0.05, seed=10 * run + i) for i, c in enumerate((A, B, C))}
        fastest.add(min(times, key=lambda c: np.median(times[c])))
    assert len(fastest) > 1


@pytest.mark.parametrize(("gain", "winner"), [(0.005, A), (0.015, A), (0.04, B), (0.5, B)])
def test_the_default_is_left_only_for_more_than_two_percent(gain, winner):
    choice = choose([A, B], A, {A: around(1.0), B: around(1.0 / (1 + gain), seed=1)})
    assert choice.winner == winner
    assert ("faster than the default" in choice.reason) == (winner == B)


def test_a_gain_that_drowns_in_noise_does_not_unseat_the_default():
    choice = choose([A, B], A, {A: around(1.0, 0.5, seed=3), B: around(0.95, 0.5, seed=4)})
    assert choice.winner == A
    assert choice.tied == (A, B)


def test_noise_that_hits_both_alike_does_not_hide_a_gain():
    """Pairs are what is compared: the clock halves midway, and B is 5% faster throughout."""
    drift = np.linspace(1.0, 2.0, 20)
    choice = choose([A, B], A, {A: list(drift), B: list(0.95 * drift)})
    assert choice.winner == B


@pytest.mark.parametrize("broken", [[-0.2] * 20, [0.0] * 20, [-5.0] * 15 + [1.0] * 5, []])
def test_times_of_zero_and_below_never_win(broken):
    choice = choose([A, B], A, {A: around(1.0), B: broken})
    assert choice.winner == A
    assert choice.rejected[B].cause == "bad_timer"


def test_single_negative_samples_are_left_out_of_their_pair_only():
    times = {A: around(1.0), B: [-3.0, *around(0.8, seed=1)[1:]]}
    assert choose([A, B], A, times).winner == B


def test_where_every_timer_is_wrong_nothing_is_chosen():
    assert choose([A, B], A, {A: [-1.0] * 20, B: [0.0] * 20}) is None


def test_a_default_that_is_unusable_does_not_stop_the_others():
    choice = choose([B, C], A, {B: around(1.0), C: around(3.0)})
    assert choice.winner == B
    assert "default is not usable" in choice.reason


def test_of_equals_the_one_that_is_nowhere_slower_is_taken_and_lengths_it_is_slower_on_are_not_its_own():
    """B and C tie on the mix; B loses on short requests, which are not reason enough to leave 20% on the mix."""
    mix = {A: around(1.2), B: around(1.0, seed=1), C: around(1.0, seed=2)}
    short = {A: around(1.0), B: around(1.06, seed=1), C: around(1.0, seed=2)}
    long = {A: around(3.0), B: around(2.9, seed=1), C: around(2.9, seed=2)}
    lengths = {"short": short, "long": long}
    choice = choose([A, B, C], A, mix, lengths=lengths)
    assert (choice.winner, choice.serves) == (C, ("short", "long"))
    choice = choose([A, B], A, mix, lengths=lengths)
    assert (choice.winner, choice.serves) == (B, ("long",))
    assert choose([A, B], A, mix).serves == (), "what was not timed is not served"
    too_noisy = {A: [1.0] * 20, B: [0.7, 1.5] * 10}
    assert choose([A, B], A, mix, lengths={"short": too_noisy}).serves == ()


def test_what_wins_hot_and_loses_cold_is_not_taken():
    hot = {A: around(1.0), B: around(0.8, seed=1), C: around(0.9, seed=2)}
    cold = {A: around(5.0), B: around(6.0, seed=1), C: around(5.0, seed=2)}
    assert choose([A, B, C], A, hot).winner == B
    choice = choose([A, B, C], A, hot, {"slower_cold": cold})
    assert choice.winner == C
    assert choice.rejected[B].cause == "slower_cold"
    assert "20" in choice.rejected[B].reason
