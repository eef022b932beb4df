"""Faults of the one block table."""

from __future__ import annotations

from ....backends.cutlass_mla import CutlassMlaBackend
from ..matrix import Sizes
from .variants import variant


class WholePagesOnly(CutlassMlaBackend):
    """The page count is rounded down: the page that is being written is missing."""

    def build_classic(self, pool, lens, table, bs):
        super().build_classic(pool, lens // 128 * 128, table, bs)


class TruncatingDivision(CutlassMlaBackend):
    """The builder divides toward zero: slot -1 becomes page 0."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        md.block_kv_indices.masked_fill_(md.block_kv_indices == -1, 0)


FAULTS = (
    variant(WholePagesOnly, "C3", sizes=Sizes(128, 500, (2,), steps=4)),
    variant(TruncatingDivision, "C3", sizes=Sizes(128, 900, (4,), holes=True, steps=4)),
)
