"""The EAGLE draft runner over the multi-step wrapper: steps in one graph, positions restored, padding told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import draft_room, idle_batch
from attn_graph.backends.modes import Arm, ForwardMode
from attn_graph.backends.runners.decode import upload
from attn_graph.backends.runners.drafting import write_slots
from attn_graph.backends.runners.eagle_draft import EagleDraftRunner
from attn_graph.backends.wrappers.multi_step_draft import MultiStepDraft
from attn_graph.profilers.conformance.faults.eagle_draft import WithoutInGraphHook
from rebuilds import ARMS
from runner_cases import built, captured, wrong_fields
from runner_spies import DEVICE, GRAPHS, H, SpyBackend, a_step, on_device, placement, pools

pytestmark = pytest.mark.usefixtures("on_stream")
Mode = ForwardMode
CONTEXT = 100


def config_of(inner="triton", topk=1, steps=3) -> AttentionConfig:
    return AttentionConfig(
        page_size=16 if inner == "trtllm_mha" else 1, max_context=CONTEXT, draft_tokens=4, topk=topk,
        draft_steps=steps, extra={"inner": inner},
    )  # fmt: skip


def tables_of(config: AttentionConfig):
    room = max(draft_room(max(config.topk, 1), config.draft_steps, config.page_size), config.headroom)
    return pools(CONTEXT + room, config.page_size)


def step_of(config, tables, lengths, **also):
    k, s, b = max(config.topk, 1), config.draft_steps, len(lengths)
    step = a_step(
        Mode.DRAFT_DECODE, lengths, tables, k, topk=k, draft_steps=s, page_size=config.page_size,
        topk_p=torch.full((b, k), 0.5), topk_index=torch.arange(b * k).view(b, k),
        hidden_states=torch.arange(b * H, dtype=torch.float32).view(b, H),
    )  # fmt: skip
    slots = torch.from_numpy(100 + np.arange(b * k * s))
    return on_device(replace(step, positions=step.seq_lens.repeat_interleave(k), out_cache_loc=slots, **also))


def real(arm: Arm, config, buckets=(2, 4), cls=EagleDraftRunner, forward=lambda step: None, lens=torch.int64):
    tables = tables_of(config)
    backend = MultiStepDraft(config, tables, arm.implementation, recorded=arm.placement.value != "eager")
    return captured(cls, backend, buckets, forward, lens=lens), tables


def spied(log, buckets=(2, 4), recorded=True, cls=EagleDraftRunner, topk=2, steps=3, **options):
    backend = SpyBackend(log, recorded=recorded, tables=pools(), draft_tokens=4, topk=topk, draft_steps=steps)
    return built(cls, backend, buckets, log=log, **options), partial(step_of, backend.config, backend.pools)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize(("inner", "topk"), [("triton", 1), ("triton", 2), ("trtllm_mha", 1)])
def test_every_step_of_every_batch_is_the_oracles(arm, inner, topk):
    config = config_of(inner, topk)
    runner, tables = real(arm, config)
    for lengths in ((5, 40, 17, 3), (90, 7, 2), (9, 64), (33,)):
        step = step_of(config, tables, lengths)
        runner.load_batch(step)
        runner.replay()
        assert wrong_fields(runner, tables) == []


# Order.


def test_hooks_run_in_order_three_times_and_twice_for_each_size():
    log = []
    runner, step = spied(log, forward=lambda s: log.append(f"step{s.index}"))
    runner.capture()
    body = ["in", "step0", "step1"]
    one_size = ["out_capture", "capture", *body, "warm", *body, "warm", *body]
    assert log == [("state", 4, 8), *one_size, *one_size]
    del log[:]
    runner.load_batch(step([5, 9, 7]))
    runner.replay()
    assert log == ["out", "launch"]


@pytest.mark.parametrize(("cls", "stale"), [(EagleDraftRunner, False), (WithoutInGraphHook, True)])
def test_a_runner_that_leaves_the_in_graph_hook_out_replays_stale_tables(cls, stale):
    config = config_of()
    runner, tables = real(ARMS[3], config, cls=cls)
    step = step_of(config, tables, (5, 40, 17, 3))
    runner.load_batch(step)
    runner.replay()
    assert bool(wrong_fields(runner, tables)) is stale


# Positions, locations, hidden states.


class LeavesPositions(EagleDraftRunner):
    """The loop's advance is not taken back."""

    def _forward(self, bucket, batch):
        made = super()._forward(bucket, batch)
        self.slots.positions[: bucket * self.slots.tokens_per_req].add_(self.backend.config.draft_steps - 1)
        return made


