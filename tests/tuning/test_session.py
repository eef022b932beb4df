"""A session with a made-up device: what is stored, logged and left alone."""

from __future__ import annotations

import pandas as pd
import pytest
from attn_graph.profilers.devices import Device
from attn_graph.profilers.sample import Case
from attn_graph.tuning import session, store
from attn_graph.tuning.exhaustive import search
from attn_graph.tuning.log import Log
from attn_graph.tuning.outcome import SKIPPED, Finals, Outcome, timed
from attn_graph.tuning.space import candidates, key_of
from attn_graph.tuning.static import Compiled, Resources, Target

CASE = Case("trtllm_mha", "decode", 8, 8, "loguniform:1:65536", 64, 65536, swa=False)
GPU = Device("cuda", 0, "NVIDIA H200")
SPACE = candidates(CASE)


class MadeUpBench:
    """Each candidate is 5% faster than the one before it; `broken` breaks all."""

    broken = False
    tried: list = []  # noqa: RUF012 (one list for all, read by the tests)

    def __init__(self, target, device, variables) -> None:
        assert (device, variables) == ("cuda:0", {"TRITON_INTERPRET": "0"})

    def prepare(self, case) -> None:
        MadeUpBench.tried = []

    def rough(self, candidate):
        MadeUpBench.tried.append(candidate)
        if MadeUpBench.broken:
            return Outcome(candidate, SKIPPED, "wrong_values", "page_table[0, 3] is -7, wanted 9")
        return timed(candidate, [2.0 * 0.95 ** SPACE.index(candidate)] * 5)

    def finals(self, chosen):
        return Finals({c: (2.0 * 0.95 ** SPACE.index(c),) * 20 for c in chosen})

    def close(self) -> None:
        pass


class MadeUpCompilers:
    """The default and the last candidate spill."""

    def __init__(self, target, jobs) -> None:
        pass

    def survey(self, case, space):
        for candidate in space:
            spills = candidate in (space[0], space[-1])
            outcome = Outcome(candidate, SKIPPED, "spills", "64 bytes a lane") if spills else Outcome(candidate)
            yield Compiled(outcome, Resources(255 if spills else 30, 64 * spills, 0, 1000))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def made_up(monkeypatch, tmp_path):
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "tuned"))
    monkeypatch.setattr(session, "IsolatedBench", MadeUpBench)
    monkeypatch.setattr(session, "Compilers", MadeUpCompilers)
    monkeypatch.setattr(MadeUpBench, "broken", False)


def tuned(tmp_path, **options):
    target = Target("cuda", 90, 32)
    with (
        Log(tmp_path / "log.csv", GPU.name) as log,
        session.Session(GPU, log, target=target, search=search, **options) as s,
    ):
        return s.tune(CASE)


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
    tuned(tmp_path, listen=lambda phase, outcome: heard.append(phase))
    assert heard == ["compiled"] * len(SPACE) + ["measured"] * len(SPACE)


def test_without_time_compiling_stops_early_and_the_default_is_measured(tmp_path):
    with Log(None) as log, session.Session(GPU, log, target=Target("cuda", 90, 32), search=search) as s:
        report = s.tune(CASE, budget_s=0.0)
    assert len(report.compiled) == 1
    assert MadeUpBench.tried == SPACE[:1]
    assert len(report.tuned.left_out) == len(SPACE) - 1
