"""Faults of the split-KV schedule."""

from __future__ import annotations

import torch

from ....backends.flashmla import FlashMlaBackend
from ....backends.modes import ForwardMode
from ....backends.schedules import split_kv
from ..matrix import Sizes
from .variants import FUSED, variant


class NoDraftTokensInThePlan(FlashMlaBackend):
    """The plan is made for the prefix alone: the last block of a request whose drafts open one is nobody's."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        plan = split_kv(fb.seq_lens[: fb.batch_size].tolist(), md.flashmla_metadata.shape[0])
        md.flashmla_metadata.copy_(torch.tensor(plan.parts, dtype=torch.int32))


class RecordedHostPlan(FlashMlaBackend):
    """A plan computed on the host and recorded as a copy: every replay reads the plan of the captured batch."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        plan = split_kv([1] * fb.batch_size, md.flashmla_metadata.shape[0])
        md.num_splits.copy_(torch.tensor(plan.num_splits, dtype=torch.int32))


FAULTS = (
    variant(NoDraftTokensInThePlan, "C3", mode=ForwardMode.TARGET_VERIFY, sizes=Sizes(64, 500, (2,), steps=3)),
    variant(RecordedHostPlan, "C3", sizes=Sizes(64, 500, (2,), steps=3), arm=FUSED),
)
