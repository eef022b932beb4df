"""Faults of index lists for a planner, of their windows and of packed masks."""

from __future__ import annotations

import numpy as np
import torch

from ....backends.flashinfer import FlashInferBackend
from ....backends.modes import ForwardMode
from ..matrix import Sizes
from .variants import FUSED, variant


class StaleWindowStart(FlashInferBackend):
    """Upstream's verify: window lengths, but the list begins at the request's first token."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        w, pool = md.wrappers[0], self.pools.req_to_token
        for r in range(fb.batch_size):
            begin, end = w.kv_indptr[r : r + 2].tolist()
            w.kv_indices[begin:end] = pool[fb.req_pool_indices[r], : end - begin]


class SharedMask(FlashInferBackend):
    """Upstream's one mask buffer: the second wrapper's plan overwrites the first one's."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        n = int(md.wrappers[1].mask_indptr[-1])
        md.wrappers[0].custom_mask[:n] = md.wrappers[1].custom_mask[:n]


class CellsPackedThrough(FlashInferBackend):
    """A request's mask begins on a byte of its own; packed as one run of bits, all but the first are shifted."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        w = md.wrappers[0]
        bits = [
            np.unpackbits(w.custom_mask[a:b].cpu().numpy(), bitorder="little")[: n * md.queries]
            for a, b, n in zip(w.mask_indptr, w.mask_indptr[1:], np.diff(w.plan.kv_indptr), strict=False)
        ]
        packed = torch.from_numpy(np.packbits(np.concatenate(bits), bitorder="little")).to(self.device)
        w.custom_mask[: len(packed)] = packed


class EagerBuffer(FlashInferBackend):
    """A26: the list is rebuilt in a buffer of the eager path, the captured one keeps the first batch's."""

    def rebuild_aten(self, fb, md):
        captured = self.kv_indptr
        self.kv_indptr = [x.clone() for x in captured]
        super().rebuild_aten(fb, md)
        self.kv_indptr = captured


class StepsForDraftTokens(FlashInferBackend):
    """A07: query starts of draft extend v2 num_steps + 1 apart, where the runner lays out draft tokens."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        md.qo_indptr.copy_(self.row_numbers[: fb.batch_size + 1] * self.config.draft_steps)


Mode = ForwardMode
SMALL = Sizes(16, 61, (2,), steps=3)
WINDOWED = Sizes(16, 61, (2,), swa=True, steps=3)
TREES = Sizes(1, 61, (3,), topk=3, steps=3)
FAULTS = (
    variant(EagerBuffer, "C3", sizes=SMALL),
    variant(StaleWindowStart, "C3", mode=Mode.TARGET_VERIFY, sizes=WINDOWED, arm=FUSED),
    variant(SharedMask, "C3", mode=Mode.TARGET_VERIFY, sizes=Sizes(1, 61, (2,), topk=3, swa=True, steps=3), arm=FUSED),
    variant(CellsPackedThrough, "C3", mode=Mode.TARGET_VERIFY, sizes=TREES, arm=FUSED),
    variant(StepsForDraftTokens, "C3", mode=Mode.DRAFT_EXTEND_V2, sizes=SMALL, arm=FUSED),
)
