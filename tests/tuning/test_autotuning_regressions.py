"""Known ways in which tuners go wrong that have no test beside the code they concern.

Elsewhere: unlike choices on ranks (test_ranks), lost or torn files (test_store, test_log), outputs left by an earlier
candidate and inputs that change (test_measure), candidates that break (test_tuner, test_child), a near key that is not
near (test_store), winners that change from run to run (test_decide), one search for each bucket and time budgets
(test_tune), timers that go negative (test_decide, test_tuner).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attn_graph.backends.base import tensors_of
from attn_graph.cli import plan
from attn_graph.cli.run import Run
from attn_graph.profilers.devices import Device
from attn_graph.profilers.graphs import CaptureError, GraphFactory
from attn_graph.profilers.sample import Case
from attn_graph.tuning import store
from attn_graph.tuning.measure import CaseMeasurer
from attn_graph.tuning.space import Candidate, candidates, default, key_of, representatives
from attn_graph.tuning.store import Entry, describe, lookup_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = Device("cuda", 0, "NVIDIA H200")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "tuned"))
    return tmp_path / "tuned"


# Tuning while a graph is captured.


def test_a_first_call_inside_a_capture_runs_with_the_default_and_tunes_nothing(folder):
    case = Case("trtllm_mha", "decode", 3, 4, "uniform:1:200", 16, 256, swa=False)
    assert lookup_case(case, "NVIDIA H200").config is None
    measurer = CaseMeasurer(case, DEVICE)
    backend, check = measurer._built(default(case)), measurer._checks[0]
    bound = tensors_of(backend.forward_metadata)
    check.poison(bound)
    graph = GraphFactory(torch.device(DEVICE))()
    graph.capture(lambda: backend.init_forward_metadata_in_graph(check.batch), warmups=1 if DEVICE == "cuda" else 0)
    check.poison(bound)
    graph.launch()
    assert check.first_wrong(bound) == ""
    assert not folder.exists()


def test_trials_inside_a_capture_are_refused_and_the_graph_and_the_tuner_are_usable_afterwards():
    case = Case("trtllm_mha", "decode", 2, 2, "uniform:1:200", 16, 256, swa=False)
    measurer = CaseMeasurer(case, DEVICE)
    setting = default(case)
    factory = GraphFactory(torch.device(DEVICE))
    for trial in (lambda: measurer.rough(setting), lambda: measurer.finals([setting])):
        with pytest.raises(CaptureError, match="Tune first, then capture"):
            factory().capture(trial, warmups=0)
    assert measurer.rough(setting).status == "ok"
    graph, body = factory(), measurer.body(setting)
    graph.capture(body, warmups=1)
    graph.launch()


# A choice that nobody looks up.


def run_of(case: Case, tmp_path: Path, **options) -> Run:
    return Run(plan.Plan([case], {}), ("fused-graph",), 1, 0, H200, tmp_path / "run", quiet=True, **options)


@pytest.mark.parametrize("backend", representatives())
def test_what_tune_stores_is_what_a_bench_finds_and_names_with_its_file_and_key(backend, tmp_path, folder):
    """The tuner's case has full batches of the bucket; the bench's is one that is padded to it."""
    tuned = Case(backend, "decode", 64, 64, "loguniform:1:131072", 64, 131072, swa=False)
    setting = candidates(tuned)[-1]
    store.save([Entry(key_of(tuned, "NVIDIA H200"), setting.as_dict())])
    benched = replace(tuned, bs=60, graph_nodes=2876, tp=8)
    found, notes = run_of(benched, tmp_path)._tuned([benched])
    assert found[benched.key].config == setting.as_dict()
    (line,) = notes
    assert line.startswith("Block sizes: tuned (exact)")
    assert str(folder / store.FILE) in line
    assert str(key_of(benched, "NVIDIA H200")) in line
    elsewhere = describe(lookup_case(benched, "NVIDIA B200"))
    assert elsewhere.startswith("Block sizes: default, searched NVIDIA B200")


def test_a_run_with_fixed_block_sizes_looks_nothing_up(tmp_path):
    case = Case("trtllm_mha", "decode", 64, 64, "loguniform:1:131072", 64, 131072, swa=False)
    store.save([Entry(key_of(case, "NVIDIA H200"), candidates(case)[-1].as_dict())])
    assert run_of(case, tmp_path)._tuned([case])[0][case.key].config
    assert run_of(case, tmp_path, tuned=False)._tuned([case]) == ({}, ())


@pytest.mark.parametrize("backend", representatives())
def test_a_tuned_setting_is_the_one_that_the_backend_launches_with(backend):
    case = Case(backend, "decode", 2, 2, "uniform:1:200", 1 if backend != "trtllm_mla" else 16, 4096, swa=False)
    setting = candidates(case)[-1]
    assert setting != default(case)
    built = CaseMeasurer(case, DEVICE)._built(setting)
    assert Candidate.of(**built.kernel_config(2).as_dict()) == setting


# Tuner and bench that measure in unlike ways.


@pytest.mark.gpu
def test_tune_and_bench_give_the_same_setting_the_same_time(cli, tmp_path):
    """Within 5%, on lengths that are all alike, so that both time the same work."""
    env = {store.FOLDER_VARIABLE: str(tmp_path / "tuned")}
    shape = ("--bs", "64", "--no-swa", "--context", "8192", "--json")
    tuned = cli("tune", "--backend", "trtllm_mha", *shape, env=env, timeout_s=300)
    assert tuned.code == 0, tuned.err
    (entry,) = (entry for path, entry in store.saved_entries()[0] if path.parent != store.SHIPPED)
    bench = (
        "--backend",
        "trtllm_mha",
        "--tp",
        "1",
        "--steps",
        "5",
        "--arm",
        "fused-graph",
        "--no-plots",
        "--out",
        "run",
    )
    ended = cli("bench", *bench, *shape, env=env, timeout_s=300)
    assert ended.code == 0, ended.err
    import pandas as pd

    summary = pd.read_csv(tmp_path / "run" / "summary.csv")
    of_all_ranks = (summary.metric == "prep_device_us") & (summary["rank"].astype(str) == "all")
    (timed,) = summary.loc[of_all_ranks, "p50"]
    assert timed == pytest.approx(entry.facts["p50_us"], rel=0.05)


def test_tune_and_bench_time_one_body_by_the_same_arithmetic():
    """With a made-up clock a body's time is exactly its own in both; constants of the launch drop out."""
    from attn_graph.profilers.device_time import Laps, marginal_us
    from attn_graph.tuning.measure import HOT_COUNTS

    class Clock:
        now = 0.0

        def captured(self, body, n):
            return lambda: setattr(self, "now", self.now + 7.0 + 1.4 * n)

        def flush(self): ...

        def laps(self, *stretches):
            us = []
            for stretch in stretches:
                before = self.now
                stretch()
                us.append(self.now - before)
            return Laps(tuple(us), gapless=True)

    assert marginal_us(lambda: None, repeats=3, timer=Clock()) == pytest.approx([1.4] * 3)
    assert marginal_us(lambda: None, repeats=3, counts=HOT_COUNTS, timer=Clock()) == pytest.approx([1.4] * 3)


