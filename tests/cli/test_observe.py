"""`attn-graph bench --observer` from the command line to its two tables, and what it refuses."""

from __future__ import annotations

import pandas as pd
import pytest
from attn_graph.cli import observe
from attn_graph.cli.errors import CliError

SMALL = ("--bs", "2", "--context", "64", "--max-context", "256", "--arm", "aten-eager", "--steps", "2")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_a_run_writes_both_tables_and_report_makes_them_again(cli, tmp_path):
    ended = cli("bench", *SMALL, "--observer", "nvtx", "--out", "run", env=NO_GPU)
    assert ended.code == 0, ended.err
    folder = tmp_path / "run"
    rows, fits = pd.read_csv(folder / "observer.csv"), pd.read_csv(folder / "observer_fit.csv")
    assert set(rows["observer"]) == {"none", "nvtx"}  # the control always runs
    assert set(rows["arm"]) == {"aten-eager", "body"} and set(rows["graph"]) == {"recorded"}
    assert (rows["n"] == 2).all() and (rows["bare_us"] > 0).all() and (rows["status"] == "ok").all()
    assert set(fits["phase"]) == {"bare", "during", "after", "recaptured"}
    straight = fits[fits["graph_branches"] == 1]  # from 1 to 500 nodes: no noise makes that slope negative
    assert len(straight) == 8 and (straight["per_node_us"] > 0).all()
    assert "ns per node" in ended.out and "aten-eager" in ended.out and "ranges are idle" in ended.out
    assert (folder / "plots" / "observer.png").exists() and (folder / "report.html").exists()

    before = (folder / "observer.csv").read_bytes()
    (folder / "observer.csv").unlink()
    again = cli("report", "run", env=NO_GPU)
    assert again.code == 0 and "ns per node" in again.out
    assert (folder / "observer.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--observer", "nsys"), "observer 'nsys'"),
        (("--observer", "none", "--tp", "2"), "leave --tp out"),
        (("--observer", "none", "--resume"), "leave --resume out"),
    ],
)
def test_what_cannot_be_observed_is_refused_before_anything_is_measured(cli, tmp_path, options, said):
    ended = cli("bench", *SMALL, *options, "--out", "run", env=NO_GPU)
    assert ended.code == 2 and said in ended.err and "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()


def test_all_means_every_observer_and_unknown_ones_are_answered_with_what_there_is():
    assert observe.observer_names("all") == ["none", "nvtx", "torch-profiler-cpu", "torch-profiler", "cupti"]
    assert observe.observer_names("cupti, nvtx") == ["none", "nvtx", "cupti"]
    with pytest.raises(CliError, match="torch-profiler"):
        observe.observer_names("torch-profile")
