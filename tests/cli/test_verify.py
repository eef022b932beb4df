"""`attn-graph verify` through its real entry point."""

from __future__ import annotations

import csv
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
    found = json.loads(done.out)
    assert {(f["mode"], f["check"], f["status"]) for f in found if f["check"] != "sizes"} == {
        ("decode", "process", "fail"),
        ("idle", "process", "fail"),
    }
    died = [f["detail"] for f in found if f["check"] == "process"]
    assert all(detail.startswith("a process died while it did C3 at P=") for detail in died), died
    assert len(set(died)) > 2, "each configuration has its own process"


def test_a_worker_that_dies_takes_nobody_else_s_work_with_it(cli, third_party, tmp_path):
    dying = BROKEN.replace("md.page_table[0, 0] += 1", "fb.batch_size == 33 and __import__('os')._exit(9)")
    (tmp_path / "broken_backend.py").write_text(dying)
    arguments = ("--backend", "broken,trtllm_mha", "--mode", "decode", "--check", "C3,C14", "--arm", "fused-eager")
    done = cli("verify", *arguments, "--jobs", "2", "--json", env=third_party)
    assert done.code == 1
    died, *others = sorted(json.loads(done.out), key=lambda f: f["check"] != "process")
    assert died["backend"] == "broken" and "C3 at P=128 C=1000 B=33" in died["detail"]
    passed = {(f["backend"], f["check"]) for f in others if f["status"] == "pass"}
    assert passed == {("broken", "sizes"), ("broken", "C14"), *(("trtllm_mha", c) for c in ("sizes", "C3", "C14"))}
    assert all(f["status"] == "pass" for f in others), "C3 of the one that died has not passed"


def test_findings_are_on_disk_as_they_are_known(cli, tmp_path):
    out = tmp_path / "found.csv"
    arguments = ("--backend", "trtllm_mha", "--mode", "idle", "--check", "C3,C14", "--arm", "aten", "--out", str(out))
    done = cli("verify", *arguments, "--json")
    assert done.code == 0, done.err
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = json.loads(done.out)
    assert list(rows[0]) == ["backend", "mode", "check", "status", "detail"]
    assert sorted(map(str, rows)) == sorted(map(str, found))
    missing = cli("verify", *arguments[:-1], str(tmp_path / "nowhere" / "found.csv"))
    assert missing.code == 2 and "No such file" in missing.err and "Traceback" not in missing.err


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


def test_faults_of_runners_are_told_like_those_of_backends(cli):
    done = cli("verify", "--backend", "eagle_draft_extend,multi_layer_eagle_draft_extend", "--check", "R5,faults")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert "eagle_draft_extend: 4 of 4 known faults are noticed" in lines
    assert "multi_layer_eagle_draft_extend: 4 of 4 known faults are noticed" in lines


def test_a_family_of_checks_is_asked_for_by_its_letter(cli):
    done = cli("verify", "--backend", "trtllm_mha", "--mode", "idle", "--check", "L", "--arm", "aten-graph", "--json")
    found = json.loads(done.out)
    assert [f["check"] for f in found] == ["sizes", *(f"L{i}" for i in range(1, 11))]
    assert {f["mode"] for f in found} == {"idle"} and done.code == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_keeps_what_is_known_and_leaves_no_process_behind(tmp_path, how):
    out = tmp_path / "found.csv"
    command = [sys.executable, "-m", "attn_graph.cli.main", "verify", "--backend", "trtllm_mha", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--jobs", "2", "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (out.exists() and "decode,C" in out.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(how)
    said, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "Interrupted.\n"
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert workers and not alive
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"pass", "interrupted"} <= {row["status"] for row in rows}
    assert all("were still to do" in row["detail"] for row in rows if row["status"] == "interrupted")
    assert "interrupted" in said and "trtllm_mha" in said, "the table is printed too"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "trtllm_mah"), "unknown backend, wrapper or runner 'trtllm_mah'. Known: "),
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
