"""`bench` on ranks that meet for real, over gloo: what it measures, and what a rank that goes wrong leaves behind.

Faults are done, not simulated: a rank is killed, gets stuck in its capture, runs out of memory, or is started with
another command. They are brought in by a module that Python loads by itself at the start (sitecustomize).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import made_up_waits as made_up
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from attn_graph.cli.errors import CliError
from attn_graph.cli.plan import rank_counts
from attn_graph.cli.tp import injection, needs_launch
from attn_graph.profilers.devices import Device
from attn_graph.profilers.team import Place, TeamError, place_of

TINY = (
    "bench", "--device", "cpu", "--bs", "2", "--context", "40", "--page-size", "16", "--max-context", "64", "--no-swa",
    "--warmup", "1", "--graph-nodes", "3", "--arm", "aten-eager,fused-graph", "--no-plots", "--out", "run",
)  # fmt: skip
MEET = ("--tp", "2", "--allreduce", "gloo", "--steps", "10")
LIMIT_S = 12  # for a rank to count as hung: above the start of two Python processes on a busy machine


@pytest.fixture(autouse=True)
def no_rank_is_left(tmp_path):
    yield
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()) == tmp_path and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.cmdline())
    assert left == []


@pytest.fixture
def fault(tmp_path):
    """Environment in which `body` runs on rank 1 when it builds its second arm."""

    def make(body: str) -> dict[str, str]:
        folder = tmp_path / "fault"
        folder.mkdir()
        lines = textwrap.indent(textwrap.dedent(body), " " * 12)
        (folder / "sitecustomize.py").write_text(
            "import os, sys, importlib.abc\n"
            "class Patch(importlib.abc.MetaPathFinder):\n"
            "    def find_spec(self, name, path, target=None):\n"
            "        if name != 'attn_graph.profilers.nvtx_ranges':\n"  # imported by measure, before its classes
            "            return None\n"
            "        sys.meta_path.remove(self)\n"
            "        import attn_graph.backends.runners.decode as decode\n"
            "        captured, before = decode.DecodeRunner.capture, []\n"
            "        def capture(self):\n"
            "            before.append(self)\n"
            "            if len(before) < 2:\n"
            "                return captured(self)\n"
            f"{lines}\n"
            "        decode.DecodeRunner.capture = capture\n"
            "if os.environ.get('RANK') == '1':\n"
            "    sys.meta_path.insert(0, Patch())\n"
        )
        return {"PYTHONPATH": str(folder)}

    return make


def samples(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "samples.csv.gz")


def status(folder: Path) -> str:
    return json.loads((folder / "environment.json").read_text())["status"]


# --- what works -------------------------------------------------------------------------------------------------


def test_two_ranks_measure_their_first_wait_and_what_the_exchange_costs(cli, tmp_path):
    ended = cli(*TINY, *MEET, "--tp", "1,2")
    assert ended.code == 0, ended.err
    found = samples(tmp_path / "run")
    waits = found[(found.metric == "first_wait_us") & (found.source == "measured") & (found.status == "ok")]
    assert len(waits) == 2 * 10 and (waits.value > 0).all()
    assert set(waits.arm) == {"aten-eager"}  # an interpreted kernel in the graph makes a rank late by nothing real
    exchange = found[found.metric == "exchange_us"]
    assert set(exchange["rank"]) == {0, 1} and (exchange.value > 0).all()
    assert status(tmp_path / "run") == "done"
    longest = pd.read_csv(tmp_path / "run" / "wait.csv").query("rank == 'longest'")
    assert list(longest.n) == [10]


def test_a_delay_injected_on_one_rank_makes_the_other_wait(cli, tmp_path):
    ended = cli(*TINY, *MEET, "--steps", "40", "--inject", "1:20000")
    assert ended.code == 0, ended.err
    found = pd.read_csv(tmp_path / "run" / "inject.csv")
    assert list(found.dose_us) == [0, 20000] and set(found.injected_rank) == {1}
    assert abs(found.slope[0] - 1) < max(0.1, 4 * found.slope_stderr[0])
    assert found.others_p50_us[1] > 10_000 > found.own_p50_us[1]


@pytest.mark.gpu
@pytest.mark.parametrize("allreduce", ["symm", "nccl"])
def test_two_gpus_wait_as_their_launch_ends_predict(cli, tmp_path, allreduce):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = ("bench", "--swa", "--bs", "64", "--context", "8192", "--arm", "aten-eager,fused-graph", "--no-plots")
    ended = cli(*command, "--tp", "2", "--allreduce", allreduce, "--steps", "200", "--out", "run")
    assert ended.code == 0, ended.err
    found = pd.read_csv(tmp_path / "run" / "predict.csv").query("arm == 'aten-eager' and source == 'predicted'")
    assert abs(found.error_p50.item()) < 0.25


def torchrun(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", "attn_graph.cli.main", *arguments]
    return subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def two_ranks(tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], **more: str):
    """As torchrun would start them on one host; (exit code, stdout, stderr) of each."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        torchrun(tmp_path, *arguments, **(common | {"RANK": str(r), "LOCAL_RANK": str(r)} | more))
        for r, arguments in enumerate((first, second))
    ]
    return [(rank.returncode, out, err) for rank in ranks for out, err in [rank.communicate(timeout=90)]]


