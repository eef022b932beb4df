"""Made-up runs, written by the real writer: numbers with the shape of real ones, from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from attn_graph.profilers.results import ACROSS_RANKS, RunWriter
from attn_graph.profilers.sample import PREDICTED, Case, Environment, Sample

PREP_US = {
    "aten-eager": 340.0,
    "aten-glue": 9.0,
    "aten-graph": 0.4,
    "compile-eager": 52.0,
    "fused-eager": 40.0,
    "fused-glue": 4.0,
    "fused-graph": 0.35,
}


def environment(**changes) -> Environment:
    machine = {
        "command": ["attn-graph", "bench", "--tp", "4"],
        "started_at": "2030-01-01T00:00:00+00:00",
        "hostname": "bench-1",
        "cpu": "a processor",
        "cores": 16,
        "affinity_cores": 16,
        "load_1m": 0.3,
        "driver": "580.1",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "gpus": [{"name": "NVIDIA H200", "cuda_index": 0}],
        "device": "cuda:0, NVIDIA H200",
        "tp": 4,
    }
    return Environment(**(machine | changes))


def case(bs: int = 8, **changes) -> Case:
    sizes = {
        "backend": "trtllm_mha", "mode": "decode", "bs": bs, "bucket": bs, "context": "8192", "page_size": 64,
        "max_context": 131072, "swa": True, "tp": 4,
    }  # fmt: skip
    return Case(**(sizes | changes))


def samples(
    of: Case,
    arms: Sequence[str] = tuple(PREP_US),
    steps: int = 40,
    slower: float = 1.0,
    failed: Sequence[str] = (),
    seed: int = 0,
) -> Iterator[Sample]:
    """What a run would measure for a case. `slower` scales every prep; `failed` arms did not compile."""
    rng, gpu = np.random.default_rng(seed), of.device == "cuda"

    def device_sample(*where, value: float) -> Sample:
        return Sample(*where, value) if gpu else Sample(*where, None, "no_device")

    for arm in arms:
        if arm in failed:
            yield Sample(arm, ACROSS_RANKS, -1, "prep_host_us", None, "compile_failed", "no C++ compiler found")
            continue
        for rank in range(of.tp):
            dispatches, launches = (28, 20) if arm.startswith("aten") else (1, 1)
            counts = {"dispatches": dispatches, "launches": launches, "syncs": 0, "bit_equal": 1}
            yield from (Sample(arm, rank, -1, metric, float(n)) for metric, n in counts.items())
        for step in range(steps):
            ends = []
            for rank in range(of.tp):
                lag, launch = rng.exponential(0.3), 3 * rng.lognormal(0, 0.1)
                prep = PREP_US[arm] * slower * rng.lognormal(0, 0.05)
                ends.append(lag + prep + launch)
                yield Sample(arm, rank, step, "start_lag_us", lag)
                yield Sample(arm, rank, step, "prep_host_us", prep)
                yield device_sample(arm, rank, step, "launch_host_us", value=launch)
                yield device_sample(arm, rank, step, "prep_device_us", value=1.6 * rng.lognormal(0, 0.02))
                yield device_sample(arm, rank, step, "prep_device_cold_us", value=3.2 * rng.lognormal(0, 0.02))
                yield Sample(arm, rank, step, "launch_end_us", ends[-1])
            if of.tp > 1:
                yield Sample(arm, ACROSS_RANKS, step, "launch_skew_us", max(ends) - min(ends))
                for rank, end in enumerate(ends):
                    yield Sample(arm, rank, step, "first_wait_us", max(ends) - end, source=PREDICTED)
                yield Sample(arm, ACROSS_RANKS, step, "longest_wait_us", max(ends) - min(ends), source=PREDICTED)


def write_run(folder: Path, cases: Sequence[Case], machine: Environment | None = None, **how) -> Path:
    """A finished run of `cases`; `how` goes to `samples`."""
    with RunWriter(folder, machine or environment()) as writer:
        for one in cases:
            writer.write_case(one, samples(one, **how))
    return folder
