"""Faults of padding rows that must have no state, and of rings that must move once a step."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....backends.mamba import MambaBackend
from ....backends.modes import Arm, ForwardMode
from ..matrix import Sizes
from .variants import FUSED, variant


class CountsByValue(MambaBackend):
    """Rows of length 1 are padding, whatever the engine says: the last live row loses its state."""

    def _padding(self, fb):
        return super()._padding(replace(fb, num_padding=None))


class ClampedSlot(MambaBackend):
    """A19: padding's -1 becomes slot 0, which somebody owns."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        md.mamba_cache_indices.clamp_(min=0)


class AdvancesRows(MambaBackend):
    """Every row moves its slot's ring cursor: a slot that stands twice in the batch moves twice."""

    def _aten_move(self, md, slots):
        live = slots >= 0
        cursors, rows = md.ring_cursors, slots[live].long()
        flushed = rows[md.force_flush[live] > 0]
        cursors.index_add_(0, rows, torch.ones_like(rows, dtype=cursors.dtype)).remainder_(self.pools.ring_length)
        cursors[flushed] = 0


class FlushesOneOfTwo(MambaBackend):
    """Rows that share a slot write their own idea of its cursor: the last one's wins, whoever asked for a flush."""

    def _aten_move(self, md, slots):
        length, live = self.pools.ring_length, slots >= 0
        following = ((md.write_pos + 1) % length).masked_fill(md.force_flush > 0, 0)
        for slot, cursor in zip(slots[live].tolist(), following[live].tolist(), strict=True):
            md.ring_cursors[slot] = cursor


class WarmsTheRing(MambaBackend):
    """Warm-ups of a capture move the ring of whoever has state_slots[0]."""

    def _static_ring(self, fb, md, requests):
        super()._static_ring(fb, md, md.mamba_cache_indices >= 0)


VERIFY = ForwardMode.TARGET_VERIFY
RING = {"variant": "gdn", "ring_interval": 3}
FAULTS = (
    variant(CountsByValue, "C3", sizes=Sizes(16, 116, (3,), steps=5)),
    variant(ClampedSlot, "C3", mode=VERIFY, sizes=Sizes(16, 116, (3,), steps=5), arm=FUSED),
    variant(AdvancesRows, "C3", sizes=Sizes(16, 116, (3,), steps=7), extra={**RING, "variant": "kda"}),
    variant(FlushesOneOfTwo, "C3", sizes=Sizes(16, 116, (8,), steps=7), extra=RING),
    variant(WarmsTheRing, "C12", sizes=Sizes(16, 116, (3,)), arm=Arm.parse("aten-graph"), extra=RING),
)
