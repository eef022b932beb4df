"""A run on several GPUs as its ranks would report it, with jitter that the test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from attn_graph.profilers.assemble import samples_of
from attn_graph.profilers.inject import INJECTED, Injection
from attn_graph.profilers.measure import ArmTimes, RankMeasurement
from attn_graph.profilers.results import RunWriter
from attn_graph.profilers.sample import Case, Environment

EXCHANGE_US = 3.4
CASE = Case("trtllm_mha", "decode", 64, 64, "8192", 64, 131072, True)


def rank_times(
    ends_us: np.ndarray, injection: Injection | None = None, gain: float = 1.0, device_delays_us: Sequence[float] = (0,)
) -> list[ArmTimes]:
    """Of each rank, from [steps, ranks] launch ends.

    gain: how much of an injected delay reaches the others. device_delays_us: how far behind its launch each rank's
    device comes.
    """
    ends, (steps, ranks) = ends_us.copy(), ends_us.shape
    dose = np.full(ends.shape, np.nan)
    for step, rank in np.ndindex(steps, ranks):
        delay = injection.delay_us(step, rank, ranks) if injection else None
        if delay is not None:
            dose[step, rank] = delay
            ends[step, rank] += gain * delay
    arrivals = ends + np.array(device_delays_us)
    waits = arrivals.max(axis=1, keepdims=True) - arrivals + EXCHANGE_US
    quiet, alone = ("",) * steps, ranks == 1
    return [
        ArmTimes(
            lag_us=np.zeros(steps), prep_us=ends[:, r] * 0.8, launch_us=ends[:, r] * 0.2, end_us=ends[:, r],
            causes_prep=quiet, causes_launch=quiet, wait_us=np.zeros(0) if alone else waits[:, r],
            injected_us=dose[:, r] if injection else np.zeros(0),
        )
        for r in range(ranks)
    ]  # fmt: skip


def write_run(
    folder: Path,
    by_tp: dict[int, dict[str, np.ndarray]],
    injection: Injection | None = None,
    gain: float = 1.0,
    device_delays_us: Sequence[float] = (0,),
) -> Path:
    """A folder with a case for each rank count: arm -> [steps, ranks] launch ends."""
    with RunWriter(folder, Environment(["made", "up"], "2026-01-01")) as writer:
        for tp, arms in by_tp.items():
            times = {arm: rank_times(ends, injection, gain, device_delays_us) for arm, ends in arms.items()}
            exchange = np.full(20, EXCHANGE_US if tp > 1 else np.nan)[: 20 * (tp > 1)]
            ranks = {
                r: RankMeasurement(
                    0, {arm: of[r] for arm, of in times.items()}, [], INJECTED if injection else "none", 0, exchange
                )
                for r in range(tp)
            }
            case = replace(CASE, tp=tp)
            writer.write_case(case, samples_of(case, ranks))
    return folder
