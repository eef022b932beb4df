"""What one rank does with a case: build every arm on the same inputs, prove them equal, then time them step by step.

Arms alternate within each step, in an order that rotates, and every step starts from the ranks' common deadline.
Nothing synchronises inside a timed window; the device is drained and the inputs are filled between windows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..backends.base import AttentionBackend, AttentionConfig, ConfigError
from ..backends.batch import (
    BatchShape,
    LiveBatch,
    Pools,
    context_lengths,
    draft_room,
    idle_batch,
    live_batch,
    make_pools,
    parse_context,
)
from ..backends.modes import Arm, ForwardMode, Implementation, Placement
from ..backends.registry import lookup
from ..backends.runners.decode import DecodeRunner, StaticSlots, StepInputs, upload
from ..backends.tunable import KERNELS
from .agreement import replay_and_compare
from .barrier import solitary_barrier
from .body import BodyShape, DecodeBody
from .causes import StepCauses, attribute, frozen_gc
from .clock import monotonic_ns
from .counters import count
from .environment import attached_tracer
from .exchange import FirstAllReduce, no_skew_us
from .gpu_state import GpuState, GpuWatch, watch_gpu
from .graphs import CaptureError, GraphFactory, RecordedGraph
from .inject import INJECTED, Injection
from .nvtx_ranges import StepRanges
from .ranks import RankContext
from .sample import Case, Sample
from .shapes import added_tokens, batch_limits, slots_per_token, steps_at_once, tokens_per_request

DISTINCT_BATCHES = 16
"""Live batches that the steps cycle through; lengths grow by a token each, so page edges are crossed."""

REPLAYS_THROUGH_WRAPPER = 50

STEPS_ALONE = 50
"""Enough for the median that sharing a device is told by."""


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """How to measure, the same for every case of a run.

    Attributes:
        arms: what to compare, by name.
        steps: timed steps per arm.
        warmup: steps before them, collective too.
        nvtx: whether ranges are pushed.
        kernel_configs: `Case.key` -> tuned block sizes, where there are any.
        injection: a delay to add on purpose, between rebuild and launch.
    """

    arms: tuple[str, ...]
    steps: int
    warmup: int
    nvtx: bool = True
    kernel_configs: dict[str, dict[str, int]] = field(default_factory=dict)
    injection: Injection | None = None

    @property
    def launches(self) -> int:
        """Graph launches of all arms of a case, warm-up included."""
        return (self.warmup + self.steps) * len(self.arms)


@dataclass(frozen=True, slots=True)
class ArmTimes:
    """What one rank saw of one arm. Arrays are [steps] float64, microseconds from the rank's common start.

    `causes_*` name what slowed a slow step, or are empty. `status` other than ok: the arm could not be built, `detail`
    says why, and the arrays are empty. `prep_is_real`: no part of the rebuild was interpreted or replayed by the CPU
    stand-ins of kernels and graphs, whose times mean nothing. `wait_us`: in the first all-reduce, by the clock of the
    device; empty where ranks share one. `injected_us`: delay added, NaN at steps that delayed another rank. `alone_us`:
    host time of whole steps while the other ranks rest, where ranks share a device. `gpu`: state of the device at the
    end of a step, None where it was not asked; empty on ranks that do not watch it.
    """

    status: str = "ok"
    detail: str = ""
    lag_us: np.ndarray = field(default_factory=lambda: np.zeros(0))
    prep_us: np.ndarray = field(default_factory=lambda: np.zeros(0))
    launch_us: np.ndarray = field(default_factory=lambda: np.zeros(0))
    end_us: np.ndarray = field(default_factory=lambda: np.zeros(0))
    prep_is_real: bool = True
    causes_prep: tuple[str, ...] = ()
    causes_launch: tuple[str, ...] = ()
    wait_us: np.ndarray = field(default_factory=lambda: np.zeros(0))
    injected_us: np.ndarray = field(default_factory=lambda: np.zeros(0))
    alone_us: np.ndarray = field(default_factory=lambda: np.zeros(0))
    gpu: tuple[GpuState | None, ...] = ()


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """One rank's part of one case; `once` holds what needs no ranks (counts, device times, equality), on rank 0.

    `observer` names the tracer that was attached, or is ``none``. `host`: where the rank ran. `exchange_us`: what the
    first all-reduce takes without skew; empty where ranks share a device.
    """

    case_index: int
    arms: dict[str, ArmTimes]
    once: list[Sample]
    observer: str = "none"
    host: int = 0
    exchange_us: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass(slots=True)
class BuiltArm:
    """An arm ready to run."""

    arm: Arm
    backend: AttentionBackend
    runner: DecodeRunner


def attention_config(case: Case, kernel_config: dict[str, int] | None = None) -> AttentionConfig:
    """The fixed part of a case, as a backend wants it."""
    extra = {}
    if kernel_config:
        extra["kernel_config"] = KERNELS[case.backend].config_of(kernel_config)
    return AttentionConfig(
        page_size=case.page_size,
        max_context=case.max_context,
        draft_tokens=case.draft_tokens,
        topk=case.topk,
        draft_steps=case.draft_steps,
        step_id=case.step_id,
        max_requests=case.bucket,
        extra=extra,
    )


def batch_shape(case: Case) -> BatchShape:
    """What bounds the lengths of a case's batches."""
    minimum, _ = batch_limits(case)
    return BatchShape(
        mode=ForwardMode(case.mode),
        bucket=case.bucket,
        page_size=case.page_size,
        max_context=case.max_context,
        tokens_per_req=tokens_per_request(case),
        reserve=added_tokens(case),
        minimum=minimum,
        topk=case.topk,
        draft_steps=steps_at_once(case),
    )


