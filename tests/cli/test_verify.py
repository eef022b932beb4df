"""`attn-graph verify` through its real entry point."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

INFO = """
from attn_graph.backends.registry import BackendInfo

INFO = BackendInfo(
    name="broken", kind="backend", family="page_table", pattern="A", modes=("decode", "idle"),
    target="broken_backend:Broken",
)
"""

BROKEN = """
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend


class Broken(TrtllmMhaBackend):
    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        md.page_table[0, 0] += 1
"""


@pytest.fixture
def third_party(tmp_path: Path) -> dict[str, str]:
    """An installed package with a backend that is wrong in one cell. What the entry point names must stay light: it is
    imported by every command that knows backends, and before the interpreter is chosen."""
    (tmp_path / "broken_info.py").write_text(INFO)
    (tmp_path / "broken_backend.py").write_text(BROKEN)
    info = tmp_path / "broken_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attn_graph.backends]\nbroken = broken_info:INFO\n")
    return {"PYTHONPATH": str(tmp_path)}


def test_a_worker_that_dies_is_a_failure_of_what_it_was_checking(cli, third_party, tmp_path):
    dying = BROKEN.replace("md.page_table[0, 0] += 1", "import os; os._exit(9)")
    (tmp_path / "broken_backend.py").write_text(dying)
    done = cli("verify", "--backend", "broken", "--check", "C3", "--arm", "fused", "--json", env=third_party)
    assert done.code == 1
    assert {(f["mode"], f["check"], f["status"]) for f in json.loads(done.out)} == {
        ("decode", "process", "fail"),
        ("idle", "process", "fail"),
    }


@pytest.mark.slow
def test_trtllm_mha_conforms_in_every_mode_and_every_known_fault_is_noticed(cli):
    done = cli("verify", "--backend", "trtllm_mha", "--device", "cpu", "--json", timeout_s=580)
    found = json.loads(done.out)
    assert [f for f in found if f["status"] == "fail"] == []
    assert done.code == 0
    assert {frozenset(f) for f in found} == {frozenset({"backend", "mode", "check", "status", "detail"})}
    modes = {"decode", "idle", "draft_decode", "target_verify", "draft_extend", "draft_extend_v2"}
    passed = {(f["mode"], f["check"]) for f in found if f["status"] == "pass"}
    for number in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 15, 16, 17, 20, 21, 22, 24, 25):
        assert {(mode, f"C{number}") for mode in modes} <= passed
    assert sum(f["check"].startswith("fault:") for f in found) >= 30


def test_a_third_party_s_backend_that_is_wrong_ends_with_exit_code_1_and_the_cell(cli, third_party):
    done = cli("verify", "--backend", "broken", "--check", "C3,C17", "--device", "cpu", env=third_party)
    assert done.code == 1, done.err
    assert "FAIL broken decode C3 (values at replay equal the oracle's, cell by cell, in every arm)" in done.out
    assert "page_table[0, 0]: wanted" in done.out and "fused-graph" in done.out
    assert "C17" in done.out.splitlines()[4], "what passed is in the table"


def test_a_table_says_what_passed_and_why_the_rest_was_skipped(cli):
    done = cli("verify", "--backend", "trtllm_mha", "--mode", "decode", "--check", "C7,C17,C22,faults", "--arm", "aten")
    assert done.code == 0, done.err
    assert "C17 C22" in done.out
    if "Conformance on cpu" in done.out:
        assert "C7 skipped: allocator statistics need a GPU" in done.out
    noticed = next(line for line in done.out.splitlines() if "known faults are noticed" in line)
    _, caught, _, known, *_ = noticed.split()
    assert caught == known and int(known) >= 30


def test_a_family_of_checks_is_asked_for_by_its_letter(cli):
    done = cli("verify", "--backend", "trtllm_mha", "--mode", "idle", "--check", "L", "--arm", "aten-graph", "--json")
    found = json.loads(done.out)
    assert [f["check"] for f in found] == ["sizes", *(f"L{i}" for i in range(1, 11))]
    assert {f["mode"] for f in found} == {"idle"} and done.code == 0


def test_ctrl_c_ends_with_130_and_leaves_no_process_behind(tmp_path):
    command = [sys.executable, "-m", "attn_graph.cli.main", "verify", "--backend", "trtllm_mha", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    parent, deadline = psutil.Process(process.pid), time.monotonic() + 60
    while not (workers := parent.children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(5)  # they are at work by now
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "Interrupted.\n"
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert workers and not alive


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "trtllm_mah"), "unknown backend 'trtllm_mah'. Known: "),
        (("--backend", "trtllm_mha", "--mode", "decod"), "unknown mode for trtllm_mha 'decod'. Known: "),
        (("--backend", "trtllm_mha", "--check", "C33"), "unknown check 'C33'. Known: "),
        (("--backend", "trtllm_mha", "--check", "fault:nothing"), "nothing was checked: no such fault"),
        (("--backend", "trtllm_mha", "--arm", "fusd"), "unknown arm 'fusd'. Known: "),
        (("--backend", "trtllm_mha", "--device", "tpu"), "unknown device 'tpu'. Known: "),
    ],
)
def test_names_that_do_not_exist_are_refused_with_those_that_do(cli, arguments, message):
    done = cli("verify", *arguments)
    assert done.code == 2
    assert message in done.err and "Traceback" not in done.err
    assert done.out == ""
