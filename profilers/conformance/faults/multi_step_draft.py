"""Faults of steps that share tables or slots."""

from __future__ import annotations

from dataclasses import replace

from ....backends.modes import Arm, ForwardMode
from ....backends.wrappers.multi_step_draft import MultiStepDraft
from ..matrix import Sizes
from .variants import CLASSIC, variant


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


class FirstOfAllSlots(MultiStepDraft):
    """Every step writes to the first B of all steps' slots, upstream's prefix, not to its own column."""

    def seen_by(self, child, fb):
        return replace(super().seen_by(child, fb), out_cache_loc=fb.out_cache_loc[: fb.batch_size])

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(replace(fb, out_cache_loc=fb.out_cache_loc[: fb.batch_size]), md)

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(replace(fb, out_cache_loc=fb.out_cache_loc[: fb.batch_size]), md)


def first_of_all_slots(inner: str, page_size: int, arm: Arm):
    """The fault over one inner backend that writes slots."""
    sizes = Sizes(page_size, 2 * page_size + 88, (2, 5), steps=4, draft_steps=4, swa=True, options=(("inner", inner),))
    return variant(FirstOfAllSlots, "C3", sizes=sizes, mode=ForwardMode.DRAFT_DECODE, arm=arm, over=inner)


SIZES = Sizes(16, 116, (3,), steps=4, topk=2, options=(("inner", "triton"),))
V4 = Sizes(256, 600, (3,), steps=4, draft_steps=4, swa=True, options=(("inner", "deepseek_v4"),))
RECORDED = Arm.parse("fused-graph")
FAULTS = (
    variant(ConsecutiveBranches, "C3", sizes=SIZES, mode=ForwardMode.DRAFT_DECODE),
    variant(FollowersLeftAlone, "C3", sizes=V4, mode=ForwardMode.DRAFT_DECODE),
    first_of_all_slots("trtllm_mha", 16, CLASSIC),
    first_of_all_slots("flashattention", 16, CLASSIC),
    first_of_all_slots("aiter", 16, RECORDED),
    first_of_all_slots("deepseek_v4", 256, RECORDED),
    first_of_all_slots("deepseek_v4_hip_radix", 256, CLASSIC),
)
