"""`attn-graph perf`: where it writes, what its last lines say, and that without a GPU it says so."""

from __future__ import annotations

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest
from attn_graph.cli import perf
from attn_graph.profilers.floor import FloorRow
from attn_graph.profilers.launch_cost import LaunchRow
from conftest import HAS_GPU
from typer.testing import CliRunner

SLOW = FloorRow("decode_metadata", 1, "128", 64, 1024, False, "hot", 2.0, "old", 8.0, 1.0, "block=64", "default", 0.7)
ROWS = [
    SLOW,
    replace(SLOW, peer="new", peer_us=1.0),
    replace(SLOW, bs=2, ours_us=1.0, peer_us=1.5),
    replace(SLOW, bs=2, ours_us=1.0, peer="new", peer_us=4.0),
]


def test_the_summary_names_the_worst_point_of_each_peer_and_of_the_faster_one():
    text = "\n".join(perf.summary(ROWS))
    assert "2.45x over old, least 1.50x at bs 2 context 128 page 64 max 1024" in text
    assert "1.41x over new, least 0.50x at bs 1" in text
    assert "0.87x over the faster peer, least 0.50x at bs 1" in text
    assert (
        "2.00x the floor at most, at bs 1 context 128 page 64 max 1024; 1 of 2 points above 1.25, 0 of them also with"
        in text
    )


def test_a_run_without_peers_still_says_how_far_the_floor_is():
    (line,) = perf.summary([replace(SLOW, peer="", peer_us=None)])
    assert "2.00x the floor" in line
    (line,) = perf.summary([replace(SLOW, peer="", peer_us=None, start_us=0.5)])
    assert "1 of 1 points above 1.25, 1 of them also with the start of their programs in it" in line


@pytest.mark.parametrize(
    ("name", "folder"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("AMD Instinct MI300X", "mi300x")],
)
def test_results_go_to_a_folder_named_after_the_gpu(name, folder):
    assert perf.default_folder(SimpleNamespace(name=name, kind="cuda")).as_posix() == f"results/{folder}"


def test_an_interrupted_run_keeps_the_rows_so_far(tmp_path):
    def rows():
        yield LaunchRow("fused-eager", 0, 5.5, 9.0, "tight", 500)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(perf._saved(tmp_path / "launch.csv", LaunchRow, rows()))
    (row,) = csv.DictReader((tmp_path / "launch.csv").open())
    assert (row["arm"], row["nodes"], row["p50_us"], row["p99_us"], row["loop"]) == (
        "fused-eager",
        "0",
        "5.5",
        "9.0",
        "tight",
    )


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_one_line_says_so():
    from attn_graph.cli.errors import CliError

    ended = CliRunner().invoke(_app(), [])
    assert isinstance(ended.exception, CliError) and "there is no GPU" in str(ended.exception)


def _app():
    import typer

    app = typer.Typer()
    app.command()(perf.perf)
    return app
