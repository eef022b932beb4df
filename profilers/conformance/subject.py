"""What a check looks at: one backend in one configuration, built in any arm, replayed on poisoned buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch

from ...backends.base import AttentionBackend, AttentionConfig, tensors_of
from ...backends.batch import BatchShape, LiveBatch, Pools, batch_sequence, idle_batch, live_batch
from ...backends.modes import ARMS, Arm, ForwardMode, Implementation, Placement, TailPolicy
from ...backends.oracle import Expected, HostPools
from ...backends.runners.decode import DecodeRunner, StaticSlots, StepInputs, upload
from ...backends.runners.tree import every
from ..agreement import host_batch, host_pools
from ..graphs import CudaGraph, Graph, GraphFactory, RecordedGraph
from ..measure import attention_config, batch_shape
from ..sample import Case
from ..shapes import slots_per_token
from .poison import Compared, Layout, Mismatch, OnDevice, Poisoned, Watch, read_together, unfit

COMPARED = tuple(arm for arm in ARMS if arm.implementation in (Implementation.ATEN, Implementation.FUSED))
"""Arms that are compared unless somebody asks for others: compiling takes longer than everything else together, and a
peer's kernel is not ours to prove."""

Word = tuple[dict[str, Expected], dict[str, OnDevice]]
"""What the oracle says of a batch, on the host and beside the metadata."""

Tails = tuple[TailPolicy, ...]
"""Of a backend and of those that it wraps."""

Address = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Replay:
    """What one replay of one arm left behind.

    Attributes:
        number: place in the sequence.
        bucket, live: captured and real batch size.
        mismatches: against the oracle.
        moved: metadata tensors that are no longer where they were at capture, or host constants that changed.
        mutated: inputs that the rebuild changed.
    """

    number: int
    arm: Arm
    bucket: int
    live: int
    mismatches: tuple[Mismatch, ...]
    moved: tuple[str, ...]
    mutated: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.arm}, B={self.bucket} ({self.live} live), replay {self.number}"


@dataclass(frozen=True, slots=True)
class Observed:
    """A replay whose outcome is still on the device."""

    replay: Replay  # as far as it is known
    slots_watch: Watch
    compared: Compared
    slots: tuple[list[torch.Tensor], list[torch.Tensor]]  # before and after
    slots_differ: tuple[torch.Tensor, ...]

    @property
    def held_bytes(self) -> int:
        return self.compared.held_bytes

    @property
    def flags(self) -> list[torch.Tensor]:
        return [*self.compared.flags, *self.slots_differ]

    def told(self, flags: Sequence[bool]) -> Replay:
        """flags: values of `self.flags`."""
        own = len(self.compared.flags)
        mismatches = (*self.replay.mismatches, *self.compared.mismatches(flags[:own]))
        names = self.slots_watch.changed(*self.slots) if any(flags[own:]) else ()
        return replace(self.replay, mismatches=mismatches, mutated=tuple(f"slots.{name}" for name in names))


MOST_UNREAD_BYTES = 2**28
"""What replays may keep on the device before somebody looks at them."""


MOST_LAYOUT_BYTES = 2**22
"""Larger layouts are made anew for each replay: a rig has one for each captured size."""


def read(observed: Sequence[Observed]) -> list[Replay]:
    """What replays left behind, with one wait for the device where nothing is wrong."""
    told = iter(read_together([flag for one in observed for flag in one.flags]))
    return [one.told(list(islice(told, len(one.flags)))) for one in observed]


