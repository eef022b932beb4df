"""Checks R1..R6 of the runners: order of hooks, padding, values, read-done events, forks, glue graphs.

A `RunnerSubject` is one runner over a real backend whose hooks are noted. Whatever a replay leaves is compared with the
oracle on what the runner's slots hold, so a hook that is missing, late, or given the wrong batch shows as a wrong cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...backends.base import AttentionBackend, AttentionConfig, tensors_of
from ...backends.batch import Pools, idle_batch, live_batch, make_pools
from ...backends.modes import ForwardMode, Implementation, Placement, ReadEnd
from ...backends.oracle import HostBatch, HostPools
from ...backends.registry import lookup
from ...backends.runners.fork import ForkedPrep, ForkError
from ...backends.runners.glue import GlueGraphs
from ...backends.runners.graph_runner import GraphRunner
from ...backends.runners.inputs import StepInputs, upload
from ...backends.runners.multi_layer_eagle_draft_extend import LayerOutput
from ...backends.runners.read_done import ReadDone
from ...backends.runners.slots import StaticSlots
from ...backends.trtllm_mha import TrtllmMhaBackend
from ...backends.wrappers.multi_step_draft import MultiStepDraft
from ..graphs import GraphFactory
from ..recorded import RecordedGraph
from .findings import Note, Skip, check

Mode = ForwardMode
N, HIDDEN, CONTEXT, LAYERS = 4, 3, 100, 2
BUCKETS = (2, 4)
CONFIG = AttentionConfig(
    page_size=16, max_context=CONTEXT, draft_tokens=N, topk=1, draft_steps=3, extra={"inner": "trtllm_mha"}
)
LENGTHS = ((20, 99, 40, 17), (90, 8, 30), (9, 64), (33,))
"""Full, padded, the smaller size, padded."""


@dataclass(eq=False)
class RunnerSubject:
    """One runner, by its name in the registry.

    Attributes:
        cls: the runner's class, or a faulty variant of it.
        log: what happened, in order.
    """

    name: str
    mode: ForwardMode
    device: torch.device
    cls: type[GraphRunner]
    log: list[str] = field(default_factory=list)

    @staticmethod
    def of(name: str, mode: ForwardMode, device: torch.device) -> RunnerSubject:
        return RunnerSubject(name, mode, device, lookup(name, "runner").load())

    @property
    def case(self) -> SimpleNamespace:
        """As findings name it."""
        return SimpleNamespace(backend=self.name, mode=str(self.mode))

    @property
    def title(self) -> str:
        return f"{self.cls.__name__} over {'multi_step_draft of ' * self.drafts}trtllm_mha, B=2/4"

    @property
    def drafts(self) -> bool:
        return self.name == "eagle_draft"

    def but(self, **changes: Any) -> RunnerSubject:
        return replace(self, log=[], **changes)

    def pools(self, seed: int = 0) -> Pools:
        return make_pools(rows=9, width=CONTEXT + 8, page_size=16, swa=False, seed=seed, device=self.device)

    def built(
        self, *, recorded: bool = True, graphs: Callable[[], Any] | None = None, pools: Pools | None = None, **options
    ) -> GraphRunner:
        """A runner that has captured nothing yet."""
        pools = pools or self.pools()
        make = partial(self._backend, pools, recorded)
        placement = Placement.GRAPH if recorded else Placement.EAGER
        graphs = graphs or _noting_graphs(self.log)
        if self.name == "decode":
            backend = make()
            tokens = _tokens(self.mode)
            slots = StaticSlots(max(BUCKETS), tokens, backend.seq_len_fill_value, self.device)
            return self.cls(backend, self.mode.captured, BUCKETS, slots, placement, graphs, **options)
        backend = make()
        slots = self.cls.new_slots(backend, max(BUCKETS), HIDDEN)
        if self.name == "frozen_kv_mtp":
            target = pools
            backend.pools = self.pools(seed=1)  # the draft's own tables, which must not be read
            return self.cls(backend, target, BUCKETS, slots, placement, graphs, **options)
        if self.name == "multi_layer_eagle_draft_extend":
            backends = [backend, *(make(name=f"layer{i} ") for i in range(1, LAYERS))]
            backend.name = "layer0 "
            return self.cls(backends, BUCKETS, slots, placement, graphs, _layer, **options)
        return self.cls(backend, BUCKETS, slots, placement, graphs, **options)

    def _backend(self, pools: Pools, recorded: bool, name: str = "") -> AttentionBackend:
        backend = _noting(MultiStepDraft if self.drafts else TrtllmMhaBackend, self.log)(
            CONFIG, pools, Implementation.FUSED, recorded=recorded
        )
        backend.name = name
        return backend

    def step(self, lengths: tuple[int, ...], pools: Pools) -> StepInputs:
        """A batch of so many requests; none is an idle one."""
        if not lengths:
            return upload(idle_batch(), self.device)
        tokens, b = _tokens(self.mode), len(lengths)
        mode = self.mode.captured
        live = live_batch(mode, lengths, 1 + np.arange(b), pools, tokens, np.random.default_rng(0), draft_steps=3)
        step = upload(live, self.device)
        there = partial(torch.zeros, device=self.device)
        if self.drafts:
            slots = 100 + torch.arange(b * CONFIG.draft_steps, device=self.device)
            also = {"topk_p": there(b, 1), "topk_index": there(b, 1, dtype=torch.int64)}
            return replace(step, out_cache_loc=slots, hidden_states=there(b, HIDDEN), **also)
        if self.name == "decode":
            return step
        return replace(
            step,
            hidden_states=there(b * tokens, HIDDEN),
            bonus_tokens=there(b, dtype=torch.int64),
            extend_seq_lens=torch.full((b,), tokens, dtype=torch.int32, device=self.device),
            input_ids=there(b * tokens, dtype=torch.int64),
        )


def _tokens(mode: ForwardMode) -> int:
    return 1 if mode.captured in (Mode.DECODE, Mode.DRAFT_DECODE) else N


def _layer(step: Any) -> LayerOutput:
    return LayerOutput(step.slots["input_ids"][step.slots["select_index"]], step.slots["hidden_states"] * 2)


def _noting(cls: type[AttentionBackend], log: list[str]) -> type[AttentionBackend]:
    """The backend with its hooks noted."""

    class Noting(cls):
        name = ""

        def init_forward_metadata_out_graph(self, fb, in_capture=False):
            log.append(f"{self.name}{'bind' if in_capture else 'out'}")
            super().init_forward_metadata_out_graph(fb, in_capture)

        def init_forward_metadata_in_graph(self, fb):
            log.append(f"{self.name}in")
            super().init_forward_metadata_in_graph(fb)

        def on_after_cuda_graph_warmup(self):
            log.append(f"{self.name}warm")
            super().on_after_cuda_graph_warmup()

        def shared_read_ends(self, mode):
            return cls.shared_read_ends(self, mode)

    return Noting


def _noting_graphs(log: list[str]) -> Callable[[], Any]:
    class Noting(RecordedGraph):
        def capture(self, body, **options):
            log.append("capture")
            super().capture(body, **options)

        def launch(self):
            log.append("launch")
            super().launch()

    return Noting


def backends_of(runner: GraphRunner) -> list[AttentionBackend]:
    """One, or one a layer."""
    return list(getattr(runner, "backends", [runner.backend]))


def wrong_cells(runner: GraphRunner, step: StepInputs, tables: HostPools) -> Iterator[str]:
    """Cells that layers read and that are not the oracle's, one a field, of the step that was replayed."""
    view, slots = runner.view, runner.slots
    rows = {name: x.cpu().numpy() for name, x in slots.slices(view.batch_size).items()}
    batch = HostBatch(
        mode=str(runner.mode),
        req_pool_indices=rows["req_pool_indices"],
        seq_lens=rows["seq_lens"],
        out_cache_loc=rows["out_cache_loc"],
        tokens_per_req=slots.tokens_per_req,
        num_accept_tokens=rows.get("num_accept_tokens"),
        positions=rows["positions"],
        live_requests=view.batch_size - view.num_padding,
        seq_lens_fill=slots.fill_value,
        extend_seq_lens=rows.get("extend_seq_lens") if runner.mode is Mode.DRAFT_EXTEND_V2 else None,
    )
    for number, backend in enumerate(backends_of(runner)):
        got = tensors_of(backend.metadata[runner.mode, view.batch_size])
        for path, want in backend.expected(batch, tables).items():
            found = got[path].cpu().numpy()
            wrong = np.argwhere((found != want.values) & want.live)
            if len(wrong):
                i = tuple(wrong[0])
                at = ", ".join(map(str, i))
                yield (
                    f"{f'layer {number}: ' if number else ''}{path}[{at}]: wanted {want.values[i]}, found {found[i]} "
                    f"({step.batch_size} live in B={runner.bucket})"
                )


