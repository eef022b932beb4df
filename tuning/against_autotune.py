"""This tuner and `triton.autotune` on the same candidates: time to result, agreement of processes, regret elsewhere.

Each tunes the same captured shape in PROCESSES processes that know nothing of each other, as tensor-parallel ranks
would; those of one tuner share a kernel cache, so the first also compiles. Time to result is wall time from nothing:
start of the process, compiling, measuring. Then all choices are timed side by side on the mix they were chosen for and
on other lengths, beside the best setting found for those.
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from ..profilers.devices import Device
from ..profilers.sample import CASE_COLUMNS, Case
from . import held_out, surrogate
from .child import Child
from .isolated import BENCH, IsolatedBench
from .log import Log
from .session import Session
from .space import Candidate, candidates
from .tuner import tune

PROCESSES = 4
AUTOTUNE_LIMIT_S = 300.0
OURS, TRITON = "attn-graph tune", "triton.autotune"
_NAMED_TARGET = "attn_graph.tuning.against_autotune:AutotuneProcess"


@dataclass(frozen=True, slots=True)
class Row:
    """A choice on one mix of lengths.

    Attributes:
        case: what was tuned.
        seconds: until the choice was there.
        candidate: the choice.
        on: the mix it is timed on.
        p50_us: its device time there, hot.
        fastest_us: of the fastest setting found there.
        regret: share of time lost against that.
    """

    case: Case
    tuner: str
    process: int
    seconds: float
    candidate: str
    on: str
    p50_us: float | None
    fastest_us: float | None
    regret: float | None


COLUMNS = (*CASE_COLUMNS, *(f.name for f in fields(Row) if f.name != "case"))


class Rows:
    """Appends to a CSV; None writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115 (see exit)

    def write(self, row: Row) -> None:
        if self._file is None:
            return
        writer = csv.writer(self._file)
        if not self._file.tell():
            writer.writerow(COLUMNS)
        writer.writerow([*astuple(row.case), *(getattr(row, name) for name in COLUMNS[len(CASE_COLUMNS) :])])
        self._file.flush()

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def compare(case: Case, device: Device, seed: int = 0) -> Iterator[Row]:
    """Both tuners' choices for a case, on its own mix and on held-out ones. Minutes."""
    space = candidates(case)
    choices = [
        (tuner, process, *run)
        for tuner, once in ((TRITON, _by_triton), (OURS, _by_us))
        for process, run in enumerate(_processes(once, case, space, device, seed))
    ]
    with IsolatedBench(BENCH, str(device), variables={"TRITON_INTERPRET": "0"}) as bench:
        for shape in [case, *(other for other in held_out.shapes([case]) if other.bucket == case.bucket)]:
            times = _side_by_side(shape, [candidate for *_, candidate in choices], bench, seed)
            fastest = min(times.values(), default=None)
            for tuner, process, seconds, candidate in choices:
                us = times.get(candidate)
                regret = None if us is None else round(us / fastest - 1, 4)
                yield Row(case, tuner, process, round(seconds, 2), str(candidate), shape.context, us, fastest, regret)


def _processes(once: Any, case: Case, space: Sequence[Candidate], device: Device, seed: int) -> Iterator[tuple]:
    """(seconds, choice) of each process of one tuner, over a kernel cache of their own."""
    with tempfile.TemporaryDirectory(prefix="attn-graph-autotune-") as cache:
        for _ in range(PROCESSES):
            started = time.monotonic()
            choice = once(case, space, device, {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}, seed)
            yield time.monotonic() - started, choice


def _by_triton(case: Case, space: Sequence[Candidate], device: Device, variables: dict, seed: int) -> Candidate:
    with Child(_NAMED_TARGET, str(device), variables=variables) as child:
        return child.call("tune", case, list(space), limit_s=AUTOTUNE_LIMIT_S)


def _by_us(case: Case, space: Sequence[Candidate], device: Device, variables: dict, seed: int) -> Candidate:
    from .static import device_target

    search, target = surrogate.search, device_target(device.index)
    with (
        Log(None) as log,
        Session(
            device, log, target=target, jobs=COMPILERS, search=search, seed=seed, variables=variables, stores=False
        ) as session,
    ):
        (report,) = session.tune([case])
    return report.tuned.choice.winner


COMPILERS = 8


def _side_by_side(shape: Case, chosen: Sequence[Candidate], bench: IsolatedBench, seed: int) -> dict[Candidate, float]:
    """Median hot times of the chosen settings and of the best that is found here."""
    bench.prepare(shape)
    found = tune(candidates(shape), bench, search=surrogate.search, seed=seed)
    best = [found.choice.winner, *found.choice.tied] if found.choice else []
    finals = bench.finals(list(dict.fromkeys([*best, *chosen])))
    return {candidate: round(median(samples), 4) for candidate, samples in finals.hot_us.items()}


# In the child.


class AutotuneProcess:
    """`triton.autotune` on the one launch of a case's fused rebuild."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        torch.set_num_threads(1)
        torch.cuda.set_device(self._device)

    def tune(self, case: Case, space: Sequence[Candidate]) -> Candidate:
        import triton

        from .measure import CaseMeasurer

        measurer = CaseMeasurer(case, self._device)
        kernel, _, args, _ = _launch_of(measurer, space[0])
        grids, configs = {}, []
        for candidate in space:
            _, grid, _, options = _launch_of(measurer, candidate)
            constants = {name: value for name, value in options.items() if name != "num_warps"}
            names = sorted(constants)
            grids[tuple(constants[name] for name in names)] = grid
            configs.append(triton.Config(constants, num_warps=options["num_warps"]))
        tuned = triton.autotune(configs=configs, key=[])(kernel)
        tuned[lambda meta: grids[tuple(meta[name] for name in names)]](*args)
        return space[next(i for i, config in enumerate(configs) if config is tuned.best_config)]


def _launch_of(measurer: Any, candidate: Candidate) -> tuple[Any, tuple[int, ...], tuple, dict[str, Any]]:
    """Kernel, grid, arguments and constants of a rebuild with these block sizes, which is not run."""
    from ..backends.kernels.launch import observed

    seen: list[tuple] = []
    body = measurer.body(candidate)
    with _recorded_runs(seen), observed(lambda run, args: run()):  # an observed launch goes through Triton
        body()
    (launch,) = seen
    return launch


@contextmanager
def _recorded_runs(seen: list[tuple]) -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.append((kernel, grid, args, options))

    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = run
