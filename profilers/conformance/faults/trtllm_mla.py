"""Faults of the shared block table and its lengths."""

from __future__ import annotations

import torch

from ....backends.modes import ForwardMode
from ....backends.trtllm_mla import TrtllmMlaBackend
from ..matrix import Sizes
from .variants import variant


class TruncatingDivision(TrtllmMlaBackend):
    """The builder divides as Triton does, toward zero: slot -1 becomes page 0, which is somebody's."""

    def _classic_table(self, fb, md):
        super()._classic_table(fb, md)
        md.block_kv_indices.masked_fill_(md.block_kv_indices == -1, 0)


class FreshTable(TrtllmMlaBackend):
    """The eager builder used at replay: a new table each time, which no captured kernel reads."""

    def rebuild_aten(self, fb, md):
        md.block_kv_indices = torch.full_like(md.block_kv_indices, -1)
        super().rebuild_aten(fb, md)


class PrefixOnly(TrtllmMlaBackend):
    """Verify lengths without the draft tokens."""

    def _offset(self, mode):
        return 0


FAULTS = (
    variant(TruncatingDivision, "C3", sizes=Sizes(16, 116, (2,), holes=True, steps=4)),
    variant(FreshTable, "C1", "C3", sizes=Sizes(16, 116, (2,), steps=4)),
    variant(PrefixOnly, "C3", mode=ForwardMode.TARGET_VERIFY, sizes=Sizes(16, 116, (2,), steps=4)),
)
