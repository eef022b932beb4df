"""Faults of lists and split counts."""

from __future__ import annotations

from dataclasses import replace

from ....backends.modes import ForwardMode
from ....backends.wave import WaveBackend
from ..matrix import Sizes
from .variants import variant


class PrefixPlusDrafts(WaveBackend):
    """KV lengths with the draft tokens added: their keys come separately."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(replace(fb, seq_lens=fb.seq_lens + self.config.draft_tokens), md)


class FullWidthSplits(WaveBackend):
    """Capture of early releases: no heuristic, every token keeps the most splits."""

    def _aten_splits(self, splits, lens):
        splits.fill_(self.splits.max_splits)


FAULTS = (
    variant(PrefixPlusDrafts, "C3", mode=ForwardMode.TARGET_VERIFY, sizes=Sizes(16, 61, (2,), steps=3)),
    variant(FullWidthSplits, "C3", sizes=Sizes(16, 500, (2,), steps=3)),
)
