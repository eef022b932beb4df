"""From what the ranks saw of a case to the samples of the schema: per-rank times, then what holds across ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from .collective import duration_spread, predict_first_wait, skew
from .measure import ArmTimes, RankMeasurement
from .results import ACROSS_RANKS
from .sample import MEASURED, PREDICTED, Case, Sample

LAUNCH_METRICS = ("launch_host_us", "launch_end_us")
ACROSS = ("launch_skew_us", "duration_spread_us")
WAITS = ("first_wait_us", "longest_wait_us")


def samples_of(case: Case, ranks: Mapping[int, RankMeasurement]) -> Iterator[Sample]:
    """Every sample of one case, marked with the tracer it was taken under, if any.

    A CPU shows what the host pays to dispatch PyTorch operations. It has no graph launch, and an interpreted kernel's
    time means nothing: those are rows without numbers.
    """
    observer = ranks[0].observer
    for sample in _unmarked(case, ranks):
        yield sample if observer == sample.observer else replace(sample, observer=observer)


def _unmarked(case: Case, ranks: Mapping[int, RankMeasurement]) -> Iterator[Sample]:
    for name in ranks[0].arms:
        arms = {rank: found.arms[name] for rank, found in ranks.items()}
        broken = next((a for a in arms.values() if a.status != "ok"), None)
        if broken is not None:
            yield Sample(name, ACROSS_RANKS, -1, "prep_host_us", None, broken.status, cause=broken.detail)
            continue
        for rank, times in arms.items():
            yield from _rank_samples(case, name, rank, times)
            yield from _gpu_samples(case, name, rank, times)
        yield from _across(case, name, [ranks[r] for r in sorted(ranks)])
        for rank, found in ranks.items():
            for step, value in enumerate(found.exchange_us):
                yield Sample(name, rank, step, "exchange_us", float(value))
    yield from ranks[0].once


def _rank_samples(case: Case, arm: str, rank: int, times: ArmTimes) -> Iterator[Sample]:
    for step, lag in enumerate(times.lag_us):
        yield Sample(arm, rank, step, "start_lag_us", float(lag))
    for step, value in enumerate(times.alone_us):
        yield Sample(arm, rank, step, "step_alone_us", float(value))
    for step, value in enumerate(times.injected_us):
        if not np.isnan(value):
            yield Sample(arm, rank, step, "injected_us", float(value))
    if times.prep_is_real:
        for step, (value, cause) in enumerate(zip(times.prep_us, times.causes_prep, strict=True)):
            yield Sample(arm, rank, step, "prep_host_us", float(value), cause=cause)
    else:
        yield Sample(arm, rank, -1, "prep_host_us", None, "no_device")
    if case.device == "cpu":
        for metric in LAUNCH_METRICS:
            yield Sample(arm, rank, -1, metric, None, "no_device")
        return
    for step, (value, cause) in enumerate(zip(times.launch_us, times.causes_launch, strict=True)):
        yield Sample(arm, rank, step, "launch_host_us", float(value), cause=cause)
    for step, value in enumerate(times.end_us):
        yield Sample(arm, rank, step, "launch_end_us", float(value))
    for step, (end, lag) in enumerate(zip(times.end_us, times.lag_us, strict=True)):
        yield Sample(arm, rank, step, "step_host_us", float(end - lag))


def _gpu_samples(case: Case, arm: str, rank: int, times: ArmTimes) -> Iterator[Sample]:
    """Clock of the device at the ends of the steps at which it was asked, with what held it down as the cause."""
    told = [(step, s) for step, s in enumerate(times.gpu) if s is not None and s.sm_clock_mhz is not None]
    for step, state in told:
        yield Sample(arm, rank, step, "sm_clock_mhz", state.sm_clock_mhz, cause="+".join(state.throttles))
    if not told and rank == 0:
        status, why = (
            ("no_device", "") if case.device == "cpu" else ("unsupported", "NVML does not tell: see the gpu extra")
        )
        yield Sample(arm, rank, -1, "sm_clock_mhz", None, status, why)


def _across(case: Case, arm: str, ranks: list[RankMeasurement]) -> Iterator[Sample]:
    """What holds across ranks. Ends are compared within a host only: hosts share no clock."""
    arms = [found.arms[arm] for found in ranks]
    measured = len(ranks) > 1 and all(len(times.wait_us) for times in arms)
    if case.device == "cpu" or len(ranks) < 2:
        status = "no_device" if case.device == "cpu" else "not_applicable"
        for metric in ACROSS if measured else (*ACROSS, *WAITS):
            yield Sample(arm, ACROSS_RANKS, -1, metric, None, status)
    else:
        yield from _from_ends(arm, [found.host for found in ranks], arms)
    if measured:
        yield from _measured_waits(arm, arms)


def _from_ends(arm: str, hosts: list[int], arms: list[ArmTimes]) -> Iterator[Sample]:
    """Skew and predicted waits from when launches returned; on several hosts the worst skew of any one of them."""
    ends = np.stack([times.end_us for times in arms], axis=1)
    own = ends - np.stack([times.lag_us for times in arms], axis=1)
    skews = [skew(ends[:, [h == host for h in hosts]]) for host in dict.fromkeys(hosts)]
    for metric, values in (("launch_skew_us", np.max(skews, axis=0)), ("duration_spread_us", duration_spread(own))):
        for step, value in enumerate(values):
            yield Sample(arm, ACROSS_RANKS, step, metric, float(value))
    if len(skews) > 1:
        for metric in WAITS:
            yield Sample(arm, ACROSS_RANKS, -1, metric, None, "not_applicable", source=PREDICTED)
        return
    yield from _waits(arm, predict_first_wait(ends), PREDICTED)


def _measured_waits(arm: str, arms: list[ArmTimes]) -> Iterator[Sample]:
    """By the clock of each rank's own device."""
    yield from _waits(arm, np.stack([times.wait_us for times in arms], axis=1), MEASURED)


def _waits(arm: str, waits: np.ndarray, source: str) -> Iterator[Sample]:
    """From [steps, ranks]. The last rank waits for nobody, so what lateness costs a step is its longest wait."""
    for step, of_step in enumerate(waits):
        for rank, value in enumerate(of_step):
            yield Sample(arm, rank, step, "first_wait_us", float(value), source=source)
        yield Sample(arm, ACROSS_RANKS, step, "longest_wait_us", float(of_step.max()), source=source)
