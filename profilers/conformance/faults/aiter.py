"""Faults of page tables, lists and query offsets, and of the schedule of persistent MLA."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....backends.aiter import AiterBackend
from ....backends.modes import ForwardMode
from ..matrix import Sizes
from .variants import variant


class UnwrittenTable(AiterBackend):
    """Upstream, still: unified decode with pages of one token gathers and never stores."""

    def _aten_pages(self, fb, b, longest):
        self.pools.req_to_token[fb.req_pool_indices[:b], :longest]


class UnmappedPages(AiterBackend):
    """A03: page ids looked up in the token map, and never divided."""

    def _aten_pages(self, fb, b, longest):
        super()._aten_pages(fb, b, longest)
        self.swa_page_table[:b] = self.pools.full_to_swa[self.page_table[:b].clamp(min=0)].to(torch.int32)


class AcceptedStride(AiterBackend):
    """A06: draft extend v2 laid out by accepted tokens."""

    def _aten_draft_extend(self, fb, md, b):
        super()._aten_draft_extend(fb, md, b)
        self.qo_indptr[1 : b + 1] = torch.cumsum(fb.spec_info.num_accept_tokens[:b], 0)


class VerifyOfThePrefix(AiterBackend):
    """MLA verify over len instead of len + N."""

    def _offset(self, mode):
        return 0

    def _aten_verify(self, fb, md, b, longest):
        super()._aten_verify(fb, md, b, longest)
        self._aten_list(fb.req_pool_indices, fb.seq_lens, b)


class FillOfOne(AiterBackend):
    """Padding of length 1 where the engine pads with N."""

    def rebuild_aten(self, fb, md):
        lens = fb.seq_lens.clone()
        lens[fb.batch_size - fb.num_padding :] = 1
        super().rebuild_aten(replace(fb, seq_lens=lens), md)


class MergedChunkStopsShort(AiterBackend):
    """A last chunk of one to four tokens is merged into the one before, which keeps its end: nobody reads them."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        short = fb.seq_lens[: fb.batch_size] - self.plans[fb.forward_mode, fb.batch_size].granularity
        merged = ((short > 0) & (short <= 4)).nonzero().flatten()
        md.work.work_info_set[merged, 5] -= short[merged].to(torch.int32)
        md.work.work_info_set[merged, 6] += short[merged].to(torch.int32)


Mode = ForwardMode
SMALL = Sizes(16, 61, (2,), steps=4)
MLA = {"mla": True}
PERSISTENT = {"mla": True, "fp8": True, "gfx942": True, "num_sms": 4}
FAULTS = (
    variant(UnwrittenTable, "C3", sizes=Sizes(1, 61, (2,), steps=3), extra={"unified": True}),
    variant(UnmappedPages, "C3", sizes=Sizes(16, 61, (2,), swa=True, steps=4)),
    variant(AcceptedStride, "C3", mode=Mode.DRAFT_EXTEND_V2, sizes=SMALL),
    variant(VerifyOfThePrefix, "C3", mode=Mode.TARGET_VERIFY, sizes=SMALL, extra=MLA),
    variant(FillOfOne, "C3", "C6", mode=Mode.TARGET_VERIFY, sizes=Sizes(16, 61, (3,), steps=4), extra=MLA),
    variant(MergedChunkStopsShort, "C3", sizes=Sizes(16, 20, (2,), steps=3), extra=PERSISTENT),
)
