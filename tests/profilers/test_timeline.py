"""Steps of made-up runs as rows, and as a file that a trace viewer can take."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from pathlib import Path

import jsonschema
import made_up_runs as made_up
import pytest
from attn_graph.profilers.chrome_trace import ALL_RANKS, TIMELINE, save_timeline, write_trace
from attn_graph.profilers.results import RunWriter, read_samples
from attn_graph.profilers.sample import PREDICTED, Sample
from attn_graph.profilers.timeline import GAP_US, HOST, WAIT, Level, Mark, Slice, Timeline, timeline_of

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "chrome_trace.schema.json").read_text())


def refuse(constant: str):
    raise ValueError(f"{constant} is not JSON")


def strict(path: Path) -> dict:
    """The document, by a parser that takes JSON only, held to the schema of the format."""
    document = json.loads(gzip.decompress(path.read_bytes()), parse_constant=refuse)
    jsonschema.validate(document, SCHEMA)
    return document


def misnested(document: dict) -> list[str]:
    """Slices of one track that overlap without one holding the other: viewers drop or misplace those."""
    found, open_until = [], {}
    slices = [e for e in document["traceEvents"] if e["ph"] == "X"]
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        stack = open_until.setdefault((event["pid"], event["tid"]), [])
        start_ns, end_ns = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        while stack and stack[-1] <= start_ns:
            stack.pop()
        if stack and end_ns > stack[-1]:
            found.append(event["name"])
        stack.append(end_ns)
    return found


def one_step(tmp_path, samples, **case):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(made_up.case(**case), samples)
    return tmp_path / "run"


def of_rank(rank: int, lag: float, prep: float, launch: float, end: float, cause: str = "", **wait) -> list[Sample]:
    parts = {"start_lag_us": lag, "prep_host_us": prep, "launch_host_us": launch, "launch_end_us": end}
    found = [Sample("aten-eager", rank, 0, m, v, cause=cause if m == "prep_host_us" else "") for m, v in parts.items()]
    return found + [Sample("aten-eager", rank, 0, "first_wait_us", us, source=source) for source, us in wait.items()]


def test_a_step_is_lag_prep_launch_and_wait_from_the_common_start(tmp_path):
    samples = [*of_rank(0, 1.0, 100.0, 4.0, 106.0, predicted=20.0), *of_rank(1, 0.0, 120.0, 4.0, 126.0, predicted=0.0)]
    rows = timeline_of(read_samples(one_step(tmp_path, samples))).rows
    first = [(r.track, r.name, r.start_us, r.duration_us) for r in rows if isinstance(r, Slice) and r.rank == 0]
    assert first == [
        (HOST, "lag", 0.0, 1.0), (HOST, "step aten-eager", 1.0, 105.0), (HOST, "prep aten-eager", 1.0, 100.0),
        (HOST, "launch aten-eager", 102.0, 4.0), (WAIT, "wait aten-eager", 106.0, 20.0),
    ]  # fmt: skip
    assert [(r.name, r.value) for r in rows if isinstance(r, Level)] == [("launch skew aten-eager, us", 20.0)]
    assert [r.name for r in rows if isinstance(r, Mark)] == [made_up.case().title]


def test_a_measured_wait_goes_before_a_predicted_one_and_a_slow_part_says_why(tmp_path):
    samples = of_rank(0, 0.0, 100.0, 4.0, 106.0, cause="involuntary_switch", predicted=20.0, measured=23.0)
    rows = timeline_of(read_samples(one_step(tmp_path, samples))).rows
    (wait,) = [r for r in rows if isinstance(r, Slice) and r.track == WAIT]
    assert (wait.duration_us, wait.args["source"]) == (23.0, "measured")
    args = {r.name: r.args for r in rows if isinstance(r, Slice)}
    assert args["prep aten-eager"] == {"slow because": "involuntary_switch"} and not args["launch aten-eager"]


def test_an_injected_delay_is_its_own_slice(tmp_path):
    samples = [*of_rank(0, 0.0, 100.0, 4.0, 156.0), Sample("aten-eager", 0, 0, "injected_us", 50.0)]
    rows = timeline_of(read_samples(one_step(tmp_path, samples))).rows
    (late,) = [r for r in rows if isinstance(r, Slice) and r.name == "injected delay"]
    assert (late.start_us, late.duration_us) == (100.0, 50.0)


def test_without_waits_and_launches_what_there_is_is_drawn(tmp_path):
    run = made_up.write_run(tmp_path / "run", [made_up.case(device="cpu", tp=1)], steps=3, failed=["compile-eager"])
    timeline = save_timeline(run)
    document = strict(run / TIMELINE)
    names = {event["name"] for event in document["traceEvents"] if event["ph"] == "X"}
    assert "prep aten-eager" in names and not {n for n in names if n.startswith(("launch", "wait"))}
    assert "compile-eager" not in str(names) and (timeline.steps, timeline.left_out) == (6 * 3, 0)


def test_a_run_of_several_ranks_is_strict_json_after_the_schema_and_nests(tmp_path):
    run = made_up.write_run(tmp_path / "run", [made_up.case(1), made_up.case(8)], steps=20)
    timeline = save_timeline(run)
    document = strict(run / TIMELINE)
    assert misnested(document) == []
    events = document["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "all ranks", "rank 0", "rank 1", "rank 2", "rank 3",
    }  # fmt: skip
    waits = [e for e in events if e.get("cat") == WAIT]
    assert len(waits) == 2 * 20 * 7 * 4 and {e["pid"] for e in waits} == {0, 1, 2, 3} != {ALL_RANKS}
    assert document["otherData"]["steps_left_out"] == "0" and timeline.steps == 2 * 20 * 7
    before = (run / TIMELINE).read_bytes()
    save_timeline(run)
    assert (run / TIMELINE).read_bytes() == before


def test_steps_do_not_overlap_and_only_times_within_one_are_claimed(tmp_path):
    rows = timeline_of(read_samples(made_up.write_run(tmp_path / "run", [made_up.case()], steps=5))).rows
    steps = sorted((r.start_us, r.start_us + r.duration_us) for r in rows if isinstance(r, Slice) and r.rank == 0
                   and r.name.startswith("step"))  # fmt: skip
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(steps)]
    assert min(gaps) >= GAP_US


def test_a_long_run_is_bounded_keeps_the_slowest_steps_and_says_how_many_are_missing(tmp_path):
    arms = ("aten-eager", "fused-graph")
    run = made_up.write_run(tmp_path / "run", [made_up.case()], steps=300, arms=arms)
    samples = read_samples(run)
    timeline = timeline_of(samples, most_steps=80)  # ten of each arm on four ranks
    drawn = {r.args["step"] for r in timeline.rows if isinstance(r, Slice) and r.name == "step aten-eager"}
    assert len(drawn) == 10 and (timeline.steps, timeline.left_out) == (600, 580)
    assert timeline.note.startswith("580 of 600 steps are left out")
    ends = samples[(samples["metric"] == "launch_end_us") & (samples["arm"] == "aten-eager")]
    slowest = ends.groupby("step")["value"].max().nlargest(5).index
    assert set(slowest) <= drawn and max(drawn - set(slowest)) - min(drawn - set(slowest)) > 200


def test_a_number_that_is_no_number_is_refused_and_leaves_no_file(tmp_path):
    rows = (Slice(0, HOST, "prep", 0.0, 1.0, {"x": math.nan}),)
    with pytest.raises(ValueError, match="JSON compliant"):
        write_trace(tmp_path / "t.json.gz", Timeline(rows, 1, 0), {})
    assert list(tmp_path.iterdir()) == []


def test_the_checks_of_this_file_notice_what_they_are_for(tmp_path):
    overlapping = (Slice(0, HOST, "a", 0.0, 2.0), Slice(0, HOST, "b", 1.0, 2.0))
    path = write_trace(tmp_path / "t.json.gz", Timeline(overlapping, 1, 0), {})
    assert misnested(strict(path)) == ["b"]
    path = write_trace(tmp_path / "t.json.gz", Timeline((Slice(0, HOST, "a", -5.0, 2.0),), 1, 0), {})
    with pytest.raises(jsonschema.ValidationError):
        strict(path)
    path.write_bytes(gzip.compress(b'{"traceEvents": [NaN]}'))
    with pytest.raises(ValueError, match="NaN"):
        strict(path)


def test_predictions_are_called_predictions(tmp_path):
    run = made_up.write_run(tmp_path / "run", [made_up.case()], steps=2)
    sources = {
        r.args["source"] for r in timeline_of(read_samples(run)).rows if isinstance(r, Slice) and r.track == WAIT
    }
    assert sources == {PREDICTED}
