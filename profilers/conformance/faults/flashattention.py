"""Faults of cascades over draft trees, of local chunks and of what a recording freezes."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....backends.flashattention import FlashAttentionBackend
from ....backends.modes import Arm, ForwardMode
from ..matrix import Sizes
from .variants import FUSED, variant


def cut_chunk(chunk: int, longest: int, page_size: int) -> int:
    """Tokens of a local chunk as older engines cut it: no longer than the batch's longest request."""
    return max(page_size, min(chunk, longest) // page_size * page_size)


class ChunkOfTheBatch(FlashAttentionBackend):
    """The older engines cut the chunk to the batch's longest length: a short request loses its first tokens."""

    def _classic_local(self, md, b):
        whole = self.chunk
        self.chunk = cut_chunk(whole, int(md.cache_seqlens_int32.max()), self.config.page_size)
        super()._classic_local(md, b)
        self.chunk = whole


class TokenMapOnPages(FlashAttentionBackend):
    """Page ids looked up in the map of tokens; single-token pages hide it."""

    def _classic_local(self, md, b):
        super()._classic_local(md, b)
        wrong = self.pools.full_to_swa[md.page_table.long().clamp(min=0)].to(torch.int32)
        md.local_attn_metadata.local_block_table.copy_(wrong[:, : self.chunk // self.config.page_size])


class OneColumnView(FlashAttentionBackend):
    """A local table bound at the width that capture's lengths of 1 need; replay writes past it."""

    def _bind_decode(self, fb, md):
        super()._bind_decode(fb, md)
        md.local_attn_metadata.local_block_table = md.local_attn_metadata.local_block_table[:, :1]


class ConsecutivePages(FlashAttentionBackend):
    """Branch pages assumed to follow the first one."""

    def _static_draft_cascade(self, fb, md, seq_lens):
        super()._static_draft_cascade(fb, md, seq_lens)
        ids = self._slots_of_steps(fb) // self.config.page_size
        md.expand.page_table[:, 1:].copy_(ids[:, :1] + 1)


class StepsOutermost(FlashAttentionBackend):
    """The flat slot list reshaped on the wrong axis."""

    def _slots_of_steps(self, fb):
        return super()._slots_of_steps(fb).flatten().view(self.config.draft_steps, -1).T


class MaskLimitOfCapture(FlashAttentionBackend):
    """The number of live queries read from the captured batch: padding then reads cells of nobody."""

    def _static_verify_cascade(self, fb, md, seq_lens, pool, prefix):
        every = fb.num_token_non_padded + (1 << 30)
        super()._static_verify_cascade(replace(fb, num_token_non_padded=every), md, seq_lens, pool, prefix)


class AcceptedQueries(FlashAttentionBackend):
    """Capture lays queries out with a fixed stride, replay with a running sum of what was accepted."""

    def _new_tokens(self, fb):
        return None if fb.spec_info is None else fb.spec_info.num_accept_tokens


class PrefixOnly(FlashAttentionBackend):
    """Verify lengths without the draft tokens."""

    def _length_offset(self, mode):
        return 0


class UnsharedPrefix(FlashAttentionBackend):
    """The partial page left with the prefix, although every branch has its own copy."""

    def _static_draft_cascade(self, fb, md, seq_lens):
        super()._static_draft_cascade(fb, md, seq_lens)
        md.cache_seqlens_int32.copy_(seq_lens)


class FrozenColumns(FlashAttentionBackend):
    """As many columns as the captured batch needs, one page of padding: longer rows keep what they hold."""

    def rebuild_aten_static(self, fb, md):
        before = md.page_table.clone()
        super().rebuild_aten_static(fb, md)
        md.page_table[:, 1:] = before[:, 1:]


Mode = ForwardMode
RECORDED = Arm.parse("aten-graph")
SMALL = Sizes(16, 116, (2,), steps=4)
PADDED_TREES = Sizes(16, 61, (3,), topk=2, steps=5)
CHUNKED = {"local_chunk": 48}
FAULTS = (
    variant(ChunkOfTheBatch, "C3", sizes=SMALL, extra=CHUNKED),
    variant(TokenMapOnPages, "C3", sizes=Sizes(16, 116, (2,), swa=True, steps=4), extra=CHUNKED),
    variant(OneColumnView, "C3", sizes=SMALL, extra=CHUNKED),
    variant(ConsecutivePages, "C3", mode=Mode.DRAFT_DECODE, sizes=Sizes(4, 61, (2,), topk=2, step_id=1), arm=RECORDED),
    variant(StepsOutermost, "C3", mode=Mode.DRAFT_DECODE, sizes=Sizes(1, 61, (2,), topk=2, steps=4), arm=RECORDED),
    variant(UnsharedPrefix, "C3", mode=Mode.DRAFT_DECODE, sizes=Sizes(16, 61, (2,), topk=2, steps=4), arm=RECORDED),
    variant(MaskLimitOfCapture, "C3", mode=Mode.TARGET_VERIFY, sizes=PADDED_TREES, arm=RECORDED),
    variant(AcceptedQueries, "C3", mode=Mode.DRAFT_EXTEND_V2, sizes=SMALL, arm=FUSED),
    variant(PrefixOnly, "C3", mode=Mode.TARGET_VERIFY, sizes=SMALL),
    variant(FrozenColumns, "C3", "C4", sizes=SMALL, arm=RECORDED),
)