@dataclass(eq=False)
class Subject:
    """One backend in one configuration.

    Attributes:
        case: names, sizes and the seed; `case.bucket` is the largest captured size.
        backend_class: what is checked.
        pools: the engine's tables.
        buckets: captured batch sizes.
        device: where everything lies.
        arms: what is compared.
        lens, rows: dtypes of seq_lens and req_pool_indices.
        steps: batches of each bucket's sequence; None means all.
        thin: interpreted arms other than fused-graph replay every thin-th batch only. They run the same kernel.
        sizes: further live batch sizes to replay, behind the sequences.
        extra: options of one backend.
        runner_class: what captures and replays.
    """

    case: Case
    backend_class: type[AttentionBackend]
    pools: Pools
    buckets: tuple[int, ...]
    device: torch.device
    arms: tuple[Arm, ...] = COMPARED
    lens: torch.dtype = torch.int64
    rows: torch.dtype = torch.int64
    steps: int | None = None
    thin: int = 1
    sizes: tuple[int, ...] = ()
    extra: dict[str, Any] | None = None
    runner_class: type[DecodeRunner] = DecodeRunner
    host_pools: HostPools | None = field(default=None, init=False, repr=False)
    _at_first: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def mode(self) -> ForwardMode:
        """The captured mode."""
        return ForwardMode(self.case.mode).captured

    @property
    def title(self) -> str:
        """For people: enough to build it again."""
        c = self.case
        parts = [f"P={c.page_size}", f"C={c.max_context}", f"B={'/'.join(map(str, self.buckets))}"]
        parts += ["swa"] if c.swa else []
        parts += [f"N={c.draft_tokens} S={c.draft_steps} step={c.step_id}"] if c.draft_tokens else []
        parts += [f"K={c.topk}"] if c.topk > 1 else []
        parts += [f"{name}={value}" for name, value in (self.extra or {}).items() if isinstance(value, str | int)]
        parts += [f"{str(self.lens)[6:]} lens, {str(self.rows)[6:]} rows, seed {c.seed}"]
        return " ".join(parts)

    @property
    def shape(self) -> BatchShape:
        """What bounds the live batches. A request may have the whole context behind it: what drafts add comes on top,
        and tables must have room for it."""
        return replace(batch_shape(self.case), mode=self.mode, reserve=0)

    @property
    def config(self) -> AttentionConfig:
        config = attention_config(self.case)
        return replace(config, extra={**config.extra, **self.extra}) if self.extra else config

    @property
    def distinct_arms(self) -> tuple[Arm, ...]:
        """Arms less those that record the same hook as another."""
        graph = {arm.implementation for arm in self.arms if arm.placement is Placement.GRAPH}
        return tuple(a for a in self.arms if a.placement is not Placement.GLUE or a.implementation not in graph)

    @property
    def plain_arms(self) -> tuple[Arm, ...]:
        """Arms whose operations can be watched: looking at compiled code switches it off."""
        return tuple(arm for arm in self.arms if arm.implementation is not Implementation.COMPILE)

    def but(self, **changes: Any) -> Subject:
        """A copy with other attributes; nothing that was replayed is kept."""
        return replace(self, **changes)

    def backend(self, arm: Arm, tail: TailPolicy | None = None) -> AttentionBackend:
        recorded = arm.placement is not Placement.EAGER
        return self.backend_class(self.config, self.pools, arm.implementation, recorded=recorded, tail=tail)

    def batches(self) -> Iterator[LiveBatch]:
        """The buckets' sequences interleaved, largest first: small tables are prefixes of large ones."""
        sequences = [
            list(islice(batch_sequence(replace(self.shape, bucket=b), self.pools, self.case.seed + b), self.steps))
            for b in sorted(self.buckets, reverse=True)
        ]
        for turn in zip_longest(*sequences):
            for live in filter(None, turn):
                yield live
                if self.case.mode == ForwardMode.IDLE and live.batch_size:
                    yield idle_batch()
        for size in self.sizes:
            yield self.some_batch(size, seed=size)

    def some_batch(self, size: int, seed: int = 0, length: int | None = None) -> LiveBatch:
        """A batch of `size` requests with rows of all kinds, and lengths of all kinds or one for all."""
        shape, rng = self.shape, np.random.default_rng(self.case.seed + seed)
        rows = np.resize(1 + rng.permutation(self.pools.req_to_token.shape[0] - 1), size)
        lengths = rng.integers(shape.minimum, shape.limit + 1, size) if length is None else np.full(size, length)
        return live_batch(
            self.mode, lengths, rows, self.pools, shape.tokens_per_req, rng,
            topk=shape.topk, draft_steps=shape.draft_steps, page_size=shape.page_size,
        )  # fmt: skip

    def rig(self, arm: Arm, **options: Any) -> Rig:
        """A fresh backend and runner in one arm."""
        return Rig(self, arm, **options)

    @cached_property
    def history(self) -> list[Replay]:
        """Every arm's replay of every batch, arms side by side on the same inputs."""
        rigs = {arm: self.rig(arm) for arm in self.arms}
        tables = {name: t.clone() for name, t in tensors_of(self.pools).items()}
        history, unread, held_bytes = [], [], 0
        for number, live in enumerate(self.batches()):
            words: dict[Tails, Word] = {}
            for arm, rig in rigs.items():
                if number % self._thinned(arm) == 0:
                    unread.append(rig.observe(number, live, words))
                    held_bytes += unread[-1].held_bytes
            if held_bytes > MOST_UNREAD_BYTES:
                history += read(unread)
                unread, held_bytes = [], 0
        history += read(unread)
        moving = frozenset().union(*(rig.backend.allowances.advances for rig in rigs.values()))
        spoilt = [name for name in changed(tables, tensors_of(self.pools)) if name not in moving]
        if spoilt:
            last = history[-1]
            history[-1] = replace(last, mutated=(*last.mutated, *(f"pools.{name}" for name in spoilt)))
        return history

    def put_back(self, tables: Iterable[str]) -> None:
        """Tables that rebuilds carry on are again what they were at the first call."""
        for name in tables:
            table = getattr(self.pools, name)
            if name not in self._at_first:
                self._at_first[name] = table.clone()
            table.copy_(self._at_first[name])

    def _thinned(self, arm: Arm) -> int:
        fused_graph = arm.implementation is Implementation.FUSED and arm.placement is Placement.GRAPH
        return 1 if arm.implementation is Implementation.ATEN or fused_graph else self.thin


