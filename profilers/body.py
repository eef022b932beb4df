"""The forward pass of a decode graph, as far as its launch is concerned: many small kernels over a few streams.

What a graph launch costs depends on its nodes and branches, not on what they compute. The first all-reduce stands at
a chosen node, because the kernels before it decide how early a rank enters it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class BodyShape:
    """What the captured body looks like.

    Attributes:
        nodes: kernels, the all-reduce not counted.
        branches: streams they run on, joined at the end.
        allreduce_at: kernels on the main branch before the first all-reduce.
    """

    nodes: int
    branches: int = 1
    allreduce_at: int = 10

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.branches < 1 or self.allreduce_at < 0:
            raise ValueError(f"nodes and allreduce_at must be >= 0 and branches >= 1, got {self}")


class DecodeBody:
    """Callable that issues the body; record it with a graph.

    Args:
        all_reduce: issues the first all-reduce. None where ranks have no device of their own to meet on: then nothing
            stands at its place, and waits are predicted from launch ends.
    """

    def __init__(self, shape: BodyShape, device: torch.device, all_reduce: Callable[[], None] | None = None) -> None:
        self._shape = shape
        self._all_reduce = all_reduce
        self._work = [torch.zeros(ELEMENTS, device=device) for _ in range(shape.branches)]
        self._streams = [torch.cuda.Stream(device) for _ in range(shape.branches - 1)] if device.type == "cuda" else []

    def __call__(self) -> None:
        shape = self._shape
        before = min(shape.allreduce_at, shape.nodes)
        self._kernels(0, before)
        if self._all_reduce is not None:
            self._all_reduce()
        share, rest = divmod(shape.nodes - before, shape.branches)
        current = torch.cuda.current_stream() if self._streams else None
        for branch, stream in enumerate(self._streams, start=1):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._kernels(branch, share)
        if not self._streams:  # a recorded graph has one order of operations; the branches follow one another
            for branch in range(1, shape.branches):
                self._kernels(branch, share)
        self._kernels(0, share + rest)
        for stream in self._streams:
            current.wait_stream(stream)

    def _kernels(self, branch: int, n: int) -> None:
        for _ in range(n):
            self._work[branch].add_(1.0)
