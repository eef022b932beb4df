"""A block table and a split-KV schedule; the schedule's own rules are tested in test_schedules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import BatchShape, batch_sequence, live_batch, make_pools, with_unassigned_slots
from attn_graph.backends.flashmla import FlashMlaBackend
from attn_graph.backends.modes import ForwardMode, Placement
from attn_graph.backends.registry import lookup
from attn_graph.backends.schedules import split_kv
from attn_graph.profilers.conformance.faults.flashmla import NoDraftTokensInThePlan, RecordedHostPlan
from attn_graph.profilers.counters import count
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
MODES = sorted(FlashMlaBackend.modes)
BUCKET, N = 4, 4
SMS = 16  # few parts keep the interpreter quick, enough of them split rows of five blocks


def config(mode, max_context=300, **kwargs) -> AttentionConfig:
    spec = {} if mode is Mode.DECODE else {"draft_tokens": N, "topk": 1, "draft_steps": 3}
    options = {"page_size": 64, "num_heads": 32, "extra": {"num_sms": SMS}} | spec | kwargs
    return AttentionConfig(max_context=max_context, **options)


def pools_for(c: AttentionConfig, seed=0):
    return make_pools(rows=9, width=c.max_context + 8, page_size=c.page_size, swa=False, seed=seed, device="cpu")


def tokens_of(mode) -> int:
    return N if mode in (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2) else 1


def batches(c, mode, pools):
    extend = mode is Mode.DRAFT_EXTEND_V2
    reserve = 0 if extend or mode is Mode.DECODE else N
    return batch_sequence(
        BatchShape(mode, BUCKET, 64, c.max_context, tokens_of(mode), reserve, N if extend else 1), pools, seed=1
    )


def replayer(mode, arm, c=None, pools=None, cls=FlashMlaBackend, **kwargs) -> Replayer:
    c = c or config(mode)
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement is not Placement.EAGER)
    return Replayer.capture(backend, mode, BUCKET, arm.placement, tokens_per_req=tokens_of(mode), **kwargs)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, arm):
    c = config(mode)
    own = replayer(mode, arm, c, with_unassigned_slots(pools_for(c), seed=2))
    assert [d for d in replayed(own, batches(c, mode, own.backend.pools)) if d] == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("option", ["older_plan", "fp8"])
def test_other_planners_columns_are_the_oracles(option, arm):
    for mode in (Mode.DECODE, Mode.TARGET_VERIFY):
        c = config(mode, extra={"num_sms": SMS, option: True})
        own = replayer(mode, arm, c)
        assert [d for d in replayed(own, list(batches(c, mode, own.backend.pools))[:4]) if d] == []


def test_a_plan_of_8_bit_kv_is_in_tokens_and_for_fewer_requests():
    c = config(Mode.DECODE, extra={"num_sms": SMS, "fp8": True})
    own = replayer(Mode.DECODE, ARMS[3], c)
    own.load(live_batch(Mode.DECODE, [300, 5], [2, 3], own.backend.pools, 1, np.random.default_rng(0)))
    own.runner.replay()
    first = own.backend.forward_metadata.flashmla_metadata[:2, :5].tolist()
    # Four requests of 5, 1, 1 and 1 blocks and 5 overhead each: 28 in 16 parts, 2 + 5 a part, of which 5 are overhead.
    assert first == [[0, 0, 0, 128, 0], [0, 128, 0, 256, 1]]
    with pytest.raises(ConfigError, match="fewer than 4096 requests, got 4096"):
        FlashMlaBackend(c, pools_for(c)).init_cuda_graph_state(4096, 4096)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode):
    live = live_batch(mode, [33, 64], [2, 3], pools_for(config(mode)), tokens_of(mode), np.random.default_rng(0))
    for lens, added in ((torch.int32, 0), (torch.int64, 1)):
        classic = replayer(mode, ARMS[0], lens=lens, max_bs=BUCKET + 1).counts(live)
        table, _ = lookup("flashmla").dispatches[str(mode)]
        assert (classic.dispatches, classic.triton, classic.syncs) == (table + added, 2, 1)
    eager, graph = replayer(mode, ARMS[2]).counts(live), replayer(mode, ARMS[3]).counts(live)
    assert (eager.dispatches, eager.launches, graph.dispatches, graph.launches) == (0, 1, 0, 0)


def test_without_a_host_mirror_the_classic_chain_asks_the_device():
    own = replayer(Mode.TARGET_VERIFY, ARMS[0], lens=torch.int32, max_bs=BUCKET + 1)
    own.load(live_batch(Mode.TARGET_VERIFY, [33, 64], [2, 3], own.backend.pools, N, np.random.default_rng(0)))
    blind = dataclasses.replace(own.runner.view, seq_lens_cpu=None)
    counts = count(lambda: own.backend.init_forward_metadata_out_graph(blind))
    assert counts.dispatches == lookup("flashmla").dispatches["target_verify"][0] - 2


def test_parts_depend_on_mode_and_hardware_and_never_on_the_batch():
    backend = FlashMlaBackend(config(Mode.TARGET_VERIFY, extra={}), pools_for(config(Mode.DECODE)))
    backend.init_cuda_graph_state(2, 8)
    assert (backend.parts(Mode.DECODE), backend.parts(Mode.TARGET_VERIFY)) == (132, 66)  # 32 and 128 query rows
    wide = FlashMlaBackend(config(Mode.TARGET_VERIFY, num_heads=128), pools_for(config(Mode.DECODE)))
    wide.init_cuda_graph_state(2, 8)
    assert wide.parts(Mode.TARGET_VERIFY) == 2  # eight times 64 query rows on 16 multiprocessors


def test_alternating_modes_rebuild_the_shared_schedule_each_for_itself():
    c = config(Mode.TARGET_VERIFY)
    backend = FlashMlaBackend(c, pools_for(c))
    draft = Replayer.capture(backend, Mode.DRAFT_DECODE, BUCKET, Placement.GRAPH)
    assert backend.metadata[Mode.DRAFT_DECODE, BUCKET].flashmla_metadata.shape == (16, 8)
    batch = draft.runner.capture_batch(BUCKET)
    verify = backend.bind(dataclasses.replace(batch, forward_mode=Mode.TARGET_VERIFY))
    assert verify.flashmla_metadata.shape == (8, 8)
    assert verify.flashmla_metadata.data_ptr() == backend.schedule.data_ptr()
    for seed in range(2):
        backend.rebuild_fused(dataclasses.replace(batch, forward_mode=Mode.TARGET_VERIFY), verify)
        live = live_batch(Mode.DRAFT_DECODE, [33, 200], [2, 3], backend.pools, 1, np.random.default_rng(seed))
        assert draft.differences(live) == []


@pytest.mark.parametrize(
    ("fault", "mode", "field"),
    [
        (NoDraftTokensInThePlan, Mode.TARGET_VERIFY, "flashmla_metadata"),
        (RecordedHostPlan, Mode.DECODE, "num_splits"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, field):
    own = replayer(mode, ARMS[2] if fault is RecordedHostPlan else ARMS[0], cls=fault)
    found = [d for ds in replayed(own, batches(own.backend.config, mode, own.backend.pools)) for d in ds]
    assert found and all(d.startswith(field) for d in found)


def test_a_verify_at_the_context_limit_has_columns_of_its_own():
    c = config(Mode.TARGET_VERIFY, max_context=383)  # upstream: (383 + 64) // 64 = 6 columns; 383 + 4 tokens need 7
    pools = pools_for(c)
    own = replayer(Mode.TARGET_VERIFY, ARMS[3], c, pools)
    assert own.backend.table.shape[1] == 7
    assert own.differences(live_batch(Mode.TARGET_VERIFY, [383, 1], [2, 3], pools, N, np.random.default_rng(0))) == []


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"page_size": 32}, "page_size must be 64, the only one flashmla has; got 32"),
        ({"max_context": 900}, "15 columns of 64 tokens"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_both_numbers(kwargs, words):
    pools = make_pools(rows=3, width=310, page_size=64, swa=False, seed=0, device="cpu")
    with pytest.raises(ConfigError, match=words):
        FlashMlaBackend(config(Mode.TARGET_VERIFY, **kwargs), pools).init_cuda_graph_state(2, 8)


def test_what_it_does_not_plan_for_is_refused():
    with pytest.raises(ConfigError, match="topk is at most 1; got 2"):
        replayer(Mode.DRAFT_DECODE, ARMS[3], config(Mode.DRAFT_DECODE, topk=2))
    own = replayer(Mode.DECODE, ARMS[3])
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match="has no mode draft_extend"):
        extend = dataclasses.replace(batch, forward_mode=Mode.DRAFT_EXTEND)
        own.backend.init_forward_metadata_out_graph(extend, in_capture=True)
    with pytest.raises(ConfigError, match=r"batch size 0 is not within 1\.\.4"):
        own.backend.bind(dataclasses.replace(batch, batch_size=0))


@pytest.mark.gpu
def test_the_plan_equals_the_vendors():
    vendor = pytest.importorskip("sgl_kernel.flash_mla")
    lens = torch.tensor([1, 63, 64, 65, 8192, 100, 70000], dtype=torch.int32, device="cuda")
    schedule, num_splits = vendor.get_mla_metadata(lens, 32, 1)
    plan = split_kv(lens.tolist(), schedule.shape[0])
    ours = torch.tensor(plan.parts, dtype=torch.int32)
    busy = ours[:, 0] < len(lens)
    assert num_splits.tolist() == plan.num_splits
    torch.testing.assert_close(schedule.cpu()[busy, :7], ours[busy, :7], rtol=0, atol=0)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("path", cases("flashmla"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    for replay in golden.replays(FlashMlaBackend, arm, num_sms=SMS):
        # Every step of a draft has a buffer of its own and the same contents.
        tables = [name for name in replay.golden if name.startswith("@kv_indices")]
        assert len(tables) == (golden.config["S"] - 1 if golden.mode is Mode.DRAFT_DECODE else 1)
        for name in tables:
            assert replay.differences("block_kv_indices", name, rows=golden.config["B"]) == []
        lens = replay.golden["live/planner_in.cache_seqlens"].tolist()
        assert replay.got["num_splits"].tolist() == split_kv(lens, len(replay.got["flashmla_metadata"])).num_splits
        if "seq_lens_k" in replay.expected:
            assert replay.differences("seq_lens_k") == []