class Rig:
    """One backend instance with a runner, captured, on a stream of its own.

    Args:
        arm: how it rebuilds.
        buckets: captured sizes, the subject's if None.
        tail: tail policy, the backend's own choice if None.
        backend: an instance whose state is there already, shared with other rigs.
        capture: False makes the runner and stops there.
    """

    def __init__(
        self,
        subject: Subject,
        arm: Arm,
        *,
        buckets: Sequence[int] | None = None,
        tail: TailPolicy | None = None,
        backend: AttentionBackend | None = None,
        capture: bool = True,
    ) -> None:
        self.subject, self.arm = subject, arm
        self.factory = _ColdGraphs(subject.device)
        self._layouts: dict[int, Layout] = {}
        with self.on_stream(), nullcontext() if backend is None else _state_kept(backend):
            self.backend = backend or subject.backend(arm, tail)
            self.slots = self.new_slots(buckets or subject.buckets)
            self._on_host = self.new_slots(buckets or subject.buckets, torch.device("cpu"))
            self.runner = subject.runner_class(
                self.backend, subject.mode, buckets or subject.buckets, self.slots, arm.placement, self.factory
            )
            if capture:
                self.runner.capture()
        self.slots_watch = Watch(tensors_of(vars(self.slots)))
        captured = self.runner.buckets if capture else ()
        self._addresses = {b: addresses(self.metadata(b)) for b in captured}
        self._constants = {b: scalars_of(self.metadata(b)) for b in captured}

    def new_slots(self, buckets: Sequence[int], device: torch.device | None = None) -> StaticSlots:
        """Slots for these sizes; device: the subject's if None."""
        s, shape = self.subject, self.subject.shape
        mask_context = s.case.max_context if s.case.topk > 1 else 0
        return StaticSlots(
            max(buckets), shape.tokens_per_req, self.backend.seq_len_fill_value, device or s.device,
            lens=s.lens, rows=s.rows, mask_context=mask_context, slots_per_token=slots_per_token(s.case),
        )  # fmt: skip

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Everything a rig does runs on the stream its graphs are launched on, behind all that came before it and
        before all that comes after it. The host does not wait: processes that share a GPU take turns at every wait."""
        stream = self.factory.stream
        if stream is None:
            yield
            return
        around = torch.cuda.current_stream(self.subject.device)
        stream.wait_stream(around)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            around.wait_stream(stream)

    def __del__(self) -> None:
        """A graph may be launched still, and its memory is given back with it."""
        factory = self.__dict__.get("factory")
        if factory is not None and factory.stream is not None:
            with suppress(RuntimeError):  # a device fault is told by whoever waits for a result
                factory.stream.synchronize()

    def metadata(self, bucket: int) -> Any:
        """The object that the capture of `bucket` bound."""
        return self.backend.metadata[self.subject.mode, bucket]

    @property
    def bound(self) -> dict[str, torch.Tensor]:
        """Metadata tensors of the batch that is loaded."""
        return tensors_of(self.metadata(self.runner.bucket))

    def put_back(self) -> None:
        """Undo what rebuilds did to the engine's tables."""
        self.subject.put_back(self.backend.allowances.advances)

    def load(self, live: LiveBatch) -> StepInputs:
        """Hand a batch to the runner. What rebuilds carry on starts where every other replay's does."""
        self.put_back()
        here, there = (
            upload(live, device, lens=self.subject.lens, rows=self.subject.rows)
            for device in (torch.device("cpu"), self.subject.device)
        )
        self.runner.load_batch(there)
        # What the slots must hold now, without asking the device.
        self._on_host.fill(here, self.runner.bucket)
        self._step_on_host = here
        return there

    def expect(self, live: LiveBatch) -> Word:
        """Load a batch; the oracle's word on it."""
        self.load(live)
        return self.expected()

    def expected(self) -> Word:
        """The oracle's word on the batch that is loaded."""
        if self.subject.host_pools is None:
            self.subject.host_pools = host_pools(self.runner)
        batch = host_batch(self._on_host, self.subject.mode, self.runner.bucket, self._step_on_host)
        word = self.backend.expected(batch, self.subject.host_pools)
        return word, {path: OnDevice.of(e, self.subject.device) for path, e in word.items()}

    def poison(self, word: Word, salt: int) -> Poisoned:
        """Poison every bound cell that is no preset."""
        return self._poison(self.bound, word, salt)[0]

    def _poison(self, bound: dict[str, torch.Tensor], word: Word, salt: int) -> tuple[Poisoned, list[Mismatch]]:
        """The same, and which fields could not be poisoned."""
        spills, bucket, cannot = frozenset(), self.runner.bucket, unfit(bound, word[0])
        classic = self.arm.implementation is Implementation.ATEN
        if classic and (self.arm.placement is Placement.EAGER or children_of(self.backend)):
            spills = self.backend.allowances.spills
        unusable = {m.path for m in cannot if m.kind == "shape"}
        usable = {path: t for path, t in bound.items() if path not in unusable}
        layout = self._layouts.get(bucket)
        if layout is None or not layout.fits(usable):
            layout = Layout(usable)
            if layout.held_bytes < MOST_LAYOUT_BYTES:
                self._layouts[bucket] = layout
        poisoned = Poisoned(
            usable,
            word[1],
            salt,
            spare=self._input_storages,
            spills=spills,
            unordered=self.backend.allowances.unordered,
            layout=layout,
        )
        return poisoned, cannot

    @cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What a rebuild reads and must not change: the runner's slots and the engine's tables."""
        slots = {f"slots.{name}": t for name, t in tensors_of(vars(self.slots)).items()}
        return slots | {f"pools.{name}": t for name, t in tensors_of(self.subject.pools).items()}

    @cached_property
    def _input_storages(self) -> frozenset[int]:
        return frozenset(t.untyped_storage().data_ptr() for t in self.inputs.values())

    def replay(self, live: LiveBatch, salt: int) -> list[Mismatch]:
        """Load, poison, rebuild, launch, compare."""
        return list(read([self.observe(salt, live, {})])[0].mismatches)

    def observe(self, number: int, live: LiveBatch, words: dict[Tails, Word]) -> Observed:
        """The same, and what else the replay did. `words` keeps the oracle's word for arms of the same tail policy."""
        with self.on_stream():
            self.load(live)
            tails = tuple(backend.tail for backend in every(self.backend))
            if tails not in words:
                words[tails] = self.expected()
            bucket, before = self.runner.bucket, self.slots_watch.copy()
            poisoned, cannot = self._poison(self.bound, words[tails], salt=number)
            self.runner.rebuild()
            self.runner.launch()
            compared, after = poisoned.compare(), self.slots_watch.copy()
            differ = tuple((old != new).any() for old, new in zip(before, after, strict=True))
        known = Replay(number, self.arm, bucket, live.batch_size, tuple(cannot), tuple(self._moved(bucket)), ())
        return Observed(known, self.slots_watch, compared, (before, after), differ)

    def _moved(self, bucket: int) -> Iterator[str]:
        """How the metadata in use differs from what was captured."""
        there, now = self._addresses[bucket], addresses(self.backend.forward_metadata)
        for path in there.keys() | now.keys():
            if there.get(path) != now.get(path):
                yield f"{path} was {_place(there.get(path))} at capture, is {_place(now.get(path))}"
        if self.backend.recorded:  # an eager rebuild hands its host lengths on; a graph has baked them
            constants = scalars_of(self.backend.forward_metadata)
            for path, value in self._constants[bucket].items():
                if constants.get(path) != value:
                    yield f"host constant {path} was {value} at capture, is {constants.get(path)}"


