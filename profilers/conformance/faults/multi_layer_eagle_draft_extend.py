"""Faults of draft layers in a chain of graphs."""

from __future__ import annotations

from ....backends.modes import ForwardMode
from ....backends.runners.eagle_draft_extend import ExtendStep
from ....backends.runners.multi_layer_eagle_draft_extend import MultiLayerEagleDraftExtendRunner
from .variants import PoolRowsKept, runner_variant


class DefaultsHook(MultiLayerEagleDraftExtendRunner):
    """The warm-up hook of the runner's first backend for every layer, not of the one that is captured."""

    def _capture_layers(self, layers, bucket, batch):
        own, self.backends = self.backends, (self.backends[0],) * len(self.backends)
        try:
            return super()._capture_layers(layers, bucket, batch)
        finally:
            self.backends = own


class FirstLayersHook(MultiLayerEagleDraftExtendRunner):
    """Only the first layer's in-graph hook is recorded: the others read the metadata of their capture."""

    def _run_layers(self, layers, bucket, batch):
        rows = self.slots.slices(bucket)
        for i in layers:
            if i == 0:
                self.backends[i].init_forward_metadata_in_graph(batch)
            made = self._extend_forward(ExtendStep(i, batch, rows))
            rows["hidden_states"].copy_(made.hidden_states)
            self._tokens[bucket, i] = made.tokens


class KeepsPoolRows(PoolRowsKept, MultiLayerEagleDraftExtendRunner):
    """Preparing a step does not zero the pool rows behind the live ones."""


class LeavesWarmUps(MultiLayerEagleDraftExtendRunner):
    """Hidden states that warm-ups and captures wrote into the chained slots are not put back."""

    def _capture_layers(self, layers, bucket, batch):
        graph = self._new_graph()
        graph.capture(lambda: self._run_layers(layers, bucket, batch), after_warmup=lambda: self._warmed(layers))
        return graph

    def _warmed(self, layers):
        for i in layers:
            self.backends[i].on_after_cuda_graph_warmup()


EXTEND = ForwardMode.DRAFT_EXTEND_V2
FAULTS = (
    runner_variant(DefaultsHook, "R1", mode=EXTEND),
    runner_variant(FirstLayersHook, "R1", "R3", mode=EXTEND),
    runner_variant(KeepsPoolRows, "R2", mode=EXTEND),
    runner_variant(LeavesWarmUps, "R2", mode=EXTEND),
)
