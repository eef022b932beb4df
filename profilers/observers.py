"""What watching costs: the same steps bare, under an observer, after it has left, and on graphs captured after that.

Tracing a CUDA graph costs a time per node, and CUPTI, once it has been used in a process, may go on costing a part of
that until the process ends. So each observer gets a process of its own, which is measured before anything looks at it;
what is called bare is never taken in a process that was observed.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .environment import TEARDOWN
from .sample import Case, Sample
from .stats import summarise

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from .graphs import Graph, GraphFactory
    from .measure import BuiltArm, CaseBench
    from .nvtx_ranges import StepRanges
    from .ranks import RankContext

OBSERVERS = {
    "none": "nothing; a control of how far the numbers wander by themselves",
    "nvtx": "NVTX ranges, received by CUPTI where it is found",
    "torch-profiler-cpu": "torch.profiler with CPU activities only",
    "torch-profiler": "torch.profiler with CPU and CUDA activities",
    "cupti": "CUPTI kernel activity records, without torch.profiler",
}
LEAVE_SOMETHING = ("torch-profiler-cpu", "torch-profiler", "cupti")
"""Observers that use CUPTI: measured with and without having it torn down when they leave."""

NEEDS_GPU = ("torch-profiler", "cupti")

BARE, DURING, AFTER, RECAPTURED = PHASES = ("bare", "during", "after", "recaptured")
"""In order. `RECAPTURED`: after the observer has left, on graphs that were captured then."""

NODES = (1, 100, 500, 1000, 2876)
MOST_RECORDED_NODES = 500  # a recorded graph replays in Python: larger ones take long and say nothing more
BRANCHES = (1, 2, 4)
BODY = "body"
"""In place of an arm: the captured body alone, no rebuild."""

WARMUPS = 3
ROUNDS = 20
MOST_TRACED_ROUNDS = 12
"""A traced round of the whole table leaves some 30,000 records of 208 bytes, and PyTorch's profiler stops to record,
silently, when it has 128 MiB of them: what came after would look cheap."""

_SETTLED_ROUNDS = 2  # torch's profiler takes CUPTI down inside a later driver call, not when it ends


@dataclass(frozen=True, slots=True)
class Observation:
    """One process: who observes, and whether CUPTI is torn down when it leaves.

    For torch's profilers that is the variable TEARDOWN_CUPTI=1, set before the process starts, or unset; for ``cupti``
    it is a call of cuptiFinalize, or none.
    """

    observer: str
    teardown: bool = False

    def label(self, phase: str) -> str:
        """As it stands in the `observer` column of samples; a bare step of the control is plainly ``none``."""
        if (self.observer, phase) == ("none", BARE):
            return "none"
        return f"{self.observer}{'+teardown' if self.teardown else ''} {phase}"

    @staticmethod
    def parse(label: str) -> tuple[Observation, str]:
        """Observation and phase of a label."""
        who, _, phase = label.partition(" ")
        name, _, teardown = who.partition("+")
        return Observation(name, bool(teardown)), phase or BARE

    @property
    def title(self) -> str:
        return f"{self.observer}, teardown" if self.teardown else self.observer


def observations(observers: Sequence[str]) -> list[Observation]:
    """The processes that these observers take, control first."""
    ordered = [name for name in OBSERVERS if name in observers]
    return [
        Observation(name, teardown)
        for name in ordered
        for teardown in ((False, True) if name in LEAVE_SOMETHING else (False,))
    ]


@dataclass(frozen=True, slots=True)
class ObserverPlan:
    """What every process measures.

    Attributes:
        cases: measured in each of `arms`: prep, launch and step.
        bodies: cases of whose graph the body alone is launched.
        device: ``cpu`` or ``cuda:N``.
    """

    cases: tuple[Case, ...]
    arms: tuple[str, ...]
    bodies: tuple[Case, ...]
    device: str
    rounds: int = ROUNDS

    @property
    def all_cases(self) -> tuple[Case, ...]:
        return tuple(dict.fromkeys((*self.cases, *self.bodies)))


def body_table(case: Case) -> tuple[Case, ...]:
    """`case` with the node counts and topologies of the table. One node has no branches."""
    return tuple(
        replace(case, graph_nodes=nodes, graph_branches=branches)
        for branches in BRANCHES
        for nodes in NODES
        if nodes >= branches and (case.device != "cpu" or nodes <= MOST_RECORDED_NODES)
    )


def observe_all(
    plan: ObserverPlan, observed: Iterable[Observation], timeout_s: float
) -> Iterator[tuple[Observation, dict[Case, list[Sample]]]]:
    """Each observation with its samples, in a fresh process each, one after the other.

    A process that fails or hangs gives rows without numbers that say so; the others go on.
    """
    from .ranks import RankFailure, run_ranks

    for observation in observed:
        if plan.device == "cpu" and observation.observer in NEEDS_GPU:
            yield observation, _blanks(plan, observation, "no_device", "observes a GPU, and there is none")
            continue
        if plan.device == "cpu" and observation.teardown:
            yield observation, _blanks(plan, observation, "not_applicable", "no CUPTI without a GPU")
            continue
        try:
            with _variable(TEARDOWN, "1" if observation.teardown else None):
                (found,) = run_ranks(1, _observe, (plan, observation), timeout_s=timeout_s)
        except RankFailure as failure:
            found = _blanks(plan, observation, "failed", str(failure))
        yield observation, found


def _blanks(plan: ObserverPlan, observation: Observation, status: str, cause: str) -> dict[Case, list[Sample]]:
    subjects = [(case, arm, "step_host_us") for case in plan.cases for arm in plan.arms]
    subjects += [(case, BODY, "replay_host_us") for case in plan.bodies]
    found: dict[Case, list[Sample]] = {}
    for case, arm, metric in subjects:
        blank = Sample(arm, 0, -1, metric, None, status, cause, observer=observation.label(DURING))
        found.setdefault(case, []).append(blank)
    return found


@contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """An environment variable as a process started inside will find it; None removes it."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


