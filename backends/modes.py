"""Names shared by every layer: forward modes, implementations, placements. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class ForwardMode(str, Enum):
    """What a captured graph does with its batch. Symbolic on purpose: engines renumber these between releases."""

    DECODE = "decode"
    IDLE = "idle"
    DRAFT_DECODE = "draft_decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    DRAFT_EXTEND_V2 = "draft_extend_v2"
    DLLM_EXTEND = "dllm_extend"

    # Enum hashes in Python; this one is a key on the way to every graph launch.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.value

    @property
    def captured(self) -> ForwardMode:
        """The mode whose graph serves this one: an idle rank replays the decode graph on padding rows."""
        return ForwardMode.DECODE if self is ForwardMode.IDLE else self

    @property
    def is_speculative(self) -> bool:
        return self not in (ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.DLLM_EXTEND)


class Implementation(str, Enum):
    """Who rebuilds the metadata: PyTorch ops, those compiled, our kernel, or that of an engine found installed."""

    ATEN = "aten"
    COMPILE = "compile"
    FUSED = "fused"
    SGLANG = "sglang"

    def __str__(self) -> str:
        return self.value


class Placement(str, Enum):
    """Where the rebuild runs: dispatched before each replay, in a graph of its own, or inside the main graph."""

    EAGER = "eager"
    GLUE = "glue"
    GRAPH = "graph"

    def __str__(self) -> str:
        return self.value


class TailPolicy(str, Enum):
    """Which columns of a page table a rebuild writes, right of each row's live prefix.

    batch_max: up to the longest row of the batch, filled from req_to_token (classic ATen chain).
    static_full: every column, filled from req_to_token (the chain at static width).
    live_only: nothing right of the live prefix; older ids stay.
    zero_tail: zeros up to the table's width.
    """

    BATCH_MAX = "batch_max"
    STATIC_FULL = "static_full"
    LIVE_ONLY = "live_only"
    ZERO_TAIL = "zero_tail"

    def __str__(self) -> str:
        return self.value


class ReadEnd(IntEnum):
    """When a step has read the tables that the scheduler rewrites for the next one; later ends are larger.

    PRE_REPLAY: before the graph is launched. IN_REPLAY: with the in-graph hook. POST_REPLAY: layers read them too.
    UNKNOWN: nobody looked, so the scheduler waits for the whole forward pass.
    """

    PRE_REPLAY = 0
    IN_REPLAY = 1
    POST_REPLAY = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """One way to rebuild: implementation x placement, e.g. ``aten-eager`` or ``fused-graph``."""

    implementation: Implementation
    placement: Placement

    def __str__(self) -> str:
        return f"{self.implementation}-{self.placement}"

    @staticmethod
    def parse(text: str) -> Arm:
        """Read ``impl-placement``.

        Raises:
            ValueError: not one of ARMS.
        """
        for arm in ARMS:
            if str(arm) == text:
                return arm
        raise ValueError(f"unknown arm {text!r}. Known: {', '.join(map(str, ARMS))}")

    @property
    def is_peer(self) -> bool:
        """Whether it runs somebody else's kernel."""
        return self.implementation is Implementation.SGLANG


ARMS: tuple[Arm, ...] = tuple(
    Arm(Implementation(i), Placement(p))
    for i, p in (
        ("aten", "eager"),
        ("aten", "glue"),
        ("aten", "graph"),
        ("compile", "eager"),
        ("fused", "eager"),
        ("fused", "glue"),
        ("fused", "graph"),
        ("sglang", "eager"),
        ("sglang", "glue"),
        ("sglang", "graph"),
    )
)