# Many processes over one kernel cache.

COMPILES = """
import json, os, sys
from pathlib import Path
from attn_graph.profilers.sample import Case
from attn_graph.tuning.space import candidates
from attn_graph.tuning.static import StaticCompiler, parse_target
case = Case("trtllm_mla", "decode", 8, 8, "loguniform:1:131072", 64, 131072, False)
compiler = StaticCompiler(parse_target("sm_90"))
folder, processes = Path(sys.argv[1]), int(sys.argv[2])
children = []
for rank in range(processes):
    if not (child := os.fork()):
        found = [compiler.compile(case, one) for one in candidates(case)[:2]]
        (folder / f"{rank}.json").write_text(json.dumps(
            [(c.outcome.reason, c.resources and (c.resources.registers, c.resources.code_bytes)) for c in found]))
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def compiled_by(processes: int, folder: Path, cache: Path) -> list[list]:
    """What each of the processes, forked at the same moment, got: (reason, (registers, bytes of code)) by candidate."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILES, str(folder), str(processes)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_eight_processes_over_one_empty_kernel_cache_all_get_the_same_kernels(tmp_path):
    found = compiled_by(8, tmp_path, tmp_path / "cache")
    assert all(one == found[0] for one in found)
    for reason, (registers, code_bytes) in found[0]:
        assert reason == ""
        assert registers > 8 and code_bytes > 1000


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_a_kernel_cache_that_cannot_be_used_is_named_with_the_way_out(tmp_path):
    (tmp_path / "cache").write_text("in the way")
    ((reason, _), _), *_ = compiled_by(1, tmp_path, tmp_path / "cache")
    assert f"The kernel cache is {tmp_path / 'cache'}: give each rank a folder of its own by TRITON_CACHE_DIR" in reason