def _host(pools: Pools) -> HostPools:
    return HostPools(pools.req_to_token.cpu().numpy().copy())


@check("R1", "each size is bound, warmed up twice and recorded, largest first; a replay is the hook, then the launch",
       of="runner")  # fmt: skip
def order_of_hooks(subject: RunnerSubject) -> Iterator[str]:
    pools = subject.pools()
    runner = subject.built(pools=pools)
    runner.capture()
    names = [backend.name for backend in backends_of(runner)]
    once = [f"{n}bind" for n in names]
    for n in names:
        once += ["capture", *[f"{n}in", f"{n}warm"] * 2, f"{n}in"]
    yield from _other_order("capture", subject.log, once * len(BUCKETS))
    del subject.log[:]
    runner.load_batch(subject.step((20, 30, 40), pools))
    if subject.log:
        yield f"loading a batch already did {', '.join(subject.log)}"
    runner.replay()
    yield from _other_order("replay", subject.log, [x for n in names for x in (f"{n}out", "launch")])


def _other_order(what: str, did: list[str], wanted: list[str]) -> Iterator[str]:
    if did != wanted:
        i = next((i for i, (a, b) in enumerate(zip(did, wanted, strict=False)) if a != b), min(len(did), len(wanted)))
        found, due = (x[i] if i < len(x) else "nothing" for x in (did, wanted))
        yield f"{what}: step {i} is {found}, wanted {due} (did {' '.join(did)})"


