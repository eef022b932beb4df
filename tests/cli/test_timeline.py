"""`attn-graph bench --timeline` leaves a file beside the tables and names it."""

from __future__ import annotations

import gzip
import json


def test_a_bench_leaves_a_timeline_of_its_ranks_in_the_folder_of_the_run(cli, tmp_path):
    ended = cli(
        "bench", "--bs", "2", "--context", "64", "--max-context", "256", "--no-swa", "--tp", "2", "--graph-nodes", "5",
        "--arm", "aten-eager", "--steps", "3", "--warmup", "0", "--timeline", "--no-plots", "--out", "run",
        env={"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "Timeline: run/timeline.json.gz" in ended.out
    events = json.loads(gzip.decompress((tmp_path / "run" / "timeline.json.gz").read_bytes()))["traceEvents"]
    prep = [event for event in events if event["name"] == "prep aten-eager"]
    assert sorted(event["pid"] for event in prep) == [0, 0, 0, 1, 1, 1] and all(event["dur"] > 0 for event in prep)


def test_a_timeline_of_an_observer_run_is_refused(cli):
    ended = cli("bench", "--timeline", "--observer", "none", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.code == 2 and "--timeline draws the steps of an unobserved run" in ended.err