def case_width(case: Case) -> int:
    """Columns of req_to_token: room for the context and for what drafts add."""
    branches = draft_room(case.topk, case.draft_steps, case.page_size) if case.topk > 1 and case.draft_steps else 0
    return case.max_context + max(case.draft_tokens, case.draft_steps, branches) + 4


def case_pools(case: Case, device: torch.device | str) -> Pools:
    """The tables of a case: a row for each request."""
    return make_pools(
        rows=case.bucket + 1,
        width=case_width(case),
        page_size=case.page_size,
        swa=case.swa,
        seed=case.seed,
        device=device,
    )


def case_batches(case: Case, pools: Pools) -> list[LiveBatch]:
    """The live batches that the steps of a case cycle through; the same on every rank."""
    shape, rng = batch_shape(case), np.random.default_rng(case.seed)
    if shape.mode is ForwardMode.IDLE:
        return [idle_batch()]
    base = context_lengths(parse_context(case.context), case.bs, shape.limit, rng)
    rows = 1 + rng.permutation(case.bucket)[: case.bs]
    return [
        live_batch(
            shape.mode,
            np.clip(base + i, shape.minimum, shape.limit),
            rows,
            pools,
            shape.tokens_per_req,
            rng,
            topk=case.topk,
            draft_steps=shape.draft_steps,
            page_size=case.page_size,
        )
        for i in range(DISTINCT_BATCHES)
    ]


def refusal(case: Case) -> str:
    """Why the backend of `case` cannot do it, in its own words; blank if it can.

    Asks a backend with one request on the host: page sizes, modes and table widths are refused alike for any batch.
    """
    one = replace(case, bs=min(case.bs, 1), bucket=1, seed=0)
    width = case_width(case)
    table = torch.zeros(2, width, dtype=torch.int32)
    window = torch.zeros(2 * width + 1, dtype=torch.int64) if case.swa else None
    pools = Pools(table, window, state_slots=torch.zeros(2, dtype=torch.int32))
    shape, make = batch_shape(one), lookup(case.backend).load()
    slots = StaticSlots(
        1, shape.tokens_per_req, make.seq_len_fill_value, "cpu",
        mask_context=case.max_context if case.topk > 1 else 0, slots_per_token=slots_per_token(case),
    )  # fmt: skip
    try:
        backend = make(attention_config(one), pools, Implementation.ATEN, recorded=True)
        runner = DecodeRunner(backend, shape.mode.captured, [1], slots, Placement.GRAPH, RecordedGraph)
        backend.bind(runner.capture_batch(1))
    except ConfigError as error:
        return str(error)
    return ""


