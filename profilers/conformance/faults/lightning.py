"""Faults of tensors that upstream makes anew with every call."""

from __future__ import annotations

from ....backends.lightning import LightningBackend
from ....backends.modes import ForwardMode
from ..matrix import Sizes
from .variants import FUSED, variant


class NewTensorsEveryCall(LightningBackend):
    """The object's query lengths are a new tensor at every call: a graph would read the freed one."""

    def rebuild_aten(self, fb, md):
        md.q_lengths = md.q_lengths.clone()
        super().rebuild_aten(fb, md)


class PaddingHasQueries(LightningBackend):
    """All rows taken as N queries long, as the verify kernel's own step is."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        md.q_lengths.fill_(self.tokens)


VERIFY = ForwardMode.TARGET_VERIFY
FAULTS = (
    variant(NewTensorsEveryCall, "C1", "C3", sizes=Sizes(16, 116, (3,), steps=5)),
    variant(PaddingHasQueries, "C3", mode=VERIFY, sizes=Sizes(16, 116, (3,), steps=5), arm=FUSED),
)
