"""This tuner and `triton.autotune` on the same candidates: time to result, agreement of processes, regret elsewhere.

Each tunes the same captured shape in PROCESSES processes that know nothing of each other, as tensor-parallel ranks
would. All start at once and tune one after the other, so that none disturbs the times of another; those of one tuner
share a kernel cache, so the first also compiles. Time to result is wall time from nothing: start of the process,
compiling, measuring. Then all choices are timed side by side on the mix they were chosen for and on other lengths,
beside the best setting found for those.
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from ..profilers.devices import Device
from ..profilers.sample import CASE_COLUMNS, Case
from . import held_out, surrogate
from .child import Child
from .isolated import BENCH, IsolatedBench
from .random_order import shuffled
from .space import Candidate, candidates
from .tuner import tune

PROCESSES = 4
MOST_CANDIDATES = 12
AUTOTUNE_LIMIT_S = 300.0
OURS, TRITON = "attn-graph tune", "triton.autotune"
Answer = tuple[Candidate, Sequence[Candidate]]
"""A choice, and what is as good."""
_NAMED_TARGET = "attn_graph.tuning.against_autotune:AutotuneProcess"


@dataclass(frozen=True, slots=True)
class Row:
    """A choice on one mix of lengths.

    Attributes:
        case: what was tuned.
        seconds: until the choice was there.
        candidate: the choice.
        tied: what it says is as good, joined by |; `triton.autotune` says nothing.
        on: the mix it is timed on; blank, with what follows, in the row that is written when the choice is made.
        p50_us: its device time there, hot.
        fastest_us: of the fastest setting found there.
        regret: share of time lost against that.
    """

    case: Case
    tuner: str
    process: int
    seconds: float
    candidate: str
    tied: str
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
    """Both tuners' choices for a case, as they are made, then on its own mix and on held-out ones. About a minute."""
    space = some(candidates(case), seed)
    choices = []
    with tempfile.TemporaryDirectory(prefix="attn-graph-autotune-") as folder, ExitStack() as ended:
        started = _started(str(device), folder, ended)
        for tuner, process, start_s, tuning in started:
            begun = time.monotonic()
            candidate, tied = tuning.tune(case, space, seed)
            seconds = round(start_s + time.monotonic() - begun, 2)
            tuning.close()  # before the next one is timed
            told = (tuner, process, seconds, str(candidate), " | ".join(map(str, tied)))
            choices.append((told, candidate))
            yield Row(case, *told, "", None, None, None)
        variables = _variables(folder, OURS)
        bench = ended.enter_context(IsolatedBench(BENCH, str(device), variables=variables))
        for shape in [case, *(other for other in held_out.shapes([case]) if other.bucket == case.bucket)]:
            times = _side_by_side(shape, space, [candidate for _, candidate in choices], bench)
            fastest = min(times.values(), default=None)
            for told, candidate in choices:
                us = times.get(candidate)
                regret = None if us is None else round(us / fastest - 1, 4)
                yield Row(case, *told, shape.context, us, fastest, regret)


def agreeing(rows: Sequence[Row]) -> int:
    """How many of one tuner's processes chose, or said to be as good, the setting that most of them did."""
    answers = {row.process: {row.candidate, *filter(None, row.tied.split(" | "))} for row in rows}
    return max(Counter(setting for answer in answers.values() for setting in answer).values(), default=0)


def some(space: Sequence[Candidate], seed: int) -> list[Candidate]:
    """The default and a sample of the others in the space's order: compiling all takes a process half a minute."""
    taken = set(shuffled(space, seed)[:MOST_CANDIDATES])
    return [candidate for candidate in space if candidate in taken]


def _started(device: str, folder: str, ended: ExitStack) -> list[tuple[str, int, float, Any]]:
    """(tuner, process, seconds it took, the process) of all processes, which start at once and wait for their turn."""

    def start(tuner: str, process: int) -> tuple[str, int, float, Any]:
        begun = time.monotonic()
        tuning = TUNERS[tuner](device, _variables(folder, tuner))
        ended.callback(tuning.close)
        return tuner, process, time.monotonic() - begun, tuning

    with ThreadPoolExecutor(len(TUNERS) * PROCESSES) as threads:
        return list(threads.map(start, *zip(*product(TUNERS, range(PROCESSES)), strict=True)))


def _variables(folder: str, tuner: str) -> dict[str, str]:
    """A kernel cache for each tuner, so that the first process of each compiles."""
    return {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": f"{folder}/{tuner.replace(' ', '-')}"}


class _ByTriton:
    """`triton.autotune` in a process of its own."""

    def __init__(self, device: str, variables: dict[str, str]) -> None:
        self._child = Child(_NAMED_TARGET, device, variables=variables)

    def tune(self, case: Case, space: Sequence[Candidate], seed: int) -> Answer:
        return self._child.call("tune", case, list(space), limit_s=AUTOTUNE_LIMIT_S), ()

    def close(self) -> None:
        self._child.close()


class _ByUs:
    """This tuner in a process of its own, which compiles what it measures, as the other one's does."""

    def __init__(self, device: str, variables: dict[str, str]) -> None:
        self._bench = IsolatedBench(BENCH, device, variables=variables)
        self._bench.start()

    def tune(self, case: Case, space: Sequence[Candidate], seed: int) -> Answer:
        self._bench.prepare(case)
        choice = tune(space, self._bench, search=surrogate.search, seed=seed).choice
        return (choice.winner, choice.tied) if choice else (space[0], ())

    def close(self) -> None:
        self._bench.close()


TUNERS = {TRITON: _ByTriton, OURS: _ByUs}


def _side_by_side(
    shape: Case, space: Sequence[Candidate], chosen: Sequence[Candidate], bench: IsolatedBench
) -> dict[Candidate, float]:
    """Median hot times of the chosen settings and of the two that are fastest here, roughly timed."""
    bench.prepare(shape)
    rough = [outcome for outcome in map(bench.rough, space) if outcome.median_us and not outcome.cause]
    best = [outcome.candidate for outcome in sorted(rough, key=lambda outcome: outcome.median_us)[:2]]
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