def test_the_same_command_under_torchrun_is_a_rank_and_only_rank_0_writes_and_prints(tmp_path):
    command = (*TINY, "--steps", "10")
    (code, out, err), (other, silence, _) = two_ranks(tmp_path, command, command)
    assert (code, other) == (0, 0), err
    assert "Results: run" in out and silence == ""
    assert set(samples(tmp_path / "run").tp) == {2}  # --tp is how many torchrun started


def test_ranks_on_two_hosts_wait_for_each_other_and_ends_are_per_host(tmp_path):
    if not (shutil.which("ip") and shutil.which("unshare") and os.geteuid() == 0):
        pytest.skip("network namespaces need root and iproute2")
    names = [f"ag{os.getpid()}{end}" for end in "ab"]
    setup = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}",
        *(f"ip -n {name} addr add 10.213.0.{i + 1}/24 dev {name}" for i, name in enumerate(names)),
        *(f"ip -n {name} link set {dev} up" for name in names for dev in (name, "lo")),
    ]
    try:
        for line in setup:
            made = subprocess.run(line.split(), capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"{line}: {made.stderr.strip()}")
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        hosts = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                 "--nproc-per-node", "1", "--node-rank", str(i), "--master-addr", "10.213.0.1", "--master-port",
                 "29511", "-m", "attn_graph.cli.main", *TINY, "--steps", "10"],
                env=env | {"GLOO_SOCKET_IFNAME": name}, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for i, name in enumerate(names)
        ]  # fmt: skip
        outputs = [host.communicate(timeout=100)[0] for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], outputs
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["options"]["hosts"] == 2
    assert any("hosts share no clock" in warning for warning in environment["warnings"])
    found = samples(tmp_path / "run")
    waits = found[(found.metric == "first_wait_us") & (found.status == "ok")]
    assert set(waits.source) == {"measured"} and set(waits["rank"]) == {0, 1}


# --- what goes wrong --------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_is_named_and_the_cases_before_are_kept(cli, tmp_path, fault):
    # One case builds two arms, so the third capture is the second case's.
    env = fault("""
        if len(before) < 3:
            return captured(self)
        os.kill(os.getpid(), 9)
    """)
    ended = cli(*TINY, *MEET, "--bs", "2,1", env=env)
    assert ended.code == 1
    assert "rank 1" in ended.err and "SIGKILL" in ended.err and "Traceback" not in ended.err
    assert status(tmp_path / "run") == "failed"
    assert set(samples(tmp_path / "run").bs) == {2}


def test_a_rank_stuck_in_capture_is_named_within_the_limit(cli, tmp_path, fault):
    began = time.monotonic()
    env = fault("import time; time.sleep(1000)")
    ended = cli(*TINY, *MEET, "--rank-timeout", str(LIMIT_S), env=env)
    assert ended.code == 1
    assert "rank 1 in case" in ended.err and f"hung: did not reach the barrier within {LIMIT_S} s" in ended.err
    assert time.monotonic() - began < LIMIT_S + 45
    assert status(tmp_path / "run") == "failed"


