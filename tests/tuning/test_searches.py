"""Searches on times that are known beforehand, and what the store's rules would have cost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from attn_graph.profilers.sample import Case
from attn_graph.tuning import store, surrogate
from attn_graph.tuning.log import Log, read_log
from attn_graph.tuning.outcome import NOT_TRIED, SKIPPED, Finals, Outcome, timed
from attn_graph.tuning.regret import left_out
from attn_graph.tuning.replays import GOOD_ENOUGH, SEEDS, TRIES, compare_searches, search_all
from attn_graph.tuning.session import Report
from attn_graph.tuning.space import Candidate, candidates, key_of
from attn_graph.tuning.tuner import SEARCHES, tune

CASE = Case("trtllm_mha", "decode", 64, 64, "loguniform:1:131072", 64, 131072, swa=False)
SPACE = candidates(CASE)


def valley(candidate, best=(8, 256, 4, 2), noise: float = 0.0) -> float:
    """A smooth made-up device time in us: 1.5 at `best`, more the further a setting is from it."""
    values = [candidate.as_dict()[name] for name in ("programs_per_row", "block", "num_warps", "rows")]
    far = sum(abs(math.log2(a / b)) for a, b in zip(values, best, strict=True))
    return 1.5 * (1 + 0.1 * far) * (1 + noise * np.random.default_rng(values).standard_normal())


class Valley:
    def __init__(self, noise: float = 0.0, broken=lambda candidate: False) -> None:
        self.tried, self._noise, self._broken = [], noise, broken

    def rough(self, candidate):
        self.tried.append(candidate)
        if self._broken(candidate):
            return Outcome(candidate, SKIPPED, "failed", "an illegal memory access was encountered")
        return timed(candidate, [valley(candidate, noise=self._noise)] * 5)

    def finals(self, chosen):
        return Finals({c: (valley(c),) * 20 for c in chosen})


@pytest.mark.parametrize("seed", range(5))
def test_the_surrogate_finds_the_fastest_of_a_smooth_space_in_a_fraction_of_the_tries(seed):
    bench = Valley(noise=0.005)
    tuned = tune(SPACE, bench, search=surrogate.search, seed=seed)
    fastest = min(map(valley, SPACE))
    assert fastest / valley(tuned.choice.winner) >= GOOD_ENOUGH
    assert len(bench.tried) == len(set(bench.tried)) < len(SPACE) / 3
    assert bench.tried[0] == SPACE[0]
    left = [o for o in tuned.outcomes if o.status == NOT_TRIED]
    assert len(left) == len(SPACE) - len(bench.tried)
    assert {o.cause for o in left} == {"search"}


def test_a_search_that_is_cut_off_by_time_says_so_and_not_that_it_saw_no_promise():
    clock = iter(range(1000)).__next__
    tuned = tune(SPACE, Valley(), search=surrogate.search, budget_s=8, clock=clock)
    assert {o.cause for o in tuned.outcomes if o.status == NOT_TRIED} == {"time_budget"}


def test_the_surrogate_stays_clear_of_a_corner_where_everything_breaks():
    bench = Valley(broken=lambda c: c.as_dict()["block"] > 128)
    tuned = tune(SPACE, bench, search=surrogate.search)
    good = [c for c in SPACE if c.as_dict()["block"] <= 128]
    assert min(map(valley, good)) / valley(tuned.choice.winner) >= GOOD_ENOUGH
    assert sum(c.as_dict()["block"] > 128 for c in bench.tried[surrogate.FIRST :]) < len(bench.tried) / 2


def test_where_everything_breaks_the_surrogate_gives_up():
    tuned = tune(SPACE, Valley(broken=lambda c: True), search=surrogate.search)
    assert tuned.choice is None


def test_searches_are_compared_on_a_log_without_a_device(tmp_path):
    path = tmp_path / "log.csv"
    with Log(path, "NVIDIA H200") as log:
        tune(SPACE, Valley(noise=0.005), listen=lambda outcome: log.outcome(CASE, outcome))
    found = {(one.search, one.tries): one for one in compare_searches(list(read_log(path)))}
    assert set(found) == {(name, tries) for name in SEARCHES for tries in TRIES}
    assert all(0 < one.least_speed <= one.mean_speed + 1e-12 <= 1 + 1e-9 for one in found.values())
    most = TRIES[-1]
    assert found["surrogate", most].mean_speed > found["random", most].mean_speed
    assert found["surrogate", most].good_enough == 1.0
    assert found["exhaustive", most].good_enough < 1.0, "a few at the space's beginning are not enough"


H200 = Path(__file__).parents[2] / "results" / "h200"


@pytest.fixture(scope="module")
def of_an_h200():
    """What was measured of each shape: every candidate where it was searched through, else what a search tried."""
    whole = {one.case: one for one in read_log(H200 / "tune_exhaustive.csv.gz")}
    partly = list(read_log(H200 / "tune.csv.gz"))
    assert len(whole) == 7 and len(partly) == 28
    return partly, [whole.get(one.case, one) for one in partly], [one for one in whole.values()]


@pytest.fixture(scope="module")
def shipped():
    return list(store._read(store.SHIPPED / "h200.json").entries())


@pytest.mark.parametrize("seed", SEEDS)
def test_on_an_h200_what_was_seen_in_other_cases_finds_the_fastest_in_twenty_tries(of_an_h200, seed):
    for logged in of_an_h200:
        runs = list(search_all(logged, surrogate.search, seed))
        assert min(run.speed(len(run.us)) for run in runs) >= GOOD_ENOUGH
        informed = [run for run in runs if run.informed]
        assert informed
        assert min(run.speed(20) for run in informed) >= GOOD_ENOUGH
        assert sum(len(run.us) for run in informed) / len(informed) <= 40, "a third of a space of pages"


@pytest.mark.parametrize("seed", SEEDS)
def test_no_shape_needs_more_than_sixteen_tries_where_choices_of_other_shapes_are_stored(of_an_h200, shipped, seed):
    """As many as 2 seconds have room for. The shape's own choice is not shown to the search."""
    for logged in of_an_h200:
        runs = list(search_all(logged, surrogate.search, seed, shipped, 16))
        assert all(run.informed and len(run.us) == 16 for run in runs)
        assert min(run.speed(16) for run in runs) >= GOOD_ENOUGH


