from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from attn_graph.profilers.causes import CAUSES, UNKNOWN, StepCauses, attribute, frozen_gc, slow_steps
from attn_graph.profilers.clock import FakeClock
from attn_graph.profilers.gpu_state import EVERY_NS, GpuState, GpuWatch


def counts_of(*steps: Callable[[], object]) -> dict[str, list[int]]:
    with StepCauses() as causes:
        for step in steps:
            causes.mark()
            step()
            causes.mark()
    return {cause: events.tolist() for cause, events in causes.counts().items()}


def nothing() -> None: ...


def touch_fresh_pages() -> None:
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as memory:
        for page in range(64):
            memory[page * mmap.PAGESIZE] = 1


def test_a_step_that_blocks_shows_a_voluntary_switch_and_a_quiet_one_does_not():
    blocked = counts_of(nothing, lambda: time.sleep(0.002), nothing)["voluntary_switch"]
    assert blocked[1] >= 1 and blocked[0] == blocked[2] == 0


def test_first_touches_of_memory_show_as_minor_faults():
    touched = counts_of(touch_fresh_pages, nothing)["minor_fault"]
    assert touched[0] > touched[1]  # not one each: the kernel may map several pages at a fault


def test_a_collection_shows_in_its_own_step_and_the_hook_is_gone_afterwards():
    hooks = len(gc.callbacks)
    assert counts_of(nothing, gc.collect, nothing)["gc"] == [0, 1, 0]
    assert len(gc.callbacks) == hooks


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_step_that_ends_on_another_core_shows_a_migration():
    mask = os.sched_getaffinity(0)
    first, second = sorted(mask)[:2]
    os.sched_setaffinity(0, {first})
    try:
        assert counts_of(nothing, lambda: os.sched_setaffinity(0, {second}))["migration"] == [0, 1]
    finally:
        os.sched_setaffinity(0, mask)


def spin(core: int, seconds: float) -> None:
    os.sched_setaffinity(0, {core})
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="no counters by thread here")
def test_a_rival_on_the_same_core_shows_as_involuntary_switches():
    mask = os.sched_getaffinity(0)
    core = min(mask)
    rival = multiprocessing.get_context("spawn").Process(target=spin, args=(core, 30.0))
    rival.start()
    try:
        while rival.is_alive() and psutil.Process(rival.pid).cpu_affinity() != [core]:
            time.sleep(0.02)
        switches = counts_of(lambda: spin(core, 0.2))["involuntary_switch"]
    finally:
        os.sched_setaffinity(0, mask)
        rival.kill()
        rival.join()
    assert switches[0] >= 1


def test_an_unfinished_step_is_left_out():
    with StepCauses() as causes:
        for _ in range(3):
            causes.mark()
    assert {cause: len(events) for cause, events in causes.counts().items()} == dict.fromkeys(CAUSES, 1)
    with StepCauses() as causes:
        assert all(events.shape == (0,) for events in causes.counts().values())


def test_a_mark_costs_what_its_description_says_within_an_order_of_magnitude():
    with StepCauses() as causes:
        costs_ns = []
        for _ in range(2_000):
            start = time.perf_counter_ns()
            causes.mark()
            costs_ns.append(time.perf_counter_ns() - start)
    assert "about 0.7 us" in StepCauses.__doc__
    assert 70 < statistics.median(costs_ns) < 7_000


# --- attribution ------------------------------------------------------------------------------------------------


def steps_with(slow: dict[int, float], n: int = 200, seed: int = 0) -> np.ndarray:
    """Times around 100 us; the steps in `slow` take the time given."""
    values = np.random.default_rng(seed).normal(100, 2, n)
    for step, value in slow.items():
        values[step] = value
    return values


def test_slow_is_far_above_the_median_and_never_below():
    values = steps_with({10: 150.0, 20: 40.0, 30: 101.0})
    slow = slow_steps(values)
    assert slow[10] and not slow[20] and not slow[30]
    assert slow.sum() <= 3  # of 200 quiet ones nearly none


def test_half_of_the_steps_may_be_slow_without_becoming_usual():
    values = steps_with({step: 400.0 for step in range(0, 198, 2)})
    assert slow_steps(values)[:198:2].all() and not slow_steps(values)[1::2].any()


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ([5.0] * 20, [False] * 20),
        ([5.0] * 19 + [90.0], [False] * 19 + [True]),
        ([5.0] * 15 + [5.1, 5.3, 4.9, 5.2, 90.0], [False] * 19 + [True]),
        ([], []),
    ],
)
def test_equal_values_have_no_deviation_and_only_a_true_outlier_is_slow(values: list, slow: list):
    assert slow_steps(np.array(values)).tolist() == slow