@check("R2", "slots behind the live rows are reset before every replay, and the hook is told how many there are",
       of="runner")  # fmt: skip
def padding_of_slots(subject: RunnerSubject) -> Iterator[str]:
    pools = subject.pools()
    runner = subject.built(pools=pools)
    runner.capture()
    fill, tokens = runner.slots.fill_value, runner.slots.tokens_per_req
    for lengths in (LENGTHS[0], LENGTHS[1], ()):
        step = subject.step(lengths, pools)
        runner.load_batch(step)
        rows, live, b = runner.slots.slices(runner.view.batch_size), step.batch_size, runner.view.batch_size
        if runner.view.num_padding != b - live:
            yield f"the hook is told of {runner.view.num_padding} padded rows, there are {b - live}"
        for name, pad, width in (
            ("req_pool_indices", 0, 1), ("seq_lens", fill, 1), ("seq_lens_cpu", fill, 1), ("positions", 0, tokens),
            ("out_cache_loc", 0, runner.slots.slots_per_req),
        ):  # fmt: skip
            found, given = rows[name].tolist(), getattr(step, name).tolist()
            wanted = [*given, *[pad] * (b * width - len(given))]
            if found[: len(wanted)] != wanted:
                yield f"slots.{name} is {found}, wanted {wanted} ({live} live in B={b})"


@check("R3", "after every replay the metadata is the oracle's for the batch that was loaded: full, padded, idle",
       of="runner")  # fmt: skip
def values_of_replays(subject: RunnerSubject) -> Iterator[str]:
    replays = 0
    factory = GraphFactory(subject.device)
    stream = nullcontext() if factory.stream is None else torch.cuda.stream(factory.stream)
    for recorded in (False, True):
        pools = subject.pools()
        with stream:
            runner = subject.built(recorded=recorded, graphs=factory, pools=pools)
            runner.capture()
            for lengths in (*LENGTHS, (), LENGTHS[0]):
                replays += 1
                step = subject.step(lengths, pools)
                runner.load_batch(step)
                runner.replay()
                yield from wrong_cells(runner, step, _host(pools))
    yield Note(f"{replays} replays")


