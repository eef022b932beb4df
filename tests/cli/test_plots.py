"""Plots of made-up runs: what they show, what they leave out, and that they say so."""

from __future__ import annotations

import re
from pathlib import Path

import made_up_runs as made_up
import pytest
from attn_graph.backends.modes import ARMS
from attn_graph.cli import plots
from attn_graph.cli.plots import ARM_COLOURS, PLOTS, NothingToPlot, RunTables, save_plots
from attn_graph.profilers.results import ACROSS_RANKS, RunWriter
from attn_graph.profilers.sample import Sample

ON_CPU = {"device": "cpu", "gpus": []}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two backends on a GPU, four ranks, one arm that failed."""
    folder = tmp_path_factory.mktemp("plots") / "run"
    cases = [made_up.case(1), made_up.case(8), made_up.case(8, backend="flashinfer")]
    return made_up.write_run(folder, cases, failed=["compile-eager"])


def texts(figure) -> str:
    """All that is written on a figure."""
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
        found += [text.get_text() for text in (*axes.texts, *axes.get_yticklabels())]
        legend = axes.get_legend()
        found += [text.get_text() for text in legend.get_texts()] if legend else []
    return "\n".join(found)


def one_step_run(folder: Path, ends_us: dict[str, list[list[float]]], tp: int = 2) -> Path:
    """A run in which arm's rank r of step s returned from its launch at ends_us[arm][s][r]; prep is all of it."""
    case = made_up.case(8, tp=tp)

    def measured():
        for arm, steps in ends_us.items():
            for step, ends in enumerate(steps):
                for rank, end in enumerate(ends):
                    yield Sample(arm, rank, step, "start_lag_us", 1.0)
                    yield Sample(arm, rank, step, "prep_host_us", end - 3.0)
                    yield Sample(arm, rank, step, "launch_host_us", 2.0)
                    yield Sample(arm, rank, step, "launch_end_us", end)
                yield Sample(arm, ACROSS_RANKS, step, "launch_skew_us", max(ends) - min(ends))

    with RunWriter(folder, made_up.environment()) as writer:
        writer.write_case(case, measured())
    return folder


OF_SIDE_TABLES = {"first_wait_ranks", "dose_response"}  # see test_wait_plots.py


def test_every_plot_is_saved_as_png_and_svg(run):
    made = save_plots(run)
    assert [plot.name for plot in made] == [plot.name for plot in PLOTS if plot.name not in OF_SIDE_TABLES]
    for plot in made:
        assert plot.path == run / "plots" / f"{plot.name}.png"
        assert plot.path.read_bytes().startswith(b"\x89PNG")
        assert plot.path.with_suffix(".svg").read_text().rstrip().endswith("</svg>")
        assert plot.title
        assert len(plot.how_to_read) > 80


def test_the_same_run_gives_the_same_svg(run, monkeypatch):
    monkeypatch.setattr(plots, "PLOTS", PLOTS[:1])
    save_plots(run)
    before = (run / "plots" / "host_prep.svg").read_bytes()
    save_plots(run)
    assert (run / "plots" / "host_prep.svg").read_bytes() == before


def test_every_arm_has_a_colour_of_its_own():
    assert set(ARM_COLOURS) == set(map(str, ARMS))
    assert len(set(ARM_COLOURS.values())) == len(ARMS)


def test_host_prep_shows_median_p99_count_and_unit(run):
    figure, note = plots.host_prep(RunTables(run))
    written = texts(figure)
    tables = RunTables(run)
    row = tables.measured("prep_host_us").query("arm == 'aten-eager' and bs == 1").iloc[0]
    assert f"{row.p50:.0f} / {row.p99:.0f}  (n=160)" in written
    assert "us (log)" in written
    assert figure.axes[0].get_xscale() == "log"
    drawn = {colour for arm, colour in ARM_COLOURS.items() if not arm.startswith(("compile", "sglang"))}
    assert {line.get_color() for line in figure.axes[0].lines} == drawn
    assert "compile failed" in written
    assert note == "No number: compile-eager (compile failed, 3 cases)."


