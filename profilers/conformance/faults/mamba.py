"""Faults of padding rows that must have no state."""

from __future__ import annotations

from dataclasses import replace

from ....backends.mamba import MambaBackend
from ....backends.modes import ForwardMode
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


VERIFY = ForwardMode.TARGET_VERIFY
FAULTS = (
    variant(CountsByValue, "C3", sizes=Sizes(16, 116, (3,), steps=5)),
    variant(ClampedSlot, "C3", mode=VERIFY, sizes=Sizes(16, 116, (3,), steps=5), arm=FUSED),
)
