"""A session with a made-up device: what is stored, logged and left alone."""

from __future__ import annotations

import inspect
import itertools
import math
from concurrent.futures import Future
from dataclasses import replace

import pandas as pd
import pytest
from attn_graph.cli import tune, tune_store
from attn_graph.cli.errors import ExitCode
from attn_graph.profilers.devices import Device
from attn_graph.profilers.sample import Case
from attn_graph.tuning import held_out, session, store, surrogate
from attn_graph.tuning.exhaustive import search
from attn_graph.tuning.log import Log, read_log
from attn_graph.tuning.outcome import SKIPPED, Finals, Outcome, timed
from attn_graph.tuning.space import candidates, key_of
from attn_graph.tuning.static import Compiled, Resources, Target

CASE = Case("trtllm_mha", "decode", 8, 8, "loguniform:1:65536", 64, 65536, swa=False)
GPU = Device("cuda", 0, "NVIDIA H200")
SPACE = candidates(CASE)


def made_up_us(candidate) -> float:
    """The last candidate takes 1 us, each before it 5% more, up to 2; so does what is not of this case."""
    behind = len(SPACE) - 1 - SPACE.index(candidate) if candidate in SPACE else len(SPACE)
    return min(2.0, 1.05**behind)


class MadeUpBench:
    """Times as above; `broken` breaks all."""

    broken = False
    tried: list = []  # noqa: RUF012 (one list for all, read by the tests)

    def __init__(self, target, device, variables) -> None:
        assert (device, variables) == ("cuda:0", {"TRITON_INTERPRET": "0"})

    def start(self) -> None:
        pass

    def prepare(self, case) -> None:
        MadeUpBench.tried = []

    def rough(self, candidate):
        MadeUpBench.tried.append(candidate)
        if MadeUpBench.broken:
            return Outcome(candidate, SKIPPED, "wrong_values", "page_table[0, 3] is -7, wanted 9")
        return timed(candidate, [made_up_us(candidate)] * 5)

    def finals(self, chosen):
        times = {c: (made_up_us(c),) * 20 for c in chosen}
        return Finals(times, short_us=times, long_us=times)

    def close(self) -> None:
        pass


class MadeUpCompilers:
    """The default and the last candidate spill."""

    def __init__(self, target, jobs) -> None:
        pass

    def submit(self, case, space, urgency):
        return [self.compiled(candidate) for candidate in space]

    def compiled(self, candidate) -> Future:
        spills = candidate in (SPACE[0], SPACE[-1])
        outcome = Outcome(candidate, SKIPPED, "spills", "64 bytes a lane") if spills else Outcome(candidate)
        future = Future()
        future.set_result(Compiled(outcome, Resources(255 if spills else 30, 64 * spills, 0, 1000)))
        return future

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def made_up(monkeypatch, tmp_path):
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "tuned"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(session, "IsolatedBench", MadeUpBench)
    monkeypatch.setattr(session, "Compilers", MadeUpCompilers)
    monkeypatch.setattr(MadeUpBench, "broken", False)


def tuned(tmp_path, **options):
    target = Target("cuda", 90, 32)
    with (
        Log(tmp_path / "log.csv", GPU.name) as log,
        session.Session(GPU, log, target=target, search=search, **options) as s,
    ):
        (report,) = s.tune([CASE])
        return report


def test_the_choice_is_stored_with_what_a_reader_wants_to_know(tmp_path):
    report = tuned(tmp_path)
    found = store.lookup(key_of(CASE, "NVIDIA H200"))
    assert (found.rule, found.config) == ("exact", report.tuned.choice.winner.as_dict())
    ((_, entry),) = store.saved_entries()[0]
    assert entry.facts["default_p50_us"] == 2.0
    assert entry.facts["p50_us"] < 2.0
    assert entry.facts["reason"] == report.tuned.choice.reason
    assert entry.facts["tied"] == [report.tuned.choice.winner.as_dict()]
    assert entry.facts["triton"]


def test_a_spilling_candidate_is_not_measured_but_the_default_always_is(tmp_path):
    report = tuned(tmp_path)
    assert SPACE[0] in MadeUpBench.tried
    assert SPACE[-1] not in MadeUpBench.tried
    assert report.tuned.outcomes[-1].cause == "spills"
    assert report.tuned.choice.winner == SPACE[-2]


def test_every_step_of_every_candidate_is_logged(tmp_path):
    tuned(tmp_path)
    log = pd.read_csv(tmp_path / "log.csv")
    assert set(log["gpu"]) == {"NVIDIA H200"}
    by_phase = log.groupby("phase")["candidate"].nunique()
    assert by_phase["static"] == by_phase["rough"] == len(SPACE)
    assert by_phase["final_hot"] >= 2
    assert log.loc[log["phase"] == "static", "registers"].notna().all()


def test_where_no_candidate_is_usable_nothing_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(MadeUpBench, "broken", True)
    report = tuned(tmp_path)
    assert (report.tuned.choice, report.key) == (None, None)
    assert store.saved_entries() == ([], [])


