"""DeepSeek-V4: window, compressed pools and plans rebuilt in place, where upstream upgrades a struct in the graph."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError, tensors_of
from attn_graph.backends.batch import (
    BatchShape,
    batch_sequence,
    idle_batch,
    live_batch,
    make_pools,
    with_unassigned_slots,
)
from attn_graph.backends.deepseek_v4 import DeepseekV4Backend, DeepseekV4Metadata, FlashMLASchedule, copy_fields
from attn_graph.backends.modes import ForwardMode, Implementation, Placement, TailPolicy
from attn_graph.backends.registry import lookup
from attn_graph.backends.runners.inputs import upload
from attn_graph.profilers.conformance.faults.deepseek_v4 import HostPlanner, StalePlan
from attn_graph.profilers.counters import count
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, host_pools, replayed

Mode = ForwardMode
MODES = [Mode.DECODE, Mode.DRAFT_DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2]
BUCKET, N, SMS = 4, 4, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config(mode=Mode.DECODE, max_context=600, **extra) -> AttentionConfig:
    spec = {} if mode is Mode.DECODE else {"draft_tokens": N, "topk": 1, "draft_steps": 3}
    return AttentionConfig(page_size=256, max_context=max_context, window=128, extra={"num_sms": SMS} | extra, **spec)


def pools_for(c: AttentionConfig, seed=0, swa=True):
    width = c.max_context + 4 + c.draft_tokens
    return make_pools(rows=9, width=width, page_size=256, swa=swa, seed=seed, device=DEVICE)


def tokens_of(mode) -> int:
    return 1 if mode in (Mode.DECODE, Mode.DRAFT_DECODE) else N


def shape_of(c: AttentionConfig, mode, page_size=128) -> BatchShape:
    reserve = N if mode in (Mode.DRAFT_DECODE, Mode.TARGET_VERIFY) else 0
    least = N if mode is Mode.DRAFT_EXTEND_V2 else 1
    return BatchShape(mode, BUCKET, page_size, c.max_context, tokens_of(mode), reserve, least)


def replayer(mode, arm, c=None, pools=None, lens=torch.int64, cls=DeepseekV4Backend, **options) -> Replayer:
    c = c or config(mode, **options)
    recorded = arm.placement is not Placement.EAGER
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=recorded)
    return Replayer.capture(backend, mode, BUCKET, arm.placement, tokens_per_req=tokens_of(mode), lens=lens)


def a_batch(mode, pools, lengths=(300, 512, 130), rows=(3, 5, 7)):
    return live_batch(mode, lengths, rows, pools, tokens_of(mode), np.random.default_rng(0))


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, arm):
    own = replayer(mode, arm)
    batches = list(batch_sequence(shape_of(own.backend.config, mode), own.backend.pools, seed=1))
    few = mode is Mode.DRAFT_DECODE or arm == ARMS[2]  # the same code as decode and as fused-graph
    assert [d for d in replayed(own, batches[:3] if few else batches) if d] == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_block_edges_of_both_ratios_unassigned_slots_and_32_bit_lengths(arm):
    mode = Mode.TARGET_VERIFY
    c = config(mode)
    pools = with_unassigned_slots(pools_for(c), seed=2)
    own = replayer(mode, arm, c, pools, lens=torch.int32)
    lengths = ((121, 122, 123, 124), (125, 126, 127, 128), (252, 509, 510, 596), (1, 2, 3, 4))
    rows = (8, 1, 3, 3)
    assert [d for d in replayed(own, [a_batch(mode, pools, n, rows) for n in lengths]) if d] == []


def test_expanding_on_the_device_gives_the_same_as_the_loop_over_requests():
    for mode in (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2):
        own = replayer(mode, ARMS[0], host_expansion=False)
        batches = list(batch_sequence(shape_of(own.backend.config, mode), own.backend.pools, 3))[3:6]
        assert [d for d in replayed(own, batches) if d] == []


def test_without_host_lengths_the_classic_chain_checks_nothing_and_expands_on_the_device():
    """An engine may keep no mirror: later releases do not ask for one."""
    for mode in (Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2):
        own = replayer(mode, ARMS[0])
        for lengths in ((300, 512, 130), (), (5, 600 - N, 128, 4)):
            live = a_batch(mode, own.backend.pools, lengths, range(1, 1 + len(lengths))) if lengths else idle_batch()
            if not lengths and mode is Mode.DRAFT_EXTEND_V2:
                continue
            batch, step = own.load(live), upload(live, DEVICE)
            own.runner.load_batch(replace(step, seq_lens_cpu=None))
            own.runner.replay()
            found = tensors_of(own.backend.forward_metadata)
            for name, want in own.backend.expected(batch, host_pools(own.backend.pools)).items():
                np.testing.assert_array_equal(found[name].cpu().numpy()[want.live], want.values[want.live], name)
        assert count(own.runner.rebuild).syncs == 0


def test_a_draft_extend_padding_row_is_shorter_than_its_window():
    own = replayer(Mode.DRAFT_EXTEND_V2, ARMS[3])
    own.differences(a_batch(Mode.DRAFT_EXTEND_V2, own.backend.pools, (44,), (1,)))
    md = own.backend.forward_metadata
    assert md.seq_lens_casual[4:8].tolist() == [-2, -1, 0, 1] and md.swa_topk_lengths[4:8].tolist() == [-2, -1, 0, 1]
    assert (md.swa_page_indices[4:7] == -1).all() and md.c4_plan is None and md.indexer is None


# What a rebuild costs the host.


def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch():
    info = lookup("deepseek_v4")
    for mode, kernels in ((Mode.DECODE, 5), (Mode.DRAFT_DECODE, 5), (Mode.TARGET_VERIFY, 7), (Mode.DRAFT_EXTEND_V2, 0)):
        growth = DeepseekV4Backend.allowances.dispatches_per_request.get(str(mode), 0)
        live = a_batch(mode, pools_for(config(mode)))
        got = replayer(mode, ARMS[0]).counts(live)
        specified = info.dispatches[str(mode)][1] + growth * (BUCKET - 1)
        assert (got.dispatches, got.triton, got.syncs) == (specified, kernels, 1)
        eager, graph = replayer(mode, ARMS[2]), replayer(mode, ARMS[3])
        assert (eager.counts(live).dispatches, eager.counts(live).launches) == (0, 1)
        counts = graph.counts(live)
        assert (counts.dispatches, counts.launches, graph.runner.graphs[BUCKET].nodes) == (0, 0, 1)


@pytest.mark.parametrize(
    ("mode", "outside", "inside", "kernels"), [(Mode.DECODE, 9, 41, 5), (Mode.TARGET_VERIFY, 10, 54, 7)]
)
def test_two_stages_cost_what_upstream_leaves_outside_and_records_inside(mode, outside, inside, kernels):
    arm = ARMS[1]
    for lens, casts in ((torch.int64, 0), (torch.int32, 1)):
        own = replayer(mode, arm, lens=lens, two_stage=True)
        pools = own.backend.pools
        assert own.counts(a_batch(mode, pools)).dispatches == outside
        assert own.counts(idle_batch()).dispatches == outside + 4
        batch, md = own.runner.capture_batch(BUCKET), own.backend.forward_metadata
        raw = own.backend.raw[mode, BUCKET]

        def upgrade(own=own, batch=batch, raw=raw, md=md):
            own.backend.upgrade(batch, raw, md)
            own.backend._store_locations(batch, md)

        seen = count(upgrade)
        assert (seen.dispatches, seen.triton, seen.syncs) == (inside + casts, kernels, 0)


def test_two_stages_are_right_and_leave_the_runners_slots_alone():
    for mode in (Mode.DECODE, Mode.TARGET_VERIFY):
        own = replayer(mode, ARMS[1], two_stage=True)
        batches = list(batch_sequence(shape_of(own.backend.config, mode), own.backend.pools, 1))[2:7]
        assert [d for d in replayed(own, batches) if d] == []
        slots = own.runner.slots
        own.load(idle_batch())
        with own.stream():
            slots.seq_lens.fill_(77)  # a runner whose slots still hold the last batch
            slots.req_pool_indices.fill_(3)
            own.runner.replay()
        assert own.backend.forward_metadata.seq_lens_casual[0] == (1 if mode is Mode.DECODE else 2)
        assert (slots.seq_lens == 77).all() and (slots.req_pool_indices == 3).all()


def test_an_idle_step_costs_the_classic_chain_four_dispatches():
    own = replayer(Mode.DECODE, ARMS[0])
    assert own.counts(idle_batch()).dispatches == 69
    assert own.differences(idle_batch()) == []


# Warm-up and copying.


def test_a_graph_captures_the_call_that_fills_its_schedules():
    filled = []
    own = replayer(Mode.DECODE, ARMS[3])

    def attention():
        schedule = own.backend.forward_metadata.c4_flashmla_metadata
        filled.append(schedule.num_splits is None)
        schedule.num_splits = own.backend.plan_numbers

    own.runner._body = attention
    with own.stream():
        own.runner.capture()
    assert filled == [True, True, True]  # two warm-ups and the capture, each on a new schedule
    kept = DeepseekV4Backend.on_after_cuda_graph_warmup
    filled.clear()
    try:
        DeepseekV4Backend.on_after_cuda_graph_warmup = lambda self: None
        with own.stream():
            own.runner.capture()
    finally:
        DeepseekV4Backend.on_after_cuda_graph_warmup = kept
    assert filled == [True, False, False]  # without the hook the capture records no fill at all


class UpgradesOnce(DeepseekV4Backend):
    """Upgrades in the graph unless the struct is full already, and forgets to make it raw again after a warm-up."""

    def init_forward_metadata_out_graph(self, fb, in_capture=False):
        super().init_forward_metadata_out_graph(fb, in_capture)
        self.full = False

    def init_forward_metadata_in_graph(self, fb):
        if not self.full:
            super().init_forward_metadata_in_graph(fb)
        self.full = True


def test_metadata_of_a_warm_up_must_not_be_what_the_graph_holds():
    own = replayer(Mode.DECODE, ARMS[3], cls=UpgradesOnce)
    assert own.runner.graphs[BUCKET].nodes == 0
    assert own.differences(a_batch(Mode.DECODE, own.backend.pools)) != []


@dataclass
class Pair:
    size: int
    lens: torch.Tensor | None


def test_a_field_that_the_copy_forgets_or_cannot_refill_is_an_error():
    one, two = Pair(1, torch.zeros(2)), Pair(1, torch.ones(2))
    copy_fields(one, two, equal=["size"], copy=["lens"])
    assert one.lens.tolist() == [1, 1] and one.lens is not two.lens
    for lists, words in (
        ({"equal": ["size"]}, "lists"),
        ({"equal": ["size"], "copy": ["lens"], "assign": ["lens"]}, "lists"),
    ):
        with pytest.raises(AssertionError, match=words):
            copy_fields(one, two, **lists)
    with pytest.raises(AssertionError, match="size was 1 at capture, is 2"):
        copy_fields(one, Pair(2, None), equal=["size"], copy=["lens"])
    for dst, src in ((one, Pair(1, None)), (Pair(1, None), two)):
        with pytest.raises(AssertionError, match="lens is"):
            copy_fields(dst, src, equal=["size"], copy=["lens"])
    assert {"page_table", "c4_plan", "indexer"} <= set(DeepseekV4Metadata.copied)


def test_a_second_capture_binds_the_same_tensors_and_new_schedules():
    for arm in (ARMS[0], ARMS[1]):
        own = replayer(Mode.DECODE, arm, two_stage=True)
        before = own.backend.forward_metadata
        with own.stream():
            own.runner.capture()
        after = own.backend.metadata[Mode.DECODE, BUCKET]
        where = [{path: t.data_ptr() for path, t in tensors_of(md).items()} for md in (before, after)]
        assert where[0] == where[1] and after.c1_flashmla_metadata is not before.c1_flashmla_metadata
        assert after.c1_flashmla_metadata == FlashMLASchedule()
        assert own.differences(a_batch(Mode.DECODE, own.backend.pools)) == []


# Faults of upstream, and of what is easy to write.


class FirstEntries(DeepseekV4Backend):
    """Multi-step drafts hand over the slots of every step; padding by a negative number keeps the first B of them."""

    def _checked_slots(self, slots, rows):
        return slots.shape[0]

    def rebuild_aten(self, fb, md):
        steps = torch.stack([fb.out_cache_loc, fb.out_cache_loc + 1, fb.out_cache_loc + 2], 1).flatten()
        super().rebuild_aten(replace(fb, out_cache_loc=steps), md)


class OldestFirst(DeepseekV4Backend):
    """The window list in the order of the tokens."""

    def _aten_window(self, context, pool):
        return super()._aten_window(context, pool).flip(1)


class MapWithoutSentinel(DeepseekV4Backend):
    """A slot map whose last entry is a slot: positions before the first token are somebody's."""

    def _aten_window(self, context, pool):
        self.pools.full_to_swa[-1] = 7
        window = super()._aten_window(context, pool)
        self.pools.full_to_swa[-1] = -1
        return window