class _Events:
    """Events in program order. `then` runs at the earliest moment at which somebody who waits may go on."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.then = log, lambda: None

    def external(self) -> _Event:
        return _Event(self, "marker")

    def recorded(self) -> _Event:
        event = _Event(self, "fresh")
        event.record()
        return event


@dataclass
class _Event:
    source: _Events
    name: str

    def record(self) -> None:
        self.source.log.append(f"record {self.name}")
        self.source.then()


@check("R4", "a read-done event is published in the declared place, and rows rewritten at that moment harm nobody",
       of="runner")  # fmt: skip
def read_done_events(subject: RunnerSubject) -> Iterator[str]:
    for recorded in (False, True):
        pools = subject.pools()
        events = _Events(subject.log)
        read_done = ReadDone(events)
        runner = subject.built(recorded=recorded, pools=pools, read_done=read_done)
        runner.capture()
        events.then = lambda pools=pools: pools.req_to_token.add_(16 * 1000)
        end = max(backend.shared_read_ends(runner.mode) for backend in backends_of(runner))
        for lengths in (LENGTHS[0], LENGTHS[1]):
            step, before = subject.step(lengths, pools), _host(pools)
            runner.load_batch(step)
            runner.replay()
            for problem in wrong_cells(runner, step, before):
                yield f"{problem}: the table was rewritten when its readers had said they were done (reads end {end})"
            event = read_done.take()
            if (event is None) is not (end is ReadEnd.UNKNOWN):
                yield f"{'no event' if event is None else event.name} was published, reads end {end}"
            if read_done.take() is not None:
                yield "an event was handed out twice"


@check("R5", "a forked hook is joined before its metadata is read, and a body that never joins is refused", of="runner")
def forked_hook(subject: RunnerSubject) -> Iterator[str]:
    if subject.name != "decode":
        raise Skip("this runner does not fork")
    pools, seen = subject.pools(), torch.zeros(max(BUCKETS), dtype=torch.int32, device=subject.device)
    gpu = subject.device.type == "cuda"
    factory = GraphFactory(subject.device)
    with nullcontext() if factory.stream is None else torch.cuda.stream(factory.stream):
        fork = ForkedPrep(torch.cuda.Stream(subject.device) if gpu else None)

        def body() -> None:
            fork.join()
            lens = runner.backend.forward_metadata.cache_seqlens_int32
            seen[: len(lens)].copy_(lens)

        runner = subject.built(graphs=factory, pools=pools, fork=fork, body=body)
        runner.capture()
        for lengths in (LENGTHS[0], LENGTHS[1]):
            step = subject.step(lengths, pools)
            runner.load_batch(step)
            runner.replay()
            md = runner.backend.metadata[runner.mode, runner.bucket]
            lens = md.cache_seqlens_int32.tolist()
            if seen.tolist()[: runner.bucket] != lens:
                yield f"the forward pass read {seen.tolist()}, this step's lengths are {lens}"
            yield from wrong_cells(runner, step, _host(pools))
        never = ForkedPrep(torch.cuda.Stream(subject.device) if gpu else None)
        try:
            subject.built(graphs=factory, pools=pools, fork=never).capture()
        except ForkError:
            return
        yield "a forward pass that never joins was captured"


@check("R6", "full steps go through a glue graph of their own size and mode, padded ones run eagerly, both are right",
       of="runner")  # fmt: skip
def glue_routing(subject: RunnerSubject) -> Iterator[str]:
    if subject.name != "decode":
        raise Skip("this runner has no glue graphs")
    pools = subject.pools()
    factory = GraphFactory(subject.device)
    with nullcontext() if factory.stream is None else torch.cuda.stream(factory.stream):
        runner = subject.built(recorded=False, graphs=factory, pools=pools)
        runner.glue_graphs = GlueGraphs(runner.backend, factory)
        runner.capture()
        for lengths in (*LENGTHS, LENGTHS[0]):
            step = subject.step(lengths, pools)
            runner.load_batch(step)
            runner.replay()
            yield from wrong_cells(runner, step, _host(pools))
    glue = runner.glue_graphs
    full = sum(len(lengths) in BUCKETS for lengths in (*LENGTHS, LENGTHS[0]))
    if glue.routed != full:
        yield f"{glue.routed} steps went through a graph, {full} fill their size ({glue.refusal or dict(glue.eager)})"
