"""From candidates to a choice, without a device: mishaps, time budgets, searches."""

from __future__ import annotations

import itertools

import pytest
from attn_graph.tuning import exhaustive, random_order
from attn_graph.tuning.isolated import IsolatedBench
from attn_graph.tuning.outcome import NOT_TRIED, OK, SKIPPED, Outcome
from attn_graph.tuning.tuner import MOST_FINALISTS, tune
from made_up_bench import MadeUpTimes, candidate

SPACE = [candidate(n) for n in range(1, 6)]


def causes(tuned) -> dict[int, str]:
    return {o.candidate.as_dict()["n"]: o.cause for o in tuned.outcomes}


def test_a_hanging_a_crashing_and_a_failing_candidate_are_rows_and_the_good_one_is_chosen():
    with IsolatedBench("made_up_bench:Mishaps", limit_s=1.0) as bench:
        bench.prepare("a case")
        tuned = tune(SPACE, bench)
    assert causes(tuned) == {1: "", 2: "hung", 3: "died", 4: "failed", 5: ""}
    assert all(o.reason for o in tuned.outcomes if o.status == SKIPPED)
    assert tuned.choice.winner == candidate(5)


def test_where_all_are_bad_there_is_no_choice_and_every_reason_is_kept():
    tuned = tune(SPACE, MadeUpTimes({}))
    assert tuned.choice is None
    assert {o.cause for o in tuned.outcomes} == {"wrong_values"}
    assert len(tuned.outcomes) == len(SPACE)


def test_each_round_is_expected_before_its_first_candidate_is_tried():
    """In rounds of two, so that a round can be compiled at once; a round that time cuts off ends the search."""

    def in_pairs(candidates, seed, near):
        for i in range(0, len(candidates), 2):
            told = yield list(candidates[i : i + 2])
            assert [outcome.candidate for outcome in told] == list(candidates[i : i + 2])

    bench, expected = MadeUpTimes({n: 1.0 for n in range(1, 6)}), []
    tune(SPACE, bench, search=in_pairs, expect=lambda tries: expected.append((len(bench.tried), list(tries))))
    assert expected == [(0, SPACE[:2]), (2, SPACE[2:4]), (4, SPACE[4:])]
    clock = itertools.count().__next__
    tuned = tune(SPACE, MadeUpTimes({n: 1.0 for n in range(1, 6)}), search=in_pairs, budget_s=4, clock=clock)
    assert [o.status for o in tuned.outcomes] == [OK, OK, OK, NOT_TRIED, NOT_TRIED]


def test_a_time_budget_gives_the_best_so_far_and_says_what_it_left_out():
    """Each reading of the clock is a second later; three quarters of the budget are for the rough pass."""
    clock = itertools.count().__next__
    tuned = tune(SPACE, MadeUpTimes({n: 10.0 / n for n in range(1, 6)}), budget_s=4, clock=clock)
    assert [o.status for o in tuned.outcomes] == [OK, OK, OK, NOT_TRIED, NOT_TRIED]
    assert [o.candidate for o in tuned.left_out] == SPACE[3:]
    assert tuned.choice.winner == candidate(3)


def test_without_any_time_the_default_is_still_measured():
    tuned = tune(SPACE, MadeUpTimes({n: 1.0 for n in range(1, 6)}), budget_s=0.0)
    assert [o.status for o in tuned.outcomes] == [OK] + [NOT_TRIED] * 4
    assert tuned.choice.winner == SPACE[0]


def test_the_default_is_a_finalist_however_slow_its_rough_pass_was():
    """The rough pass was disturbed; side by side the default is the fastest."""
    bench = MadeUpTimes({1: 9.0, 2: 1.0, 3: 1.01, 4: 5.0, 5: 5.0}, hot={n: [0.5 * n] * 20 for n in range(1, 6)})
    tuned = tune(SPACE, bench)
    assert set(tuned.finals.hot_us) == {candidate(1), candidate(2), candidate(3)}
    assert tuned.choice.winner == candidate(1)


def test_finalists_are_few():
    many = [candidate(n) for n in range(1, 40)]
    tuned = tune(many, MadeUpTimes({n: 1.0 + 0.001 * n for n in range(1, 40)}))
    assert len(tuned.finals.hot_us) == MOST_FINALISTS


def test_a_rough_time_of_zero_is_a_bad_timer_and_no_finalist():
    tuned = tune(SPACE[:3], MadeUpTimes({1: 1.0, 2: -0.3, 3: 0.0}))
    assert causes(tuned) == {1: "", 2: "bad_timer", 3: "bad_timer"}
    assert tuned.choice.winner == candidate(1)


def test_finals_that_break_fall_back_on_the_rough_times_and_say_so():
    class Broken(MadeUpTimes):
        def finals(self, candidates):
            return type(super().finals(candidates))({}, note="the finalists could not be timed side by side (died)")

    tuned = tune(SPACE, Broken({1: 2.0, 2: 1.9, 3: 1.0, 4: 1.05, 5: 4.0}))
    assert tuned.choice.winner == candidate(3)
    assert "could not be timed side by side" in tuned.notes[0]


@pytest.mark.parametrize("search", [exhaustive.search, random_order.search])
def test_every_search_tries_the_default_first_and_each_candidate_once(search):
    bench = MadeUpTimes({n: 1.0 for n in range(1, 6)})
    tune(SPACE, bench, search=search, seed=3)
    assert bench.tried[0] == 1
    assert sorted(bench.tried) == [1, 2, 3, 4, 5]


def test_a_random_order_is_the_seeds_and_another_one_for_another_seed():
    def order(seed: int) -> list[int]:
        bench = MadeUpTimes({n: 1.0 for n in range(1, 30)})
        tune([candidate(n) for n in range(1, 30)], bench, search=random_order.search, seed=seed)
        return bench.tried

    assert order(0) == order(0) != order(1)


def test_an_outcome_without_a_cause_is_ok_and_the_other_way_round():
    with pytest.raises(ValueError, match="status 'skipped' with cause ''"):
        Outcome(candidate(1), SKIPPED)
    with pytest.raises(ValueError, match="status 'ok' with cause 'spills'"):
        Outcome(candidate(1), OK, "spills")
