"""`attn-graph tune` through its real entry point, on a machine without a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from attn_graph.cli.tune import _cases
from attn_graph.profilers.sample import Case
from attn_graph.tuning import store
from attn_graph.tuning.log import COLUMNS, Log
from attn_graph.tuning.outcome import SKIPPED, Finals, Outcome, timed
from attn_graph.tuning.space import candidates, representatives
from attn_graph.tuning.store import Entry, Key

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

KEY = Key("NVIDIA H200", "decode_metadata", 64, False, bucket=64, columns=2048, context="loguniform:1:131072")
CONFIG = {"programs_per_row": 8, "block": 256, "num_warps": 4}
CASE = Case("trtllm_mha", "decode", 64, 64, "8192", 64, 131072, swa=False)


@pytest.fixture
def tune(cli, tmp_path, monkeypatch):
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "tuned"))
    return lambda *arguments, **options: cli("tune", *arguments, **options)


@without_gpu
def test_without_a_gpu_one_line_says_so_and_nothing_is_stored(tune, tmp_path):
    ended = tune()
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1
    assert "no GPU" in ended.err
    assert "checked for values but not timed, so nothing is stored" in ended.err
    assert "--device cpu" in ended.err
    assert not (tmp_path / "tuned").exists()


def test_on_a_cpu_every_candidate_is_checked_none_timed_and_nothing_stored(tune, tmp_path):
    ended = tune(
        "--device", "cpu", "--backend", "trtllm_mla", "--bs", "1", "--max-context", "1024", "--page-size", "4",
        "--no-swa", "--json", "--out", "log.csv",
    )  # fmt: skip
    assert ended.code == 2
    document = json.loads(ended.out)
    assert "nothing is stored" in document["problem"]
    assert "nothing is stored" in ended.err
    (case,) = document["cases"]
    assert case["winner"] is None
    assert len(case["candidates"]) > 5
    assert {c["status"] for c in case["candidates"]} == {"ok"}
    assert {c["rough_p50_us"] for c in case["candidates"]} == {None}
    assert not (tmp_path / "tuned").exists()
    log = pd.read_csv(tmp_path / "log.csv")
    assert tuple(log.columns) == COLUMNS
    assert len(log) == len(case["candidates"])
    assert log["p50_us"].isna().all()


def test_candidates_compile_for_a_gpu_that_is_not_there(tune, tmp_path):
    ended = tune(
        "--static", "--target", "sm_90", "--bs", "1", "--max-context", "256", "--no-swa", "--json",
        env={"TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    document = json.loads(ended.out)
    assert document["target"] == "sm_90"
    assert {case["case"]["backend"] for case in document["cases"]} == set(representatives())
    for case in document["cases"]:
        assert all(c["resources"]["registers"] > 8 for c in case["candidates"])


def test_what_is_stored_is_shown_with_its_file_and_cleared_by_renaming(tune, tmp_path):
    assert "Nothing is tuned" in tune("--show").out
    store.save(
        [Entry(KEY, CONFIG, {"p50_us": 1.234, "default_p50_us": 1.5, "measured_at": "2026-01-02T03:04:05+00:00"})]
    )
    shown = tune("--show", env={"COLUMNS": "300"})
    assert shown.code == 0
    for text in ("NVIDIA H200", "programs_per_row=8", "1.234", "1.500", "2026-01-02"):
        assert text in shown.out
    (entry,) = json.loads(tune("--show", "--json").out)["entries"]
    assert (entry["device"], entry["bucket"], entry["config"], entry["p50_us"]) == ("NVIDIA H200", 64, CONFIG, 1.234)
    assert entry["file"] == str(tmp_path / "tuned" / "tuned.json")
    cleared = tune("--clear")
    assert cleared.code == 0
    assert "tuned.aside-1.json" in cleared.out
    assert "Nothing is tuned" in tune("--show").out
    assert (tmp_path / "tuned" / "tuned.aside-1.json").exists()


def test_a_file_that_cannot_be_used_is_noted_by_show(tune, tmp_path):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "tuned.json").write_text('{"entries": []}')
    ended = tune("--show")
    assert ended.code == 0
    assert "no schema version" in ended.err


def log_of(path: Path, usable: bool) -> None:
    space = candidates(CASE)[:5]
    with Log(path, "NVIDIA H200") as log:
        for i, candidate in enumerate(space):
            if i == 3:
                log.outcome(CASE, Outcome(candidate, SKIPPED, "wrong_values", "page_table[0, 512] is -7, wanted 93"))
            elif usable:
                log.outcome(CASE, timed(candidate, [2.0 - 0.2 * i] * 5))
        if usable:
            log.finals(CASE, Finals({c: (2.0 - 0.2 * i,) * 20 for i, c in enumerate(space) if i != 3}))


def test_a_log_is_replayed_without_a_gpu(tune, tmp_path):
    log_of(tmp_path / "log.csv", usable=True)
    ended = tune("--replay", "log.csv")
    assert (ended.code, ended.err) == (0, "")
    winner = candidates(CASE)[4]
    assert f"Chosen: {winner}, 66.7% faster than the default" in ended.out
    assert "wrong_values: page_table[0, 512] is -7, wanted 93" in ended.out
    assert not (tmp_path / "tuned").exists()


def test_a_log_without_a_usable_candidate_ends_with_one_and_the_table(tune, tmp_path):
    log_of(tmp_path / "log.csv", usable=False)
    ended = tune("--replay", "log.csv")
    assert ended.code == 1
    assert "no valid config for trtllm_mha decode bs 64" in ended.err
    assert "wanted 93" in ended.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--search", "randm"), "Did you mean 'random'?"),
        (("--target", "sm_90"), "--target goes with --static"),
        (("--static", "--target", "h200"), "unknown target 'h200'"),
        (("--static", "--target", "sm_90", "--bs", "x"), "--bs: 'x' is not a whole number"),
        (("--static", "--target", "sm_90", "--context-mix", "loguniform:1:999999"), "lengths must be within 1..131072"),
        (("--replay", "absent.csv"), "absent.csv"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tune, arguments, said):
    ended = tune(*arguments)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert said in ended.err


def test_batch_sizes_of_one_bucket_are_tuned_once():
    cases = _cases("trtllm_mha", ",".join(map(str, range(1, 65))), "loguniform", "64", "131072", False, "cuda", 0)
    buckets = [case.bucket for case in cases]
    assert len(buckets) == len(set(buckets)) < 64
    assert {case.bs for case in cases} == set(buckets)
    assert {case.context for case in cases} == {"loguniform:1:131072"}


def test_without_a_home_directory_the_store_is_in_a_folder_that_is_named(cli, tmp_path):
    gone = {"HOME": str(tmp_path / "gone"), "XDG_CONFIG_HOME": None, "TMPDIR": str(tmp_path)}
    ended = cli("tune", "--show", env=gone | {store.FOLDER_VARIABLE: None})
    assert ended.code == 0
    assert "home directory cannot be written" in ended.err
    assert f"Nothing is tuned: {tmp_path}/" in ended.out


@pytest.mark.gpu
def test_a_choice_is_stored_and_named_by_the_next_look_up(tune, tmp_path):
    ended = tune("--bs", "8", "--no-swa", "--max-context", "8192", "--json", "--out", "log.csv")
    assert ended.code == 0, ended.err
    (case,) = json.loads(ended.out)["cases"]
    found = store.lookup(Key(**case["key"]))
    assert (found.rule, found.config) == ("exact", case["winner"])
    again = json.loads(tune("--replay", "log.csv", "--json").out)["cases"][0]
    assert again["winner"] == case["winner"]


@pytest.mark.gpu
def test_a_time_budget_on_a_gpu_is_kept_and_what_is_left_out_is_said(tune):
    started = time.monotonic()
    ended = tune("--bs", "64", "--no-swa", "--time-budget", "1", "--json")
    assert time.monotonic() - started < 60
    (case,) = json.loads(ended.out)["cases"]
    assert any(c["cause"] == "time_budget" for c in case["candidates"])
    assert case["winner"] is not None