class _ColdGraphs(GraphFactory):
    """Graphs with as few warm-ups as their device can do with: they are C12's business. Interpreted, they take twice as
    long as the rest; on a GPU the first run loads kernels, and each waits for the device."""

    def __call__(self) -> Graph:
        return _ColdGraph() if self.stream is None else _WarmedOnce(self.stream, self._pool)


class _ColdGraph(RecordedGraph):
    def capture(
        self, body: Callable[[], None], *, warmups: int = 0, after_warmup: Callable[[], None] | None = None
    ) -> None:
        super().capture(body, warmups=warmups, after_warmup=after_warmup)


class _WarmedOnce(CudaGraph):
    def capture(
        self, body: Callable[[], None], *, warmups: int = 1, after_warmup: Callable[[], None] | None = None
    ) -> None:
        super().capture(body, warmups=warmups, after_warmup=after_warmup)


@contextmanager
def _state_kept(backend: AttentionBackend) -> Iterator[None]:
    """Let another runner be built over `backend` without allocating its state anew."""
    backend.init_cuda_graph_state = lambda max_bs, max_num_tokens: None
    try:
        yield
    finally:
        del backend.init_cuda_graph_state


def changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that hold something else. Same names, shapes and dtypes in both."""
    differs = read_together([(t != after[name]).any() for name, t in before.items()])
    return [name for name, yes in zip(before, differs, strict=True) if yes]


def children_of(backend: AttentionBackend) -> dict[str, AttentionBackend]:
    """Backends that a backend holds, by attribute."""
    found = {}
    for name, value in vars(backend).items():
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        found |= {f"{name}.{key}": item for key, item in items if isinstance(item, AttentionBackend)}
        if isinstance(value, AttentionBackend):
            found[name] = value
    return found


def addresses(metadata: Any) -> dict[str, Address]:
    """Where each metadata tensor lies and what it looks like."""
    return {p: (t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype) for p, t in tensors_of(metadata).items()}


def _place(address: Address | None) -> str:
    return "absent" if address is None else f"{list(address[1])} at {address[0]:#x}"


def scalars_of(value: Any, path: str = "") -> dict[str, int | float | bool]:
    """Every host number in a metadata object, by path."""
    if isinstance(value, int | float):
        return {path: value}
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    found: dict[str, int | float | bool] = {}
    for f in fields(value):
        found |= scalars_of(getattr(value, f.name), f"{path}.{f.name}" if path else f.name)
    return found