class CaseBench:
    """One rank's arms of one case, on shared inputs. `exchange` is the first all-reduce, where ranks can meet."""

    def __init__(
        self,
        case: Case,
        settings: MeasureSettings,
        device: torch.device,
        factory: GraphFactory,
        exchange: FirstAllReduce | None = None,
        gpu: GpuWatch | None = None,
    ) -> None:
        self.case, self.settings, self.device, self.exchange = case, settings, device, exchange
        self.gpu = gpu
        self.shape = batch_shape(case)
        self.pools = case_pools(case, device)
        self.batches = [upload(live, device) for live in case_batches(case, self.pools)]
        self.slots = StaticSlots(
            case.bucket,
            self.shape.tokens_per_req,
            lookup(case.backend).load().seq_len_fill_value,
            device,
            mask_context=case.max_context if case.topk > 1 else 0,
            slots_per_token=slots_per_token(case),
        )
        self._factory = factory
        self._body = DecodeBody(BodyShape(case.graph_nodes, case.graph_branches, case.allreduce_at), device, exchange)
        self.built: dict[str, BuiltArm] = {}
        self.failed: dict[str, ArmTimes] = {}
        for name in settings.arms:
            self._build(name)

    def _build(self, name: str) -> None:
        """Build an arm; one that cannot be built is a row with a reason, and the others go on."""
        arm = Arm.parse(name)
        config = attention_config(self.case, self.settings.kernel_configs.get(self.case.key))
        make = lookup(self.case.backend).load()
        try:
            backend = make(config, self.pools, arm.implementation, recorded=arm.placement is not Placement.EAGER)
            runner = DecodeRunner(
                backend,
                self.shape.mode.captured,
                [self.case.bucket],
                self.slots,
                arm.placement,
                self._factory,
                self._body,
            )
            runner.capture()
            runner.load_batch(self.batches[0])
            runner.replay()
        except ConfigError as error:
            self.failed[name] = ArmTimes("unsupported", str(error))
        except CaptureError as error:
            self.failed[name] = ArmTimes("capture_failed", str(error))
        except Exception as error:
            # Compilers fail in ways of their own (no C++ compiler, an unsupported Python); nothing else may fail here.
            if arm.implementation is not Implementation.COMPILE:
                raise
            self.failed[name] = ArmTimes("compile_failed", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            self.built[name] = BuiltArm(arm, backend, runner)

    def drain(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(self) -> list[Sample]:
        """Each arm against the oracle on poisoned buffers: 1 where every cell is as it must be, else 0."""
        found = []
        for name, built in self.built.items():
            wrong = [
                str(w)
                for seed, step in enumerate((self.batches[0], self.batches[-1]))
                for w in replay_and_compare(built.runner, step, seed)
            ]
            found.append(Sample(name, 0, -1, "bit_equal", float(not wrong), cause="; ".join(wrong)))
        return found

    def counts(self) -> list[Sample]:
        """Dispatches, launches and synchronisations of one rebuild of each arm."""
        found = []
        for name, built in self.built.items():
            if built.arm.implementation is Implementation.COMPILE:
                # Counting dispatches switches compiled code off: there is nothing true to report.
                found += [Sample(name, 0, -1, m, None, "not_applicable") for m in ("dispatches", "launches", "syncs")]
                continue
            built.runner.load_batch(self.batches[0])
            seen = count(built.runner.rebuild, [self.slots.seq_lens_cpu])
            self.drain()
            for metric in ("dispatches", "launches", "syncs"):
                found.append(Sample(name, 0, -1, metric, float(getattr(seen, metric))))
        return found

    def device_times(self) -> list[Sample]:
        """Device time of each arm's rebuild, hot and cold; blank without a GPU."""
        found = []
        for name, built in self.built.items():
            if self.device.type != "cuda":
                found += [Sample(name, 0, -1, m, None, "no_device") for m in ("prep_device_us", "prep_device_cold_us")]
                continue
            from .device_time import eager_device_us, marginal_us

            built.runner.load_batch(self.batches[0])
            if built.arm.placement is Placement.EAGER:
                eager = eager_device_us(built.runner.rebuild, device=self.device)
                found += _device_samples(name, "prep_device_us", eager.values, eager.status, eager.cause)
                found += _device_samples(name, "prep_device_cold_us", (), "not_applicable", "timed hot only")
                continue
            batch = built.runner.capture_batch(self.case.bucket)
            built.backend.init_forward_metadata_out_graph(batch)

            def body(backend=built.backend, batch=batch) -> None:
                backend.init_forward_metadata_in_graph(batch)

            for metric, cold in (("prep_device_us", False), ("prep_device_cold_us", True)):
                found += _device_samples(name, metric, marginal_us(body, device=self.device, cold=cold))
        return found

    def prep_is_real(self, built: BuiltArm) -> bool:
        """Whether the host time of this arm's rebuild is what it would be with a GPU behind it."""
        if self.device.type == "cuda" or built.arm.implementation is Implementation.COMPILE:
            return True
        built.runner.load_batch(self.batches[0])
        seen = count(built.runner.rebuild, [self.slots.seq_lens_cpu])
        return seen.triton == seen.graphs == 0

    def time_steps(self, context: RankContext) -> dict[str, ArmTimes]:
        """Warm up together, then time every arm at every step."""
        timers = self._run_steps(context, self.settings.warmup + self.settings.steps)
        found = {}
        for name, timer in timers.items():
            built, times = self.built[name], timer.result(self.settings.warmup)
            real = self.prep_is_real(built)
            if self.device.type != "cuda" and not (real and built.arm.placement is Placement.EAGER):
                # Stand-ins of kernels and graphs ran before the all-reduce: how late a rank came to it means nothing.
                times = replace(times, wait_us=np.zeros(0))
            found[name] = replace(times, prep_is_real=real)
        return found

    def time_alone(self, context: RankContext) -> dict[str, np.ndarray]:
        """Host time of whole steps, [steps] us by arm, with the other ranks at rest: what sharing a device costs."""
        alone = replace(context, barrier=solitary_barrier())
        timers = self._run_steps(alone, self.settings.warmup + min(self.settings.steps, STEPS_ALONE))
        found = {n: timer.result(self.settings.warmup) for n, timer in timers.items()}
        return {n: times.end_us - times.lag_us for n, times in found.items()}

    def _run_steps(self, context: RankContext, steps: int) -> dict[str, _StepTimer]:
        """Every arm at every step, in an order that rotates, from common starts."""
        names = list(self.built)
        if not names:
            return {}
        timers = {n: _StepTimer(self, self.built[n], context) for n in names}
        if self.exchange is not None:
            self.exchange.arm()
            context.barrier.wait()
        with ExitStack() as stack:
            for timer in timers.values():
                stack.enter_context(timer.causes)
            stack.enter_context(frozen_gc())
            for step in range(steps):
                inputs = self.batches[step % len(self.batches)]
                for i in range(len(names)):
                    timers[names[(i + step) % len(names)]].run(step, inputs)
        if self.exchange is not None:
            waits = self.exchange.read_us(steps * len(names)).reshape(steps, len(names))
            for i, name in enumerate(names):
                timers[name].waits_us = waits[np.arange(steps), (i - np.arange(steps)) % len(names)]
        return timers

    def time_wrapper(self) -> dict[str, np.ndarray]:
        """PyTorch's own graph replay, beside the raw launch: [n] us of host time by arm; empty without a GPU."""
        if self.device.type != "cuda":
            return {}
        found = {}
        for name, built in self.built.items():
            graph, times = built.runner.graphs[self.case.bucket], []
            with frozen_gc():
                for _ in range(REPLAYS_THROUGH_WRAPPER):
                    before = monotonic_ns()
                    graph.replay()
                    times.append((monotonic_ns() - before) / 1e3)
                    self.drain()
            found[name] = np.array(times)
        return found


def _device_samples(
    arm: str, metric: str, values: Sequence[float], status: str = "failed", cause: str = ""
) -> list[Sample]:
    """One sample a repeat, or one blank with the reason."""
    return [Sample(arm, 0, i, metric, v) for i, v in enumerate(values)] or [
        Sample(arm, 0, -1, metric, None, status, cause)
    ]


def timed_window(
    ranges: StepRanges, rebuild: Callable[[], object], launch: Callable[[], object], delay_us: float | None = None
) -> tuple[int, int, int, int, int]:
    """One step in its ranges, by the host's clock in ns: start, before and after `rebuild`, before and after `launch`.

    Args:
        delay_us: spun away between the two, on purpose.
    """
    clock = monotonic_ns
    started = clock()
    ranges.push_step()
    ranges.push_prep()
    before = clock()
    rebuild()
    prepared = clock()
    ranges.pop()
    if delay_us:
        until = prepared + int(delay_us * 1e3)
        while clock() < until:
            pass
    ranges.push_launch()
    launching = clock()
    launch()
    launched = clock()
    ranges.pop()
    ranges.pop()
    return started, before, prepared, launching, launched


class _StepTimer:
    """The timed window of one arm."""

    def __init__(self, bench: CaseBench, built: BuiltArm, context: RankContext) -> None:
        case = bench.case
        self.causes = StepCauses(bench.gpu)
        self.waits_us = np.zeros(0)
        self._rank, self._size, self._injection = context.rank, context.size, bench.settings.injection
        self._injected: list[float | None] = []
        self._bench, self._runner, self._wait = bench, built.runner, context.barrier.wait
        self._ranges = StepRanges(case.backend, case.mode, str(built.arm), enabled=bench.settings.nvtx)
        self._marks: list[tuple[int, int, int, int, int, int]] = []

    def run(self, step: int, inputs: StepInputs) -> None:
        runner, ranges = self._runner, self._ranges
        runner.load_batch(inputs)
        self._bench.drain()
        rebuild, launch = runner.rebuild, runner.launch
        delay_us = self._injection.delay_us(step, self._rank, self._size) if self._injection else None
        deadline = self._wait(step, self.causes.mark)
        window = timed_window(ranges, rebuild, launch, delay_us)
        self.causes.mark()
        self._bench.drain()
        self.causes.read_gpu()
        self._marks.append((deadline, *window))
        self._injected.append(delay_us)

    def result(self, warmup: int) -> ArmTimes:
        deadline, started, before, prepared, launching, launched = np.array(self._marks[warmup:], dtype=np.int64).T
        counts = {cause: events[warmup:] for cause, events in self.causes.counts().items()}
        prep, launch = (prepared - before) / 1e3, (launched - launching) / 1e3
        return ArmTimes(
            lag_us=(started - deadline) / 1e3,
            prep_us=prep,
            launch_us=launch,
            end_us=(launched - deadline) / 1e3,
            causes_prep=tuple(attribute(prep, counts)),
            causes_launch=tuple(attribute(launch, counts)),
            wait_us=self.waits_us[warmup:],
            injected_us=np.array(self._injected[warmup:], dtype=np.float64) if self._injection else np.zeros(0),
            gpu=tuple(self.causes.gpu_states()[warmup:]),
        )


def measure_cases(
    context: RankContext, cases: Sequence[tuple[int, Case]], settings: MeasureSettings, device: str
) -> None:
    """A rank's whole life: measure each case in turn and report it.

    Args:
        cases: (index, case); the same on every rank.
        device: ``cpu`` or ``cuda:N``, where the rank has none of its own.
    """
    torch.set_num_threads(1)
    where = torch.device(context.device or device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    factory = GraphFactory(where)
    with ExitStack() as stack:
        if factory.stream is not None:
            stack.enter_context(torch.cuda.stream(factory.stream))
        exchange, exchange_us = None, np.zeros(0)
        if context.new_exchange is not None:
            context.announce("the exchange without skew")
            exchange = context.new_exchange(settings.launches)
            exchange_us = no_skew_us(exchange, factory, context.barrier.wait)
        gpu = None
        if where.type == "cuda" and (context.rank == 0 or context.device):  # one watch a device
            gpu = stack.enter_context(watch_gpu(where.index or 0))
        for index, case in cases:
            context.announce(case.title)
            found = _measure(context, index, case, settings, where, factory, exchange, gpu)
            context.report(replace(found, host=context.host, exchange_us=exchange_us))


def _measure(
    context: RankContext,
    index: int,
    case: Case,
    settings: MeasureSettings,
    device: torch.device,
    factory: GraphFactory,
    exchange: FirstAllReduce | None,
    gpu: GpuWatch | None,
) -> RankMeasurement:
    bench = CaseBench(case, settings, device, factory, exchange, gpu)
    leads = context.rank == 0
    replays = leads or (exchange is not None and exchange.lockstep)
    once: list[Sample] = []
    # Ranks must run the same arms, or one would wait for a step that the other never takes.
    context.barrier.wait(_fingerprint(bench.built))
    if replays:
        checked = bench.check()
        once += checked if leads else []
    times = bench.time_steps(context)
    wrapped = bench.time_wrapper() if replays else {}
    context.barrier.wait()
    if leads:  # alone: the other ranks would take time slices of the same device
        if exchange is None and context.size > 1 and device.type == "cuda":
            alone = bench.time_alone(context)
            times = {n: replace(found, alone_us=alone[n]) for n, found in times.items()}
        once += bench.counts() + bench.device_times()
        once += [Sample(n, 0, i, "replay_host_us", v) for n, vs in wrapped.items() for i, v in enumerate(vs)]
    context.barrier.wait()
    observer = INJECTED if settings.injection else attached_tracer()
    return RankMeasurement(index, times | bench.failed, once, observer)


def _fingerprint(names: Iterable[str]) -> int:
    """A number that tells sets of arms apart; hash() differs between processes."""
    return zlib.crc32(",".join(names).encode())
