"""Rank processes, with real processes: each test says what one of them does and what the caller sees."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from attn_graph.profilers import ranks
from attn_graph.profilers.clock import monotonic_ns
from attn_graph.profilers.collective import analyse_collectives, predict_first_wait
from attn_graph.profilers.ranks import RankContext, RankFailure, plan_affinity, run_ranks

PATIENT_S = 60.0
HANG_S = 3.0  # above the start of a few Python processes on a busy machine


def own_children() -> set[int]:
    """Processes below this one, without the tracker that multiprocessing keeps for good."""
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if "resource_tracker" not in " ".join(child.cmdline())}


def shared_memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("pym-", "psm_"))}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = own_children(), shared_memory_files()
    yield
    assert (own_children(), shared_memory_files()) == before


def fails_with(target, n: int = 2, args: tuple = (), timeout_s: float = PATIENT_S, **options) -> RankFailure:
    with pytest.raises(RankFailure) as raised:
        run_ranks(n, target, args, timeout_s=timeout_s, **options)
    return raised.value


# --- what works -------------------------------------------------------------------------------------------------


def name_yourself(context: RankContext, word: str) -> str:
    return f"{word} {context.rank} of {context.size}"


def test_results_come_back_in_rank_order():
    assert run_ranks(3, name_yourself, ("rank",), timeout_s=PATIENT_S) == [f"rank {r} of 3" for r in range(3)]


def much(context: RankContext) -> np.ndarray:
    context.report(np.full(1_000_000, context.rank))
    return np.arange(1_000_000) + context.rank


def test_results_far_above_the_size_of_a_pipe_get_through():
    reports = {}
    results = run_ranks(2, much, timeout_s=PATIENT_S, on_report=lambda rank, got: reports.update({rank: got}))
    for rank in range(2):
        np.testing.assert_array_equal(results[rank], np.arange(1_000_000) + rank)
        np.testing.assert_array_equal(reports[rank], np.full(1_000_000, rank))


def run_cases(context: RankContext, answers: Path, cases: int) -> int:
    """Goes on to the next case only when the parent has answered the last report."""
    for case in range(cases):
        context.announce(f"case {case}")
        context.barrier.wait(case)
        context.report((case, os.getpid()))
        answer = answers / f"{context.rank}-{case}"
        while not answer.exists():
            time.sleep(0.005)
    return os.getpid()


def test_one_set_of_processes_runs_many_cases_and_streams_each_as_it_ends(tmp_path: Path):
    got = []

    def answer(rank: int, payload: tuple[int, int]) -> None:
        got.append((rank, *payload))
        (tmp_path / f"{rank}-{payload[0]}").touch()

    pids = run_ranks(2, run_cases, (tmp_path, 3), timeout_s=PATIENT_S, on_report=answer)
    for rank in range(2):
        assert [found for found in got if found[0] == rank] == [(rank, case, pids[rank]) for case in range(3)]


def start_together(context: RankContext, steps: int) -> tuple[list[int], list[int], list[int]]:
    arrived, deadlines, started = [], [], []
    for step in range(steps):
        arrived.append(monotonic_ns())
        deadlines.append(context.barrier.wait(step))
        started.append(monotonic_ns())
    return arrived, deadlines, started


@pytest.mark.alone
@pytest.mark.parametrize("n", [2, 6], ids=["a-core-each", "more-ranks-than-cores"])
def test_no_rank_starts_before_the_last_has_arrived_and_none_gets_stuck(n: int):
    cores = list(os.sched_getaffinity(0))[:2]
    times = np.array(run_ranks(n, start_together, (300,), timeout_s=PATIENT_S, cores=cores))
    arrived, deadlines, started = times[:, 0], times[:, 1], times[:, 2]
    assert (deadlines == deadlines[0]).all()
    assert (deadlines[0] > arrived.max(axis=0)).all()
    assert (started >= deadlines).all()
    # A lock wakes its waiters 70 us apart or more; with cores to themselves ranks start at the same reading.
    if n <= len(cores):
        assert np.median(started - deadlines) < 50_000


def delay_rank_two(context: RankContext, steps: int) -> list[float]:
    ends = []
    for step in range(steps):
        deadline = context.barrier.wait(step)
        if context.rank == 2:
            time.sleep(0.03)
        ends.append((monotonic_ns() - deadline) / 1000)
    return ends


def test_a_late_rank_is_named_and_the_others_are_seen_waiting_for_it():
    ends = np.array(run_ranks(4, delay_rank_two, (20,), timeout_s=PATIENT_S)).T
    report = analyse_collectives(predict_first_wait(ends) + 15.0, ends)
    assert (report.late_rank, report.waiting_ranks, report.recurring) == (2, (0, 1, 3), True)
    assert report.spread.p50 > 25_000


def noisy(context: RankContext) -> None:
    print("this is not a result", flush=True)


def test_what_a_rank_prints_stays_out_of_the_callers_output(capfd: pytest.CaptureFixture):
    run_ranks(1, noisy, timeout_s=PATIENT_S)
    out, err = capfd.readouterr()
    assert out == "" and "this is not a result" in err


def keep_stepping(context: RankContext, seconds: float) -> None:
    if context.rank == 0:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            context.barrier.wait(1)
            time.sleep(0.1)
        context.barrier.wait(1)
        context.barrier.abort()
    else:
        with pytest.raises(RuntimeError, match="run was ended"):
            while True:
                context.barrier.wait(1)


def test_a_long_case_that_reports_nothing_is_alive_as_long_as_its_ranks_step():
    run_ranks(2, keep_stepping, (HANG_S * 1.5,), timeout_s=HANG_S)


# --- failures ---------------------------------------------------------------------------------------------------


def fail_after_reporting(context: RankContext, how: str) -> None:
    context.announce("warm case")
    context.report(("measured", context.rank))
    context.barrier.wait(1)
    context.announce("bad case")
    if context.rank == 1:
        if how == "raise":
            raise ValueError("page table has 3 columns, 4 needed")
        if how == "exit":
            os._exit(7)
        if how == "sys.exit":
            sys.exit("no more")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "step":
            context.barrier.wait(9)
        if how == "unpicklable":
            context.report(lambda: None)
        if how == "return":
            return
        if how == "sleep":
            time.sleep(3600)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    context.barrier.wait(2)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "ValueError: page table has 3 columns, 4 needed"),
        ("exit", "exited with status 7 before returning"),
        ("sys.exit", "SystemExit: no more"),
        ("kill", "killed by SIGKILL"),
        ("step", "rank 1 at 9, the others at 2"),
        ("unpicklable", "PicklingError|AttributeError"),
    ],
)
def test_a_rank_that_fails_ends_the_run_at_once_named_with_case_and_cause(how: str, cause: str):
    start = time.monotonic()
    failure = fails_with(fail_after_reporting, 3, (how,))
    assert time.monotonic() - start < PATIENT_S / 4  # long before anybody's patience ends
    assert (failure.rank, failure.case) == (1, "bad case")
    assert re.search(cause, failure.cause)
    assert str(failure) == f"rank 1 in case 'bad case': {failure.cause}"
    assert failure.partial == [[("measured", rank)] for rank in range(3)]


def test_what_a_rank_said_before_another_blamed_it_is_heard_however_late(monkeypatch: pytest.MonkeyPatch):
    forward, others_gone = ranks._forward, threading.Event()

    def late(rank: int, *rest) -> None:
        if rank == 1:
            others_gone.wait(PATIENT_S)
            time.sleep(0.2)
        forward(rank, *rest)
        if rank == 2:
            others_gone.set()

    monkeypatch.setattr(ranks, "_forward", late)
    failure = fails_with(fail_after_reporting, 3, ("step",))
    assert (failure.rank, failure.case) == (1, "bad case")
    assert failure.partial == [[("measured", rank)] for rank in range(3)]


def die_with_a_crowd_waiting(context: RankContext) -> None:
    try:
        if context.rank == 1:
            os._exit(7)
        context.barrier.wait(1)
    finally:
        context.report(f"saved by {context.rank}")


def test_ranks_that_wait_for_a_dead_one_are_woken_and_hand_in_what_they_have():
    failure = fails_with(die_with_a_crowd_waiting, 3)
    assert failure.rank == 1 and failure.partial == [["saved by 0"], [], ["saved by 2"]]


def test_the_traceback_of_a_rank_that_raises_reaches_the_caller():
    failure = fails_with(fail_after_reporting, 2, ("raise",))
    assert "fail_after_reporting" in failure.traceback and "page table has 3 columns" in failure.traceback


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("sleep", f"hung: did not reach the barrier within {HANG_S:g} s"),
        ("stop", f"hung: did not reach the barrier within {HANG_S:g} s"),
        ("return", "returned while other ranks waited for it at the barrier"),
    ],
)
def test_a_rank_that_others_wait_for_in_vain_is_named_within_the_limit(how: str, cause: str):
    start = time.monotonic()
    failure = fails_with(fail_after_reporting, 3, (how,), timeout_s=HANG_S)
    assert time.monotonic() - start < 3 * HANG_S + 6
    assert (failure.rank, failure.case, failure.cause) == (1, "bad case", cause)
    assert failure.partial == [[("measured", rank)] for rank in range(3)]


def hang_with_a_child(context: RankContext) -> str:
    if context.rank == 0:
        return "done"
    context.announce("capture")
    context.report(subprocess.Popen(["sleep", "3600"]).pid)
    time.sleep(3600)
    return "never"


def test_a_rank_that_hangs_alone_is_ended_with_what_it_started():
    failure = fails_with(hang_with_a_child, timeout_s=HANG_S)
    assert (failure.rank, failure.case) == (1, "capture")
    assert failure.cause == f"hung: no sign of life for {HANG_S:g} s"
    (sleeper,) = failure.partial[1]
    limit = time.monotonic() + 5
    while psutil.pid_exists(sleeper) and psutil.Process(sleeper).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_an_error_in_the_callers_callback_ends_the_ranks_too():
    def full_disk(rank: int, payload: object) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run_ranks(2, fail_after_reporting, ("sleep",), timeout_s=PATIENT_S, on_report=full_disk)


# --- Ctrl-C, and a parent that dies -----------------------------------------------------------------------------

PARENT = """
import os, signal, sys, time
from attn_graph.profilers import ranks

