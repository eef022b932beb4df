"""Faults of expanded lengths, and of the schedules made from them."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....backends.dsa import DsaBackend
from ....backends.kernels.expand_seqlens import expand_seqlens
from ....backends.modes import ForwardMode
from ..matrix import Sizes
from .variants import variant


class StaleSchedule(DsaBackend):
    """The schedule of the capture kept for every replay; on a GPU this hangs the logits kernel."""

    def bind(self, fb):
        md = super().bind(fb)
        return replace(md, paged_mqa_schedule_metadata=md.paged_mqa_schedule_metadata.clone())

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, replace(md, paged_mqa_schedule_metadata=self.schedule))


class NegativeLengths(DsaBackend):
    """Draft extend without the clamp: a padding row of one token has N - 1 queries before its first token."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        n = self._queries(fb)
        rows = md.cache_seqlens_int32[:, None] - n + 1 + torch.arange(n, device=self.device)
        md.dsa_seqlens_expanded.view(-1, n).copy_(rows)


class AcceptedWidth(DsaBackend):
    """Draft extend laid out by accepted counts: fewer rows than the graph reads, the rest from the step before."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        accepted = fb.spec_info.num_accept_tokens[: fb.batch_size]
        offsets = torch.zeros(fb.batch_size + 1, dtype=torch.int32, device=self.device)
        offsets[1:] = torch.cumsum(accepted, 0)
        expand_seqlens(accepted, md.cache_seqlens_int32, offsets, md.dsa_seqlens_expanded)


class AliasesTheRunner(DsaBackend):
    """A cast of 32-bit lengths is the runner's own buffer."""

    def bind(self, fb):
        lens = fb.seq_lens[: fb.batch_size].to(torch.int32)
        return replace(super().bind(fb), cache_seqlens_int32=lens, dsa_seqlens_expanded=lens)


EXTEND = ForwardMode.DRAFT_EXTEND_V2
SIZES = Sizes(64, 200, (3,), steps=5)
FAULTS = (
    variant(StaleSchedule, "C3", sizes=SIZES),
    variant(NegativeLengths, "C3", sizes=SIZES, mode=EXTEND),
    variant(AcceptedWidth, "C3", sizes=SIZES, mode=EXTEND),
    variant(AliasesTheRunner, "C22", sizes=replace(SIZES, lens=torch.int32)),
)