@pytest.mark.parametrize(("cls", "right"), [(EagleDraftRunner, True), (LeavesPositions, False)])
def test_step_i_stands_at_len_plus_i_and_repeated_replays_are_the_same(cls, right):
    at = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)

    def forward(step):
        at[step.index].copy_(step.slots["positions"][:4])

    config = config_of()
    runner, tables = real(ARMS[3], config, (4,), cls, forward)
    assert runner.slots.positions.tolist() == [0] * 4 or not right  # warm-ups and capture left none behind
    step = step_of(config, tables, (5, 40, 17, 3))
    runner.load_batch(step)
    for _ in range(3):
        runner.replay()
    same = at.tolist() == [[5, 40, 17, 3], [6, 41, 18, 4]] and runner.slots.positions.tolist() == [5, 40, 17, 3]
    assert same is right
    assert (wrong_fields(runner, tables) == []) is right
    assert step.positions.tolist() == [5, 40, 17, 3]  # the live tensor is never advanced


def r13_write_slots(flat, branches, steps, index):
    """A13: reshaped on the wrong axis."""
    return flat.view(steps, branches)[index].clone()


@pytest.mark.parametrize(("columns", "right"), [(write_slots, True), (r13_write_slots, False)])
def test_a_step_writes_its_column_of_the_slots(columns, right, monkeypatch):
    """A13: bs 2, topk 2, 3 steps, slots 100..111."""
    monkeypatch.setattr("attn_graph.backends.runners.eagle_draft.write_slots", columns)
    written = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    config = config_of(topk=2)
    runner, tables = real(ARMS[3], config, (2,), forward=lambda step: written[step.index].copy_(step.out_cache_loc))
    runner.load_batch(step_of(config, tables, (5, 9)))
    runner.replay()
    assert (written.tolist() == [[100, 103, 106, 109], [101, 104, 107, 110]]) is right
    assert runner.slots.out_cache_loc.tolist() == list(range(100, 112))  # still all steps'


def test_hidden_states_go_from_step_to_step_and_their_slot_stays_as_it_was():
    last = torch.zeros(2, H, device=DEVICE)

    def forward(step):
        last.copy_(step.hidden_states)
        return {"hidden_states": step.hidden_states * 10}

    config = config_of(steps=4)
    runner, tables = real(ARMS[3], config, (2,), forward=forward)
    step = step_of(config, tables, (5,))
    runner.load_batch(step)
    for _ in range(2):
        made = runner.replay()
    assert last[0].tolist() == (step.hidden_states[0] * 100).tolist()
    assert made["hidden_states"].tolist() == (step.hidden_states * 1000).tolist()
    assert runner.slots.hidden_states.tolist() == [[0, 1, 2], [0, 0, 0]]


# What the out-graph hook sees.


@pytest.mark.parametrize("lens", [torch.int32, torch.int64])
def test_a_full_batch_is_handed_on_as_it_came_and_nothing_binds_it(lens):
    runner, step_for = spied([], (2,), recorded=False)
    runner.capture()
    step = step_for([5, 9])
    step = replace(step, seq_lens=step.seq_lens.to(lens))
    runner.load_batch(step)
    view = runner.view
    for name in ("seq_lens", "req_pool_indices", "positions", "out_cache_loc", "seq_lens_cpu"):
        assert getattr(view, name) is getattr(step, name)
    assert view.num_padding == 0 and view.seq_lens_sum == 14
    runner.replay()
    bound = runner.backend.forward_metadata["lens"]
    assert bound.tolist() == [5, 9] and bound.data_ptr() != step.seq_lens.data_ptr()


