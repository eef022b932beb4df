"""Sparse MLA: a table, a length and a share of three schedules for every query row; nothing that the host must read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends import schedules
from attn_graph.backends.base import AttentionConfig, ConfigError, NotCapturedError, tensors_of
from attn_graph.backends.batch import BatchShape, batch_sequence, live_batch, make_pools, with_unassigned_slots
from attn_graph.backends.dsa import DsaBackend
from attn_graph.backends.modes import Arm, ForwardMode, Implementation, Placement, TailPolicy
from attn_graph.backends.registry import lookup
from attn_graph.profilers.conformance.faults.dsa import AcceptedWidth, AliasesTheRunner, NegativeLengths, StaleSchedule
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
MODES = sorted(DsaBackend.modes)
BUCKET, N, SMS = 4, 4, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERY_OPTION = {"topk_v2": True, "flashmla_kv": True, "mqa_2d": True}


def config(mode=Mode.DECODE, page_size=64, max_context=200, **extra) -> AttentionConfig:
    spec = {} if mode is Mode.DECODE else {"draft_tokens": N, "topk": 1, "draft_steps": 3}
    extra = {"index_topk": 70, "num_sms": SMS} | extra
    return AttentionConfig(page_size=page_size, max_context=max_context, extra=extra, **spec)


def pools_for(c: AttentionConfig, seed=0):
    width = c.max_context + 4 + c.draft_tokens
    return make_pools(rows=13, width=width, page_size=c.page_size, swa=False, seed=seed, device=DEVICE)


def tokens_of(mode) -> int:
    return 1 if mode in (Mode.DECODE, Mode.DRAFT_DECODE) else N


def shape_of(c: AttentionConfig, mode, bucket=BUCKET) -> BatchShape:
    reserve = N if mode in (Mode.DRAFT_DECODE, Mode.TARGET_VERIFY) else 0
    least = N if mode is Mode.DRAFT_EXTEND_V2 else 1
    return BatchShape(mode, bucket, c.page_size, c.max_context, tokens_of(mode), reserve, least)


def replayer(mode, arm, c=None, pools=None, lens=torch.int64, cls=DsaBackend, bucket=BUCKET, tail=None) -> Replayer:
    c = c or config(mode)
    recorded = arm.placement is not Placement.EAGER
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=recorded, tail=tail)
    return Replayer.capture(backend, mode, bucket, arm.placement, tokens_per_req=tokens_of(mode), lens=lens)


def a_batch(mode, pools, lengths=(33, 64, 190), rows=(3, 5, 7)):
    return live_batch(mode, lengths, rows, pools, tokens_of(mode), np.random.default_rng(0))


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, arm):
    own = replayer(mode, arm, config(mode, **EVERY_OPTION))
    batches = batch_sequence(shape_of(own.backend.config, mode), own.backend.pools, seed=1)
    assert [d for d in replayed(own, batches) if d] == []


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("arm", [ARMS[0], ARMS[1], ARMS[3]], ids=str)
def test_other_page_sizes_and_slots_that_are_not_assigned(page_size, arm):
    mode = Mode.TARGET_VERIFY
    c = config(mode, page_size)
    own = replayer(mode, arm, c, with_unassigned_slots(pools_for(c), seed=2))
    batches = list(batch_sequence(shape_of(c, mode), own.backend.pools, 3))[:6]
    assert [d for d in replayed(own, batches) if d] == []
    md = own.backend.forward_metadata
    assert (md.real_page_table is md.page_table_1) or page_size > 1


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.DRAFT_EXTEND_V2], ids=str)
def test_the_fused_kernel_can_write_whole_tables_too(mode):
    c = config(mode, max_context=700)  # several tiles a row
    own = replayer(mode, ARMS[3], c, tail=TailPolicy.STATIC_FULL)
    batches = list(batch_sequence(shape_of(c, mode), own.backend.pools, 4))[1:4]
    assert [d for d in replayed(own, batches) if d] == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_without_the_wide_table_pages_are_gathered_alone(arm):
    c = config(Mode.DECODE, max_context=2100, topk_v2=True, wide_table=False)
    own = replayer(Mode.DECODE, arm, c)
    assert own.backend.forward_metadata.page_table_1 is None
    assert [
        d for d in replayed(own, list(batch_sequence(shape_of(c, Mode.DECODE), own.backend.pools, 5))[:5]) if d
    ] == []


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
def test_rows_beyond_the_topk_level_are_planned(arm):
    c = AttentionConfig(page_size=64, max_context=70000, extra={"index_topk": 64, "num_sms": SMS, "topk_v2": True})
    pools = make_pools(rows=4, width=70016, page_size=64, swa=False, seed=0, device=DEVICE)
    own = replayer(Mode.DECODE, arm, c, pools, bucket=3)
    assert own.differences(a_batch(Mode.DECODE, pools, (70000, 5, 65537), (1, 2, 3))) == []
    assert own.backend.forward_metadata.topk_v2_plan.tolist()[:3] == [[65536, 2], [0, 70000], [2, 65537]]


def test_32_bit_lengths_never_become_the_metadata():
    for arm in ARMS:
        own = replayer(Mode.DECODE, arm, lens=torch.int32)
        assert own.differences(a_batch(Mode.DECODE, own.backend.pools)) == []
        bound = tensors_of(own.backend.forward_metadata).values()
        assert own.runner.slots.seq_lens.untyped_storage().data_ptr() not in {
            t.untyped_storage().data_ptr() for t in bound
        }


OPTIONS_COST = (({}, 0, 0), ({"topk_v2": True}, 2, 1), ({"flashmla_kv": True}, 3, 1))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode):
    table, _ = lookup("dsa").dispatches[str(mode)]
    live = a_batch(mode, pools_for(config(mode)))
    launches = 1 if tokens_of(mode) == 1 else 2
    for extra, dispatches, providers in OPTIONS_COST:
        got = replayer(mode, ARMS[0], config(mode, **extra)).counts(live)
        assert (got.dispatches, got.triton, got.syncs) == (table + dispatches, launches + providers, 0)
    for lens, difference in ((torch.int32, -1), (torch.int64, 0)):
        assert replayer(mode, ARMS[0], lens=lens).counts(live).dispatches == table + difference
    assert replayer(mode, ARMS[0], config(mode, page_size=1)).counts(live).dispatches == table - 5
    eager, graph = replayer(mode, ARMS[2], config(mode, **EVERY_OPTION)), replayer(mode, ARMS[3])
    assert (eager.counts(live).dispatches, eager.counts(live).launches) == (0, 1)
    assert (graph.counts(live).dispatches, graph.counts(live).launches, graph.runner.graphs[BUCKET].nodes) == (0, 0, 1)


def test_two_dimensional_contexts_cost_verify_two_dispatches_and_schedule_requests():
    mode = Mode.TARGET_VERIFY
    own = replayer(mode, ARMS[0], config(mode, mqa_2d=True))
    assert own.counts(a_batch(mode, own.backend.pools)).dispatches == 37
    md = own.backend.forward_metadata
    assert md.paged_mqa_ctx_lens_2d.tolist() == [[s] * N for s in (37, 68, 194, 5)]
    assert list(map(tuple, md.paged_mqa_schedule_metadata.tolist())) == schedules.paged_mqa_schedule(
        [37, 68, 194, 5], SMS
    )


def test_draft_extend_counts_the_new_tokens_once():
    own = replayer(Mode.DRAFT_EXTEND_V2, ARMS[3])
    own.differences(a_batch(Mode.DRAFT_EXTEND_V2, own.backend.pools, (44, 11), (1, 2)))
    md = own.backend.forward_metadata
    assert md.cache_seqlens_int32.tolist() == [44, 11, 1, 1] and md.cu_seqlens_k.tolist() == [0, 44, 55, 56, 57]
    assert md.dsa_seqlens_expanded.tolist() == [41, 42, 43, 44, 8, 9, 10, 11, 0, 0, 0, 1, 0, 0, 0, 1]


def test_one_instance_serves_every_mode_at_one_size():
    c = config(Mode.TARGET_VERIFY)
    pools = pools_for(c)
    backend = DsaBackend(c, pools)
    backend.init_cuda_graph_state(BUCKET, BUCKET * N)
    backend.init_cuda_graph_state = lambda *sizes: None  # three runners, one state
    runners = {
        mode: Replayer.capture(backend, mode, BUCKET, Placement.GRAPH, tokens_per_req=tokens_of(mode))
        for mode in (Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2)
    }
    for mode in [*runners, *reversed(runners), Mode.DECODE]:
        assert runners[mode].differences(a_batch(mode, pools)) == []


def test_addresses_stay_and_a_size_that_was_not_captured_is_refused():
    own = replayer(Mode.DECODE, ARMS[0])
    where = {path: t.data_ptr() for path, t in tensors_of(own.backend.forward_metadata).items()}
    for seed in range(5):
        own.differences(a_batch(Mode.DECODE, own.backend.pools, (1 + seed, 200), (3, 5)), seed)
        assert {path: t.data_ptr() for path, t in tensors_of(own.backend.forward_metadata).items()} == where
    other = replace(own.runner.view, batch_size=3)
    with pytest.raises(NotCapturedError, match="batch size 3 was not captured"):
        own.backend.init_forward_metadata_out_graph(other)


def test_tables_follow_req_to_token_from_replay_to_replay():
    pools = make_pools(rows=4, width=16, page_size=4, swa=False, seed=0, device=DEVICE)
    table = pools.req_to_token
    table[1, :4] = torch.arange(12, 16)
    table[3, :12] = torch.tensor([20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31])
    for arm in ARMS:
        c = AttentionConfig(page_size=4, max_context=12, extra={"index_topk": 8, "num_sms": 3})
        own = replayer(Mode.DECODE, arm, c, replace(pools, req_to_token=table.clone()), bucket=2)
        live = live_batch(Mode.DECODE, [9, 4], [3, 1], pools, 1, np.random.default_rng(0))
        own.differences(live)
        md = own.backend.forward_metadata
        assert md.cu_seqlens_k.tolist() == [0, 9, 13] and md.dsa_cu_seqlens_k.tolist() == [0, 8, 12]
        assert md.real_page_table[0, :3].tolist() == [5, 2, 7] and md.real_page_table[1, 0] == 3
        own.backend.pools.req_to_token[3, 4:8] = torch.arange(24, 28)
        assert own.differences(live, 1) == [] and md.real_page_table[0, :3].tolist() == [5, 6, 7]


class BatchMaxWidth(DsaBackend):
    """Tables gathered up to the batch's longest length only: the columns behind it are an older batch's."""

    def rebuild_aten(self, fb, md):
        kept = md.page_table_1.clone()
        super().rebuild_aten(fb, md)
        longest = int(md.cache_seqlens_int32.max())
        md.page_table_1[:, longest:] = kept[:, longest:]


class TruncatingDivision(DsaBackend):
    """Division toward zero: slot -1 becomes page 0, which is somebody's."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        md.real_page_table.clamp_(min=0)


