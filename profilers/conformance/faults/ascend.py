"""Faults of lengths that are not the backend's own, and of tables that are not rewritten to their end."""

from __future__ import annotations

import torch

from ....backends.ascend import AscendBackend
from ....backends.modes import ForwardMode
from ..matrix import Sizes
from .variants import variant


class AliasedLengths(AscendBackend):
    """The lengths are the runner's buffer, so every rebuild adds its offset to what the last one left."""

    def bind(self, fb):
        md = super().bind(fb)
        md.seq_lens = fb.seq_lens
        return md


class RowWidths(AscendBackend):
    """Each row filled to its own length only, the rest zero."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        pages = -(-md.seq_lens // self.config.page_size)
        md.block_tables *= (self.column_numbers < pages[:, None]).to(torch.int32)


class StaleTails(AscendBackend):
    """Nothing is zeroed behind the width of the batch: ids of a longer, older batch stay."""

    def rebuild_aten(self, fb, md):
        before = md.block_tables.clone()
        super().rebuild_aten(fb, md)
        columns = -(-(int(fb.seq_lens.max()) + self._offset(fb.forward_mode)) // self.config.page_size)
        md.block_tables[:, columns:] = before[:, columns:]


SMALL = Sizes(16, 116, (2,), steps=4)
FAULTS = (
    variant(
        AliasedLengths, "C17", "C22", mode=ForwardMode.TARGET_VERIFY,
        sizes=Sizes(16, 116, (2,), lens=torch.int32, steps=4),
    ),
    variant(RowWidths, "C3", sizes=Sizes(16, 116, (4,), steps=2)),
    variant(StaleTails, "C3", "C4", sizes=SMALL),
)  # fmt: skip
