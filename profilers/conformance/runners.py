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
from ...backends.runners.drafting import DraftStep
from ...backends.runners.fork import ForkedPrep, ForkError
from ...backends.runners.glue import GlueGraphs
from ...backends.runners.graph_runner import GraphRunner
from ...backends.runners.inputs import StepInputs, upload
from ...backends.runners.multi_layer_eagle_draft_extend import LayerOutput
from ...backends.runners.read_done import ReadDone
from ...backends.runners.slots import StaticSlots
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

BACKENDS = {"eagle_draft": "multi_step_draft", "frozen_kv_mtp": "flashattention"}
"""What a runner is looked at with; trtllm_mha if nothing is said."""

BRANCHES = {"frozen_kv_mtp": 2}
"""Rows of a request, where there are several."""

CLEARED = {"frozen_kv_mtp": {"bonus_tokens": 0, "hidden_states": 0}}
"""Further slots whose padding is reset, and to what."""


@dataclass(eq=False)
class RunnerSubject:
    """One runner, by its name in the registry.

    Attributes:
        cls: the runner's class, or a faulty variant of it.
        log: what happened, in order.
        bound: what captures found in their slots, in order.
        written: write slots that the forward pass of a draft step saw, by rows and step.
    """

    name: str
    mode: ForwardMode
    device: torch.device
    cls: type[GraphRunner]
    log: list[str] = field(default_factory=list, init=False)
    bound: list[AtCapture] = field(default_factory=list, init=False)
    written: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, init=False)

    @staticmethod
    def of(name: str, mode: ForwardMode, device: torch.device) -> RunnerSubject:
        return RunnerSubject(name, mode, device, lookup(name, "runner").load())

    @property
    def case(self) -> SimpleNamespace:
        """As findings name it."""
        return SimpleNamespace(backend=self.name, mode=str(self.mode))

    @property
    def title(self) -> str:
        inner = f" of {CONFIG.extra['inner']}" if self.drafts else ""
        return f"{self.cls.__name__} over {self.backend}{inner}, B=2/4"

    @property
    def backend(self) -> str:
        return BACKENDS.get(self.name, "trtllm_mha")

    @property
    def branches(self) -> int:
        return BRANCHES.get(self.name, 1)

    @property
    def drafts(self) -> bool:
        return self.name == "eagle_draft"

    def but(self, **changes: Any) -> RunnerSubject:
        """A copy with other attributes; nothing that happened is kept."""
        return replace(self, **changes)

    def pools(self, seed: int = 0) -> Pools:
        return make_pools(rows=9, width=CONTEXT + 8, page_size=16, swa=False, seed=seed, device=self.device)

    def built(
        self, *, recorded: bool = True, graphs: Callable[[], Any] | None = None, pools: Pools | None = None, **options
    ) -> GraphRunner:
        """A runner that has captured nothing yet."""
        pools = pools or self.pools()
        make = partial(self._backend, pools, recorded)
        if self.drafts:
            options.setdefault("forward", self._note_slots)
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
        config = replace(CONFIG, topk=self.branches)
        noting = _noting(lookup(self.backend, "backend", "wrapper").load(), self)
        backend = noting(config, pools, Implementation.FUSED, recorded=recorded)
        backend.name = name
        return backend

    def _note_slots(self, step: DraftStep) -> None:
        key = step.batch.batch_size, step.index
        if key not in self.written:  # in a warm-up, so in no graph's memory
            self.written[key] = torch.zeros_like(step.out_cache_loc)
        self.written[key].copy_(step.out_cache_loc)

    def step(self, lengths: tuple[int, ...], pools: Pools) -> StepInputs:
        """A batch of so many requests, a row for each of their branches; none is an idle one."""
        if not lengths:
            return upload(idle_batch(), self.device)
        tokens, b = _tokens(self.mode), len(lengths) * self.branches
        rows = np.repeat(1 + np.arange(len(lengths)), self.branches)
        live = live_batch(
            self.mode.captured, np.repeat(lengths, self.branches), rows, pools, tokens, np.random.default_rng(0),
            draft_steps=CONFIG.draft_steps if self.drafts else 0,
        )  # fmt: skip
        step = upload(live, self.device)
        there = partial(torch.ones, device=self.device)
        if self.drafts:
            also = {"topk_p": there(b, 1), "topk_index": there(b, 1, dtype=torch.int64)}
            return replace(step, hidden_states=there(b, HIDDEN), **also)
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
    return LayerOutput(step.slots["input_ids"][step.slots["select_index"]], step.slots["hidden_states"] + 1)


@dataclass(frozen=True, slots=True)
class AtCapture:
    """What the out-graph hook of a capture of B rows saw."""

    rows: list[int]  # [B]
    lens: list[int]  # [B]
    lens_sum: int