def test_the_case_that_failed_leaves_a_gap_and_the_sweep_is_drawn(tmp_path):
    cases = [made_up.case(bs, context=context) for bs in (1, 8) for context in ("1024", "8192")]
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        for case in cases:
            failed = list(made_up.PREP_US) if case == cases[2] else []
            writer.write_case(case, made_up.samples(case, failed=failed, steps=10))
    figure, note = plots.host_prep(RunTables(tmp_path / "run"))
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(panels) == ["bs 1, ctx 1024", "bs 1, ctx 8192", "bs 8, ctx 1024", "bs 8, ctx 8192"]
    assert [len(axes.lines) for axes in panels.values()] == [14, 14, 0, 14]
    assert "compile failed, 1 case" in note
    drawn = {plot.name for plot in save_plots(tmp_path / "run") if plot.path}
    assert drawn == {plot.name for plot in PLOTS} - OF_SIDE_TABLES - {"backends"}


def test_skew_curves_are_the_share_of_steps_at_or_below(tmp_path):
    ends = {"aten-eager": [[10.0, 10.0 + skew] for skew in (4, 1, 3, 2)]}
    figure, _ = plots.rank_skew(RunTables(one_step_run(tmp_path / "run", ends)))
    curve = figure.axes[0].lines[0]
    assert list(zip(curve.get_xdata(), curve.get_ydata(), strict=True)) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1)]
    assert "aten-eager (n=4)" in texts(figure)


def test_the_timeline_shows_the_median_and_the_p99_step_of_the_classic_path_and_the_goal(tmp_path):
    skews = [5.0] * 50 + [7.0] + [9.0] * 47 + [400.0, 800.0]
    ends = {
        "aten-eager": [[100.0, 100.0 + skew] for skew in skews],
        "fused-eager": [[50.0, 51.0]] * 100,
        "fused-graph": [[10.0, 10.0 + skew / 10] for skew in skews],
    }
    figure, note = plots.timeline(RunTables(one_step_run(tmp_path / "run", ends)))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0].startswith("aten-eager, median of n=100 (step 49): skew 5 us")
    assert titles[1] == "aten-eager, p99 of n=100 (step 98): skew 400 us"
    assert titles[3] == "fused-graph, p99 of n=100 (step 98): skew 40 us"
    assert len(titles) == 4
    bars = {c.get_label(): [(b.get_x(), b.get_width()) for b in c] for c in figure.axes[1].containers}
    assert bars["lag"] == [(0, 1.0), (0, 1.0)]
    assert bars["prep"] == [(1.0, 97.0), (1.0, 497.0)]
    assert bars["launch"] == [(98.0, 2.0), (498.0, 2.0)]
    assert bars["waits for the last"] == [(100.0, 400.0), (500.0, 0.0)]
    assert figure.axes[1].get_xlim()[1] > 500
    assert "Up to 2 ranks take turns on 1 GPU" in note


def test_a_step_that_a_rank_lacks_is_not_drawn(tmp_path):
    ends = {"aten-eager": [[10.0, 900.0]] + [[10.0, 12.0]] * 4}
    run = one_step_run(tmp_path / "run", ends)
    tables = RunTables(run)
    lost = (tables.samples["step"] == 0) & (tables.samples["rank"] == 1)
    tables.samples = tables.samples[~lost]
    figure, _ = plots.timeline(tables)
    assert "p99 of n=4" in figure.axes[1].get_title(loc="left")
    assert "skew 2 us" in figure.axes[1].get_title(loc="left")


def test_without_a_gpu_device_time_is_not_drawn_and_the_rest_is(tmp_path):
    case = made_up.case(8, device="cpu")
    run = made_up.write_run(tmp_path / "run", [case], made_up.environment(**ON_CPU), steps=10)
    made = {plot.name: plot for plot in save_plots(run)}
    assert made["device_time"].path is None
    assert made["device_time"].note == "prep_device_us and prep_device_cold_us: no device"
    assert made["backends"].note == "the run has one backend"
    assert made["host_prep"].path and made["rank_skew"].path and made["timeline"].path
    assert "take turns" not in made["rank_skew"].note


