"""The log of candidates: written as they come, read back, and searched again without a device."""

from __future__ import annotations

import gzip

import pandas as pd
import pytest
from attn_graph.profilers.sample import Case
from attn_graph.tuning import exhaustive, random_order, session
from attn_graph.tuning.log import COLUMNS, Log, LogError, read_log
from attn_graph.tuning.outcome import NOT_TRIED, SKIPPED, Finals, Outcome, timed
from attn_graph.tuning.space import candidates
from attn_graph.tuning.static import Compiled, Resources
from attn_graph.tuning.tuner import tune

CASE = Case("trtllm_mha", "decode", 64, 64, "8192", 64, 131072, swa=True)
SPACE = candidates(CASE)[:6]
FASTEST = SPACE[4]


class Device:
    """The fifth candidate is the fastest by far, the third is wrong."""

    def rough(self, candidate):
        i = SPACE.index(candidate)
        if i == 1:
            return Outcome(candidate, SKIPPED, "spills", "64 bytes a lane")
        if i == 2:
            return Outcome(candidate, SKIPPED, "wrong_values", "page_table[0, 512] is -7, wanted 93 (1 of 2 cells)")
        return timed(candidate, [2.0 - 0.3 * (i == 4) + 0.01 * n for n in range(5)])

    def finals(self, chosen):
        hot = {c: tuple(2.0 - 0.5 * (c == FASTEST) + 0.001 * n for n in range(20)) for c in chosen}
        return Finals(hot, {c: tuple(5 * v for v in values) for c, values in hot.items()})


def logged(path, search=exhaustive.search):
    with Log(path, "NVIDIA H200") as log:
        log.compiled(CASE, Compiled(Outcome(SPACE[1], SKIPPED, "spills", "64 bytes a lane"), Resources(255, 64, 0, 9)))
        tuned = tune(SPACE, Device(), search=search, listen=lambda outcome: log.outcome(CASE, outcome))
        log.finals(CASE, tuned.finals)
    return tuned


@pytest.mark.parametrize("search", [exhaustive.search, random_order.search])
def test_a_log_replays_to_the_same_choice_by_every_search(tmp_path, search):
    tuned = logged(tmp_path / "log.csv", search)
    for again in (exhaustive.search, random_order.search):
        (one,) = read_log(tmp_path / "log.csv")
        assert (one.case, one.gpu, one.space) == (CASE, "NVIDIA H200", SPACE)
        report = session.replay(one, again)
        assert report.tuned.choice.winner == tuned.choice.winner == FASTEST
        assert report.tuned.choice.tied == tuned.choice.tied
        assert {o.candidate: (o.status, o.cause, o.reason) for o in report.tuned.outcomes} == {
            o.candidate: (o.status, o.cause, o.reason) for o in tuned.outcomes
        }


def test_finalists_that_were_never_side_by_side_are_decided_by_their_rough_times_and_that_is_said(tmp_path):
    with Log(tmp_path / "log.csv") as log:
        for candidate in SPACE:
            log.outcome(CASE, Device().rough(candidate))
    (one,) = read_log(tmp_path / "log.csv")
    report = session.replay(one, exhaustive.search)
    assert report.tuned.choice.winner == FASTEST
    assert "rough times" in report.notes[0]


def test_rows_are_on_disk_as_they_come_and_a_second_run_appends(tmp_path):
    path = tmp_path / "log.csv"
    with Log(path, "gpu") as log:
        log.outcome(CASE, timed(SPACE[0], [1.0, 2.0, 4.0]))
        assert len(pd.read_csv(path)) == 1
    with Log(path, "gpu") as log:
        log.outcome(CASE, Outcome(SPACE[1], NOT_TRIED, "time_budget", 'no "time", was\nleft'))
    frame = pd.read_csv(path)
    assert tuple(frame.columns) == COLUMNS
    assert frame["p50_us"].tolist()[0] == 2.0
    assert frame["p50_us"].isna().tolist() == [False, True]
    assert frame["reason"].tolist()[1] == 'no "time", was\nleft'
    assert frame["n"].tolist() == [3, 0]


def test_cases_and_gpus_of_one_file_are_kept_apart(tmp_path):
    path = tmp_path / "log.csv"
    other = Case("trtllm_mha", "decode", 8, 8, "uniform:1:64", 64, 131072, swa=False)
    for gpu, case, us in (("A", CASE, 1.0), ("B", CASE, 2.0), ("A", other, 3.0)):
        with Log(path, gpu) as log:
            log.outcome(case, timed(candidates(case)[0], [us]))
    found = {(one.gpu, one.case): one.rough(one.space[0]).samples_us for one in read_log(path)}
    assert found == {("A", CASE): (1.0,), ("A", other): (3.0,), ("B", CASE): (2.0,)}


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", ",".join(COLUMNS) + "\n"])
def test_what_is_no_log_is_refused(tmp_path, content):
    path = tmp_path / "log.csv"
    path.write_text(content)
    with pytest.raises(LogError, match=r"log\.csv"):
        list(read_log(path))


def test_a_compressed_log_is_read_and_not_appended_to(tmp_path):
    tuned = logged(tmp_path / "log.csv")
    packed = tmp_path / "log.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "log.csv").read_bytes()))
    (one,) = read_log(packed)
    assert session.replay(one, exhaustive.search).tuned.choice.winner == tuned.choice.winner
    with pytest.raises(LogError, match="Compress it afterwards"):
        Log(packed)


def test_another_table_is_not_appended_to(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(LogError, match="not a log of candidates"):
        Log(path)
    assert path.read_text() == "a,b\n1,2\n"
