"""Slow steps of known runs, grouped by what slowed them."""

from __future__ import annotations

import made_up_runs as made_up
import pandas as pd
import pytest
from attn_graph.profilers.results import RunWriter, read_samples
from attn_graph.profilers.sample import PREDICTED, Sample
from attn_graph.profilers.slow import ALL, SLOW, slow_rows, write_slow


def run_of(tmp_path, values_and_causes, metric="prep_host_us", **sample):
    with RunWriter(tmp_path / "run", made_up.environment()) as writer:
        writer.write_case(
            made_up.case(),
            [
                Sample("aten-eager", i % 2, i // 2, metric, v, cause=c, **sample)
                for i, (v, c) in enumerate(values_and_causes)
            ],
        )
    return tmp_path / "run"


def test_slow_steps_are_grouped_by_cause_the_costliest_first_with_sums_beside_medians(tmp_path):
    quiet = [(100.0, "")] * 16
    run = run_of(tmp_path, [*quiet, (500.0, "gc"), (300.0, "unknown"), (350.0, "unknown"), (2100.0, "migration+gc")])
    found = list(slow_rows(read_samples(run)))
    assert [(r.cause, r.steps, r.p50_us, r.sum_us, r.excess_us) for r in found] == [
        (ALL, 20, 100.0, 4850.0, 2850.0),
        ("migration+gc", 1, 2100.0, 2100.0, 2000.0),
        ("unknown", 2, 325.0, 650.0, 450.0),
        ("gc", 1, 500.0, 500.0, 400.0),
    ]
    assert found[1].share == pytest.approx(2100 / 4850)


def test_numbers_under_a_tracer_and_single_numbers_do_not_count(tmp_path):
    run = run_of(tmp_path, [(100.0, "gc")] * 4, observer="cuda")
    assert list(slow_rows(read_samples(run))) == [] and write_slow(run) == [] and not (run / SLOW).exists()


def test_waits_have_their_sum_and_say_whether_they_were_predicted(tmp_path):
    run = run_of(tmp_path, [(0.0, ""), (150.0, "")] * 80, metric="first_wait_us", source=PREDICTED)
    (row,) = write_slow(run)
    assert (row.metric, row.source, row.sum_us) == ("first_wait_us", PREDICTED, 12_000.0)
    saved = pd.read_csv(run / SLOW)
    assert saved["sum_us"].tolist() == [12_000.0] and saved["cause"].tolist() == [ALL]


def test_the_terminal_names_the_costliest_causes_and_the_page_all_of_them(tmp_path, capsys):
    from attn_graph.cli.plots import save_plots
    from attn_graph.cli.report import write_report
    from attn_graph.cli.tables import print_slow

    run = run_of(tmp_path, [*[(100.0, "")] * 16, *((200.0 + i, f"cause{i}") for i in range(10))])
    rows = write_slow(run)
    print_slow(rows)
    printed = capsys.readouterr().out
    assert "cause9" in printed and "cause2" in printed and "cause1 " not in printed and "2 more in slow.csv" in printed
    page = write_report(run, save_plots(run)).read_text()
    assert all(f'<td class="text">cause{i}</td>' in page for i in range(10))
    print_slow([row for row in rows if row.cause == ALL])
    assert capsys.readouterr().out == ""


def test_a_rank_that_is_always_late_recurs_and_rotating_jitter_does_not(tmp_path):
    from attn_graph.cli.report import waiting

    def late(rank_of_step):
        for step in range(60):
            ends = [100.0, 100.0, 100.0]
            ends[rank_of_step(step)] = 150.0
            for rank, end in enumerate(ends):
                yield Sample("aten-eager", rank, step, "launch_end_us", end)
                yield Sample("aten-eager", rank, step, "first_wait_us", max(ends) - end, source=PREDICTED)

    def recurring(name, rank_of_step):
        with RunWriter(tmp_path / name, made_up.environment()) as writer:
            writer.write_case(made_up.case(tp=3), late(rank_of_step))
        return [row.rank for row in waiting(read_samples(tmp_path / name)) if row.recurring]

    assert recurring("always", lambda step: 1 if step % 2 else step % 3) == [1]
    assert recurring("rotates", lambda step: step % 3) == []
