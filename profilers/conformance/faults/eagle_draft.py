"""Faults of draft steps in one graph."""

from __future__ import annotations

from dataclasses import replace

from ....backends.modes import ForwardMode
from ....backends.runners.drafting import DraftStep
from ....backends.runners.eagle_draft import EagleDraftRunner
from .variants import runner_variant


class WithoutInGraphHook(EagleDraftRunner):
    """The body leaves the in-graph hook out: what is rebuilt there keeps the values of the capture."""

    def _metadata(self, batch):
        pass


class NobodySaysPadding(EagleDraftRunner):
    """Before num_padding there was nothing to tell a padded row by: hooks guess from lengths."""

    def _batch(self, bucket, step):
        return replace(super()._batch(bucket, step), num_padding=0)


class DriftingPositions(EagleDraftRunner):
    """The body adds a step to positions and never takes it off again: they drift from replay to replay."""

    def _forward(self, bucket, batch):
        made = super()._forward(bucket, batch)
        self.slots.slices(bucket)["positions"].add_(self.backend.config.draft_steps - 1)
        return made


class PrefixOfTheSlots(EagleDraftRunner):
    """A13: a step writes to the first B of all steps' slots instead of its own column."""

    def _forward(self, bucket, batch):
        rows = self.slots.slices(bucket)
        for i in range(self.backend.config.draft_steps - 1):
            self._step_forward(
                DraftStep(i, batch, rows, rows["hidden_states"], rows["out_cache_loc"][: len(rows["positions"])])
            )


DRAFT = ForwardMode.DRAFT_DECODE
FAULTS = (
    runner_variant(WithoutInGraphHook, "R1", "R3", mode=DRAFT),
    runner_variant(NobodySaysPadding, "R2", mode=DRAFT),
    runner_variant(DriftingPositions, "R2", mode=DRAFT),
    runner_variant(PrefixOfTheSlots, "R3", mode=DRAFT),
)
