"""Faults of padding rows that have a state."""

from __future__ import annotations

from ....backends.ascend_gdn import AscendGdnBackend
from ....backends.modes import ForwardMode
from ..matrix import Sizes
from .variants import FUSED, variant


class PaddingAtTokenZero(AscendGdnBackend):
    """Padding rows of a verify use token 0, request 0's first state."""

    def _number_padding(self, md, live_tokens):
        md.mamba_cache_indices_gdn[live_tokens:] = 0


class SkippedSlot(AscendGdnBackend):
    """Padding rows get the -1 of other devices' kernels: here it would index the last state."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        md.mamba_cache_indices[fb.batch_size - fb.num_padding :] = -1


VERIFY = ForwardMode.TARGET_VERIFY
FAULTS = (
    variant(PaddingAtTokenZero, "C3", mode=VERIFY, sizes=Sizes(16, 116, (3,), steps=5)),
    variant(SkippedSlot, "C3", mode=VERIFY, sizes=Sizes(16, 116, (3,), steps=5), arm=FUSED),
)