def test_the_own_choice_of_a_shape_is_not_shown_to_a_search_that_is_judged_on_it(of_an_h200, shipped):
    (one,) = (one for one in of_an_h200[2] if (one.case.backend, one.case.swa) == ("triton", True))
    own = [e for e in shipped if (e.key.kernel, e.key.bucket, e.key.swa) == ("csr_metadata", 64, True)]
    assert len(own) == 1 and Candidate.of(**own[0].config) in one.space
    (run,) = search_all([one], surrogate.search, 0, own)
    assert not run.informed


def test_without_what_other_cases_showed_sixteen_tries_are_too_few(of_an_h200):
    alone = [run for logged in of_an_h200[2] for run in search_all([logged], surrogate.search, 0)]
    assert not any(run.informed for run in alone)
    assert min(run.speed(16) for run in alone) < GOOD_ENOUGH
    assert min(run.speed(28) for run in alone) >= GOOD_ENOUGH


def test_a_log_without_times_has_nothing_to_compare(tmp_path):
    with Log(tmp_path / "log.csv") as log:
        log.outcome(CASE, Outcome(SPACE[0]))
    assert compare_searches(list(read_log(tmp_path / "log.csv"))) == []


def report_of(bucket: int, best) -> Report:
    case = Case("trtllm_mha", "decode", bucket, bucket, "loguniform:1:131072", 64, 131072, swa=False)
    space = candidates(case)

    class Bench(Valley):
        def rough(self, candidate):
            return timed(candidate, [valley(candidate, best)] * 5)

        def finals(self, chosen):
            return Finals({c: (valley(c, best),) * 20 for c in chosen})

    return Report(case, space, tune(space, Bench()), key=key_of(case, "NVIDIA H200"))


def test_every_tuned_shape_is_judged_as_if_it_had_not_been():
    """48 likes half the programs of 32 and 64; 512 is far from all."""
    reports = [report_of(b, best) for b, best in
               ((32, (8, 256, 4, 2)), (48, (4, 256, 4, 2)), (64, (8, 256, 4, 2)), (512, (2, 256, 4, 2)))]  # fmt: skip
    found = {one.key.bucket: one for one in left_out(reports)}
    assert {bucket: one.rule for bucket, one in found.items()} == {
        32: "neighbour", 48: "neighbour", 64: "neighbour", 512: "default"
    }  # fmt: skip
    assert found[48].regret == pytest.approx(0.1)
    default = reports[3].default
    assert found[512].regret == pytest.approx(valley(default, (2, 256, 4, 2)) / 1.5 - 1)
    assert found[48].entry.facts == {"left_out": {"rule": "neighbour", "regret": 0.1}}


def test_a_setting_that_was_never_timed_has_no_regret():
    near, far = report_of(64, (8, 256, 4, 2)), report_of(48, (8, 256, 4, 2))
    winner = far.tuned.choice.winner
    outcomes = tuple(o for o in near.tuned.outcomes if o.candidate != winner)
    hidden = type(near.tuned)(outcomes, Finals({}), near.tuned.choice)
    one = left_out([Report(near.case, near.space, hidden, key=near.key), far])[0]
    assert winner == near.tuned.choice.winner or one.regret is None


def test_a_torn_row_is_cut_off_before_the_next_is_written(tmp_path):
    path = tmp_path / "log.csv"
    with Log(path, "gpu") as log:
        log.outcome(CASE, timed(SPACE[0], [1.0]))
        log.outcome(CASE, Outcome(SPACE[1], SKIPPED, "failed", "two\nlines"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-60:-2])
    assert len(list(read_log(path))) == 1
    with Log(path, "gpu") as log:
        log.outcome(CASE, timed(SPACE[2], [2.0]))
    assert path.read_bytes().startswith(whole)
    assert pd.read_csv(path)["candidate"].tolist() == [str(c) for c in SPACE[:3]]
