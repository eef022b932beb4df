"""A run that a rank ends: said, and on disk as what it is."""

from __future__ import annotations

from attn_graph.cli import plan
from attn_graph.cli.errors import ExitCode
from attn_graph.cli.run import Run
from attn_graph.profilers import ranks
from attn_graph.profilers.devices import Device
from attn_graph.profilers.results import read_environment
from attn_graph.profilers.sample import Case

CASE = Case("trtllm_mha", "decode", 2, 2, "40", 16, 64, False, graph_nodes=2, device="cpu")


def test_a_run_that_a_rank_ended_is_on_disk_as_failed(tmp_path, monkeypatch):
    def fails(n, target, args, **options):
        raise ranks.RankFailure(1, CASE.title, "killed by SIGKILL", [[], []])

    monkeypatch.setattr(ranks, "run_ranks", fails)
    run = Run(plan.Plan([CASE], {}), ("aten-eager",), 1, 0, Device("cpu"), tmp_path / "run", quiet=True)
    outcome = run.measure()
    saved = read_environment(tmp_path / "run")
    assert outcome.exit_code == ExitCode.FOUND_WRONG and "rank 1" in outcome.problem
    assert saved.status == "failed"
    assert any("killed by SIGKILL" in warning for warning in saved.warnings)
