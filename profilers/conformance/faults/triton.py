"""Faults of index lists with windows, masks and split counts."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....backends.modes import ForwardMode
from ....backends.triton import TritonBackend
from ..matrix import Sizes
from .variants import variant


class StepsForDraftTokens(TritonBackend):
    """A07: query offsets of draft extend v2 laid out num_steps + 1 apart, where the runner lays out draft tokens."""

    def _aten_queries(self, b, n):
        super()._aten_queries(b, self.config.draft_steps)


class WholePrefix(TritonBackend):
    """R12: the full length as draft extend's prefix, whose own tokens are then read twice."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(replace(fb, spec_info=replace(fb.spec_info, extend_seq_lens=None)), md)


class MaskOfTheWindow(TritonBackend):
    """Mask offsets from window lengths: the mask has a column for every token all the same."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        if md.mask_indptr is not None:
            kept = torch.clamp(fb.seq_lens[: fb.batch_size], max=self.window)
            md.mask_indptr[1:] = torch.cumsum(md.max_extend_len * (kept + md.max_extend_len), 0)


class WindowPlusOne(TritonBackend):
    """FlashInfer's window, one token longer."""

    def _aten_window(self, pool, lens, b, starts=False):
        self.window += 1
        try:
            return super()._aten_window(pool, lens, b, starts)
        finally:
            self.window -= 1


class FrozenLists(TritonBackend):
    """A01, A26: replay rebuilds buffers of its own; the captured ones keep the first batch."""

    def rebuild_aten(self, fb, md):
        captured = self.kv_indptr, self.kv_indices
        self.kv_indptr, self.kv_indices = (x.clone() for x in captured)
        super().rebuild_aten(fb, md)
        self.kv_indptr, self.kv_indices = captured


class UnpaddedSplits(TritonBackend):
    """Split counts of the live rows alone: padding of length 1 belongs to the batch and makes its rows uneven."""

    def _aten_splits(self, splits, lens):
        live = int((lens > 1).sum()) or 1
        super()._aten_splits(splits[:live], lens[:live])


Mode = ForwardMode
SMALL = Sizes(16, 61, (2,), steps=4)
WINDOWED = Sizes(16, 61, (2,), swa=True, steps=4)
FAULTS = (
    variant(StepsForDraftTokens, "C3", mode=Mode.DRAFT_EXTEND_V2, sizes=SMALL),
    variant(WholePrefix, "C3", mode=Mode.DRAFT_EXTEND_V2, sizes=SMALL),
    variant(MaskOfTheWindow, "C3", mode=Mode.TARGET_VERIFY, sizes=WINDOWED),
    variant(WindowPlusOne, "C3", sizes=WINDOWED),
    variant(FrozenLists, "C3", sizes=SMALL),
    variant(UnpaddedSplits, "C3", sizes=Sizes(16, 500, (3,), steps=4)),
)
