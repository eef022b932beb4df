"""Comparison of two saved runs, or of two sides of three."""

from __future__ import annotations

import io
from pathlib import Path

import made_up_runs as made_up
import pytest
from attn_graph.cli.saved import compare_saved
from attn_graph.cli.tables import saved_table
from attn_graph.profilers.results import ResultsError, RunWriter
from attn_graph.profilers.sample import Sample
from rich.console import Console

ARMS = ("aten-eager", "fused-graph")
CASES = (made_up.case(1), made_up.case(8))


def write(folder: Path, machine=None, **how) -> Path:
    return made_up.write_run(folder, CASES, machine, **({"arms": ARMS, "steps": 60} | how))


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("saved") / "a")


def words(result, metric: str) -> dict[tuple[int, str], str]:
    return {(row.case.bs, row.arm): row.verdict.word for row in result.rows if row.metric == metric}


def test_a_run_against_itself_shows_no_difference(baseline):
    result = compare_saved(baseline, baseline)
    assert {row.verdict.word for row in result.rows if row.decides} == {"same"}
    assert {row.metric for row in result.rows if row.decides} == {
        "prep_host_us", "prep_device_us", "dispatches", "launches", "syncs",
    }  # fmt: skip
    assert (result.exit_code, result.refusal) == (0, "")
    assert any("one run a side" in warning for warning in result.warnings)


def test_a_slower_candidate_is_found_and_a_faster_one_too(baseline, tmp_path):
    slower = compare_saved(baseline, write(tmp_path / "slower", slower=1.5, seed=1))
    assert words(slower, "prep_host_us")[8, "aten-eager"] == "slower"
    assert slower.exit_code == 1
    row = next(row for row in slower.rows if row.metric == "prep_host_us" and row.arm == "aten-eager")
    assert row.verdict.ratio == pytest.approx(1.5, rel=0.03)
    assert row.verdict.ratio_low < row.verdict.ratio < row.verdict.ratio_high
    assert (row.unit, row.verdict.n) == ("us", 240)
    faster = compare_saved(baseline, write(tmp_path / "faster", slower=0.5, seed=1))
    assert words(faster, "prep_host_us")[8, "aten-eager"] == "faster"
    assert faster.exit_code == 0


def test_half_of_half_a_microsecond_is_no_difference(baseline, tmp_path):
    result = compare_saved(baseline, write(tmp_path / "b", slower=1.5, seed=1))
    assert words(result, "prep_host_us")[8, "fused-graph"] == "same"


def one_metric_run(folder: Path, values, metric: str = "prep_host_us", machine=None, **case) -> Path:
    with RunWriter(folder, machine or made_up.environment()) as writer:
        samples = [Sample("aten-eager", 0, step, metric, value) for step, value in enumerate(values)]
        writer.write_case(made_up.case(8, **case), samples)
    return folder


def test_noise_is_undecided(tmp_path):
    a = one_metric_run(tmp_path / "a", [100.0, 900.0] * 4)
    b = one_metric_run(tmp_path / "b", [120.0, 800.0] * 4)
    result = compare_saved(a, b)
    assert (result.rows[0].verdict.word, result.exit_code) == ("undecided", 3)


def test_one_more_dispatch_is_found(tmp_path):
    a = one_metric_run(tmp_path / "a", [28.0], "dispatches")
    b = one_metric_run(tmp_path / "b", [29.0], "dispatches")
    result = compare_saved(a, b)
    assert (result.rows[0].verdict.word, result.exit_code) == ("slower", 1)


def test_a_consequence_alone_decides_nothing(tmp_path):
    a = one_metric_run(tmp_path / "a", [100.0] * 9, "launch_skew_us")
    b = one_metric_run(tmp_path / "b", [300.0] * 9, "launch_skew_us")
    result = compare_saved(a, b)
    assert (result.rows[0].verdict.word, result.rows[0].decides) == ("slower", False)
    assert result.exit_code == 4  # nothing that decides was measured


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gpus": [{"name": "NVIDIA B200", "cuda_index": 0}]}, "B200"),
        ({"driver": "999.1"}, "999.1"),
        ({"torch": "2.13.0"}, "2.13.0"),
        ({"triton": "3.9.0"}, "3.9.0"),
        ({"cpu": "another"}, "another"),
    ],
)
def test_another_machine_is_refused_unless_asked_for(baseline, tmp_path, change, named):
    other = write(tmp_path / "other", made_up.environment(**change), steps=8)
    refused = compare_saved(baseline, other)
    assert (refused.rows, refused.exit_code) == ([], 4)
    assert "different machines" in refused.refusal
    assert named in refused.refusal
    allowed = compare_saved(baseline, other, allow_different=True)
    assert allowed.rows
    assert any(named in warning and "across machines" in warning for warning in allowed.warnings)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"affinity_cores": 2}, "affinity_cores"), ({"cores": 2}, "cores"), ({"load_1m": 9.5}, "load")],
)
def test_other_conditions_are_warned_of_and_compared(baseline, tmp_path, change, named):
    result = compare_saved(baseline, write(tmp_path / "other", made_up.environment(**change)))
    assert result.rows
    (warning,) = [text for text in result.warnings if text.startswith("measured under other conditions")]
    assert named in warning
    assert str(next(iter(change.values()))) in warning


