"""Faults of steps that share tables or slots."""

from __future__ import annotations

from dataclasses import replace

from ....backends.modes import ForwardMode
from ....backends.wrappers.multi_step_draft import MultiStepDraft
from ..matrix import Sizes
from .variants import variant


class FollowersLeftAlone(MultiStepDraft):
    """Steps behind the first keep the locations of an earlier batch, as upstream's last one does."""

    def rebuild_aten(self, fb, md):
        pass


class ConsecutiveBranches(MultiStepDraft):
    """A12: branch slots assumed consecutive behind the prefix although branches own whole pages."""

    def rebuild_aten(self, fb, md):
        paged, self.tables.config = self.tables.config, replace(self.tables.config, page_size=1)
        super().rebuild_aten(fb, md)
        self.tables.config = paged


SIZES = Sizes(16, 116, (3,), steps=4, topk=2, options=(("inner", "triton"),))
V4 = Sizes(256, 600, (3,), steps=4, draft_steps=4, swa=True, options=(("inner", "deepseek_v4"),))
FAULTS = (
    variant(ConsecutiveBranches, "C3", sizes=SIZES, mode=ForwardMode.DRAFT_DECODE),
    variant(FollowersLeftAlone, "C3", sizes=V4, mode=ForwardMode.DRAFT_DECODE),
)
