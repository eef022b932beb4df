"""Faults of two halves that are not told the same."""

from __future__ import annotations

from dataclasses import replace

from ....backends.mamba import MambaBackend
from ....backends.modes import Arm
from ....backends.wrappers.hybrid_linear import HybridLinear
from ..matrix import Sizes
from .mamba import CountsByValue
from .variants import variant


class NoInGraphHook(HybridLinear):
    """A22, two releases of upstream: an in-graph hook inherited from a base class, where it does nothing."""

    def init_forward_metadata_in_graph(self, fb):
        pass


class CountsAnothersFill(HybridLinear):
    """Padding counted by the linear half's own fill, where the full half chose another: live rows of that length lose
    their state, and padding has one."""

    @staticmethod
    def child_class(name):
        cls = HybridLinear.child_class(name)
        return CountsByValue if cls is MambaBackend else cls


SIZES = Sizes(16, 116, (3,), steps=5, options=(("full", "triton"), ("linear", "mamba")))
FAULTS = (
    variant(NoInGraphHook, "C3", "C13", sizes=SIZES, arm=Arm.parse("fused-graph")),
    variant(CountsAnothersFill, "C3", sizes=replace(SIZES, options=(("full", "ascend"), ("linear", "mamba")))),
)