# In the observed process.


@dataclass(frozen=True, slots=True)
class _Subject:
    """One thing that is timed over and over: `once(ranges, round)` gives metric -> us, `ranges` being what it pushes.

    `holds`: what must live as long as its graph, whose kernels write to it.
    """

    case: Case
    arm: str
    once: Callable[[StepRanges, int], dict[str, float]]
    holds: object = None


def _observe(context: RankContext, plan: ObserverPlan, observation: Observation) -> dict[Case, list[Sample]]:
    """The life of an observed process. Returns the samples of each case."""
    import torch

    from .graphs import GraphFactory

    torch.set_num_threads(1)
    device = torch.device(plan.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    factory = GraphFactory(device)
    stream = torch.cuda.stream(factory.stream) if factory.stream is not None else nullcontext()
    found: dict[Case, list[Sample]] = {case: [] for case in plan.all_cases}
    with stream:
        context.announce(observation.title)
        arms, blanks = _arm_subjects(plan, device, factory)
        for case, blank in blanks:
            found[case].append(replace(blank, observer=observation.label(DURING)))
        subjects = [*arms, *_body_subjects(plan, device, factory)]

        def keep(phase: str, these: list[_Subject], nvtx: bool = False, cause: str = "") -> None:
            rounds = min(plan.rounds, MOST_TRACED_ROUNDS) if phase == DURING else plan.rounds
            for case, sample in _time(these, rounds, nvtx):
                found[case].append(replace(sample, observer=observation.label(phase), cause=cause))

        keep(BARE, subjects)
        try:
            with _watching(observation) as state:
                keep(DURING, subjects, nvtx=observation.observer == "nvtx", cause=state())
        except CuptiError as error:
            for case, blanks in _blanks(plan, observation, "unsupported", str(error)).items():
                found[case] += blanks
            return found
        for _ in _time(subjects, _SETTLED_ROUNDS, nvtx=False):
            pass
        keep(AFTER, subjects)
        keep(RECAPTURED, list(_body_subjects(plan, device, factory)))
    return found


def _time(subjects: Sequence[_Subject], rounds: int, nvtx: bool) -> Iterator[tuple[Case, Sample]]:
    """`rounds` of each subject in turn, so that a slow phase of the host meets all of them; warm-ups not kept."""
    from .causes import frozen_gc
    from .nvtx_ranges import StepRanges

    ranges = [StepRanges(s.case.backend, s.case.mode, s.arm, enabled=nvtx) for s in subjects]
    kept = []
    with frozen_gc():
        for n in range(-WARMUPS, rounds):
            for subject, pushed in zip(subjects, ranges, strict=True):
                times = subject.once(pushed, n % 16)
                if n >= 0:
                    kept.append((subject, n, times))
    for subject, n, times in kept:
        for metric, value in times.items():
            yield subject.case, Sample(subject.arm, 0, n, metric, value)


def _arm_subjects(
    plan: ObserverPlan, device: torch.device, factory: GraphFactory
) -> tuple[list[_Subject], list[tuple[Case, Sample]]]:
    """The arms of each case, and a row without a number for each that cannot be built or timed here."""
    from ..backends.modes import Implementation
    from .measure import CaseBench, MeasureSettings

    host_real = (Implementation.ATEN, Implementation.COMPILE)
    subjects, blanks = [], []
    for case in plan.cases:
        bench = CaseBench(case, MeasureSettings(plan.arms, plan.rounds, WARMUPS), device, factory)
        for name, failed in bench.failed.items():
            blanks.append((case, Sample(name, 0, -1, "step_host_us", None, failed.status, failed.detail)))
        for name, built in bench.built.items():
            interpreted = device.type == "cpu" and built.arm.implementation not in host_real
            if bench.prep_is_real(built) and not interpreted:
                subjects.append(_Subject(case, name, _step_timer(bench, built)))
            else:
                why = "the time of an interpreted kernel or graph means nothing"
                blanks.append((case, Sample(name, 0, -1, "step_host_us", None, "no_device", why)))
    return subjects, blanks


def _step_timer(bench: CaseBench, built: BuiltArm) -> Callable[[StepRanges, int], dict[str, float]]:
    """A step as `bench` times it, without other ranks to wait for."""
    from .clock import monotonic_ns as clock
    from .measure import timed_window

    runner = built.runner
    graph = runner.graphs[bench.case.bucket]
    has_launch = graph.kind == "cuda"  # a recorded graph replays in Python: that is no launch

    def once(ranges: StepRanges, n: int) -> dict[str, float]:
        runner.load_batch(bench.batches[n % len(bench.batches)])
        rebuild, launch = runner.rebuild, runner.launch
        bench.drain()
        started, before, prepared, launching, launched = timed_window(ranges, rebuild, launch)
        ended = clock()
        bench.drain()
        times = {"prep_host_us": (prepared - before) / 1e3, "step_host_us": (ended - started) / 1e3}
        if has_launch:
            times["launch_host_us"] = (launched - launching) / 1e3
            replaying = clock()
            graph.replay()
            times["replay_host_us"] = (clock() - replaying) / 1e3
            bench.drain()
        else:
            times["replay_host_us"] = (launched - launching) / 1e3
        return times

    return once


def _body_subjects(plan: ObserverPlan, device: torch.device, factory: GraphFactory) -> Iterator[_Subject]:
    from .body import BodyShape, DecodeBody

    for case in plan.bodies:
        graph = factory()
        body = DecodeBody(BodyShape(case.graph_nodes, case.graph_branches, case.allreduce_at), device)
        graph.capture(body)
        yield _Subject(case, BODY, _graph_timer(graph, device), body)


def _graph_timer(graph: Graph, device: torch.device) -> Callable[[StepRanges, int], dict[str, float]]:
    from .clock import monotonic_ns as clock

    def drain() -> None:
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)

    def timed(call: Callable[[], None], ranges: StepRanges) -> float:
        drain()
        before = clock()
        ranges.push_launch()
        call()
        ranges.pop()
        return (clock() - before) / 1e3

    def once(ranges: StepRanges, n: int) -> dict[str, float]:
        times = {"replay_host_us": timed(graph.replay, ranges)}
        if graph.kind == "cuda":
            times["launch_host_us"] = timed(graph.launch, ranges)
        drain()
        return times

    return once


