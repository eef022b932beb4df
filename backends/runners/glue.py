"""Glue graphs: an eager rebuild's out-graph hook in a small graph of its own, one launch instead of its operations.

A graph serves one (B, captured mode, live mode), because live and idle steps take different branches in Python. What a
hook would read on the host is None in the batch that is captured: a graph would freeze it, without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..base import AttentionBackend
from ..batch import ForwardBatch
from ..modes import ForwardMode, Implementation
from .tree import every, halves_batches, plans_on_host

Key = tuple[int, ForwardMode, ForwardMode]


def backend_refusal(backend: AttentionBackend) -> str:
    """Why the hook cannot be captured; empty where it can."""
    if backend.recorded:
        return "the rebuild is recorded already"
    planner = plans_on_host(backend)
    if planner:
        return f"{planner} plans on the host: a graph would replay the plan of its capture"
    if backend.implementation not in (Implementation.FUSED, Implementation.COMPILE):
        return f"a rebuild by {backend.implementation} may read lengths on the host"
    if halves_batches(backend):
        return "two-batch overlap splits on the host"
    if backend.allowances.advances:
        return f"it moves {', '.join(sorted(backend.allowances.advances))}: warm-ups would move them once more"
    return ""


def step_refusal(view: ForwardBatch) -> str:
    """Why this step cannot take a glue graph; empty where it can."""
    return "padded: rows are missing to the captured size" if view.num_padding else ""


@dataclass(frozen=True, slots=True)
class _Glue:
    graph: Any
    state: tuple[tuple[AttentionBackend, Any], ...]  # each backend's metadata object as the capture left it

    def replay(self) -> None:
        for backend, metadata in self.state:
            backend.forward_metadata = metadata
        self.graph.launch()


class GlueGraphs:
    """Routes eligible steps through graphs, captured at first use; everything else runs eagerly and is counted.

    Attributes:
        refusal: why no step is routed; empty while steps are.
        routed: steps that went through a graph.
        eager: reasons of the others, and how many had them.

    Args:
        backend: whose out-graph hook is captured.
        new_graph: makes an empty graph, on a stream of its own.
    """

    def __init__(self, backend: AttentionBackend, new_graph: Callable[[], Any]) -> None:
        self._backend, self._new_graph = backend, new_graph
        self.refusal = backend_refusal(backend)
        self.routed = 0
        self.eager: Counter[str] = Counter()
        self._glue: dict[Key, _Glue] = {}

    def rebuild_of(self, view: ForwardBatch, static: Callable[[], ForwardBatch]) -> Callable[[], None]:
        """What rebuilds the metadata of a step.

        Args:
            view: the step as the hook sees it.
            static: makes the same step on static slots only; its live tensors would be freed under the graph.
        """
        reason = self.refusal or step_refusal(view)
        if reason:
            return partial(self._run_eagerly, view, reason)
        key = view.batch_size, view.forward_mode, view.actual_forward_mode
        if key not in self._glue:
            return partial(self._capture, key, view, static)
        return partial(self._run, self._glue[key])

    def drop(self) -> None:
        """Forget all graphs: the runner captures anew."""
        self._glue.clear()

    def _run_eagerly(self, view: ForwardBatch, reason: str) -> None:
        self.eager[reason] += 1
        self._backend.init_forward_metadata_out_graph(view)

    def _run(self, glue: _Glue) -> None:
        self.routed += 1
        glue.replay()

    def _capture(self, key: Key, view: ForwardBatch, static: Callable[[], ForwardBatch]) -> None:
        graph = self._new_graph()
        mode = view.actual_forward_mode
        batch = replace(static(), actual_forward_mode=mode, seq_lens_cpu=None, seq_lens_sum=None)
        try:
            graph.capture(partial(self._backend.init_forward_metadata_out_graph, batch))
        except Exception as error:
            # Any: a hook that needs a host value trips over None in a way of its own. A fault of the rebuild itself is
            # raised again by the eager run.
            self.refusal = f"capture failed: {error}"
            self._run_eagerly(view, self.refusal)
            return
        state = tuple((b, b.forward_metadata) for b in every(self._backend))
        self._glue[key] = _Glue(graph, state)
        self._run(self._glue[key])  # capturing executes nothing
