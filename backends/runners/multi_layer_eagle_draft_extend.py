"""The multi-layer EAGLE draft-extend runner: one draft layer and one backend for each step, chained.

A step is prepared once: all slots filled, select_index[b] = b * N + accepted[b] - 1. Then, layer by layer: out-graph
hook (unless the backend does everything in the graph), replay, rotation of input ids. A layer reads the hidden states
that the one before wrote into their slot, and the tokens it sampled: ids move one to the left, and the sampled token
takes the place of the last accepted one.

With single_graph all layers and rotations are one graph; each backend's in-graph hook runs right before its own layer.
Warm-ups and captures change the chained slots, which are put back outside the graph. seq_lens is int32, so a cast to
int32 is the slot itself: metadata must copy it, not bind it. Source: specs of SGLang's multi-layer EAGLE runners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..base import AttentionBackend, ConfigError
from ..batch import ForwardBatch
from ..modes import Placement, ReadEnd
from .eagle_draft_extend import EagleDraftExtendRunner, ExtendStep
from .inputs import StepInputs
from .read_done import ReadDone
from .slots import BufferPool, StaticSlots
from .tree import is_idle_out_of_graph

CHAINED = ("input_ids", "hidden_states", "select_index")
"""Slots that a captured body changes."""


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """What a draft layer leaves for the next one."""

    tokens: torch.Tensor  # [B] int64, sampled at select_index
    hidden_states: torch.Tensor  # [B * N, H]


def rotate(input_ids: torch.Tensor, tokens: torch.Tensor, select_index: torch.Tensor, width: int) -> None:
    """Move each request's ids one to the left and put its sampled token where the last accepted one was, in place.

    Args:
        input_ids: [B * width] int64.
        tokens, select_index: [B] int64; select_index counts within input_ids.
    """
    ids = input_ids.view(-1, width)
    ids[:, :-1].copy_(ids[:, 1:].clone())
    input_ids.scatter_(0, select_index, tokens)


class MultiLayerEagleDraftExtendRunner(EagleDraftExtendRunner):
    """Draft extend over several layers.

    Args:
        backends: one for each layer, of one configuration.
        forward: one layer's device work.
        single_graph: all layers in one graph.
        others: see GraphRunner.
    """

    needs = (*EagleDraftExtendRunner.needs, "input_ids")

    def __init__(
        self,
        backends: Sequence[AttentionBackend],
        buckets: Sequence[int],
        slots: StaticSlots,
        placement: Placement,
        new_graph: Callable[[], Any],
        forward: Callable[[ExtendStep], LayerOutput],
        *,
        single_graph: bool = False,
        read_done: ReadDone | None = None,
    ) -> None:
        if placement is Placement.GLUE:
            raise ConfigError("multi_layer_eagle_draft_extend has no glue graphs: its graphs are chained already")
        super().__init__(backends[0], buckets, slots, placement, new_graph, forward, read_done=read_done)
        self.backends, self.single_graph = tuple(backends), single_graph
        for backend in self.backends[1:]:
            backend.init_cuda_graph_state(self.buckets[-1], self.buckets[-1] * slots.tokens_per_req)
        self._tokens: dict[tuple[int, int], torch.Tensor] = {}

    @staticmethod
    def new_slots(
        backend: AttentionBackend,
        max_bs: int,
        hidden_size: int,
        *,
        lens: torch.dtype = torch.int32,
        dtype: torch.dtype = torch.float32,
        pool: BufferPool | None = None,
    ) -> StaticSlots:
        """Static slots for up to max_bs requests. lens: dtype of seq_lens; dtype: of hidden states."""
        slots = EagleDraftExtendRunner.new_slots(backend, max_bs, hidden_size, lens=lens, dtype=dtype, pool=pool)
        n = slots.tokens_per_req
        starts = torch.arange(0, max_bs * n, n, device=backend.device)
        # Of this runner's width, so of no other runner's.
        slots.add("extend_start_loc", dtype=torch.int32, pad=None, shared=False).copy_(starts)
        slots.add("select_index", pad=None, shared=False).copy_(starts + n - 1)
        return slots

    # Capture.

    def _capture_size(self, bucket: int, batch: ForwardBatch) -> None:
        layers = range(len(self.backends))
        for backend in self.backends:
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
        groups = [layers] if self.single_graph else [[i] for i in layers]
        self.graphs[bucket] = [self._capture_layers(group, bucket, batch) for group in groups]

    def _capture_layers(self, layers: Sequence[int], bucket: int, batch: ForwardBatch) -> Any:
        rows = self.slots.slices(bucket)
        before = {name: rows[name].clone() for name in CHAINED}

        def put_back() -> None:
            for name, content in before.items():
                rows[name].copy_(content)

        def after_warmup() -> None:
            for i in layers:
                self.backends[i].on_after_cuda_graph_warmup()
            put_back()

        graph = self._new_graph()
        graph.capture(partial(self._run_layers, layers, bucket, batch), after_warmup=after_warmup)
        put_back()
        return graph

    def _run_layers(self, layers: Sequence[int], bucket: int, batch: ForwardBatch) -> None:
        rows = self.slots.slices(bucket)
        for i in layers:
            self.backends[i].init_forward_metadata_in_graph(batch)
            made = self._extend_forward(ExtendStep(i, batch, rows))
            rows["hidden_states"].copy_(made.hidden_states)
            self._tokens[bucket, i] = made.tokens
            if self.single_graph:
                self._rotate_after(i, bucket)

    def _rotate_after(self, layer: int, bucket: int) -> None:
        if layer + 1 < len(self.backends):  # nobody reads the ids after the last one
            rows = self.slots.slices(bucket)
            rotate(rows["input_ids"], self._tokens[bucket, layer], rows["select_index"], self.slots.tokens_per_req)

    # Replay.

    def load_batch(self, step: StepInputs) -> None:
        super().load_batch(step)
        rows = self.slots.slices(self.bucket)
        rows["select_index"].copy_(rows["extend_start_loc"] + rows["num_accept_tokens"] - 1)

    def _select(self, bucket: int, live: int, view: ForwardBatch) -> None:
        self.bucket, self.live, self.view = bucket, live, view
        self.rebuild = partial(self._rebuild_layers, range(len(self.backends)))
        self.launch = self._launch_all

    def replay(self) -> dict[str, torch.Tensor]:
        """Layer by layer; tokens of layer i as ``tokens{i}``, and the last hidden states."""
        graphs, end = self.graphs[self.bucket], self._read_end()
        for i, graph in enumerate(graphs):
            self._rebuild_layers(range(len(self.backends)) if self.single_graph else [i])
            last = self.read_done is not None and i + 1 == len(graphs)
            if last:
                self.read_done.before_launch(end)
            graph.launch()
            if last:
                self.read_done.after_launch(end, marked=self.marks_reads)
            if not self.single_graph:
                self._rotate_after(i, self.bucket)
        return self.outputs()

    def outputs(self) -> dict[str, torch.Tensor]:
        live, t = self.live, self.slots.tokens_per_req
        made = {f"tokens{i}": self._tokens[self.bucket, i][:live] for i in range(len(self.backends))}
        return made | {"hidden_states": self.slots.hidden_states[: live * t].clone()}

    def _rebuild_layers(self, layers: Sequence[int]) -> None:
        for i in layers:
            if not is_idle_out_of_graph(self.backends[i]):
                self.backends[i].init_forward_metadata_out_graph(self.view)

    def _launch_all(self) -> None:
        for i, graph in enumerate(self.graphs[self.bucket]):
            graph.launch()
            if not self.single_graph:
                self._rotate_after(i, self.bucket)

    def _read_end(self) -> ReadEnd:
        return max(backend.shared_read_ends(self.mode) for backend in self.backends)
