"""From what ranks saw to samples: what holds across ranks, what a CPU leaves blank, what a tracer marks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from attn_graph.profilers.assemble import samples_of
from attn_graph.profilers.environment import attached_tracer
from attn_graph.profilers.gpu_state import GpuState
from attn_graph.profilers.measure import ArmTimes, RankMeasurement
from attn_graph.profilers.sample import MEASURED, PREDICTED, Case

CASE = Case("trtllm_mha", "decode", 8, 8, "512", 64, 2048, False, tp=2)


def seen(lag: list[float], end: list[float], **changes) -> ArmTimes:
    lag_us, end_us = np.array(lag), np.array(end)
    quiet = ("",) * len(lag)
    times = ArmTimes("ok", "", lag_us, (end_us - lag_us) / 2, (end_us - lag_us) / 2, end_us)
    return replace(times, causes_prep=quiet, causes_launch=quiet, **changes)


def measured(*ranks: ArmTimes, observer: str = "none") -> dict[int, RankMeasurement]:
    return {i: RankMeasurement(0, {"aten-eager": times}, [], observer) for i, times in enumerate(ranks)}


def values(samples, metric: str) -> dict[tuple[int, int], float | None]:
    return {(s.rank, s.step): s.value for s in samples if s.metric == metric}


def test_skew_is_last_end_less_first_and_the_early_rank_waits_for_it():
    found = list(samples_of(CASE, measured(seen([1, 2], [11, 50]), seen([3, 0], [31, 20]))))
    assert values(found, "launch_skew_us") == {(-1, 0): 20, (-1, 1): 30}
    assert values(found, "first_wait_us") == {(0, 0): 20, (1, 0): 0, (0, 1): 0, (1, 1): 30}
    assert values(found, "longest_wait_us") == {(-1, 0): 20, (-1, 1): 30}
    assert {s.source for s in found if s.metric in ("first_wait_us", "longest_wait_us")} == {PREDICTED}


def test_measured_waits_have_a_longest_one_too():
    early, late = (replace(seen([1, 2], [11, 50]), wait_us=np.array(waits)) for waits in ([9.0, 2.5], [2.5, 7.0]))
    found = [s for s in samples_of(CASE, measured(early, late)) if s.source == MEASURED]
    assert values(found, "first_wait_us") == {(0, 0): 9, (1, 0): 2.5, (0, 1): 2.5, (1, 1): 7}
    assert values(found, "longest_wait_us") == {(-1, 0): 9, (-1, 1): 7}


def test_the_spread_of_durations_leaves_start_lags_out():
    found = list(samples_of(CASE, measured(seen([1], [11]), seen([3], [31]))))
    assert values(found, "duration_spread_us") == {(-1, 0): 18}
    assert values(found, "step_host_us") == {(0, 0): 10, (1, 0): 28}


def test_one_rank_has_no_skew():
    found = list(samples_of(CASE, measured(seen([1], [11]))))
    assert {s.status for s in found if s.metric in ("launch_skew_us", "longest_wait_us")} == {"not_applicable"}


def test_a_cpu_has_no_launch_and_interpreted_work_no_time():
    on_cpu = replace(CASE, device="cpu")
    real = list(samples_of(on_cpu, measured(seen([1], [11]), seen([1], [9]))))
    assert values(real, "prep_host_us") == {(0, 0): 5, (1, 0): 4}
    stand_in = list(samples_of(on_cpu, measured(*[seen([1], [11], prep_is_real=False)] * 2)))
    for metric in ("launch_host_us", "launch_end_us", "launch_skew_us", "longest_wait_us", "prep_host_us"):
        assert {(s.value, s.status) for s in stand_in if s.metric == metric} == {(None, "no_device")}


def test_an_arm_that_failed_on_one_rank_is_one_row_with_the_reason():
    failed = ArmTimes("capture_failed", "item: a host read")
    (row,) = samples_of(CASE, measured(seen([1], [11]), failed))
    assert (row.status, row.cause, row.value) == ("capture_failed", "item: a host read", None)


def test_numbers_taken_under_a_tracer_carry_its_name():
    assert {s.observer for s in samples_of(CASE, measured(seen([1], [2]), seen([1], [2]), observer="cuda"))} == {"cuda"}
    assert attached_tracer({"CUDA_INJECTION64_PATH": "/x.so"}) == "cuda"
    assert attached_tracer({}) in ("none", "nvtx")


def test_the_clock_stands_at_the_steps_that_asked_for_it_with_what_holds_it_down():
    states = (GpuState(1980.0), None, GpuState(1200.0, ("power cap", "thermal (software)")))
    watched = seen([1, 1, 1], [11, 11, 11], gpu=states)
    found = list(samples_of(CASE, measured(watched, seen([1, 1, 1], [9, 9, 9]))))
    clocks = [(s.rank, s.step, s.value, s.cause) for s in found if s.metric == "sm_clock_mhz"]
    assert clocks == [(0, 0, 1980.0, ""), (0, 2, 1200.0, "power cap+thermal (software)")]


def test_a_clock_that_nobody_tells_is_blank_with_the_reason():
    def blanks(case):
        found = samples_of(case, measured(seen([1], [11], gpu=(GpuState(None),)), seen([1], [9])))
        return [(s.rank, s.value, s.status) for s in found if s.metric == "sm_clock_mhz"]

    assert blanks(CASE) == [(0, None, "unsupported")]
    assert blanks(replace(CASE, device="cpu")) == [(0, None, "no_device")]
