"""Faults of halves that a hook does not reach."""

from __future__ import annotations

from ....backends.modes import Arm
from ....backends.wrappers.tbo import TwoBatchOverlap
from ..matrix import Sizes
from .variants import variant


class HalvesForgottenAtCapture(TwoBatchOverlap):
    """A21, upstream without its runner's plug-in: a capture batch that nobody split reaches the whole only."""

    def _halves(self, fb):
        return super()._halves(fb) if self.metadata.get((fb.forward_mode, fb.batch_size)) else []


class HalvesNotRecorded(TwoBatchOverlap):
    """The in-graph hook reaches the whole only: halves keep what capture left, and the whole looks right."""

    def init_forward_metadata_in_graph(self, fb):
        self.primary.init_forward_metadata_in_graph(fb)


SIZES = Sizes(16, 116, (4,), steps=4, options=(("inner", "trtllm_mha"),))
FAULTS = (
    variant(HalvesForgottenAtCapture, "C3", "C14", sizes=SIZES),
    variant(HalvesNotRecorded, "C3", "C13", sizes=SIZES, arm=Arm.parse("fused-graph")),
)
