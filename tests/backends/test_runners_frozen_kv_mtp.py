"""The frozen-KV MTP runner: the target's tables, a row per branch, lengths without a draft step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError, tensors_of
from attn_graph.backends.batch import make_pools
from attn_graph.backends.modes import ForwardMode
from attn_graph.backends.runners.frozen_kv_mtp import FrozenKvMtpRunner, reading
from attn_graph.backends.runners.slots import StaticSlots
from attn_graph.backends.triton import TritonBackend
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.backends.wrappers.hybrid_linear import HybridLinear
from attn_graph.profilers.conformance.faults.frozen_kv_mtp import OwnTables, SizedByRequests
from rebuilds import ARMS
from runner_cases import built, captured, wrong_fields
from runner_spies import DEVICE, H, SpyBackend, a_step, on_device, pools

pytestmark = pytest.mark.usefixtures("on_stream")
Mode = ForwardMode
K, CONTEXT = 2, 100
CONFIG = AttentionConfig(page_size=16, max_context=CONTEXT, draft_tokens=4, topk=K, draft_steps=3)
CHAIN = replace(CONFIG, topk=1)
OWN, TARGET = (
    pools(CONTEXT + 4, 16),
    make_pools(rows=9, width=CONTEXT + 4, page_size=16, swa=True, seed=7, device=DEVICE),
)
TARGET = replace(TARGET, swa_write=False)  # frozen: nothing is written


def step_of(lengths, topk=K, **also):
    """K rows for each request."""
    rows = np.repeat(1 + np.arange(len(lengths)), topk)
    step = a_step(
        Mode.DECODE, np.repeat(lengths, topk), TARGET, rows=rows, bonus_tokens=10 + torch.arange(len(rows)),
        hidden_states=torch.ones(len(rows), H),
    )  # fmt: skip
    return on_device(replace(step, **also))


def real(cls, arm, config, buckets=(1, 3), runner=FrozenKvMtpRunner):
    backend = cls(config, OWN, arm.implementation, recorded=arm.placement.value != "eager")
    return captured(runner, backend, buckets, target=TARGET)


def spied(log, buckets=(1, 3), cls=FrozenKvMtpRunner, backend=SpyBackend, recorded=True, **options):
    spy = backend(log, recorded=recorded, tables=OWN, draft_tokens=4, topk=K, draft_steps=3)
    return built(cls, spy, buckets, log=log, target=TARGET, **options)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize(("cls", "config"), [(TrtllmMhaBackend, CHAIN), (TritonBackend, CONFIG)])
def test_every_row_is_the_oracles_over_the_targets_tables(cls, config, arm):
    runner = real(cls, arm, config)
    for lengths in ((20, 100, 40), (90, 7), (33,), (5, 6, 7)):
        runner.load_batch(step_of(lengths, config.topk))
        runner.replay()
        assert wrong_fields(runner, TARGET, Mode.DECODE) == []
        assert runner.backend.pools is OWN
    assert "swa_page_table" in tensors_of(runner.backend.forward_metadata) or cls is TritonBackend


class OneStepMore(FrozenKvMtpRunner):
    """Captured as a draft step: the backend bakes one token more into every length."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mode = Mode.DRAFT_DECODE


class WithoutInGraphHook(FrozenKvMtpRunner):
    """R13 and R14."""

    def _metadata(self, batch):
        pass


@pytest.mark.parametrize(
    ("cls", "field"),
    [(OwnTables, "page_table"), (OneStepMore, "cache_seqlens_int32"), (WithoutInGraphHook, "cache_seqlens_int32")],
)
def test_the_comparison_catches(cls, field):
    runner = real(TrtllmMhaBackend, ARMS[3], CHAIN, runner=cls)
    runner.load_batch(step_of((20, 100, 40), 1))
    runner.replay()
    assert field in wrong_fields(runner, TARGET, Mode.DECODE)


# Hooks.


class Watcher(SpyBackend):
    """Notes whose tables it could read in each hook."""

    def note(self, *event):
        if event[0] != "warm":
            self.log.append((event[0], "target" if self.pools is TARGET else "own"))