def test_one_rank_has_no_skew_to_plot(tmp_path):
    run = made_up.write_run(tmp_path / "run", [made_up.case(8, tp=1)], steps=10)
    made = {plot.name: plot for plot in save_plots(run)}
    assert made["rank_skew"].note == "launch_skew_us: not recorded in this run"
    assert made["timeline"].note == "the run has one rank, so none drifts from another"
    assert made["host_prep"].path


def test_a_plot_that_can_no_longer_be_drawn_does_not_stay_behind(tmp_path):
    run = made_up.write_run(tmp_path / "run", [made_up.case(8, tp=1)], steps=10)
    (run / "plots").mkdir()
    (run / "plots" / "rank_skew.svg").write_text("of another run")
    save_plots(run)
    assert not (run / "plots" / "rank_skew.svg").exists()


@pytest.mark.filterwarnings("error")
def test_zeros_and_single_samples_draw_without_a_warning(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(made_up.case(8), [Sample("fused-graph", r, 0, "prep_host_us", 0.0) for r in (0, 1)])
        writer.write_case(made_up.case(9), [Sample("sglang-graph", 0, 0, "prep_host_us", 2.0)])
    made = {plot.name: plot for plot in save_plots(tmp_path / "run")}
    assert made["host_prep"].path


@pytest.mark.filterwarnings("error")
def test_a_run_without_any_number_draws_nothing_and_says_why(tmp_path):
    run = made_up.write_run(tmp_path / "run", [made_up.case(8)], failed=list(made_up.PREP_US))
    made = save_plots(run)
    assert {plot.path for plot in made} == {None}
    assert {plot.name: plot.note for plot in made}["host_prep"] == "prep_host_us: compile failed"
    with RunWriter(tmp_path / "empty", made_up.environment()):
        pass
    assert {plot.path for plot in save_plots(tmp_path / "empty")} == {None}


def test_numbers_taken_under_a_tracer_are_not_mixed_in(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        traced = [Sample("aten-eager", 0, s, "prep_host_us", 9000.0, observer="torch") for s in range(9)]
        bare = [Sample("aten-eager", 0, s, "prep_host_us", 300.0) for s in range(9)]
        writer.write_case(made_up.case(8), traced + bare)
    figure, _ = plots.host_prep(RunTables(tmp_path / "run"))
    assert "300 / 300  (n=9)" in texts(figure)
    assert "9,000" not in texts(figure)


def test_all_backends_are_drawn_beside_each_other(run):
    figure, _ = plots.backends_overview(RunTables(run))
    written = texts(figure)
    assert "trtllm_mha decode (2 cases)" in written
    assert "flashinfer decode (1 case)" in written
    assert re.search(r"aten-eager\n.*fused-graph", written, re.DOTALL)


def test_device_times_are_told_apart_hot_and_cold(run):
    figure, _ = plots.device_time(RunTables(run))
    assert "fused-graph, hot" in texts(figure)
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert {line.get_markerfacecolor() == "white" for line in dots} == {True, False}


def test_more_cases_than_fit_are_counted_under_the_title(tmp_path):
    cases = [made_up.case(bs, tp=1) for bs in range(1, plots.MOST_PANELS + 3)]
    run = made_up.write_run(tmp_path / "run", cases, arms=["aten-eager"], steps=1)
    figure, _ = plots.host_prep(RunTables(run))
    assert "2 more cases in summary.csv" in figure.get_suptitle()


def test_nothing_to_plot_is_told_from_a_bug(tmp_path, monkeypatch, run):
    with pytest.raises(NothingToPlot):
        RunTables(run).measured("duration_spread_us")

    def broken(_):
        raise KeyError("a bug")

    monkeypatch.setattr(plots, "PLOTS", (plots.Plot("x", "X", broken, ""),))
    with pytest.raises(KeyError):
        save_plots(run)