def _noting(cls: type[AttentionBackend], subject: RunnerSubject) -> type[AttentionBackend]:
    """The backend with its hooks noted."""
    log = subject.log

    class Noting(cls):
        name = ""

        def init_forward_metadata_out_graph(self, fb, in_capture=False):
            b = fb.batch_size
            log.append(f"{self.name}{f'bind{b}' if in_capture else 'out'}")
            if in_capture:
                lens = fb.seq_lens[:b].tolist()
                subject.bound.append(AtCapture(fb.req_pool_indices[:b].tolist(), lens, fb.seq_lens_sum))
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


def _noting_graphs(log: list[str], before_launch: Callable[[], None] = lambda: None) -> Callable[[], Any]:
    class Noting(RecordedGraph):
        def capture(self, body, **options):
            log.append("capture")
            super().capture(body, **options)

        def launch(self):
            log.append("launch")
            before_launch()
            super().launch()

    return Noting


def backends_of(runner: GraphRunner) -> list[AttentionBackend]:
    """One, or one a layer."""
    return list(getattr(runner, "backends", [runner.backend]))


def wrong_cells(subject: RunnerSubject, runner: GraphRunner, step: StepInputs, tables: HostPools) -> Iterator[str]:
    """Cells that layers read and that are not the oracle's, one a field, of the step that was replayed."""
    view, slots, mode = runner.view, runner.slots, subject.mode.captured
    rows = {name: x.cpu().numpy() for name, x in slots.slices(view.batch_size).items()}
    batch = HostBatch(
        mode=str(mode),
        req_pool_indices=rows["req_pool_indices"],
        seq_lens=rows["seq_lens"],
        out_cache_loc=rows["out_cache_loc"],
        tokens_per_req=slots.tokens_per_req,
        num_accept_tokens=rows.get("num_accept_tokens"),
        positions=rows["positions"],
        live_requests=view.batch_size - view.num_padding,
        seq_lens_fill=slots.fill_value,
        extend_seq_lens=rows.get("extend_seq_lens") if mode is Mode.DRAFT_EXTEND_V2 else None,
    )
    live = f"({step.batch_size} live in B={view.batch_size})"
    for number, backend in enumerate(backends_of(runner)):
        if (mode, view.batch_size) not in backend.metadata:
            yield f"nothing is bound for {mode}, but for {', '.join(str(m) for m, _ in backend.metadata)}"
            return
        got = tensors_of(backend.metadata[mode, view.batch_size])
        for path, want in backend.expected(batch, tables).items():
            found = got[path].cpu().numpy()
            wrong = np.argwhere((found != want.values) & want.live)
            if len(wrong):
                i = tuple(wrong[0])
                at = ", ".join(map(str, i))
                at = f"{f'layer {number}: ' if number else ''}{path}[{at}]"
                yield f"{at}: wanted {want.values[i]}, found {found[i]} {live}"
    for (size, i), seen in subject.written.items():
        column = batch.out_cache_loc.reshape(-1, CONFIG.draft_steps)[:, i].tolist()
        if size == view.batch_size and seen.tolist() != column:
            yield f"step {i} writes to {seen.tolist()}, wanted {column} {live}"


def _host(pools: Pools) -> HostPools:
    return HostPools(pools.req_to_token.cpu().numpy().copy())


@check("R1", "each size is bound, warmed up twice and recorded, largest first; a replay is the hook, then the launch",
       of="runner")  # fmt: skip
def order_of_hooks(subject: RunnerSubject) -> Iterator[str]:
    pools = subject.pools()
    runner = subject.built(pools=pools)
    runner.capture()
    names, wanted = [backend.name for backend in backends_of(runner)], []
    for bucket in sorted(BUCKETS, reverse=True):
        wanted += [f"{n}bind{bucket * subject.branches}" for n in names]
        for n in names:
            wanted += ["capture", *[f"{n}in", f"{n}warm"] * 2, f"{n}in"]
    yield from _other_order("capture", subject.log, wanted)
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


@check("R2", "captures find slots reset and leave them so; slots behind the live rows are reset before every replay, "
       "and the hook is told how many there are, and no host lengths of an earlier step", of="runner")  # fmt: skip
