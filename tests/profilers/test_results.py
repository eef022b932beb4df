"""What a run leaves on disk, whatever ends it."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import shutil
from dataclasses import replace

import made_up_runs as made_up
import numpy as np
import pandas as pd
import pytest
from attn_graph.profilers import results
from attn_graph.profilers.results import (
    ResultsError,
    RunWriter,
    cases_in,
    read_environment,
    read_progress,
    read_samples,
    read_summary,
    runs_in,
)
from attn_graph.profilers.sample import PREDICTED, SAMPLE_COLUMNS, SUMMARY_COLUMNS, Sample

FIRST, SECOND, THIRD = (made_up.case(bs) for bs in (1, 2, 4))
ARMS = ("aten-eager", "fused-graph")


def measured(case, **how):
    return made_up.samples(case, **({"arms": ARMS, "steps": 8} | how))


def test_both_tables_are_read_by_pandas_in_one_call_with_columns_in_schema_order(tmp_path):
    made_up.write_run(tmp_path / "run", [FIRST, SECOND], arms=ARMS, steps=8)
    raw = pd.read_csv(tmp_path / "run" / "samples.csv.gz")
    assert tuple(raw.columns) == SAMPLE_COLUMNS
    assert len(raw) == sum(1 for case in (FIRST, SECOND) for _ in measured(case))
    assert set(raw["bs"]) == {1, 2}
    assert tuple(pd.read_csv(tmp_path / "run" / "summary.csv").columns) == SUMMARY_COLUMNS
    assert (tmp_path / "run" / "summary.csv").read_text(encoding="utf-8").count("backend,") == 1


def test_every_figure_of_the_summary_recomputes_from_the_samples(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST], arms=ARMS, steps=9)
    raw, summary = read_samples(run), read_summary(run)
    checked = 0
    for row in summary[summary["status"] == "ok"].itertuples():
        of_row = (raw["arm"] == row.arm) & (raw["metric"] == row.metric) & (raw["source"] == row.source)
        values = raw.loc[of_row & ((row.rank == "all") | (raw["rank"].astype(str) == row.rank)), "value"]
        assert row.n == len(values)
        found = [row.p50, row.p90, row.p99, row.mean, row.min, row.max, row.sum]
        wanted = [*np.percentile(values, (50, 90, 99)), values.mean(), values.min(), values.max(), values.sum()]
        assert found == pytest.approx(wanted, abs=1e-4)
        checked += 1
    assert checked > 50


def test_one_row_a_rank_and_one_for_all_and_none_a_rank_for_what_spans_ranks(tmp_path):
    summary = read_summary(made_up.write_run(tmp_path / "run", [FIRST], arms=ARMS, steps=8))
    prep = summary[(summary["arm"] == "aten-eager") & (summary["metric"] == "prep_host_us")]
    assert list(prep["rank"]) == ["all", "0", "1", "2", "3"]
    assert list(prep["n"]) == [32, 8, 8, 8, 8]
    skew = summary[(summary["arm"] == "aten-eager") & (summary["metric"] == "launch_skew_us")]
    assert list(skew["rank"]) == ["all"]
    assert set(summary.loc[summary["metric"] == "first_wait_us", "source"]) == {PREDICTED}


def test_numbers_stay_numbers_and_failures_are_rows_with_blanks(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST, SECOND], arms=ARMS, steps=8, failed=["fused-graph"])
    summary = read_summary(run)
    figures = ["n", "p50", "p90", "p99", "mean", "min", "max", "sum", "p50_low", "p50_high", "bs", "page_size"]
    assert all(pd.api.types.is_numeric_dtype(summary[column]) for column in figures)
    assert summary["swa"].dtype == bool
    assert set(summary["context"]) == {"8192"}  # text: it may be a mix
    failed = summary[summary["status"] == "compile_failed"]
    assert len(failed) == 2
    assert failed[figures[1:10]].isna().all(axis=None)
    assert set(failed["n"]) == {0}
    assert ",compile_failed," in (run / "summary.csv").read_text().splitlines()[-1]
    assert ",,,,,,,,," in (run / "summary.csv").read_text().splitlines()[-1]
    causes = read_samples(run).query("status == 'compile_failed'")["cause"]
    assert set(causes) == {"no C++ compiler found"}


def test_a_rank_that_failed_takes_no_number_from_the_others(tmp_path):
    def half_failed():
        yield Sample("aten-eager", 0, 0, "prep_host_us", 5.0)
        yield Sample("aten-eager", 1, 0, "prep_host_us", None, "failed", "died")

    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(FIRST, half_failed())
    summary = read_summary(tmp_path / "run")
    assert list(zip(summary["rank"], summary["n"], summary["status"], strict=True)) == [
        ("all", 1, "ok"), ("0", 1, "ok"), ("all", 0, "failed"), ("1", 0, "failed"),
    ]  # fmt: skip


def test_a_value_that_is_no_number_becomes_a_failure(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(FIRST, [Sample("aten-eager", 0, 0, "prep_host_us", float("nan"))])
    row = read_samples(tmp_path / "run").iloc[0]
    assert (row["status"], row["cause"]) == ("failed", "the measured value was nan")
    assert np.isnan(row["value"])


def test_cases_come_back_as_they_were_written(tmp_path):
    cases = [FIRST, replace(SECOND, swa=False, context="loguniform:1:131072"), replace(THIRD, device="cpu")]
    run = made_up.write_run(tmp_path / "run", cases, arms=ARMS, steps=2)
    assert [case for case, _ in cases_in(read_summary(run))] == cases
    assert [case.key for case, _ in cases_in(read_samples(run))] == [case.key for case in cases]


def write_and_die(folder, calls_left: int) -> None:
    """Write two cases in a run, and vanish at one of the second's steps to disk, as a killed process would."""
    writer = RunWriter(folder, made_up.environment())
    writer.write_case(FIRST, measured(FIRST))

    def until_killed(call):
        def step(*args):
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                os._exit(9)
            return call(*args)

        return step

    results.os.fsync, results.os.replace = until_killed(os.fsync), until_killed(os.replace)
    writer.write_case(SECOND, measured(SECOND))