# Observers.


@contextmanager
def _watching(observation: Observation) -> Iterator[Callable[[], str]]:
    """The observer at work. Yields a function that says what it is seen to do; blank if it cannot tell."""
    name = observation.observer
    if name == "nvtx":
        library = cupti_library()
        # Read by NVTX at the first call into it, which is yet to come in this process.
        if library is not None and not os.environ.get("NVTX_INJECTION64_PATH"):
            os.environ["NVTX_INJECTION64_PATH"] = str(library)
        from .nvtx_ranges import range_state

        yield lambda: f"ranges are {range_state()}"
    elif name.startswith("torch-profiler"):
        from torch.profiler import ProfilerActivity, profile

        gpu = [ProfilerActivity.CUDA] if name == "torch-profiler" else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]):
            yield str
    elif name == "cupti":
        with kernel_activity(teardown=observation.teardown):
            yield str
    else:
        yield str


class CuptiError(RuntimeError):
    """CUPTI is not there, or a call of it failed; names the call and its code."""


_CONCURRENT_KERNEL = 10  # CUpti_ActivityKind
_BUFFER_BYTES = 8 << 20
_FLUSH_FORCED = 1
_REQUESTED = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


def cupti_library(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """libcupti as this process has it loaded (PyTorch links it), else as a wheel or a toolkit installed it."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    loaded = [Path(line[line.index("/") :]) for line in lines if "/libcupti.so" in line]
    if loaded:
        return loaded[0]
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "extras" / "CUPTI" / "lib64"
    found = [*sorted(wheels.glob("*/lib/libcupti.so*")), *sorted(toolkit.glob("libcupti.so*"))]
    return found[0] if found else None


@contextmanager
def kernel_activity(*, teardown: bool) -> Iterator[Callable[[], int]]:
    """CUPTI records every kernel of this process. Yields a function: bytes of records delivered so far.

    Needs a CUDA context. Once only in a process, and not while another profiler uses CUPTI.

    Args:
        teardown: call cuptiFinalize at the end, which detaches CUPTI from the process; otherwise only disable.

    Raises:
        CuptiError: no libcupti, it refuses, or it delivered no record at all.
    """
    path = cupti_library()
    if path is None:
        raise CuptiError("libcupti was not found. Install nvidia-cuda-cupti, or the CUDA toolkit and set CUDA_HOME")
    library = ctypes.CDLL(str(path))
    buffers: dict[int, ctypes.Array] = {}
    delivered = [0]

    @_REQUESTED
    def requested(buffer, size, most_records) -> None:
        memory = ctypes.create_string_buffer(_BUFFER_BYTES + 8)
        address = (ctypes.addressof(memory) + 7) & ~7  # CUPTI wants records 8-byte aligned
        buffers[address] = memory
        buffer[0], size[0], most_records[0] = address, _BUFFER_BYTES, 0

    @_COMPLETED
    def completed(context, stream, buffer, size, valid) -> None:
        delivered[0] += valid
        buffers.pop(buffer, None)

    def call(name: str, *arguments) -> None:
        code = getattr(library, name)(*arguments)
        if code:
            raise CuptiError(f"{name} failed with code {code} ({path})")

    call("cuptiActivityRegisterCallbacks", requested, completed)
    call("cuptiActivityEnable", _CONCURRENT_KERNEL)
    # CUPTI may call back until the process ends.
    _KEPT_FOR_CUPTI.extend((requested, completed))
    try:
        yield lambda: delivered[0]
    finally:
        call("cuptiActivityFlushAll", ctypes.c_uint32(_FLUSH_FORCED))
        call("cuptiActivityDisable", _CONCURRENT_KERNEL)
        if teardown:
            call("cuptiFinalize")
    if not delivered[0]:
        raise CuptiError(f"CUPTI was switched on and delivered no record ({path})")


_KEPT_FOR_CUPTI: list = []


# What was found.


@dataclass(frozen=True, slots=True)
class ObserverRow:
    """One row of observer.csv: a metric of a case and arm in one observed process, medians in us.

    Attributes:
        arm: an arm's name, or ``body`` for the captured body alone.
        graph: ``cuda``, or ``recorded`` for the stand-in on a machine without a GPU.
        teardown: whether CUPTI was torn down when the observer left, see `Observation`.
        n: rounds in each phase; `DURING` has at most `MOST_TRACED_ROUNDS`.
        *_us: p50, and p99 where the name says so; blank where there is no number.
        *_factor: median over the median bare, of the same process.
        status, cause: why numbers are blank; for ``nvtx`` the cause says whether a tool received the ranges.
    """

    case: str
    arm: str
    graph_nodes: int
    graph_branches: int
    graph: str
    metric: str
    observer: str
    teardown: bool
    n: int
    bare_us: float | None
    during_us: float | None
    after_us: float | None
    recaptured_us: float | None
    bare_p99_us: float | None
    during_p99_us: float | None
    after_p99_us: float | None
    recaptured_p99_us: float | None
    during_factor: float | None
    after_factor: float | None
    status: str
    cause: str


@dataclass(frozen=True, slots=True)
class LaunchFit:
    """One row of observer_fit.csv: launch time of the body = fixed + per node, least squares over the node counts.

    Attributes:
        metric: ``launch_host_us`` (the driver's call) or ``replay_host_us`` (PyTorch's).
        points: node counts it rests on, one median each.
        *_stderr_us: standard errors; blank with fewer than three points.
    """

    graph: str
    graph_branches: int
    metric: str
    observer: str
    teardown: bool
    phase: str
    points: int
    fixed_us: float
    fixed_stderr_us: float | None
    per_node_us: float
    per_node_stderr_us: float | None
    r_squared: float


def observer_rows(samples: pd.DataFrame) -> list[ObserverRow]:
    """From the samples of a run, as `results.read_samples` gives them."""
    from .results import cases_in

    return [
        _observer_row(case, arm, metric, Observation(name, teardown), of_process)
        for case, rows in cases_in(samples)
        for (arm, metric, name, teardown), of_process in _by_process(rows).groupby(
            ["arm", "metric", "_name", "_teardown"], sort=False, observed=True
        )
    ]


def _by_process(rows: pd.DataFrame) -> pd.DataFrame:
    """Samples with columns for observer, teardown and phase, from the label they carry."""
    parsed = {label: Observation.parse(label) for label in rows["observer"].unique()}
    labels = rows["observer"].astype(str)
    return rows.assign(
        _name=labels.map({label: who.observer for label, (who, _) in parsed.items()}),
        _teardown=labels.map({label: who.teardown for label, (who, _) in parsed.items()}),
        _phase=labels.map({label: phase for label, (_, phase) in parsed.items()}),
    )


def _observer_row(case: Case, arm: str, metric: str, who: Observation, rows: pd.DataFrame) -> ObserverRow:
    figures: dict[str, float | None] = {}
    measured = rows[rows["status"] == "ok"]
    for phase in PHASES:
        found = summarise(measured.loc[measured["_phase"] == phase, "value"])
        figures |= {f"{phase}_us": _rounded(found.p50), f"{phase}_p99_us": _rounded(found.p99)}
    blank = rows[rows["status"] != "ok"]
    seen = rows.loc[rows["_phase"] == DURING, "cause"].unique()
    return ObserverRow(
        case=case.title, arm=arm, graph_nodes=case.graph_nodes, graph_branches=case.graph_branches,
        graph="recorded" if case.device == "cpu" else "cuda", metric=metric, observer=who.observer,
        teardown=who.teardown, n=int((measured["_phase"] == BARE).sum()),
        during_factor=_factor(figures["during_us"], figures["bare_us"]),
        after_factor=_factor(figures["after_us"], figures["bare_us"]),
        status="ok" if blank.empty else str(blank["status"].iloc[0]), cause="; ".join(filter(None, map(str, seen))),
        **figures,
    )  # fmt: skip


def launch_fits(rows: Iterable[ObserverRow]) -> list[LaunchFit]:
    """Fixed and per-node cost of launching the body, for each process, phase and number of branches."""
    series: dict[tuple, dict[int, float]] = {}
    for row in rows:
        if row.arm != BODY:
            continue
        for phase in PHASES:
            median = getattr(row, f"{phase}_us")
            if median is not None:
                key = (row.graph, row.graph_branches, row.metric, row.observer, row.teardown, phase)
                series.setdefault(key, {})[row.graph_nodes] = median
    return [LaunchFit(*key, *fit_line(points)) for key, points in series.items() if len(points) >= 2]


def fit_line(us_by_nodes: dict[int, float]) -> tuple[int, float, float | None, float, float | None, float]:
    """points, fixed, its standard error, per node, its standard error, r squared. At least two points."""
    from scipy.stats import linregress

    fit = linregress(list(us_by_nodes), list(us_by_nodes.values()))
    n = len(us_by_nodes)
    errors = (float(fit.intercept_stderr), float(fit.stderr)) if n > 2 else (None, None)
    return n, float(fit.intercept), errors[0], float(fit.slope), errors[1], float(fit.rvalue) ** 2


def launch_cost(device: str = "cuda", rounds: int = 30) -> tuple[float, float]:
    """What a graph launch costs in this process now: (fixed, per node), us, through the driver.

    A process that CUPTI has been used in shows it here: per node it pays 0.2 us and more, where 0.01 is usual. Takes
    about a second, a few MB of device memory, and synchronises the device.
    """
    import torch

    from .body import BodyShape, DecodeBody
    from .graphs import GraphFactory

    where = torch.device(device)
    factory = GraphFactory(where)
    medians = {}
    with torch.cuda.stream(factory.stream):
        for nodes in (1, 250, 1000):
            graph, body = factory(), DecodeBody(BodyShape(nodes), where)  # the body holds what the graph writes to
            graph.capture(body)
            medians[nodes] = summarise([_launch_us(graph, where) for _ in range(rounds)][WARMUPS:]).p50
    _, fixed_us, _, per_node_us, _, _ = fit_line(medians)
    return fixed_us, per_node_us


def _launch_us(graph: Graph, device: torch.device) -> float:
    import torch

    from .clock import monotonic_ns as clock

    torch.cuda.synchronize(device)
    before = clock()
    graph.launch()
    return (clock() - before) / 1e3


def _factor(us: float | None, bare_us: float | None) -> float | None:
    return round(us / bare_us, 3) if us is not None and bare_us else None


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)