def test_the_listener_hears_of_compiling_and_measuring(tmp_path):
    heard = []
    tuned(tmp_path, listen=lambda case, phase, outcome: heard.append(phase))
    assert heard == ["compiled", "measured"] * len(SPACE)


class NeverCompiled(MadeUpCompilers):
    def compiled(self, candidate) -> Future:
        return Future()


def test_without_time_nothing_waits_for_compilers_and_the_default_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "Compilers", NeverCompiled)
    with Log(None) as log, session.Session(GPU, log, target=Target("cuda", 90, 32), search=search) as s:
        (report,) = s.tune([CASE], budget_s=0.0)
    assert report.compiled == {}
    assert MadeUpBench.tried == SPACE[:1]
    assert set(report.seconds) >= {"preparing", "trying"}
    assert len(report.tuned.left_out) == len(SPACE) - 1


class Clock:
    """Seconds that pass only where a made-up bench says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class SlowBench(MadeUpBench):
    """Takes as long as an H200: seconds to start, and more to prepare a case of more requests."""

    clock: Clock

    def start(self) -> None:
        self.clock.now += 6.0

    def prepare(self, case) -> None:
        self.clock.now += 0.05 + case.bs / 400
        MadeUpBench.tried = []

    def rough(self, candidate):
        self.clock.now += 0.035
        return super().rough(candidate)

    def finals(self, chosen):
        self.clock.now += 0.25 * len(chosen)
        return super().finals(chosen)


def test_every_case_has_its_share_of_a_budget_the_first_and_the_last_too(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(SlowBench, "clock", clock, raising=False)
    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr(session, "IsolatedBench", SlowBench)
    cases = [replace(CASE, bs=bs, bucket=bs, backend=b) for b in ("trtllm_mha", "trtllm_mla") for bs in (1, 8, 64, 256)]
    began = clock.now
    with Log(None) as log, session.Session(GPU, log, search=search) as s:
        tried = [(clock.now, len(MadeUpBench.tried)) for _ in s.tune(cases, budget_s=6.0 + 2.0 * len(cases))]
    assert clock.now - began <= 1.02 * (6.0 + 2.0 * len(cases))
    assert min(n for _, n in tried) >= 12
    times = [began + 6.0, *(at for at, _ in tried)]
    assert max(after - before for before, after in itertools.pairwise(times)) < 1.5 * 2.0


def test_a_case_begins_with_the_default_and_the_stored_choices_of_its_neighbours(tmp_path):
    near, far = (replace(CASE, bs=bs, bucket=bs) for bs in (16, 128))
    settings = {near: SPACE[40], far: SPACE[20]}
    store.save(store.Entry(key_of(case, GPU.name), c.as_dict(), {"p50_us": 1.0}) for case, c in settings.items())
    store.save([store.Entry(key_of(replace(CASE, bs=4, bucket=4), GPU.name), SPACE[7].as_dict())])  # never timed
    with Log(None) as log, session.Session(GPU, log, search=surrogate.search) as s:
        list(s.tune([CASE]))
    assert MadeUpBench.tried[:3] == [SPACE[0], SPACE[40], SPACE[20]]


def test_a_case_that_cannot_be_prepared_is_a_report_and_the_others_go_on(tmp_path, monkeypatch):
    too_large = replace(CASE, bs=16, bucket=16)

    def prepare(self, case):
        if case == too_large:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(MadeUpBench, "prepare", prepare)
    with Log(None) as log, session.Session(GPU, log, search=search) as s:
        failed, good = s.tune([too_large, CASE])
    assert (failed.tuned.choice, failed.key) == (None, None)
    assert failed.notes == ("not measured: out of memory",)
    assert good.tuned.choice is not None


def test_a_killed_run_goes_on_without_trying_a_candidate_again(tmp_path):
    """The first run is cut off after five candidates, in the middle of writing the sixth row."""
    path = tmp_path / "log.csv"
    with (
        pytest.raises(KeyboardInterrupt),
        Log(path, GPU.name) as log,
        session.Session(GPU, log, search=search, listen=StopsAfter(5)) as s,
    ):
        list(s.tune([CASE]))
    with open(path, "a") as file:
        file.write("trtllm_mha,decode,8,8,log")
    before = set(MadeUpBench.tried)
    assert len(before) == 5
    resumed = {one.case: one for one in read_log(path)}
    with Log(path, GPU.name) as log, session.Session(GPU, log, search=search, resumed=resumed) as s:
        (report,) = s.tune([CASE])
    assert not before & set(MadeUpBench.tried)
    assert before | set(MadeUpBench.tried) == set(SPACE)
    assert report.tuned.choice.winner == SPACE[-1]
    rows = pd.read_csv(path)
    assert rows.loc[rows["phase"] == "rough", "candidate"].is_unique


def test_a_run_that_is_complete_is_resumed_without_measuring_anything(tmp_path):
    first = tuned(tmp_path)
    again = tuned(tmp_path, resumed={one.case: one for one in read_log(tmp_path / "log.csv")})
    assert MadeUpBench.tried == []
    assert again.tuned.choice.winner == first.tuned.choice.winner
    log = pd.read_csv(tmp_path / "log.csv")
    assert not log[log["phase"] != "static"].duplicated(["candidate", "phase"]).any()


class StopsAfter:
    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, case, phase, outcome) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_what_is_tuned_by_default_is_exactly_what_ci_asks_for_by_default():
    """Also where CI has no GPU and names one."""
    usual = {name: option.default for name, option in inspect.signature(tune.tune).parameters.items()}
    names = ("backend", "bs", "context_mix", "page_size", "max_context", "swa")
    on_gpu, in_ci = (tune._cases(*(usual[name] for name in names), device, usual["seed"]) for device in ("cuda", "cpu"))
    assert tune_store.assert_hit(in_ci, GPU.name, as_json=True) == ExitCode.FOUND_WRONG
    with Log(None) as log, session.Session(GPU, log, search=search) as s:
        reports = list(s.tune(on_gpu))
    assert tune_store.assert_hit(in_ci, GPU.name, as_json=True) == ExitCode.OK
    assert {report.key for report in reports} == {key_of(case, GPU.name) for case in in_ci}
    assert len(reports) == len(in_ci) == 28
    order = [report.case.backend for report in reports[:5]]
    assert len(set(order[:4])) == 4 and order[4] == order[0], "a case of each kernel in turns"
    sizes = [(report.case.bucket, report.case.swa) for report in reports if report.case.backend == order[0]]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 8, "the large ones first"


# Held-out shapes.


def test_choices_are_compared_with_the_default_on_shapes_that_were_not_tuned(tmp_path):
    with Log(tmp_path / "log.csv", GPU.name) as log, session.Session(GPU, log, search=search) as s:
        reports = list(s.tune([CASE]))
        held = list(s.held_out(reports))
    assert {one.case.context for one in held} == {"uniform:1:1024", "uniform:1:65536", CASE.context}
    assert {one.case.bucket for one in held} == {8, 12}
    assert all(one.found.rule == "neighbour" for one in held)
    assert {one.word for one in held} == {"faster"}
    gains = [made_up_us(one.chosen) / made_up_us(one.default) for one in held]
    assert [one.ratio for one in held] == pytest.approx(gains)
    assert held_out.geometric_mean(held) == pytest.approx(math.prod(gains) ** (1 / len(gains)))
    rows = pd.read_csv(tmp_path / "log.csv")
    rows = rows[rows["phase"] == "held_out_hot"]
    assert len(rows) == 2 * len(held)
    assert set(rows["reason"]) == {"the default", "stored, by the rule: neighbour"}


def test_on_lengths_on_which_a_choice_is_slower_the_default_runs_and_nothing_is_measured(tmp_path, monkeypatch):
    """On short requests the default wins; the choice is for the mix, for longer requests and for more of them."""

    def finals(self, chosen):
        times = {c: (made_up_us(c),) * 20 for c in chosen}
        return Finals(times, short_us={c: (1 / made_up_us(c),) * 20 for c in chosen}, long_us=times)

    monkeypatch.setattr(MadeUpBench, "finals", finals)
    with Log(tmp_path / "log.csv", GPU.name) as log, session.Session(GPU, log, search=search) as s:
        (report,) = s.tune([CASE])
        held = {(one.case.context, one.case.bucket): one for one in s.held_out([report])}
    assert report.tuned.choice.winner == SPACE[-1]
    short = held.pop(("uniform:1:1024", 8))
    assert (short.word, short.ratio, short.found.rule) == ("same setting", 1.0, "default")
    assert "on ones like these the choice was slower than the default" in store.describe(short.found)
    assert {one.word for one in held.values()} == {"faster"}
    ((_, entry),) = store.saved_entries()[0]
    assert entry.facts["serves"] == ["long"]
    (one,) = read_log(tmp_path / "log.csv")
    assert session.replay(one, search).tuned.choice.serves == ("long",)


def test_a_choice_that_is_slower_on_a_held_out_shape_is_said_to_be(tmp_path, monkeypatch):
    with Log(None) as log, session.Session(GPU, log, search=search) as s:
        reports = list(s.tune([CASE]))
        monkeypatch.setattr(
            MadeUpBench, "finals", lambda self, pair: Finals({pair[0]: (1.0,) * 20, pair[1]: (2.0,) * 20})
        )
        held = list(s.held_out(reports))
    assert {one.word for one in held} == {"slower"}
    assert held[0].ratio == pytest.approx(2.0)


def test_where_the_default_was_chosen_nothing_is_measured_on_held_out_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(MadeUpBench, "finals", lambda self, chosen: Finals({c: (1.0,) * 20 for c in chosen}))
    with Log(None) as log, session.Session(GPU, log, search=search) as s:
        (report,) = s.tune([CASE])
        monkeypatch.setattr(MadeUpBench, "prepare", None)
        held = list(s.held_out([report]))
    assert report.tuned.choice.winner == SPACE[0]
    assert {(one.word, one.ratio) for one in held} == {("same setting", 1.0)}
