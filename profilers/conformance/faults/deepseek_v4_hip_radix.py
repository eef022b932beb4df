"""Faults of what a copy of structs leaves behind."""

from __future__ import annotations

import torch

from ....backends.deepseek_v4_hip_radix import DeepseekV4HipRadixBackend
from ....backends.modes import ForwardMode
from ..matrix import Sizes
from .variants import variant


class AssignsTheSchedule(DeepseekV4HipRadixBackend):
    """The schedule assigned from the new struct: the captured kernel keeps the old one."""

    def _new_schedule(self, md):
        return torch.empty_like(md.indexer.schedule)


class KeepsDraftStates(DeepseekV4HipRadixBackend):
    """The CUDA planner's rule, which also keeps the last 4 tokens."""

    def _aten_plans(self, *args):
        self.keep_draft = True
        super()._aten_plans(*args)
        self.keep_draft = False


SIZES = Sizes(256, 600, (3,), swa=True, steps=4)
FAULTS = (
    variant(AssignsTheSchedule, "C3", sizes=SIZES),
    variant(KeepsDraftStates, "C3", sizes=SIZES, mode=ForwardMode.TARGET_VERIFY),
)
