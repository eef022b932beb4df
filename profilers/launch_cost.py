"""Host time of getting a rebuild, or a main graph, on its way: what each placement leaves on the step's critical path.

Tight: calls follow each other, a few at a time, so that code and data are warm; the first of a burst is left out. Cold:
one call after the device has drained and the host's caches have been walked over, as after a scheduler's work.
Arms take turns, burst by burst. Needs a process that was never traced, see `environment`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .body import BodyShape, DecodeBody
from .causes import frozen_gc
from .clock import Clock, monotonic_ns

Call = Callable[[], None]

NODES = (1, 100, 500, 1000, 3000)
TIGHT, COLD = "tight", "cold"
BURSTS = {TIGHT: 50, COLD: 150}
CALLS = {TIGHT: 10, COLD: 1}
CACHE_BYTES = 16 * 2**20
"""More than a core's own caches."""


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """One arm under one loop. `nodes` is 0 where no graph is launched. Times are of the host, in us."""

    arm: str
    nodes: int
    p50_us: float
    p99_us: float
    loop: str
    n: int


def measure_launches(device: torch.device) -> Iterator[LaunchRow]:
    """Every way to launch trtllm_mha's rebuild (decode, bs 64, page 64, sliding window), and main graphs by size.

    ``fused-eager``, ``fused-glue`` and ``fused-graph`` are the whole hook that a runner calls before its main graph.
    """
    arms, stream, _kept = _arms(device)
    with frozen_gc(), torch.cuda.device(device), torch.cuda.stream(stream):
        for loop in (TIGHT, COLD):
            walked = np.zeros(CACHE_BYTES // 8) if loop == COLD else None

            def drain(walked: np.ndarray | None = walked) -> None:
                torch.cuda.synchronize()
                if walked is not None:
                    walked.sum()

            taken = timed(arms, drain, bursts=BURSTS[loop], calls=CALLS[loop], drop_first=loop == TIGHT)
            for (arm, nodes), us in taken.items():
                p50, p99 = np.percentile(us, (50, 99))
                yield LaunchRow(arm, nodes, round(float(p50), 3), round(float(p99), 3), loop, len(us))


def timed(
    arms: Mapping[tuple[str, int], Call],
    drain: Call,
    *,
    bursts: int,
    calls: int,
    drop_first: bool,
    clock: Clock = monotonic_ns,
) -> dict[tuple[str, int], list[float]]:
    """Host time in us of each call of each arm; `drain` runs, untimed, before each burst of `calls`."""
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in arms}
    for call in arms.values():  # compiles, binds
        for _ in range(3):
            call()
    for _ in range(bursts):
        for key, call in arms.items():
            drain()
            us = []
            for _ in range(calls + drop_first):
                before = clock()
                call()
                us.append((clock() - before) / 1e3)
            taken[key] += us[1:] if drop_first else us
    drain()
    return taken


def _arms(device: torch.device) -> tuple[dict[tuple[str, int], Call], torch.cuda.Stream, object]:
    from .graphs import GraphFactory
    from .measure import CaseBench, MeasureSettings
    from .sample import Case

    factory = GraphFactory(device)
    case = Case("trtllm_mha", "decode", 64, 64, "8192", 64, 131_072, True, graph_nodes=1, device=str(device))
    names = ("fused-eager", "fused-glue", "fused-graph")
    with torch.cuda.device(device), torch.cuda.stream(factory.stream):
        bench = CaseBench(case, MeasureSettings(names, 1, 0), device, factory)
        runners = {name: bench.built[name].runner for name in names}
        for runner in runners.values():
            runner.load_batch(bench.batches[0])
            runner.rebuild()
        arms: dict[tuple[str, int], Call] = {
            (name, int(name == "fused-glue")): runner.rebuild for name, runner in runners.items()
        }
        fused = runners["fused-eager"].backend.forward_metadata.fused
        view = runners["fused-eager"].view
        loc = view.out_cache_loc
        values = (view.req_pool_indices, view.seq_lens, loc, None)
        varying = (view.req_pool_indices, view.seq_lens, loc, loc.shape[0], loc.stride(0))
        arms["prepared launch", 0] = lambda: fused(*values)
        arms["Triton's launcher", 0] = lambda: fused.launch.through_triton(*varying)
        kept = [one := factory()]
        one.capture(lambda: fused(*values))
        arms["one-kernel graph, replay()", 1] = one.replay
        arms["one-kernel graph, raw", 1] = one.launch
        for nodes in NODES:
            kept.append(graph := factory())
            graph.capture(DecodeBody(BodyShape(nodes), device))
            arms["main graph, replay()", nodes] = graph.replay
            arms["main graph, raw", nodes] = graph.launch
    return arms, factory.stream, (bench, kept)  # a raw launch alone would not keep its graph alive