def rank(context, stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.report(os.getpid())
    time.sleep(3600)

def show(rank, pid):
    print(pid, flush=True)

if __name__ == "__main__":
    if sys.argv[1] == "patient":
        ranks._TERMINATE_S = 60.0
    try:
        ranks.run_ranks(2, rank, (sys.argv[1] != "polite",), timeout_s=60, on_report=show)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


@pytest.fixture
def parent(tmp_path: Path):
    """Starts a parent of two sleeping ranks in a process group of its own; gives it and the ranks' ids."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    started, ranks = [], []

    def start(kind: str) -> tuple[subprocess.Popen, list[int]]:
        process = subprocess.Popen(
            [sys.executable, str(script), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        pids = [int(process.stdout.readline()) for _ in range(2)]
        ranks.extend(psutil.Process(pid) for pid in pids)
        return process, pids

    yield start
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()  # knows its process by its start time too
    for process in started:
        process.kill()
        process.communicate()


def wait_until_gone(pids: list[int], limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < limit, f"of {pids} some still run after {limit_s} s"
        time.sleep(0.02)


def test_ctrl_c_ends_the_ranks_and_only_the_parent_speaks(parent):
    process, pids = parent("polite")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and ranks alike
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130 and out == "interrupted\n"
    assert "Traceback" not in err and "leaked" not in err
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ranks_that_ignore_sigterm_do_not_outlive_ctrl_c(parent):
    process, pids = parent("stubborn")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    wait_until_gone(pids, 1)


def test_a_second_ctrl_c_does_not_wait_for_anybody(parent):
    process, pids = parent("patient")  # gives ranks that ignore SIGTERM a minute
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=5)
    assert process.returncode == 130
    wait_until_gone(pids, 2)


def test_ranks_die_with_a_parent_that_is_killed(parent):
    process, pids = parent("stubborn")
    process.kill()
    wait_until_gone(pids, 5)


# --- cores ------------------------------------------------------------------------------------------------------


def lone(cpu: int) -> tuple[int, int]:
    return 0, cpu


def test_ranks_get_disjoint_cores_of_equal_number():
    plan = plan_affinity(3, range(8), lone)
    assert plan.cores == ((0, 1), (2, 3), (4, 5)) and not plan.shared and plan.note == ""


def test_hyperthreads_of_a_core_go_to_one_rank_while_cores_last():
    def core_of(cpu: int) -> tuple[int, int]:  # cpu and cpu + 4 are one core
        return 0, cpu % 4

    assert plan_affinity(2, range(8), core_of).cores == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert plan_affinity(3, range(8), core_of).cores == ((0, 4), (1, 5), (2, 6))
    # Five ranks on four cores: better two ranks on one core than two on one hyper-thread.
    assert plan_affinity(5, range(8), core_of).cores == ((0,), (4,), (1,), (5,), (2,))


def test_more_ranks_than_cores_share_and_the_plan_says_so():
    plan = plan_affinity(4, {1, 3}, lone)
    assert plan.shared and plan.cores == ((1, 3),) * 4
    assert "4 ranks share 2 cores" in plan.note


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        plan_affinity(0)


def where_am_i(context: RankContext) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    return context.cores, tuple(sorted(os.sched_getaffinity(0))), context.shared


def test_ranks_run_where_the_plan_puts_them_and_within_the_callers_mask():
    mask = sorted(os.sched_getaffinity(0))
    one = mask[0]
    assert run_ranks(2, where_am_i, timeout_s=PATIENT_S, cores=[one]) == [((one,), (one,), True)] * 2
    plan = plan_affinity(2)
    found = run_ranks(2, where_am_i, timeout_s=PATIENT_S)
    for rank in range(2):
        cores, pinned, shared = found[rank]
        assert cores == plan.cores[rank] and pinned == tuple(sorted(cores)) and shared == plan.shared
        assert set(pinned) <= set(mask)
