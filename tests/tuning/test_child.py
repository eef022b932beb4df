"""Objects in processes of their own: limits, deaths, and the bench that survives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from attn_graph.tuning.child import Child, ChildDied, ChildError, ChildTimeout
from attn_graph.tuning.isolated import IsolatedBench
from made_up_bench import candidate

HELD = "made_up_bench:Mishaps"


@pytest.fixture(scope="module")
def child():
    with Child(HELD, variables={"MADE_UP": "yes"}) as child:
        yield child


def test_calls_run_elsewhere_under_their_own_variables(child):
    assert child.call("pid", limit_s=10) != os.getpid()
    assert child.call("variable", "MADE_UP", limit_s=10) == "yes"
    assert "MADE_UP" not in os.environ


def test_an_exception_that_pickle_cannot_carry_arrives_as_text_and_the_child_lives(child):
    with pytest.raises(ChildError, match=r"Unportable: 1 and 2"):
        child.call("odd", limit_s=10)
    assert child.call("pid", limit_s=10)


def test_a_child_that_cannot_start_says_why():
    with pytest.raises(ValueError, match="no such device"):
        Child(HELD, "refuse")


def test_a_call_over_its_limit_ends_the_process():
    child = Child(HELD)
    pid = child.call("pid", limit_s=10)
    child.call("prepare", "a case", limit_s=10)
    started = time.monotonic()
    with pytest.raises(ChildTimeout, match=r"no answer within 0\.3 s"):
        child.call("rough", candidate(2), limit_s=0.3)
    assert time.monotonic() - started < 5
    assert not psutil.pid_exists(pid)


def test_a_child_that_dies_is_told_apart_from_one_that_hangs():
    child = Child(HELD)
    child.call("prepare", "a case", limit_s=10)
    with pytest.raises(ChildDied, match="SIGSEGV"):
        child.call("rough", candidate(3), limit_s=10)
    with pytest.raises(ChildDied):
        child.call("pid", limit_s=10)


def test_a_child_does_not_outlive_a_killed_parent():
    code = (
        "import os, time, sys; sys.path.insert(0, sys.argv[1])\n"
        "from attn_graph.tuning.child import Child\n"
        "if __name__ == '__main__':\n"
        "    print(Child('made_up_bench:Mishaps').call('pid', limit_s=10), flush=True); time.sleep(60)"
    )
    tests = str(Path(__file__).parents[1])
    parent = subprocess.Popen([sys.executable, "-c", code, tests], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    limit = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit, "the child still runs"
        time.sleep(0.05)


def test_candidates_that_hang_die_or_fail_are_rows_and_the_next_is_measured():
    with IsolatedBench(HELD, limit_s=1.0) as bench:
        bench.prepare("a case")
        outcomes = {n: bench.rough(candidate(n)) for n in (2, 1, 3, 4, 5)}
        finals = bench.finals([candidate(1), candidate(5)])
        broken = bench.finals([candidate(1), candidate(5), candidate(1)])
        assert bench.rough(candidate(1)).status == "ok"
    assert {n: o.cause for n, o in outcomes.items()} == {1: "", 5: "", 2: "hung", 3: "died", 4: "failed"}
    assert "no answer within 1 s" in outcomes[2].reason
    assert "SIGSEGV" in outcomes[3].reason
    assert finals.hot_us[candidate(5)] == (1.0,) * 20
    assert not broken.hot_us
    assert "ended with code 7" in broken.note