def padding_of_slots(subject: RunnerSubject) -> Iterator[str]:
    pools = subject.pools()
    runner = subject.built(pools=pools)
    yield from _wrong_captures(subject, runner)
    fill = runner.slots.fill_value
    pads = {"req_pool_indices": 0, "seq_lens": fill, "seq_lens_cpu": fill, "positions": 0, "out_cache_loc": 0}
    pads |= CLEARED.get(subject.name, {})
    for lengths in (LENGTHS[0], LENGTHS[1], ()):
        step = subject.step(lengths, pools)
        runner.load_batch(step)
        rows, live, b = runner.slots.slices(runner.view.batch_size), step.batch_size, runner.view.batch_size
        if runner.view.num_padding != b - live:
            yield f"the hook is told of {runner.view.num_padding} padded rows, there are {b - live}"
        for when, act in (("loaded", lambda: None), ("replayed", runner.replay)):
            act()
            for name, pad in pads.items():
                given = getattr(step, name)
                wanted = torch.full_like(rows[name], pad)
                if given is not None:  # an idle step brings none
                    wanted[: len(given)] = given
                if not torch.equal(rows[name], wanted):
                    found, wanted = rows[name].tolist(), wanted.tolist()
                    yield f"slots.{name} is {found}, wanted {wanted} ({live} live in B={b}, {when})"
    runner.load_batch(replace(subject.step(LENGTHS[1], pools), seq_lens_cpu=None))
    if runner.view.seq_lens_cpu is not None or runner.view.seq_lens_sum is not None:
        yield "the hook gets host lengths that the step does not have: they are an earlier one's"


def _wrong_captures(subject: RunnerSubject, runner: GraphRunner) -> Iterator[str]:
    """Capture over slots that somebody else has used, as those of a shared pool: what was found, and what was left."""
    whole = runner.slots.slices(max(BUCKETS) * subject.branches)
    for x in whole.values():
        x.fill_(1)
    dirty = {name: x.clone() for name, x in whole.items()}
    runner.capture()
    fill = runner.slots.fill_value
    for saw in subject.bound:
        b = len(saw.lens)
        if (saw.rows, saw.lens, saw.lens_sum) != ([0] * b, [fill] * b, b * fill):
            found = f"rows {saw.rows}, lengths {saw.lens} and their sum {saw.lens_sum}"
            yield f"a capture of B={b} found {found}: those of whoever had the slots before"
    rules = runner.slots.rules
    for name, x in whole.items():
        held = dirty[name] if rules[name].pad is None else torch.full_like(x, rules[name].init)
        for i in (x != held).nonzero().tolist()[:1]:
            yield f"captures leave {x[tuple(i)]} in slots.{name}[{', '.join(map(str, i))}], {held[tuple(i)]} was there"


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
                yield from wrong_cells(subject, runner, step, _host(pools))
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


@dataclass(eq=False)
class _Event:
    source: _Events
    name: str

    def record(self) -> None:
        self.source.log.append(f"record {self.name}")
        self.source.then()


class _Watched(ReadDone):
    """Tells what a scheduler that looks now would wait for."""

    @property
    def published(self) -> _Event | None:
        return self._event


@check("R4", "a read-done event is published in the declared place, and rows rewritten at that moment harm nobody",
       of="runner")  # fmt: skip
def read_done_events(subject: RunnerSubject) -> Iterator[str]:
    for recorded in (False, True):
        pools = subject.pools()
        events = _Events(subject.log)
        read_done = _Watched(events)

        def look(read_done: _Watched = read_done, events: _Events = events) -> None:
            """Whoever waits for a marker before the launch waits for its record of the replay before, and goes on."""
            if read_done.published is not None and read_done.published.name == "marker":
                events.then()

        graphs = _noting_graphs(subject.log, look)
        runner = subject.built(recorded=recorded, graphs=graphs, pools=pools, read_done=read_done)
        runner.capture()
        end = max(backend.shared_read_ends(runner.mode) for backend in backends_of(runner))
        for lengths in (LENGTHS[0], LENGTHS[1]):
            events.then = lambda: None
            read_done.before_launch(ReadEnd.PRE_REPLAY)
            earlier = read_done.published  # of a phase before this one, which nobody has taken
            events.then = lambda pools=pools: pools.req_to_token.add_(16 * 1000)
            step, before = subject.step(lengths, pools), _host(pools)
            runner.load_batch(step)
            runner.replay()
            for problem in wrong_cells(subject, runner, step, before):
                yield f"{problem}: the table was rewritten when its readers had said they were done (reads end {end})"
            event = read_done.take()
            if event is earlier:
                yield f"the event of an earlier phase was left to be waited for, reads end {end}"
            elif (event is None) is not (end is ReadEnd.UNKNOWN):
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
            yield from wrong_cells(subject, runner, step, _host(pools))
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
            yield from wrong_cells(subject, runner, step, _host(pools))
    glue = runner.glue_graphs
    full = sum(len(lengths) in BUCKETS for lengths in (*LENGTHS, LENGTHS[0]))
    if glue.routed != full:
        yield f"{glue.routed} steps went through a graph, {full} fill their size ({glue.refusal or dict(glue.eager)})"
