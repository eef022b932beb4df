"""`attn-graph tune` through its real entry point, on a machine without a GPU."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import made_up_runs
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
from attn_graph.tuning.tuner import SEARCHES

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
    entries = json.loads(tune("--show", "--json").out)["entries"]
    (entry,) = (one for one in entries if Path(one["file"]).parent != store.SHIPPED)
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


def test_a_log_is_replayed_by_every_search_unless_one_is_named(tune, tmp_path):
    log_of(tmp_path / "log.csv", usable=True)
    document = json.loads(tune("--replay", "log.csv", "--json").out)
    assert {one["search"] for one in document["searches"]} == set(SEARCHES)
    assert "surrogate" in tune("--replay", "log.csv").out
    assert json.loads(tune("--replay", "log.csv", "--search", "random", "--json").out)["searches"] == []


def test_in_ci_a_missing_entry_fails_and_is_named(tune):
    store.save([Entry(KEY, CONFIG)])
    asked = ("--assert-hit", "--gpu", "NVIDIA H200", "--backend", "trtllm_mha", "--no-swa")
    hit = tune(*asked, "--bs", "64")
    assert (hit.code, hit.err) == (0, "")
    assert "Block sizes: tuned (exact) programs_per_row=8" in hit.out
    missed = tune(*asked, "--bs", "64,96,512")
    assert missed.code == 1
    lines = missed.err.splitlines()
    assert len(lines) == 2
    assert "bucket 96" in lines[0], "a neighbour is no entry of its own"
    assert "bucket 512" in lines[1]
    assert "tuned (neighbour" in missed.out
    document = json.loads(tune(*asked, "--bs", "96", "--json").out)
    assert (document["missing"], document["cases"][0]["rule"]) == (1, "neighbour")


def test_two_files_are_compared_like_diff(tune, tmp_path):
    for name, block in (("a", 256), ("b", 512)):
        content = {"schema": store.SCHEMA, "entries": [{"key": asdict(KEY), "config": {**CONFIG, "block": block}}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert tune("--diff", "a.json", "a.json").code == 0
    differ = tune("--diff", "a.json", "b.json")
    assert differ.code == 1
    assert "block=256" in differ.out and "block=512" in differ.out
    (row,) = json.loads(tune("--diff", "a.json", "b.json", "--json").out)["differ"]
    assert (row["a"]["block"], row["b"]["block"]) == (256, 512)


def test_the_context_mix_can_come_from_a_recorded_run(tune, tmp_path):
    made_up_runs.write_run(tmp_path / "run", [made_up_runs.case(context=c) for c in ("512", "8192")], steps=2)
    asked = ("--assert-hit", "--gpu", "NVIDIA H200", "--backend", "trtllm_mha", "--no-swa", "--bs", "64", "--json")
    (case,) = json.loads(tune(*asked, "--context-mix", "run").out)["cases"]
    assert case["context"] == "512+8192"
    made_up_runs.write_run(tmp_path / "mixed", [made_up_runs.case(context=c) for c in ("512", "uniform:1:99")], steps=2)
    refused = tune(*asked, "--context-mix", "mixed")
    assert refused.code == 2
    assert "several mixes (512, uniform:1:99)" in refused.err


def test_a_run_on_a_cpu_goes_on_where_it_was_cut_off(tune, tmp_path):
    asked = (
        "--device", "cpu", "--backend", "trtllm_mla", "--bs", "1", "--max-context", "1024", "--page-size", "4",
        "--out", "log.csv",
    )  # fmt: skip
    assert tune(*asked).code == 2
    whole = (tmp_path / "log.csv").read_bytes()
    rows = whole.split(b"\r\n")
    (tmp_path / "log.csv").write_bytes(b"\r\n".join(rows[:4]) + rows[4][:30])
    assert tune(*asked, "--resume").code == 2
    assert (tmp_path / "log.csv").read_bytes() == whole


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--search", "randm"), "Did you mean 'random'?"),
        (("--target", "sm_90"), "--target goes with --static"),
        (("--gpu", "NVIDIA H200"), "--gpu goes with --assert-hit"),
        (("--device", "cpu", "--resume"), "--resume goes with --out"),
        (("--device", "cpu", "--against-autotune"), "nothing is stored"),
        (("--device", "cpu", "--backend", "dsa"), "unknown tunable backend 'dsa'"),
        (("--diff", "a.json", "b.json"), "a.json is not there"),
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
    chosen = ("--backend", "trtllm_mha", "--no-swa")  # by default there is one backend for each kernel
    ended = tune(*chosen, "--bs", "8", "--max-context", "8192", "--json", "--out", "log.csv")
    assert ended.code == 0, ended.err
    (case,) = json.loads(ended.out)["cases"]
    found = store.lookup(Key(**case["key"]))
    assert (found.rule, found.config) == ("exact", case["winner"])
    again = json.loads(tune("--replay", "log.csv", "--json").out)["cases"][0]
    assert again["winner"] == case["winner"]


@pytest.mark.gpu
def test_a_time_budget_on_a_gpu_is_kept_and_what_is_left_out_is_said(tune):
    started = time.monotonic()
    ended = tune("--backend", "trtllm_mha", "--bs", "64", "--no-swa", "--time-budget", "1", "--json")
    assert time.monotonic() - started < 60
    (case,) = json.loads(ended.out)["cases"]
    assert any(c["cause"] == "time_budget" for c in case["candidates"])
    assert case["winner"] is not None