@pytest.mark.parametrize("calls_left", range(5))
def test_a_run_killed_anywhere_in_a_write_resumes_without_half_or_double_rows(tmp_path, calls_left):
    folder = tmp_path / "run"
    child = multiprocessing.get_context("fork").Process(target=write_and_die, args=(folder, calls_left))
    child.start()
    child.join(60)
    survived = calls_left == 4  # samples, summary, commit record: fsync, fsync, fsync and replace
    assert child.exitcode == (0 if survived else 9)
    done = [FIRST, SECOND] if survived else [FIRST]
    assert read_environment(folder).status == "running"
    assert [case for case, _ in cases_in(read_summary(folder))] == done
    assert [case for case, _ in cases_in(read_samples(folder))] == done

    with RunWriter(folder, made_up.environment(), resume=True) as writer:
        assert writer.done_cases() == {case.key for case in done}
        for case in (FIRST, SECOND, THIRD):
            if case.key not in writer.done_cases():
                writer.write_case(case, measured(case))
    whole = made_up.write_run(tmp_path / "whole", [FIRST, SECOND, THIRD], arms=ARMS, steps=8)
    pd.testing.assert_frame_equal(pd.read_csv(folder / "samples.csv.gz"), pd.read_csv(whole / "samples.csv.gz"))
    assert (folder / "summary.csv").read_text() == (whole / "summary.csv").read_text()


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_a_run_that_ends_in_the_middle_of_a_case_keeps_the_others_and_says_so(tmp_path, error, status):
    def broken_off():
        yield from list(measured(SECOND))[:20]
        raise error

    with pytest.raises(error), RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(FIRST, measured(FIRST))
        writer.write_case(SECOND, broken_off())
    assert read_environment(tmp_path / "run").status == status
    assert set(pd.read_csv(tmp_path / "run" / "samples.csv.gz")["bs"]) == {1}
    assert set(pd.read_csv(tmp_path / "run" / "summary.csv")["bs"]) == {1}


def test_a_case_that_raises_can_be_followed_by_another(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        with pytest.raises(ZeroDivisionError):
            writer.write_case(FIRST, (Sample("aten-eager", 0, i, "prep_host_us", 1 / (2 - i)) for i in range(4)))
        writer.write_case(FIRST, measured(FIRST))
    assert len(read_samples(tmp_path / "run")) == sum(1 for _ in measured(FIRST))


def test_a_finished_run_says_when_and_keeps_its_warnings(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.warn("the GPU was throttled")
        writer.warn("the GPU was throttled")
        assert read_environment(tmp_path / "run").status == "running"
    saved = read_environment(tmp_path / "run")
    assert (saved.status, saved.warnings) == ("done", ["the GPU was throttled"])
    assert saved.finished_at > "2020"
    assert not list((tmp_path / "run").glob("tmp*"))


def test_writing_a_case_twice_is_a_bug(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(FIRST, measured(FIRST))
        with pytest.raises(ValueError, match="already written"):
            writer.write_case(FIRST, measured(FIRST))


def test_a_run_is_not_overwritten_without_being_asked_to(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST], arms=ARMS, steps=2)
    before = (run / "summary.csv").read_bytes()
    with pytest.raises(ResultsError, match=r"already holds a run of 1 cases.*--resume.*--out"):
        RunWriter(run, made_up.environment())
    assert (run / "summary.csv").read_bytes() == before


def test_a_folder_with_results_of_unknown_state_is_left_alone(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST], arms=ARMS, steps=2)
    (run / "progress.json").unlink()
    before = (run / "samples.csv.gz").read_bytes()
    with pytest.raises(ResultsError, match=r"no progress.json"):
        RunWriter(run, made_up.environment(), resume=True)
    assert (run / "samples.csv.gz").read_bytes() == before
    assert len(read_samples(run)) > 0  # it can still be read


def test_a_run_is_not_gone_on_with_on_another_machine(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST], arms=ARMS, steps=2)
    other = made_up.environment(gpus=[{"name": "NVIDIA B200", "cuda_index": 0}])
    with pytest.raises(ResultsError, match=r"another machine.*H200.*B200"):
        RunWriter(run, other, resume=True)
    assert read_environment(run).gpus[0]["name"] == "NVIDIA H200"


