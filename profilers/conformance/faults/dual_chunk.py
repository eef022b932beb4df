"""Faults of a table that is as wide as the batch needs, in every row."""

from __future__ import annotations

from ....backends.dual_chunk import DualChunkBackend
from ..matrix import Sizes
from .variants import variant


class RowWidths(DualChunkBackend):
    """Each row of the whole table filled to its own length, not to the longest row's."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        own = (md.seq_lens_tensor + self.config.page_size - 1) // self.config.page_size
        md.block_tables.masked_fill_(self.page_numbers >= own[:, None], 0)


class ReboundTable(DualChunkBackend):
    """The whole table gathered anew at every call: the graph keeps the capture's."""

    def rebuild_aten(self, fb, md):
        md.block_tables = md.block_tables.clone()
        super().rebuild_aten(fb, md)


SIZES = Sizes(16, 200, (3,), steps=8)
FAULTS = (
    variant(RowWidths, "C3", sizes=SIZES),
    variant(ReboundTable, "C1", "C3", sizes=SIZES),
)
