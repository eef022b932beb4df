"""`attn-graph report` through its entry point, the HTML it writes, and the tables of the terminal."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import made_up_runs as made_up
import numpy as np
import pytest
from attn_graph.cli.plots import save_plots
from attn_graph.cli.report import missing, waiting, write_report
from attn_graph.cli.tables import arm_rows, case_labels, number, print_summary, shown_ratio
from attn_graph.profilers.results import RunWriter, cases_in, read_samples, read_summary
from attn_graph.profilers.sample import PREDICTED, Sample
from rich.console import Console


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two cases, one arm failed in both, finished."""
    folder = tmp_path_factory.mktemp("report") / "run"
    return made_up.write_run(folder, [made_up.case(1), made_up.case(8)], steps=20, failed=["compile-eager"])


class Page(HTMLParser):
    """Where a page points to, and its visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data):
        self.text += data


def page_of(run: Path) -> Page:
    return Page((run / "report.html").read_text(encoding="utf-8"))


def shown(run: Path, width: int = 100) -> str:
    out = io.StringIO()
    print_summary(read_summary(run), Console(file=out, width=width))
    return out.getvalue()


def test_the_command_writes_plots_and_report_and_prints_the_table(run, cli):
    ended = cli("report", run)
    assert (ended.code, ended.err) == (0, "No plot backends: the run has one backend\n")
    assert "aten-eager" in ended.out
    assert "\x1b" not in ended.out
    assert f"Report: {run / 'report.html'}" in ended.out
    assert (run / "plots" / "host_prep.svg").exists()


def test_the_command_loads_no_torch(run):
    code = (
        "import sys; from attn_graph.cli.main import run; "
        f"code = run(['report', {str(run)!r}]); sys.exit(code or 'torch' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_folder_that_is_no_run_is_a_usage_error_without_a_traceback(tmp_path, cli):
    ended = cli("report", tmp_path)
    assert ended.code == 2
    assert f"Error: {tmp_path} is not a run" in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "plots").exists()


def test_the_page_opens_offline(run):
    write_report(run, save_plots(run))
    html = (run / "report.html").read_text(encoding="utf-8")
    links = Page(html).links
    assert len(links) == 5  # a picture for each plot that could be drawn
    assert all(link.startswith("data:image/png;base64,iVBOR") for link in links)
    assert not re.search(r"https?://|url\(|@import|<script", html)


def test_the_page_holds_command_machine_numbers_and_how_to_read(run):
    plots = save_plots(run)
    write_report(run, plots)
    text = page_of(run).text
    assert "attn-graph bench --tp 4" in text
    assert "NVIDIA H200" in text
    assert "580.1" in text
    for plot in plots:
        assert (plot.how_to_read if plot.path else f"Not drawn. {plot.note}") in text
    row = read_summary(run).query("arm == 'aten-eager' and metric == 'prep_host_us' and rank == 'all'").iloc[0]
    assert f"{number(row.p50)}/{number(row.p99)}" in text
    assert "no C++ compiler found" in text
    assert "predicted from the ranks' launch ends" in text


def test_text_from_the_run_cannot_change_the_page(tmp_path):
    machine = made_up.environment(warnings=["<script>alert(1)</script>"], hostname='"><img src=x>')
    run = made_up.write_run(tmp_path / "<b>run", [made_up.case(8)], machine, steps=2)
    write_report(run, [])
    page = page_of(run)
    assert "<script>alert(1)</script>" in page.text
    assert page.links == []
    assert "<b>run" in page.text


def test_a_run_that_was_cut_short_says_so_on_the_page(tmp_path):
    with pytest.raises(KeyboardInterrupt), RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(made_up.case(8), made_up.samples(made_up.case(8), steps=2))
        raise KeyboardInterrupt
    write_report(tmp_path / "run", [])
    assert "This run is interrupted" in page_of(tmp_path / "run").text


def test_a_run_without_a_finished_case_still_gives_a_page(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()):
        pass
    write_report(tmp_path / "run", save_plots(tmp_path / "run"))
    assert "No case ended." in page_of(tmp_path / "run").text


def test_the_late_rank_is_named_and_the_others_wait_for_it(tmp_path):
    case, steps = made_up.case(8, tp=4), 50

    def rank_two_is_late():
        for step in range(steps):
            ends = 100.0 + np.array([0.0, 1.0, 300.0, 2.0])
            for rank, end in enumerate(ends):
                yield Sample("aten-eager", rank, step, "launch_end_us", end)
                yield Sample("aten-eager", rank, step, "first_wait_us", ends.max() - end, source=PREDICTED)

    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(case, rank_two_is_late())
    rows = list(waiting(read_samples(tmp_path / "run")))
    assert [(row.rank, row.last, row.steps, row.p50) for row in rows] == [
        (0, 0, 50, 300.0), (1, 0, 50, 299.0), (2, 50, 50, 0.0), (3, 0, 50, 298.0),
    ]  # fmt: skip
    assert rows[0].sum == 50 * 300.0
    assert all(row.aligned and row.source == PREDICTED for row in rows)
    write_report(tmp_path / "run", [])
    assert "50 of 50 steps" in page_of(tmp_path / "run").text


def test_what_is_missing_is_listed_with_its_cause(run):
    rows = list(missing(read_samples(run)))
    assert [(row.arm, row.status, row.cause) for row in rows] == [
        ("compile-eager", "compile failed", "no C++ compiler found")
    ] * 2


def test_the_table_shows_figures_words_and_marks(tmp_path):
    case = made_up.case(8, device="cpu")
    run = made_up.write_run(tmp_path / "run", [case], steps=20, failed=["compile-eager"])
    summary = read_summary(run)
    rows = {row.arm: row for row in arm_rows(next(cases_in(summary))[1])}
    prep = summary.query("arm == 'aten-eager' and metric == 'prep_host_us' and rank == 'all'").iloc[0]
    assert rows["aten-eager"].cells[0] == f"{prep.p50:.0f}/{prep.p99:.0f}"
    assert rows["aten-eager"].cells[1:3] == ("no device", "no device")
    assert rows["aten-eager"].cells[4].endswith("*")
    assert rows["aten-eager"].cells[5] == "28/20/0"
    assert (rows["compile-eager"].cells[0], rows["compile-eager"].status) == ("failed", "compile failed")
    assert [row.failed for row in rows.values()].count(True) == 1
    assert (list(rows)[:1], list(rows)[-1:]) == (["aten-eager"], ["fused-graph"])


def test_results_that_are_not_bit_equal_are_shouted(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        equal = [Sample("fused-graph", r, -1, "bit_equal", float(r != 1)) for r in range(4)]
        writer.write_case(made_up.case(8), [*equal, Sample("fused-graph", 0, 0, "prep_host_us", 1.0)])
    (row,) = arm_rows(read_summary(tmp_path / "run"))
    assert (row.status, row.failed) == ("NOT BIT-EQUAL", True)


def test_numbers_taken_under_a_tracer_are_marked_and_come_last(tmp_path):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        for_both = [Sample("aten-eager", 0, 0, "prep_host_us", 9.0, observer=o) for o in ("torch", "none")]
        writer.write_case(made_up.case(8), for_both)
    assert [row.arm for row in arm_rows(read_summary(tmp_path / "run"))] == ["aten-eager", "aten-eager\n under torch"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("width", [80, 100])
def test_no_number_and_no_arm_is_cut_at_common_widths(tmp_path, device, width):
    run = made_up.write_run(tmp_path / "run", [made_up.case(8, device=device)], steps=20, failed=["compile-eager"])
    text = shown(run, width)
    assert max(map(len, text.splitlines())) <= width
    for row in arm_rows(read_summary(run)):
        line = next(line for line in text.splitlines() if line.startswith(row.arm))
        assert all(cell in line for cell in row.cells if cell != "no device")
    assert "…" not in text


def test_what_cases_share_is_said_once():
    cases = [made_up.case(bs, context=c) for bs in (1, 8) for c in ("64", "uniform:1:64")]
    shared, labels = case_labels(cases)
    assert shared == "trtllm_mha, decode, page 64, max ctx 131072, SWA, graph nodes 500, tp 4"
    assert list(labels.values()) == ["bs 1, ctx 64", "bs 1, ctx uniform:1:64", "bs 8, ctx 64", "bs 8, ctx uniform:1:64"]
    padded = [made_up.case(3, bucket=4), made_up.case(4)]
    assert list(case_labels(padded)[1].values()) == ["bs 3", "bs 4"]
    assert "bucket 4" in case_labels(padded)[0]
    assert case_labels([]) == ("", {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (28.0, "28"), (0.3461, "0.35"), (0.0123, "0.012"), (3.014, "3.01"), (9.996, "10.0"),
        (51.84, "51.8"), (99.96, "100"), (340.4, "340"), (1437.6, "1,438"), (None, ""), (float("nan"), ""),
    ],
)  # fmt: skip
def test_three_digits_are_shown(value, text):
    assert number(value) == text


def test_a_shown_ratio_recomputes_from_the_shown_numbers():
    assert shown_ratio(41.26, 342.4) == f"{41.3 / 342:.3g}"
    assert shown_ratio(1, 0) == ""
    assert shown_ratio(None, 3) == ""