def test_each_slow_step_names_its_own_causes_and_the_rest_stay_blank():
    values = steps_with({3: 300.0, 7: 300.0, 11: 300.0})
    zero = np.zeros(200, dtype=np.int64)
    counts = {cause: zero.copy() for cause in CAUSES}
    counts["involuntary_switch"][[3, 7]] = 1
    counts["migration"][7] = 1
    counts["gc"][50] = 1  # in a step that was not slow
    found = attribute(values, counts)
    assert (found[3], found[7]) == ("involuntary_switch", "involuntary_switch+migration")
    assert found[11] == UNKNOWN and found[50] == ""


def test_what_happens_in_every_step_is_not_why_one_was_slow():
    values = steps_with({3: 300.0, 4: 300.0})
    always = np.ones(200, dtype=np.int64)
    assert attribute(values, {"voluntary_switch": always})[3] == UNKNOWN
    always[4] = 2
    assert attribute(values, {"voluntary_switch": always})[3:5] == [UNKNOWN, "voluntary_switch"]


def test_a_real_stall_is_found_among_real_steps():
    times_us = []
    with StepCauses() as causes:
        for step in range(60):
            causes.mark()
            start = time.perf_counter_ns()
            sum(range(2_000))
            if step == 40:
                time.sleep(0.05)
            times_us.append((time.perf_counter_ns() - start) / 1000)
            causes.mark()
    assert "voluntary_switch" in attribute(np.array(times_us), causes.counts())[40]


def test_counts_of_another_run_are_refused():
    with pytest.raises(ValueError, match="gc has 3 steps, the values have 4"):
        attribute(np.ones(4), {"gc": np.zeros(3)})


# --- garbage collection -----------------------------------------------------------------------------------------


def make_garbage() -> None:
    for _ in range(20_000):
        loop: list = []
        loop.append(loop)


def test_no_collection_runs_while_frozen_and_the_old_state_comes_back():
    with StepCauses() as causes:
        with frozen_gc():
            causes.mark()
            make_garbage()
            causes.mark()
            assert not gc.isenabled() and gc.get_freeze_count() > 0
        causes.mark()
        make_garbage()
        causes.mark()
    frozen, usual = causes.counts()["gc"]
    assert frozen == 0 and usual > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with pytest.raises(KeyError), frozen_gc():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()


# --- the GPU ----------------------------------------------------------------------------------------------------


def watched(states: list[GpuState], ticks_ns: int = EVERY_NS) -> StepCauses:
    clock, answers = FakeClock(), iter(states)
    causes = StepCauses(GpuWatch(lambda: next(answers), clock))
    with causes:
        for _ in range(len(states) * EVERY_NS // ticks_ns):
            causes.mark()
            causes.mark()
            causes.read_gpu()
            clock.advance(ticks_ns)
    return causes


def test_a_throttled_step_and_a_low_clock_are_told_apart():
    usual, hot, low = GpuState(1980.0), GpuState(1970.0, ("power cap",)), GpuState(900.0)
    counts = watched([usual, usual, hot, usual, low]).counts()
    assert counts["gpu_throttle"].tolist() == [0, 0, 1, 0, 0]
    assert counts["gpu_clock"].tolist() == [0, 0, 0, 0, 1]


def test_the_gpu_is_asked_now_and_then_and_its_last_answer_holds():
    causes = watched([GpuState(1980.0), GpuState(1980.0, ("power cap",))], ticks_ns=EVERY_NS // 4)
    assert causes.counts()["gpu_throttle"].tolist() == [0] * 4 + [1] * 4
    assert [step for step, state in enumerate(causes.gpu_states()) if state is not None] == [0, 4]


def test_a_gpu_that_does_not_tell_its_clock_is_never_low():
    counts = watched([GpuState(None)] * 3).counts()
    assert counts["gpu_clock"].tolist() == [0, 0, 0]


def test_without_a_gpu_there_are_no_causes_of_one():
    assert set(counts_of(nothing)) == set(CAUSES)


def test_ending_on_a_core_of_another_node_is_a_move_and_on_the_same_node_is_none(monkeypatch):
    core = iter([0, 1, 1, 2])
    monkeypatch.setattr("attn_graph.profilers.causes.cached_nodes", lambda: {0: 0, 1: 0, 2: 1})
    monkeypatch.setattr("attn_graph.profilers.causes._core_reader", lambda: lambda: next(core))
    found = counts_of(nothing, nothing)
    assert (found["migration"], found["numa_move"]) == ([1, 1], [0, 1])