class PlaceholderKept(DeepseekV4Backend):
    """Every token writes a compressed entry, not only those that end a block."""

    def _aten_compressed(self, built, md):
        super()._aten_compressed(built, md)
        built.c4_out_loc = built.raw_out_loc // 4


@pytest.mark.parametrize(
    ("fault", "mode", "field"),
    [
        (FirstEntries, Mode.DRAFT_DECODE, "raw_out_loc"),
        (HostPlanner, Mode.TARGET_VERIFY, "c128_plan.plan_w"),
        (OldestFirst, Mode.DECODE, "swa_page_indices"),
        (MapWithoutSentinel, Mode.DECODE, "swa_page_indices"),
        (StalePlan, Mode.DECODE, "c4_plan.plan_d"),
        (PlaceholderKept, Mode.DECODE, "c4_out_loc"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, field):
    found = {}
    lengths = (10, 257, 130, 400) if mode is not Mode.TARGET_VERIFY else (9, 125, 131, 401)
    for cls in (fault, DeepseekV4Backend):
        own = replayer(mode, ARMS[0], cls=cls)
        lines = own.differences(a_batch(mode, own.backend.pools, lengths, (1, 3, 5, 7)))
        found[cls] = {line.split("[")[0].split(":")[0] for line in lines}
    assert field in found[fault] and found[DeepseekV4Backend] == set()


@pytest.mark.parametrize(
    ("changes", "swa", "tail", "words"),
    [
        ({"page_size": 64}, True, None, "pages of 256 tokens, got page_size 64"),
        ({"window": 512}, True, None, "window of 128 tokens, got 512"),
        ({}, False, None, "full_to_swa is None"),
        ({"topk": 2}, True, None, "topk of at most 1, got 2"),
        ({"extra": {"index_topk": 700}}, True, None, "index_topk 700"),
        ({}, True, TailPolicy.LIVE_ONLY, "live_only"),
        ({"max_context": 605}, True, None, "604 tokens wide, but lengths reach 605"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_both_numbers(changes, swa, tail, words):
    c = replace(config(), **changes)
    with pytest.raises(ConfigError, match=words):
        DeepseekV4Backend(c, pools_for(config(), swa=swa), Implementation.FUSED, tail=tail).init_cuda_graph_state(2, 2)


def test_batches_that_the_buffers_and_plans_do_not_hold_are_refused():
    c = config(Mode.TARGET_VERIFY)
    with pytest.raises(ConfigError, match="at most 1024 requests and 65535 tokens, got 1025"):
        DeepseekV4Backend(c, pools_for(c)).init_cuda_graph_state(1025, 4100)
    own = replayer(Mode.TARGET_VERIFY, ARMS[3], c)
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match="batch size 5 exceeds the buffers' 4 requests"):
        own.backend.bind(replace(batch, batch_size=5))
    with pytest.raises(ConfigError, match="holds 16 rows, 4 requests need 20"):
        own.backend.bind(replace(batch, positions=torch.zeros(20)))
    with pytest.raises(ConfigError, match="has 20 slots, the captured batch writes 16"):
        own.backend.rebuild_fused(
            replace(batch, out_cache_loc=torch.zeros(20, device=DEVICE)), own.backend.forward_metadata
        )
    with pytest.raises(ConfigError, match="mode target_verify needs draft_tokens > 0"):
        DeepseekV4Backend(config(), pools_for(config())).init_cuda_graph_state(4, 4) or replayer(
            Mode.TARGET_VERIFY, ARMS[3], config()
        )
    short = replayer(Mode.DECODE, ARMS[0])
    view = replace(short.runner.capture_batch(BUCKET), seq_lens_cpu=torch.full((4,), 605))
    with pytest.raises(ConfigError, match="605 tokens exceed req_to_token, which is 604"):
        short.backend.init_forward_metadata_out_graph(view)


DRAFT_FAULTS = frozenset({"raw_out_loc"})
"""In drafts upstream takes the first B of all steps' slots; what compresses them is not comparable either."""


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("path", cases("deepseek_v4"), ids=lambda path: path.stem)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    draft = golden.mode is Mode.DRAFT_DECODE
    steps = range(golden.config["S"]) if draft else [None]
    told = json.loads(str(golden.data["capture/host"]))
    kept = next((value for name, value in told.items() if name.endswith("c4_sparse_topk")), 512)
    for step in steps:
        prefix = "" if step is None else f"step{step}."
        for replay in golden.replays(DeepseekV4Backend, arm, step or 0, num_sms=SMS, index_topk=kept):
            fields = {f for f in replay.expected if prefix + f in replay.golden and not f.startswith("indexer")}
            if draft:
                fields = {f for f in fields - DRAFT_FAULTS if not f.startswith(("c4_", "c128_"))}
            if step == golden.config["S"] - 1:  # the last step's metadata is never refreshed upstream
                fields &= {"swa_out_cache_loc"}
            assert fields
            assert [d for field in sorted(fields) for d in replay.differences(field, prefix + field)] == []
            assert all(replay.golden[prefix + f].dtype == replay.got[f].dtype for f in fields)