def test_a_resumed_run_keeps_its_command_and_tells_what_changed(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST], made_up.environment(options={"steps": 8}), arms=ARMS, steps=2)
    again = made_up.environment(command=["attn-graph", "bench", "--resume"], options={"steps": 9}, affinity_cores=2)
    with RunWriter(run, again, resume=True) as writer:
        assert writer.done_cases() == {FIRST.key}
    saved = read_environment(run)
    assert saved.command == ["attn-graph", "bench", "--tp", "4"]
    assert any("resumed with another steps: 8, then 9" in text for text in saved.warnings)
    assert any("affinity_cores" in text and "16" in text and "2" in text for text in saved.warnings)


def test_two_writers_of_one_folder_are_refused_and_the_folder_is_free_afterwards(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(FIRST, measured(FIRST))
        with pytest.raises(ResultsError, match="another run is writing to"):
            RunWriter(tmp_path / "run", made_up.environment(), resume=True)
    RunWriter(tmp_path / "run", made_up.environment(), resume=True).finish("done")


def test_a_folder_that_cannot_be_made_is_refused_by_name_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResultsError, match=r"cannot write results to .*file/run: Not a directory.*--out"):
        RunWriter(tmp_path / "file" / "run", made_up.environment())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused_by_name(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(ResultsError, match="Permission denied"):
        RunWriter(tmp_path, made_up.environment())


def test_a_full_disk_is_explained_and_costs_only_the_case_at_hand(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path / "run", made_up.environment())
    writer.write_case(FIRST, measured(FIRST))

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(ResultsError, match=r"No space left on device. 1 finished cases are kept.*--resume"):
        writer.write_case(SECOND, measured(SECOND))
    monkeypatch.undo()
    writer.finish("failed")
    assert set(pd.read_csv(tmp_path / "run" / "samples.csv.gz")["bs"]) == {1}


def test_a_table_that_was_cut_after_the_run_is_refused(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST], arms=ARMS, steps=2)
    os.truncate(run / "summary.csv", 100)
    with pytest.raises(ResultsError, match=r"summary.csv has 100 bytes where progress.json records"):
        read_progress(run)


def test_a_folder_that_is_no_run_is_answered_with_a_hint(tmp_path):
    run = made_up.write_run(tmp_path / "runs" / "one", [FIRST], arms=ARMS, steps=2)
    with pytest.raises(ResultsError, match=r"no such run: .*absent"):
        read_summary(tmp_path / "absent")
    with pytest.raises(ResultsError, match=r"It holds runs: one"):
        read_summary(tmp_path / "runs")
    with pytest.raises(ResultsError, match=r"Give its folder: .*one"):
        read_summary(run / "summary.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResultsError, match="that 'attn-graph bench' wrote"):
        runs_in(tmp_path / "empty")
    assert runs_in(tmp_path / "runs") == [run]
    assert runs_in(run) == [run]


def test_a_damaged_file_is_named(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST], arms=ARMS, steps=2)
    (run / "progress.json").unlink()
    text = (run / "summary.csv").read_text()
    (run / "summary.csv").write_text(text.replace("p99", "p999"))
    with pytest.raises(ResultsError, match=r"summary.csv lacks columns: p99"):
        read_summary(run)
    (run / "summary.csv").write_text(text.replace("131072", "many"))
    with pytest.raises(ResultsError, match=r"cannot read .*summary.csv"):
        read_summary(run)
    (run / "environment.json").write_text("{")
    with pytest.raises(ResultsError, match=r"environment.json is not an environment record"):
        read_environment(run)


def test_an_environment_of_a_later_version_is_read_without_its_new_fields(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST], arms=ARMS, steps=2)
    saved = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(saved | {"moon_phase": "full"}))
    assert read_environment(run).hostname == "bench-1"


def test_a_half_written_gzip_member_of_a_killed_run_is_not_read(tmp_path):
    run = made_up.write_run(tmp_path / "run", [FIRST], arms=ARMS, steps=2)
    rows = len(read_samples(run))
    with open(run / "samples.csv.gz", "ab") as file:
        file.write(gzip.compress(b"half a case")[:-6])
    assert len(read_samples(run)) == rows
    moved = shutil.move(run, tmp_path / "elsewhere")
    assert len(read_samples(moved)) == rows