def test_every_hook_of_capture_and_replay_reads_the_targets_tables_and_nobody_else_does():
    log = []
    runner = spied(log, (1,), backend=Watcher)
    assert log == [("state", "target")] and runner.backend.pools is OWN
    runner.capture()
    noted = {x for x in log if isinstance(x, tuple)}
    assert noted == {("state", "target"), ("out_capture", "target"), ("in", "target")}
    assert runner.backend.pools is OWN
    del log[:]
    runner.load_batch(step_of((20,)))
    runner.replay()
    assert log == [("out", "target"), "launch"] and runner.backend.pools is OWN


def test_tables_are_put_back_when_a_hook_fails_and_children_are_swapped_too():
    tables = replace(OWN, state_slots=torch.arange(9, dtype=torch.int32, device=DEVICE))
    wrapper = HybridLinear(replace(CHAIN, extra={"full": "trtllm_mha"}), tables)
    with pytest.raises(ZeroDivisionError), reading(TARGET, wrapper):
        assert all(b.pools is TARGET for b in (wrapper, *wrapper.children))
        raise ZeroDivisionError
    assert all(b.pools is tables for b in (wrapper, *wrapper.children))


def test_hooks_run_in_order_over_a_batch_without_speculative_fields():
    log = []
    runner = spied(log, forward=lambda step: log.append(f"pass{step.index}"))
    runner.capture()
    body = ["in", "pass0", "pass1", "pass2"]
    one_size = ["out_capture", "capture", *body, "warm", *body, "warm", *body]
    assert log == [("state", 3 * K, 3 * K), *one_size, *one_size]
    batches = runner.backend.captured_batches
    assert all(fb.spec_info is None and fb.forward_mode is Mode.DECODE for fb in batches)
    assert {fb.batch_size for fb in batches} == {3 * K, 1 * K}


def test_hidden_states_chain_over_the_passes_and_bonus_tokens_seed_them():
    seen = []

    def forward(step):
        seen.append(step.slots["bonus_tokens"].data_ptr())
        return {"hidden_states": step.hidden_states * 2}

    runner = spied([], (1,), forward=forward)
    runner.capture()
    assert set(seen) == {runner.slots.bonus_tokens.data_ptr()}
    runner.load_batch(step_of((20,)))
    for _ in range(2):
        assert runner.replay()["hidden_states"].eq(8).all()
    assert runner.slots.hidden_states.eq(1).all()


# Rows and padding.


def test_state_is_sized_by_rows_or_the_backend_refuses():
    with pytest.raises(ConfigError, match="batch size 6 exceeds the buffers' 3 rows"):
        real(TritonBackend, ARMS[3], CONFIG, runner=SizedByRequests)


class KeepsPaddedHidden(FrozenKvMtpRunner):
    """Padded tokens and hidden states keep the last step's."""

    @staticmethod
    def new_slots(*args, **options):
        slots = FrozenKvMtpRunner.new_slots(*args, **options)
        for name in ("bonus_tokens", "hidden_states"):
            slots._rules[name] = replace(slots._rules[name], pad=None)
        return slots


@pytest.mark.parametrize(("cls", "clean"), [(FrozenKvMtpRunner, True), (KeepsPaddedHidden, False)])
def test_padded_rows_of_every_slot_are_reset(cls, clean):
    runner = spied([], (3,), cls)
    runner.capture()
    runner.load_batch(step_of((20, 100, 40)))
    runner.load_batch(step_of((9,)))
    slots = runner.slots
    assert slots.seq_lens.tolist() == [9, 9, 1, 1, 1, 1] and slots.req_pool_indices.tolist() == [1, 1, 0, 0, 0, 0]
    assert slots.bonus_tokens.tolist()[:2] == [10, 11]
    assert (slots.bonus_tokens[2:].eq(0).all() and slots.hidden_states[2:].eq(0).all()).item() is clean
    assert runner.view.num_padding == 4 and runner.view.batch_size == 6


def test_rows_that_are_no_multiple_of_the_branches_are_refused():
    runner = spied([])
    runner.capture()
    with pytest.raises(ConfigError, match="a batch of 3 rows does not divide into 2 branches"):
        runner.load_batch(step_of((20, 30, 40), 1))
    assert isinstance(runner.slots, StaticSlots)
