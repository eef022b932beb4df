"""Faults of the list of latent slots."""

from __future__ import annotations

from ....backends.flashinfer_mla import FlashInferMlaBackend
from ....backends.modes import ForwardMode
from ..matrix import Sizes
from .variants import FUSED, variant


class EagerList(FlashInferMlaBackend):
    """A01: replay fills a list of its own, the captured one keeps the first batch's."""

    def rebuild_aten(self, fb, md):
        captured = self.kv_indices
        self.kv_indices = captured.clone()
        super().rebuild_aten(fb, md)
        self.kv_indices = captured


class NeighboursDrafts(FlashInferMlaBackend):
    """Offsets without the draft tokens that the list has: all requests but the first begin in a neighbour's."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        if self._offset(fb.forward_mode):
            md.kv_indptr -= self.row_numbers[: fb.batch_size + 1] * self._offset(fb.forward_mode)


FAULTS = (
    variant(EagerList, "C3", sizes=Sizes(1, 61, (2,), steps=3)),
    variant(NeighboursDrafts, "C3", mode=ForwardMode.TARGET_VERIFY, sizes=Sizes(1, 61, (2,), steps=3), arm=FUSED),
)
