"""Faults of a wrapper that inherits hooks which do nothing."""

from __future__ import annotations

from dataclasses import replace

from ....backends.modes import Arm, ForwardMode
from ....backends.wrappers.hybrid import Hybrid
from ..matrix import Sizes
from .variants import variant


class InGraphDropped(Hybrid):
    """A22: the in-graph hook of the base, which does nothing for a backend without metadata of its own."""

    def init_forward_metadata_in_graph(self, fb):
        pass


class WarmupDropped(Hybrid):
    """The warm-up hook of the base: a child that undoes a warm-up is captured with what the warm-up left."""

    def on_after_cuda_graph_warmup(self):
        pass


class VerifyByCurrentMode(Hybrid):
    """Selection by the live mode: an idle rank in a verify graph reaches decode."""

    def parts(self, fb):
        idle = fb.actual_forward_mode is ForwardMode.IDLE
        return super().parts(replace(fb, forward_mode=ForwardMode.DECODE) if idle else fb)


RECORDED = Arm.parse("fused-graph")
PAIR = (("decode", "triton"), ("prefill", "flashattention"))
SIZES = Sizes(16, 116, (2,), steps=4, options=PAIR)
VERIFY = ForwardMode.TARGET_VERIFY
FAULTS = (
    variant(InGraphDropped, "C3", "C13", sizes=SIZES, arm=RECORDED),
    variant(WarmupDropped, "C13", sizes=SIZES),
    variant(VerifyByCurrentMode, "C3", sizes=replace(SIZES, steps=8), mode=VERIFY),
)