class PrefixOnly(DsaBackend):
    """Verify lengths without the draft tokens."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(replace(fb, forward_mode=Mode.DRAFT_EXTEND_V2), md)


class FreshTables(DsaBackend):
    """A table made anew at replay, which no captured kernel reads."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, replace(md, page_table_1=torch.empty_like(md.page_table_1)))


@pytest.mark.parametrize(
    ("fault", "mode", "field", "lens"),
    [
        (StaleSchedule, Mode.DECODE, "paged_mqa_schedule_metadata", torch.int64),
        (NegativeLengths, Mode.DRAFT_EXTEND_V2, "dsa_seqlens_expanded", torch.int64),
        (AcceptedWidth, Mode.DRAFT_EXTEND_V2, "dsa_seqlens_expanded", torch.int64),
        (AliasesTheRunner, Mode.DECODE, "cache_seqlens_int32", torch.int32),
        (BatchMaxWidth, Mode.DECODE, "page_table_1", torch.int64),
        (TruncatingDivision, Mode.DECODE, "real_page_table", torch.int64),
        (PrefixOnly, Mode.TARGET_VERIFY, "cache_seqlens_int32", torch.int64),
        (FreshTables, Mode.DECODE, "page_table_1", torch.int64),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, field, lens):
    c = config(mode)
    pools = with_unassigned_slots(pools_for(c), seed=0)
    found = {}
    for cls in (fault, DsaBackend):
        own = replayer(mode, ARMS[0], c, pools, lens, cls)
        lines = [d for ds in replayed(own, list(batch_sequence(shape_of(c, mode), pools, 1))[:4]) for d in ds]
        found[cls] = {line.split("[")[0].split(":")[0] for line in lines}
    assert field in found[fault] and found[DsaBackend] == set()


def test_lengths_read_as_unsigned_make_a_padding_row_the_longest():
    assert schedules.topk_v2_plan([n % 2**32 for n in (-2, -1, 0, 1)])[0] == (65536, 2)
    own = replayer(Mode.DRAFT_EXTEND_V2, ARMS[0], config(Mode.DRAFT_EXTEND_V2, topk_v2=True))
    own.differences(a_batch(Mode.DRAFT_EXTEND_V2, own.backend.pools, (44,), (1,)))
    assert own.backend.forward_metadata.topk_v2_plan[0].tolist() == [65536, 0]


@pytest.mark.parametrize(
    ("page_size", "changes", "words"),
    [
        (64, {"topk": 2}, "topk of at most 1, got 2"),
        (64, {"max_context": 300}, "req_to_token, 204 tokens, but lengths reach 300"),
        (64, {"max_context": 201, "draft_tokens": 4}, "reach 205"),
        (64, {"extra": {"index_topk": 0}}, "index_topk must be at least 1, got 0"),
        (64, {"extra": {"index_topk": 4096, "topk_v2": True}}, "at most 2048 tokens, index_topk is 4096"),
        (64, {"extra": {"wide_table": False}}, "topk_v2 False"),
        (1, {"extra": {"wide_table": False, "topk_v2": True}}, "page_size 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_both_numbers(page_size, changes, words):
    c = replace(config(page_size=page_size), **changes)
    with pytest.raises(ConfigError, match=words):
        DsaBackend(c, pools_for(config(page_size=page_size)), Implementation.FUSED).init_cuda_graph_state(2, 8)


def test_tails_that_a_rebuild_cannot_leave_are_refused_and_a_batch_wide_one_is_the_static_one():
    for implementation, tail in (
        (Implementation.ATEN, TailPolicy.LIVE_ONLY),
        (Implementation.FUSED, TailPolicy.ZERO_TAIL),
    ):
        backend = DsaBackend(config(), pools_for(config()), implementation, tail=tail)
        with pytest.raises(ConfigError, match=f"{implementation} rebuild leaves no {tail} tail"):
            backend.init_cuda_graph_state(2, 2)
    own = replayer(Mode.DECODE, ARMS[2], tail=TailPolicy.BATCH_MAX)
    assert own.backend.tail is TailPolicy.STATIC_FULL and own.differences(a_batch(Mode.DECODE, own.backend.pools)) == []


def test_a_batch_that_the_buffers_do_not_hold_is_refused():
    c = config(Mode.TARGET_VERIFY)
    own = replayer(Mode.TARGET_VERIFY, Arm.parse("fused-graph"), c)
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match="batch size 5 exceeds the buffers' 4 requests"):
        own.backend.bind(replace(batch, batch_size=5))
    with pytest.raises(ConfigError, match="holds 16 rows, 4 requests of 5 queries need 20"):
        own.backend.bind(replace(batch, positions=torch.zeros(20)))


RECORDED = (
    "cache_seqlens_int32",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "page_table_1",
    "real_page_table",
    "dsa_cache_seqlens_int32",
    "dsa_cu_seqlens_q",
    "dsa_cu_seqlens_k",
    "dsa_seqlens_expanded",
)
ACCEPTED_WIDTH = frozenset(RECORDED) - {"cache_seqlens_int32", "cu_seqlens_k"}
"""Fields whose rows the releases before 0.5.15 laid out by accepted counts in draft extend."""


def released(golden: Golden) -> tuple[int, ...]:
    return tuple(int(part) for part in golden.config["release"].split(".")[:3] if part.isdigit())


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("path", cases("dsa"), ids=lambda path: path.stem)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    old = released(golden) < (0, 5, 15)
    fields = set(RECORDED)
    if old and golden.mode is Mode.DRAFT_EXTEND_V2:
        fields -= ACCEPTED_WIDTH
    steps = range(golden.config["S"] - 1) if golden.mode is Mode.DRAFT_DECODE else [None]
    for step in steps:
        prefix = "" if step is None else f"step{step}."
        options = {"index_topk": golden.config["extra"].get("index_topk", 64), "num_sms": SMS}
        for replay in golden.replays(DsaBackend, arm, step or 0, **options):
            recorded = sorted(field for field in fields if prefix + field in replay.golden)
            assert {"cache_seqlens_int32", "cu_seqlens_k"} <= set(recorded)
            assert [d for field in recorded for d in replay.differences(field, prefix + field)] == []
            if arm.implementation is Implementation.ATEN and not old:  # the whole width, tails included
                for field in recorded:
                    np.testing.assert_array_equal(replay.got[field], replay.golden[prefix + field], field)
