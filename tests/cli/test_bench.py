"""`attn-graph bench` and `compare` through their real entry point, on whatever machine this is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
from conftest import command_line

TINY = (
    "--device", "cpu", "--bs", "2", "--context", "40", "--page-size", "16", "--max-context", "64", "--steps", "8",
    "--warmup", "1", "--tp", "1", "--graph-nodes", "3", "--no-swa",
)  # fmt: skip

PROMISED = {
    "backend", "mode", "bs", "bucket", "context", "page_size", "max_context", "swa", "arm", "rank", "metric", "unit",
    "n", "p50", "p90", "p99", "mean", "min", "max", "sum", "status",
}  # fmt: skip


def test_a_run_leaves_tables_environment_and_report(cli, tmp_path):
    ended = cli("bench", *TINY, "--arm", "aten-eager,fused-graph", "--tp", "2", "--out", "run")
    assert ended.code == 0, ended.err
    folder = tmp_path / "run"
    summary = pd.read_csv(folder / "summary.csv")
    assert set(summary.columns) >= PROMISED
    samples = pd.read_csv(folder / "samples.csv.gz")
    prep = samples[(samples.metric == "prep_host_us") & (samples.arm == "aten-eager")]
    assert len(prep) == 2 * 8 and (prep.value > 0).all() and prep.value.dtype == float
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["status"] == "done" and environment["command"][1] == "bench"
    assert (folder / "report.html").stat().st_size > 10_000
    assert "aten-eager" in ended.out and "16/6/1" in ended.out


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, str]:
    """Folder and output of one run that several tests read."""
    folder = tmp_path_factory.mktemp("bench")
    arms = ("--arm", "aten-eager,aten-glue,fused-eager", "--json", "--no-plots", "--out", "run")
    return folder / "run", command_line(folder)("bench", *TINY, *arms).out


def test_what_a_cpu_cannot_show_is_blank(measured):
    rows = pd.read_csv(measured[0] / "summary.csv").query("rank == 'all'").set_index(["arm", "metric"])
    for arm in ("aten-glue", "fused-eager"):
        for metric in ("prep_host_us", "launch_host_us", "launch_end_us", "prep_device_us", "first_wait_us"):
            assert rows.loc[(arm, metric), "status"] == "no_device"
            assert pd.isna(rows.loc[(arm, metric), "p50"])
        assert rows.loc[(arm, "launches"), "p50"] == 1
        assert rows.loc[(arm, "bit_equal"), "p50"] == 1


def test_json_is_one_document_and_nothing_else(measured):
    document = json.loads(measured[1])
    assert {"folder", "environment", "summary"} <= document.keys()
    assert {row["metric"] for row in document["summary"]} >= {"prep_host_us", "dispatches", "bit_equal"}


def test_a_sweep_with_a_refused_case_keeps_numbers_numbers(cli, tmp_path):
    ended = cli(
        "bench", *TINY, "--backend", "trtllm_mha", "--mode", "target_verify", "--topk", "1,2", "--context", "20,40",
        "--arm", "aten-eager", "--out", "run",
    )  # fmt: skip
    assert ended.code == 0
    assert "unsupported" in ended.out
    summary = pd.read_csv(tmp_path / "run" / "summary.csv")
    refused = summary[summary.topk == 2]
    assert len(refused) == 2 and (refused.status == "unsupported").all() and refused.p50.isna().all()
    assert summary.p50.dtype == float and (summary[summary.topk == 1].query("metric == 'prep_host_us'").p50 > 0).all()
    causes = pd.read_csv(tmp_path / "run" / "samples.csv.gz").query("topk == 2").cause
    assert causes.str.contains("topk of at most 1").all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--backend", "trtlm_mha"), "Did you mean 'trtllm_mha'"),
        (("--context", "65"), "--context 65 does not fit"),
        (("--device", "cuda"), "no GPU"),
        (("--arm", "fused-grap"), "Did you mean 'fused-graph'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(cli, arguments, said):
    if arguments[0] == "--device" and psutil.LINUX and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    ended = cli("bench", *TINY, *arguments, "--out", "run")
    assert ended.code == 2
    assert said in ended.err and "Traceback" not in ended.err and len(ended.err.strip().splitlines()) == 1


def test_a_folder_that_cannot_be_made_stops_the_run_before_it_measures(cli, tmp_path):
    (tmp_path / "file").write_text("")
    ended = cli("bench", *TINY, "--out", "file/run")
    assert ended.code == 2
    assert "file/run" in ended.err and "Traceback" not in ended.err


def test_an_interrupted_run_keeps_its_cases_and_resume_does_the_rest(tmp_path):
    contexts = [str(20 + i) for i in range(8)]
    command = [
        sys.executable, "-m", "attn_graph.cli.main", "bench", *TINY, "--context", ",".join(contexts), "--arm",
        "aten-eager", "--steps", "300", "--no-plots", "--out", "run",
    ]  # fmt: skip
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    progress, limit = tmp_path / "run" / "progress.json", time.monotonic() + 90
    while len(_done(progress)) < 3 and time.monotonic() < limit:
        time.sleep(0.02)
    children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    kept = _done(progress)
    assert running.returncode == 130, err
    assert 3 <= len(kept) < 8
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["status"] == "interrupted"
    _, alive = psutil.wait_procs(children, timeout=10)  # multiprocessing's tracker goes when it hears of our end
    assert not alive
    resumed = subprocess.run([*command, "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    summary = pd.read_csv(tmp_path / "run" / "summary.csv")
    prep = summary.query("metric == 'prep_host_us' and rank == 'all'")
    assert sorted(prep.context.astype(str)) == contexts  # each once: what was done was not done again


def _done(progress) -> list[str]:
    try:
        return json.loads(progress.read_text())["cases"]
    except (OSError, ValueError):
        return []


def test_compare_on_a_cpu_proves_equality_and_claims_no_speed(cli):
    ended = cli("compare", *TINY, "--json", "--out", "run")
    document = json.loads(ended.out)
    assert ended.code == document["exit_code"] == 4
    by_metric = {row["metric"]: row for row in document["comparisons"]}
    assert by_metric["step_host_us"]["verdict"] == "not comparable" and by_metric["step_host_us"]["decides"]
    assert by_metric["prep_host_us"]["word"] == "faster" and by_metric["prep_host_us"]["n"] == 8


def test_compare_of_saved_runs_needs_two(cli):
    ended = cli("compare", "only_one")
    assert ended.code == 2 and "needs two" in ended.err


def test_compare_of_a_run_with_itself_finds_it_neither_faster_nor_slower(cli, measured):
    ended = cli("compare", measured[0], measured[0], "--json")
    words = {row["metric"]: row["word"] for row in json.loads(ended.out)["comparisons"] if row["decides"]}
    assert set(words.values()) <= {"same", "undecided"} and ended.code in (0, 3)
    assert words["dispatches"] == words["launches"] == words["syncs"] == "same"
