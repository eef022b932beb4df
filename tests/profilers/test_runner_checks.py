"""Each check of the runners passes on every runner and fails on a faulty variant of one."""

from __future__ import annotations

import pytest
import torch
from attn_graph.backends.modes import ForwardMode
from attn_graph.backends.registry import registered
from attn_graph.backends.runners.decode import DecodeRunner
from attn_graph.profilers.conformance import CHECKS, judge, verify
from attn_graph.profilers.conformance.faults import known_faults
from attn_graph.profilers.conformance.runners import RunnerSubject
from conftest import HAS_GPU

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
RUNNERS = [info for info in registered().values() if info.kind == "runner"]


@pytest.mark.parametrize("info", RUNNERS, ids=lambda info: info.name)
def test_every_runner_passes_in_every_mode(info):
    found = list(verify([info.name], checks=["R1", "R2", "R3", "R4", "R5", "R6"], device=DEVICE))
    assert [f for f in found if f.status == "fail"] == []
    assert {f.mode for f in found} == set(info.modes) and len(found) == 6 * len(info.modes)
    skipped = {f.check for f in found if f.status == "skip"}
    assert skipped == (set() if info.name == "decode" else {"R5", "R6"})


SAID = [
    ("decode", "launches-before-the-hook", "replay: step 0 is launch, wanted out"),
    ("decode", "smallest-first", "capture: step 0 is bind2, wanted bind4"),
    ("decode", "captures-what-is-there", "found rows [1, 1, 1, 1], lengths [1, 1, 1, 1]"),
    ("decode", "keeps-pool-rows", "slots.req_pool_indices is [1, 2, 3, 4], wanted [1, 2, 3, 0]"),
    ("decode", "rebinds-slots", "cache_seqlens_int32[0]: wanted 20"),
    ("decode", "stale-mirror", "host lengths that the step does not have"),
    ("decode", "publishes-before-the-launch", "readers had said they were done"),
    ("decode", "hands-the-marker-out-early", "readers had said they were done"),
    ("decode", "never-checks-the-join", "never joins was captured"),
    ("decode", "glues-padding", "5 steps went through a graph, 3 fill their size"),
    ("eagle_draft", "without-in-graph-hook", "step0.cache_seqlens_int32[0]: wanted 21"),
    ("eagle_draft", "drifting-positions", "slots.positions"),
    ("eagle_draft", "prefix-of-the-slots", "step 0 writes to"),
    ("eagle_draft_extend", "publishes-unaudited", "fresh was published, reads end"),
    ("eagle_draft_extend", "leaves-an-earlier-event", "an earlier phase was left"),
    ("frozen_kv_mtp", "own-tables", "page_table[0, 0]"),
    ("frozen_kv_mtp", "sized-by-requests", "batch size 8 exceeds the buffers' 4 rows"),
    ("frozen_kv_mtp", "keeps-bonus-tokens", "slots.bonus_tokens is [1, 1, 1, 1, 1, 1, 1, 1]"),
    ("multi_layer_eagle_draft_extend", "defaults-hook", "wanted layer1"),
    ("multi_layer_eagle_draft_extend", "first-layers-hook", "layer 1: cache_seqlens_int32[0]"),
    ("multi_layer_eagle_draft_extend", "leaves-warm-ups", "in slots.hidden_states[0, 0]"),
]


@pytest.mark.parametrize(("name", "fault", "words"), SAID, ids=lambda x: x if " " not in x else "")
def test_a_faulty_runner_fails_for_what_is_wrong_with_it(name, fault, words):
    """That each fails, and the sound one does not, is in test_known_faults.py."""
    wrong = next(f for f in known_faults(name) if f.name == fault)
    found = judge(CHECKS[wrong.caught_by[-1]], wrong.broken(wrong.sound(name, DEVICE)))
    assert any(words in f.detail for f in found), found


def test_every_check_of_the_runners_has_a_faulty_one():
    checks = {check.id for check in CHECKS.values() if check.of == "runner"}
    assert checks == {id for info in RUNNERS for fault in known_faults(info.name) for id in fault.caught_by}


def test_a_hook_that_is_called_twice_is_told():
    class HookTwice(DecodeRunner):
        def replay(self):
            self.rebuild()
            return super().replay()

    sound = RunnerSubject.of("decode", ForwardMode.DECODE, DEVICE)
    found = judge(CHECKS["R1"], sound.but(cls=HookTwice))
    assert "replay: step 1 is out, wanted launch" in found[0].detail