class R13View(EagleDraftRunner):
    """Write slots stay live and short, nobody says how much is padding, and the sum leaves it out."""

    def _batch(self, bucket, step):
        view = super()._batch(bucket, step)
        if step is None:
            return view
        return replace(
            view, out_cache_loc=step.out_cache_loc, num_padding=None, seq_lens_sum=int(step.seq_lens_cpu.sum())
        )


@pytest.mark.parametrize(("cls", "right"), [(EagleDraftRunner, True), (R13View, False)])
def test_a_padded_batch_is_static_in_every_field_and_says_so(cls, right):
    runner, step_for = spied([], (4,), recorded=False, cls=cls)
    runner.capture()
    runner.load_batch(step_for([9, 9, 9, 9]))
    runner.load_batch(step_for([5, 9, 7]))
    view, slots = runner.view, runner.slots
    assert view.seq_lens.data_ptr() == slots.seq_lens.data_ptr() and view.seq_lens.tolist() == [5, 9, 7, 1]
    assert view.req_pool_indices.tolist() == [1, 2, 3, 0]
    assert view.positions.tolist() == [5, 5, 9, 9, 7, 7, 0, 0]
    padded = view.out_cache_loc.numel() == 4 * 2 * 3 and view.out_cache_loc[18:].tolist() == [0] * 6
    assert (padded and view.num_padding == 1 and view.seq_lens_sum == 5 + 9 + 7 + 1) is right


def test_padding_is_reset_in_every_slot_of_the_draft():
    runner, step_for = spied([], (4,))
    runner.capture()
    runner.load_batch(step_for([9, 9, 9, 9]))
    runner.load_batch(step_for([5]))
    slots = runner.slots
    assert slots.topk_p[1:].eq(0).all() and slots.topk_index[1:].eq(0).all() and slots.hidden_states[1:].eq(0).all()
    assert slots.extend_seq_lens.tolist() == [1] * 4 and slots.seq_lens.tolist() == [5, 1, 1, 1]


@pytest.mark.parametrize("steps", [1, 3])
def test_an_idle_rank_drafts_one_filler_row_and_writes_slot_0_only(steps):
    """A23."""
    config = config_of(steps=steps)
    runner, tables = real(ARMS[3], config, (1, 2))
    runner.load_batch(step_of(config, tables, (90,)))
    runner.replay()
    runner.load_batch(upload(idle_batch(), DEVICE))
    runner.replay()
    assert (runner.bucket, runner.live, runner.view.num_padding) == (1, 0, 1)
    assert runner.view.actual_forward_mode is Mode.IDLE and runner.view.out_cache_loc.tolist() == [0] * steps
    assert runner.slots.seq_lens[0] == 1 and runner.slots.req_pool_indices[0] == 0
    for i in range(steps - 1):  # lengths by positions, 0 on padding
        assert runner.backend.forward_metadata[f"step{i}"].kv_indptr.tolist() == [0, i + 1]


def test_what_a_step_lacks_is_named():
    runner, step_for = spied([])
    runner.capture()
    with pytest.raises(ConfigError, match="EagleDraftRunner needs topk_p, hidden_states in every step"):
        runner.load_batch(replace(step_for([5, 9]), topk_p=None, hidden_states=None))


def test_rows_of_index_lists_have_room_for_every_branch():
    """A08: bs 2, 1,024 tokens, 8 branches: 9,600 entries are needed, without the factor there are 2,048."""
    config = replace(config_of(topk=8), max_context=1024)
    tables = pools(1024 + 8 * 3)
    backend = MultiStepDraft(config, tables)
    runner = EagleDraftRunner(backend, [2], EagleDraftRunner.new_slots(backend, 2, H), placement(backend), GRAPHS)
    assert runner.backend.tables.kv_indices.shape[1] >= 8 * (900 + 300)
