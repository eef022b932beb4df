"""Each check of the runners passes on every runner and fails on a faulty variant of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_graph.backends.modes import ForwardMode, ReadEnd
from attn_graph.backends.registry import registered
from attn_graph.backends.runners.decode import DecodeRunner
from attn_graph.backends.runners.eagle_draft import EagleDraftRunner
from attn_graph.backends.runners.eagle_draft_extend import EagleDraftExtendRunner
from attn_graph.backends.runners.frozen_kv_mtp import FrozenKvMtpRunner
from attn_graph.backends.runners.glue import GlueGraphs
from attn_graph.backends.runners.multi_layer_eagle_draft_extend import MultiLayerEagleDraftExtendRunner
from attn_graph.profilers.conformance import CHECKS, judge, verify
from attn_graph.profilers.conformance.runners import RunnerSubject
from conftest import HAS_GPU

Mode = ForwardMode
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
RUNNERS = [info for info in registered().values() if info.kind == "runner"]


@pytest.mark.parametrize("info", RUNNERS, ids=lambda info: info.name)
def test_every_runner_passes_in_every_mode(info):
    found = list(verify([info.name], checks=["R1", "R2", "R3", "R4", "R5", "R6"], device=DEVICE))
    assert [f for f in found if f.status == "fail"] == []
    assert {f.mode for f in found} == set(info.modes) and len(found) == 6 * len(info.modes)
    skipped = {f.check for f in found if f.status == "skip"}
    assert skipped == (set() if info.name == "decode" else {"R5", "R6"})


class HookTwice(DecodeRunner):
    def replay(self):
        self.rebuild()
        return super().replay()


class DefaultsHook(MultiLayerEagleDraftExtendRunner):
    """The first backend's warm-up hook for every layer."""

    def _capture_layers(self, layers, bucket, batch):
        own, self.backends = self.backends, (self.backends[0],) * len(self.backends)
        try:
            return super()._capture_layers(layers, bucket, batch)
        finally:
            self.backends = own


class NobodySaysPadding(EagleDraftRunner):
    def _batch(self, bucket, step):
        return replace(super()._batch(bucket, step), num_padding=0)


class StalePositions(DecodeRunner):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.slots._rules["positions"] = replace(self.slots._rules["positions"], pad=None)


class DraftWithoutInGraphHook(EagleDraftRunner):
    def _metadata(self, batch):
        pass


class ExtendWithoutInGraphHook(EagleDraftExtendRunner):
    def _metadata(self, batch):
        pass


class OwnPools(FrozenKvMtpRunner):
    """The draft's tables stay in place."""

    def __init__(self, backend, target, *args, **options):
        super().__init__(backend, backend.pools, *args, **options)


class PublishesEarly(DecodeRunner):
    """The gather moved into the graph, the event stayed before the launch."""

    def _read_end(self):
        return ReadEnd.PRE_REPLAY


class ExtendPublishes(EagleDraftExtendRunner):
    """An event of a phase that nobody has audited."""

    def _read_end(self):
        return ReadEnd.POST_REPLAY


class NeverChecksTheJoin(DecodeRunner):
    def _run(self, bucket, batch):
        if self.fork is not None:
            self.fork.begin(lambda: self._metadata(batch))
            self._run_forward(bucket, batch)
            self.fork.join()
        else:
            super()._run(bucket, batch)


class RoutesPadding(GlueGraphs):
    """Padded steps go through graphs too."""

    def rebuild_of(self, view, static):
        return super().rebuild_of(replace(view, num_padding=0), static)


class GluesEverything(DecodeRunner):
    def capture(self):
        if self.glue_graphs is not None:
            self.glue_graphs.__class__ = RoutesPadding
        super().capture()


@pytest.mark.parametrize(
    ("check", "name", "mode", "cls", "words"),
    [
        ("R1", "decode", Mode.DECODE, HookTwice, "replay: step 1 is out, wanted launch"),
        ("R1", "multi_layer_eagle_draft_extend", Mode.DRAFT_EXTEND_V2, DefaultsHook, "wanted layer1"),
        ("R1", "eagle_draft", Mode.DRAFT_DECODE, DraftWithoutInGraphHook, "wanted in"),
        ("R2", "eagle_draft", Mode.DRAFT_DECODE, NobodySaysPadding, "told of 0 padded rows, there are 1"),
        ("R2", "decode", Mode.DECODE, StalePositions, "slots.positions is"),
        ("R3", "eagle_draft", Mode.DRAFT_DECODE, DraftWithoutInGraphHook, "step0"),
        ("R3", "eagle_draft_extend", Mode.DRAFT_EXTEND_V2, ExtendWithoutInGraphHook, "cache_seqlens_int32"),
        ("R3", "frozen_kv_mtp", Mode.DECODE, OwnPools, "page_table"),
        ("R4", "decode", Mode.DECODE, PublishesEarly, "page_table"),
        ("R4", "eagle_draft_extend", Mode.DRAFT_EXTEND_V2, ExtendPublishes, "was published, reads end"),
        ("R5", "decode", Mode.DECODE, NeverChecksTheJoin, "never joins was captured"),
        ("R6", "decode", Mode.DECODE, GluesEverything, "steps went through a graph"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_faulty_runner_fails(check, name, mode, cls, words):
    sound = RunnerSubject.of(name, mode, DEVICE)
    assert judge(CHECKS[check], sound)[0].status == "pass"
    found = judge(CHECKS[check], sound.but(cls=cls))
    assert found[0].status == "fail" and any(words in f.detail for f in found), found


def test_every_check_of_the_runners_has_a_faulty_one_here():
    checks = {check.id for check in CHECKS.values() if check.of == "runner"}
    assert checks == {f"R{i}" for i in range(1, 7)}
