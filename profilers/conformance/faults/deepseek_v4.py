"""Faults of a struct that is upgraded in the graph, and of the compressors' plans."""

from __future__ import annotations

import torch

from ....backends.deepseek_v4 import DeepseekV4Backend
from ....backends.modes import ForwardMode
from ..matrix import Sizes
from .variants import variant


class HostPlanner(DeepseekV4Backend):
    """The planner for host lengths does not keep the states of drafts that may be rejected."""

    def _aten_plans(self, *args):
        self.keep_draft = False
        super()._aten_plans(*args)
        self.keep_draft = True


class StalePlan(DeepseekV4Backend):
    """Compressor plans of the capture."""

    def _aten_plans(self, built, *args):
        kept = built.c4_plan.plan_d.clone()
        super()._aten_plans(built, *args)
        built.c4_plan.plan_d.copy_(kept)


class LosesTheStoreLocations(DeepseekV4Backend):
    """Store locations assigned, not copied: Python has lost the tensor that the graph writes."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        md.swa_out_cache_loc = torch.zeros_like(md.swa_out_cache_loc)


SIZES = Sizes(256, 600, (3,), swa=True, steps=4)
FAULTS = (
    variant(HostPlanner, "C3", sizes=SIZES, mode=ForwardMode.TARGET_VERIFY),
    variant(StalePlan, "C3", sizes=SIZES),
    variant(LosesTheStoreLocations, "C1", sizes=SIZES),
)
