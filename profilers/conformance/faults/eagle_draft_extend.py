"""Faults of a draft extend in one graph."""

from __future__ import annotations

from ....backends.modes import ForwardMode, ReadEnd
from ....backends.runners.eagle_draft_extend import EagleDraftExtendRunner
from .variants import runner_variant


class WithoutInGraphHook(EagleDraftExtendRunner):
    """The first two releases: the body leaves the in-graph hook out, and page tables are the capture's."""

    def _metadata(self, batch):
        pass


class PublishesUnaudited(EagleDraftExtendRunner):
    """A read-done event of a phase whose reads nobody has audited."""

    def _read_end(self):
        return ReadEnd.POST_REPLAY


class LeavesAnEarlierEvent(EagleDraftExtendRunner):
    """The event of the phase before stays published, and the scheduler does not wait for the last reader."""

    def load_batch(self, step):
        kept, self.read_done = self.read_done, None
        super().load_batch(step)
        self.read_done = kept

    def replay(self):
        self.rebuild()
        self.launch()
        return self.outputs()


class KeepsLengths(EagleDraftExtendRunner):
    """Padding rows keep the lengths of the last batch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        s = self.slots
        s.add("seq_lens", dtype=s.seq_lens.dtype, init=s.fill_value, pad=None)


EXTEND = ForwardMode.DRAFT_EXTEND_V2
FAULTS = (
    runner_variant(WithoutInGraphHook, "R1", "R3", mode=EXTEND),
    runner_variant(PublishesUnaudited, "R4", mode=EXTEND),
    runner_variant(LeavesAnEarlierEvent, "R4", mode=EXTEND),
    runner_variant(KeepsLengths, "R2", mode=EXTEND),
)