def test_a_rank_out_of_memory_is_named_with_its_case(cli, tmp_path, fault):
    env = fault("import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 3 GiB')")
    ended = cli(*TINY, *MEET, env=env)
    assert ended.code == 1
    assert "rank 1 in case 'trtllm_mha decode bs 2" in ended.err and "Tried to allocate 3 GiB" in ended.err
    assert status(tmp_path / "run") == "failed"


def test_a_rank_with_another_command_is_named_with_what_differs(tmp_path):
    ours, theirs = (*TINY, "--steps", "10"), (*TINY, "--steps", "11")
    ended = two_ranks(tmp_path, ours, theirs)
    assert [code for code, _, _ in ended] == [1, 1]
    for _, _, err in ended:
        assert "rank 1: " in err and "number of steps" in err and "11 after 1" in err


def test_a_rank_that_never_comes_is_named_within_the_limit(tmp_path):
    common = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    rank = torchrun(tmp_path, *TINY, "--rank-timeout", "3", **common, MASTER_PORT=free_port(), LOCAL_WORLD_SIZE="2")
    _, err = rank.communicate(timeout=60)
    assert rank.returncode == 1
    assert "rank 1" in err and "did not join within 3 s" in err


def test_ctrl_c_ends_all_ranks_and_the_run_says_that_it_was_interrupted(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.Popen(
        [sys.executable, "-m", "attn_graph.cli.main", *TINY, *MEET, "--steps", "100000"],
        env=env, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    limit = time.monotonic() + 60
    while not (tmp_path / "run" / "environment.json").exists() and time.monotonic() < limit:
        time.sleep(0.1)
    time.sleep(2)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert status(tmp_path / "run") == "interrupted"


def test_an_existing_folder_is_refused_and_left_as_it_was(cli, tmp_path):
    made_up.write_run(tmp_path / "run", {1: {"aten-eager": np.ones((5, 1))}})
    before = (tmp_path / "run" / "environment.json").read_bytes()
    ended = cli(*TINY, *MEET)
    assert ended.code == 2 and "already holds a run" in ended.err
    assert (tmp_path / "run" / "environment.json").read_bytes() == before


@pytest.mark.parametrize(
    ("allreduce", "words"),
    [("symm", "does not run on cpu"), ("nccl", "does not run on cpu"), ("ring", "one of auto, symm")],
)
def test_an_allreduce_that_this_machine_lacks_is_refused(allreduce, words):
    with pytest.raises(CliError, match=words):
        needs_launch(None, 2, Device("cpu"), allreduce)


def test_ranks_are_started_where_they_can_meet_and_simulated_elsewhere():
    place = Place(0, 2, 0, 2)
    assert needs_launch(None, 2, Device("cpu"), "gloo")
    assert not needs_launch(None, 1, Device("cpu"), "gloo")
    assert not needs_launch(None, 2, Device("cpu"), "auto")
    assert not needs_launch(place, 2, Device("cpu"), "auto")
    with pytest.raises(CliError, match="started 2 ranks"):
        needs_launch(place, 4, Device("cpu"), "auto")


@pytest.mark.parametrize(
    ("text", "ranks", "words"),
    [("2:50", [2, 4], "no rank 2"), ("x", [2], "RANK:US"), ("0:50", [1, 2], "nobody who could wait")],
)
def test_an_injection_that_the_run_cannot_do_is_refused(text, ranks, words):
    with pytest.raises(CliError, match=words):
        injection(text, ranks)


def test_rank_counts_double_up_to_the_last_or_are_listed():
    assert rank_counts("2..512") == (2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert rank_counts("3..10") == (3, 6, 10)
    assert rank_counts("2,6") == (2, 6)
    for text in ("8..2", "1", "2..", "..8"):
        with pytest.raises(CliError, match="--predict-ranks"):
            rank_counts(text)


def test_a_place_is_read_from_what_torchrun_sets_and_only_from_that():
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert place_of(variables) is None
    assert place_of(variables | {"MASTER_ADDR": "a"}) == Place(3, 4, 1, 2, 1)
    with pytest.raises(TeamError, match="numbers"):
        place_of(variables | {"MASTER_ADDR": "a", "RANK": "three"})
    with pytest.raises(TeamError, match="rank 4 of 4"):
        place_of(variables | {"MASTER_ADDR": "a", "RANK": "4"})
