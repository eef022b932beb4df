"""Faults of a decode step: order, slots, padding, events, forks and glue graphs."""

from __future__ import annotations

from dataclasses import replace

from ....backends.modes import ForwardMode, ReadEnd
from ....backends.runners.decode import DecodeRunner
from ....backends.runners.glue import GlueGraphs
from .variants import PoolRowsKept, runner_variant


class LaunchesBeforeTheHook(DecodeRunner):
    """The graph is launched, then the out-graph hook makes the metadata that it should have read."""

    def replay(self):
        self.launch()
        self.rebuild()
        return self.outputs()


class SmallestFirst(DecodeRunner):
    """The smallest size captured first: larger graphs cannot reuse its memory."""

    def capture(self):
        for bucket in self.buckets:
            self.slots.reset(bucket)
            self._capture_size(bucket, self.capture_batch(bucket))


class CapturesWhatIsThere(DecodeRunner):
    """Pooled slots not reset before a capture, which finds another runner's rows and lengths."""

    def capture(self):
        self.slots.reset = lambda bucket: None
        super().capture()


class RebindsSlots(DecodeRunner):
    """A02: a slot rebound to a new tensor instead of filled; the graph reads the address of its capture."""

    def load_batch(self, step):
        self._captured = getattr(self, "_captured", self.slots.seq_lens)  # not freed: the graph reads it still
        self.slots.seq_lens = self.slots.seq_lens.clone()
        super().load_batch(step)


class KeepsPoolRows(PoolRowsKept, DecodeRunner):
    """Padding rows keep the pool rows of the last batch: somebody else's page table is read, and written."""


class StalePositions(DecodeRunner):
    """The first release: positions behind the live rows stay, and verify's plans crash on them."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.slots.add("positions", self.slots.tokens_per_req, pad=None)


class StaleMirror(DecodeRunner):
    """A step without host lengths gets those of an earlier one, which defeats every guard against None."""

    def _batch(self, bucket, step):
        mirror = self.slots.seq_lens_cpu[:bucket]
        return replace(super()._batch(bucket, step), seq_lens_cpu=mirror, seq_lens_sum=int(mirror.sum()))


class PublishesBeforeTheLaunch(DecodeRunner):
    """A04: the gather moved into the graph, the read-done event stayed before the launch."""

    def _read_end(self):
        return ReadEnd.PRE_REPLAY


class HandsTheMarkerOutEarly(DecodeRunner):
    """The graph's marker published before the launch: a wait binds to its record of the replay before."""

    def replay(self):
        self.rebuild()
        if self.read_done is not None:
            self.read_done.before_launch(self._read_end())
            self.read_done.after_launch(self._read_end(), marked=self.marks_reads)
        self.launch()
        return self.outputs()


class NeverChecksTheJoin(DecodeRunner):
    """A forked hook that the forward pass never joined is joined behind its last read, and nobody is told."""

    def _run(self, bucket, batch):
        if self.fork is not None:
            self.fork.begin(lambda: self._metadata(batch))
            self._run_forward(bucket, batch)
            self.fork.join()
        else:
            super()._run(bucket, batch)


class _RoutesPadding(GlueGraphs):
    def rebuild_of(self, view, static):
        return super().rebuild_of(replace(view, num_padding=0), static)


class GluesPadding(DecodeRunner):
    """A padded step, which is not eligible, goes through a glue graph too."""

    def capture(self):
        if self.glue_graphs is not None:
            self.glue_graphs.__class__ = _RoutesPadding
        super().capture()


DECODE = ForwardMode.DECODE
FAULTS = (
    runner_variant(LaunchesBeforeTheHook, "R1", mode=DECODE),
    runner_variant(SmallestFirst, "R1", mode=DECODE),
    runner_variant(CapturesWhatIsThere, "R2", mode=DECODE),
    runner_variant(RebindsSlots, "R3", mode=DECODE),
    runner_variant(KeepsPoolRows, "R2", mode=DECODE),
    runner_variant(StalePositions, "R2", mode=ForwardMode.TARGET_VERIFY),
    runner_variant(StaleMirror, "R2", mode=DECODE),
    runner_variant(PublishesBeforeTheLaunch, "R4", mode=DECODE),
    runner_variant(HandsTheMarkerOutEarly, "R4", mode=DECODE),
    runner_variant(NeverChecksTheJoin, "R5", mode=DECODE),
    runner_variant(GluesPadding, "R6", mode=DECODE),
)