def test_no_speed_is_claimed_where_results_differ(tmp_path):
    a = one_metric_run(tmp_path / "a", [300.0] * 9)
    with RunWriter(tmp_path / "b", made_up.environment()) as writer:
        unequal = Sample("aten-eager", 0, -1, "bit_equal", 0.0)
        faster = [Sample("aten-eager", 0, step, "prep_host_us", 1.0) for step in range(9)]
        writer.write_case(made_up.case(8), [unequal, *faster])
    result = compare_saved(a, tmp_path / "b")
    assert [row.verdict.word for row in result.rows] == ["not equal"]
    assert result.exit_code == 1


def three_runs(folder: Path, medians) -> Path:
    for i, median in enumerate(medians):
        one_metric_run(folder / f"run{i}", [median - 50, median, median + 50])
    return folder


def test_three_runs_a_side_differ_only_if_their_ranges_do_not_overlap(tmp_path):
    a = three_runs(tmp_path / "a", (470.0, 472.0, 475.0))
    b = three_runs(tmp_path / "b", (461.0, 463.0, 465.0))
    assert compare_saved(a, b).rows[0].verdict.word == "faster"
    c = three_runs(tmp_path / "c", (461.0, 465.0, 470.0))
    d = three_runs(tmp_path / "d", (464.0, 468.0, 472.0))
    overlapping = compare_saved(c, d)
    assert overlapping.rows[0].verdict.sentence == "no difference shown"
    assert overlapping.exit_code == 0
    assert not any("one run a side" in warning for warning in overlapping.warnings)


def test_sides_of_two_runs_are_refused(tmp_path):
    two = three_runs(tmp_path / "a", (470.0, 472.0))
    with pytest.raises(ResultsError, match=r"a has 2 runs .* 3"):
        compare_saved(two, three_runs(tmp_path / "b", (461.0, 463.0, 465.0)))


def test_runs_that_share_no_case_are_not_comparable_and_the_difference_is_named(tmp_path):
    a = one_metric_run(tmp_path / "a", [300.0] * 9)
    b = one_metric_run(tmp_path / "b", [300.0] * 9, page_size=16, seed=7)
    result = compare_saved(a, b)
    assert result.exit_code == 4
    assert result.refusal == "the runs share no case and arm (page_size 64 against 16; seed 0 against 7)"


def test_what_only_one_side_has_is_counted_and_an_unfinished_run_is_warned_of(baseline, tmp_path):
    with pytest.raises(KeyboardInterrupt), RunWriter(tmp_path / "b", made_up.environment()) as writer:
        writer.write_case(CASES[0], made_up.samples(CASES[0], arms=ARMS, steps=60))
        raise KeyboardInterrupt
    result = compare_saved(baseline, tmp_path / "b")
    assert {row.case for row in result.rows} == {CASES[0]}
    assert any("only in A: 2 case-arms" in warning and "bs 8" in warning for warning in result.warnings)
    assert any("is interrupted" in warning for warning in result.warnings)


def test_the_table_shows_both_medians_ratio_and_verdict(baseline, tmp_path):
    result = compare_saved(baseline, write(tmp_path / "slower", slower=1.5, seed=1))
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(saved_table(result))
    text = console.export_text()
    row = next(r for r in result.rows if r.metric == "prep_host_us" and r.arm == "aten-eager" and r.case.bs == 8)
    line = next(t for t in text.splitlines() if t.startswith("bs 8") and "aten-eager" in t and "prep_host" in t)
    before, after = f"{row.verdict.baseline:.0f}", f"{row.verdict.candidate:.0f}"
    assert [before, after, f"{int(after) / int(before):.3g}", "slower"] == [line.split()[i] for i in (4, 5, 6, 8)]
