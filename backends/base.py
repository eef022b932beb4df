"""The contract of an attention backend under CUDA-graph capture and replay.

Three moments: `init_cuda_graph_state` allocates, once; `init_forward_metadata_out_graph` does this batch's host work
before capture or replay; `init_forward_metadata_in_graph` does static-shape device work that a graph can record.
A captured graph reads addresses: whatever it read at capture must be refilled in place, never rebound.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from .batch import ForwardBatch, Pools
from .modes import ForwardMode, Implementation, ReadEnd, TailPolicy
from .oracle import Expected, HostBatch, HostPools

_UNAUDITED = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DLLM_EXTEND)


class ConfigError(ValueError):
    """A size or option that cannot work; names the buffer or argument and both numbers."""


def too_many_slots(given: int, room: int) -> ConfigError:
    """More write slots than a bound buffer holds."""
    return ConfigError(
        f"out_cache_loc has {given} slots, swa_out_cache_loc {room} at this batch size: pass the slots of this step "
        "only"
    )


class PeerMissing(ConfigError):
    """A peer implementation that is not installed here, or that this backend has no counterpart for."""


class NotCapturedError(LookupError):
    """Replay of a batch size for which nothing was captured; names the size and the captured ones."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Everything that is fixed when graphs are captured. Lengths in tokens.

    Attributes:
        page_size: P.
        max_context: C, the model's context length.
        draft_tokens: N, draft tokens per request; 0 without speculation.
        topk: K, draft branches; 0 without speculation.
        draft_steps: S.
        step_id: which draft step this instance serves, 0..S-2.
        window: sliding window in tokens, or None.
        num_heads, num_kv_heads: per rank.
        max_requests: rows of req_to_token less the padding row.
        extra: options of one backend only.
    """

    page_size: int
    max_context: int
    draft_tokens: int = 0
    topk: int = 0
    draft_steps: int = 0
    step_id: int = 0
    window: int | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    max_requests: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("page_size", "max_context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def headroom(self) -> int:
        """Tokens by which a length may exceed max_context while drafts are pending."""
        return max(self.draft_tokens, self.draft_steps)

    @property
    def table_columns(self) -> int:
        """Page-table width W: room for the context and for pending draft tokens.

        Upstream sizes tables from the context alone, and a verify near the limit then points past its last column.
        """
        return -(-(self.max_context + self.headroom) // self.page_size)


@dataclass(frozen=True, slots=True)
class Allowances:
    """What a backend does on purpose although it looks like a fault; the conformance checks read it.

    Attributes:
        aliases: groups of names that share memory: metadata fields, and runner slots as ``slots.seq_lens``.
        shared_between_modes: metadata fields whose memory several modes of one instance use in turn.
        spills: fields behind whose bound view the eager ATen chain writes too, as upstream's does.
        unordered: fields whose written cells may come in any order.
        fused_launches: launches of one fused rebuild; more than one only where data dependencies leave no choice.
        dispatches_per_request: by mode, what the classic chain dispatches for each request where it loops over them.
        syncs_per_request: how often it then waits for the device.
        lists_read: lists of numbers it reads from the device: each is a copy first, which a host that is the device
            does without.
        advances: tables of the engine, by name in `Pools`, that every rebuild carries on: it may run only once a step.
    """

    aliases: frozenset[frozenset[str]] = frozenset()
    shared_between_modes: frozenset[str] = frozenset()
    spills: frozenset[str] = frozenset()
    unordered: frozenset[str] = frozenset()
    fused_launches: int = 1
    dispatches_per_request: Mapping[str, int] = field(default_factory=dict)
    syncs_per_request: int = 0
    lists_read: int = 0
    advances: frozenset[str] = frozenset()


class AttentionBackend(ABC):
    """One attention backend: its buffers, its ATen rebuild and its fused rebuild.

    A subclass binds views of preallocated buffers once per captured (mode, batch size) and refills them in place.
    `recorded` says which hook rebuilds: in graph (static shapes) if True, out of graph if False.
    """

    modes: frozenset[ForwardMode] = frozenset()
    seq_len_fill_value = 1
    """seq_lens of padding rows."""
    allowances = Allowances()

    def __init__(
        self,
        config: AttentionConfig,
        pools: Pools,
        implementation: Implementation = Implementation.FUSED,
        *,
        recorded: bool = True,
        tail: TailPolicy | None = None,
    ) -> None:
        self.config = config
        self.pools = pools
        self.device = pools.req_to_token.device
        self.implementation = implementation
        self.recorded = recorded
        self.asked_tail = tail
        self.tail = tail or self.default_tail(implementation, recorded)
        self.metadata: dict[tuple[ForwardMode, int], Any] = {}
        self.forward_metadata: Any = None
        self.max_bs = 0
        self.take_options()
        self._rebuild = self._choose_rebuild()
        plans = type(self).plan is not AttentionBackend.plan
        self._out_graph_work = ([] if recorded else [self._rebuild]) + ([self.plan] if plans else [])

    def take_options(self) -> None:
        """Read what `config` and `pools` say to this backend only; a wrapper makes its children. Part of construction.

        Raises:
            ConfigError: an option that cannot work.
        """

    @staticmethod
    def default_tail(implementation: Implementation, recorded: bool) -> TailPolicy:
        """The fused kernel stops at the live length; ATen writes the batch's widest row, or all it could record."""
        if implementation is Implementation.FUSED:
            return TailPolicy.LIVE_ONLY
        return TailPolicy.STATIC_FULL if recorded or implementation is Implementation.COMPILE else TailPolicy.BATCH_MAX

    # The three moments.

    @abstractmethod
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate every buffer that graphs will read. The only place that allocates."""

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        """Host work before capture (bind views) or before replay (select them, rebuild if not recorded)."""
        # At replay of a recorded rebuild the next few lines are all that metadata costs the host.
        if in_capture:
            self._check_mode(fb)
            self.metadata[fb.forward_mode, fb.batch_size] = self.bind(fb)
        try:
            md = self.forward_metadata = self.metadata[fb.forward_mode, fb.batch_size]
        except KeyError:
            raise NotCapturedError(self._not_captured(fb.forward_mode, fb.batch_size)) from None
        for work in self._out_graph_work:
            work(fb, md)

    def plan(self, fb: ForwardBatch, md: Any) -> None:
        """Host work that no graph can hold (a vendor planner, host mirrors), after the rebuild. None by default."""

    def init_forward_metadata_in_graph(self, fb: ForwardBatch) -> None:
        """Device work of static shape. Recorded, so it sees the static slots whatever `fb` is at replay."""
        if self.recorded:
            self._rebuild(fb, self.forward_metadata)

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what a warm-up run changed. Nothing by default."""

    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        """Eager use: both hooks in order."""
        self.init_forward_metadata_out_graph(fb)
        self.init_forward_metadata_in_graph(fb)

    def shared_read_ends(self, mode: ForwardMode) -> ReadEnd:
        """When a replay in `mode` has read the engine's tables, the last of its reads counted.

        Draft extend is the last reader of an iteration and nobody has audited its layers. A hook of a backend's own in
        the graph may read whatever the rest of its rebuild does outside.
        """
        if mode in _UNAUDITED:
            return ReadEnd.UNKNOWN
        reads_in_graph = (
            type(self).init_forward_metadata_in_graph is not AttentionBackend.init_forward_metadata_in_graph
        )
        return ReadEnd.IN_REPLAY if self.recorded or reads_in_graph else ReadEnd.PRE_REPLAY

    # What a backend supplies.

    @abstractmethod
    def bind(self, fb: ForwardBatch) -> Any:
        """The metadata dataclass for (mode, B): views of this instance's buffers, plus baked host constants."""

    @abstractmethod
    def rebuild_aten(self, fb: ForwardBatch, md: Any) -> None:
        """The classic chain of small ops; may read the host mirror and use this batch's widths."""

    @abstractmethod
    def rebuild_aten_static(self, fb: ForwardBatch, md: Any) -> None:
        """The same at captured widths: no host read, so that a graph can record it."""

    @abstractmethod
    def rebuild_fused(self, fb: ForwardBatch, md: Any) -> None:
        """One Triton launch."""

    def peer_rebuild(self) -> Callable[[ForwardBatch, Any], None]:
        """The rebuild of the engine that is installed, on this backend's buffers; also sets `tail` to what it leaves.

        Raises:
            PeerMissing: no engine is installed, or it has no kernel for this backend.
        """
        raise PeerMissing(f"{type(self).__name__} has no counterpart in sglang that attn-graph can run")

    @abstractmethod
    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        """The oracle's word on every metadata field, by its path in the metadata object, under this instance's
        tail policy. Plain NumPy: shares no code with the rebuilds."""

    def classic_rebuild(self) -> Callable[[ForwardBatch, Any], None]:
        """The classic chain: as a graph can hold it, or eager."""
        return self.rebuild_aten_static if self.recorded else self.rebuild_aten

    def _choose_rebuild(self):
        if self.implementation is Implementation.FUSED:
            return self.rebuild_fused
        if self.implementation is Implementation.SGLANG:
            return self.peer_rebuild()
        if self.implementation is Implementation.COMPILE:
            # Dynamo guards on Python state; the bound tensors never change, so one entry per captured size stays.
            return torch.compile(self.rebuild_aten_static, dynamic=False)
        return self.classic_rebuild()

    def _check_mode(self, fb: ForwardBatch) -> None:
        if fb.forward_mode not in self.modes:
            known = ", ".join(sorted(map(str, self.modes)))
            raise ConfigError(f"{type(self).__name__} has no mode {fb.forward_mode!s}. It has: {known}")

    def _not_captured(self, mode: ForwardMode, size: int) -> str:
        sizes = sorted(b for m, b in self.metadata if m is mode)
        return (
            f"batch size {size} was not captured for mode {mode}; captured sizes: "
            f"{', '.join(map(str, sizes)) or 'none'}"
        )


def tensors_of(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor reachable from a metadata object, by path. Walks dataclasses, lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name)) for f in fields(value)]
    elif isinstance(value, Mapping):
        items = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for name, item in items:
        found |= tensors_of(item, f"{path}.{name}" if path else name)
    return found
