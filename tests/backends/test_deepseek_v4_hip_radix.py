"""DeepSeek-V4 on HIP: what differs from the CUDA backend, and the streams over one KV buffer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import BatchShape, batch_sequence, idle_batch, live_batch, make_pools
from attn_graph.backends.deepseek_v4_hip_radix import DeepseekV4HipRadixBackend, HipIndexerMetadata
from attn_graph.backends.modes import ForwardMode, Placement
from attn_graph.backends.registry import lookup
from attn_graph.profilers.conformance.faults.deepseek_v4_hip_radix import AssignsTheSchedule, KeepsDraftStates
from attn_graph.profilers.counters import count
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
MODES = [Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2]
BUCKET, N, SMS = 4, 4, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config(mode=Mode.DECODE, max_context=600, **extra) -> AttentionConfig:
    spec = {} if mode is Mode.DECODE else {"draft_tokens": N, "topk": 1, "draft_steps": 3}
    return AttentionConfig(page_size=256, max_context=max_context, window=128, extra={"num_sms": SMS} | extra, **spec)


def pools_for(c: AttentionConfig):
    width = c.max_context + 4 + c.draft_tokens
    return make_pools(rows=9, width=width, page_size=256, swa=True, seed=0, device=DEVICE)


def tokens_of(mode) -> int:
    return 1 if mode in (Mode.DECODE, Mode.DRAFT_DECODE) else N


def replayer(mode, arm, c=None, lens=torch.int64, cls=DeepseekV4HipRadixBackend, **options) -> Replayer:
    c = c or config(mode, **options)
    recorded = arm.placement is not Placement.EAGER
    backend = cls(c, pools_for(c), arm.implementation, recorded=recorded)
    return Replayer.capture(backend, mode, BUCKET, arm.placement, tokens_per_req=tokens_of(mode), lens=lens)


def a_batch(mode, pools, lengths=(300, 512, 130), rows=(3, 5, 7)):
    return live_batch(mode, lengths, rows, pools, tokens_of(mode), np.random.default_rng(0))


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("unified", [False, True], ids=["paged", "unified"])
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(unified, mode, arm):
    own = replayer(mode, arm, unified_kv=unified)
    least = N if mode is Mode.DRAFT_EXTEND_V2 else 1
    shape = BatchShape(mode, BUCKET, 128, 600, tokens_of(mode), N if mode is Mode.TARGET_VERIFY else 0, least)
    batches = list(batch_sequence(shape, own.backend.pools, seed=1))
    batches = batches[:2] if not unified or arm == ARMS[2] else batches[:6]
    assert [d for d in replayed(own, batches) if d] == []


def test_streams_hold_the_window_oldest_first_and_then_the_compressed_pages():
    own = replayer(Mode.DECODE, ARMS[3], unified_kv=True, unified_ring=130, swa_pages=5000)
    own.differences(a_batch(Mode.DECODE, own.backend.pools, (3, 257, 1), (3, 5, 7)))
    u, table = own.backend.forward_metadata.unified, own.backend.pools.req_to_token
    assert u.swa_indptr.tolist() == [0, 3, 131, 132, 133] and u.hca_indptr.tolist() == [0, 3, 133, 134, 135]
    assert u.swa_indices[:4].tolist() == [390, 391, 392, 5 * 130 + 129]  # token 129 of row 5, then 130 % 130
    assert u.swa_indices[4] == 5 * 130 and u.swa_loc.tolist() == [392, 650 + 256 % 130, 910, 0]
    page = int(table[5, 0]) // 256
    assert u.hca_indices[131:133].tolist() == [2 * page + 5000, 2 * page + 5001]
    assert u.c4_out_loc.tolist() == [5000, 5000, 5000, 5000]  # placeholders are moved behind the rings too


def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch():
    info = lookup("deepseek_v4_hip_radix")
    for mode, unified in ((Mode.DECODE, None), (Mode.TARGET_VERIFY, 115), (Mode.DRAFT_EXTEND_V2, 66)):
        growth = DeepseekV4HipRadixBackend.allowances.dispatches_per_request.get(str(mode), 0)
        live = a_batch(mode, pools_for(config(mode)))
        specified = info.dispatches[str(mode)][1] + growth * (BUCKET - 1)
        assert replayer(mode, ARMS[0]).counts(live).dispatches == specified
        if unified:
            assert replayer(mode, ARMS[0], unified_kv=True).counts(live).dispatches == unified
        eager, graph = replayer(mode, ARMS[2], unified_kv=True), replayer(mode, ARMS[3])
        assert (eager.counts(live).dispatches, eager.counts(live).launches) == (0, 1)
        assert (graph.counts(live).dispatches, graph.runner.graphs[BUCKET].nodes) == (0, 1)
    assert replayer(Mode.DECODE, ARMS[0]).counts(idle_batch()).dispatches == info.dispatches["idle"][1]


@pytest.mark.parametrize(("unified", "inside", "kernels"), [(False, 42, 5), (True, 65, 7)])
def test_two_stages_of_decode_cost_what_upstream_records(unified, inside, kernels):
    own = replayer(Mode.DECODE, ARMS[1], two_stage=True, unified_kv=unified)
    assert own.counts(a_batch(Mode.DECODE, own.backend.pools)).dispatches == 9
    batch, md = own.runner.capture_batch(BUCKET), own.backend.forward_metadata

    def upgrade():
        own.backend.upgrade(batch, own.backend.raw[Mode.DECODE, BUCKET], md)
        own.backend._store_locations(batch, md)

    seen = count(upgrade)
    assert (seen.dispatches, seen.triton) == (inside, kernels)
    verify = replayer(Mode.TARGET_VERIFY, ARMS[1], two_stage=True)  # upstream has no raw struct for it
    assert verify.counts(a_batch(Mode.TARGET_VERIFY, verify.backend.pools)).dispatches == 0


def test_two_batch_overlap_leaves_its_children_alone_in_graphs():
    assert DeepseekV4HipRadixBackend.tbo_supports_cuda_graph is False


def test_layers_of_a_draft_step_compute_their_own_store_rows():
    one = replayer(Mode.DECODE, ARMS[3], unified_kv=True)
    one.differences(a_batch(Mode.DECODE, one.backend.pools))
    md, pool = one.backend.forward_metadata, one.runner.slots.req_pool_indices
    positions = md.positions_casual.to(torch.int64)
    assert one.backend.swa_store_rows(one.runner.view, md, pool, positions) is md.unified.swa_loc
    idle = replace(one.runner.view, actual_forward_mode=Mode.IDLE)
    assert one.backend.swa_store_rows(idle, md, pool, positions) is not md.unified.swa_loc
    c = replace(config(Mode.DRAFT_DECODE), extra={"num_sms": SMS, "unified_kv": True})
    draft = replayer(Mode.DRAFT_DECODE, ARMS[3], c)
    draft.differences(a_batch(Mode.DRAFT_DECODE, draft.backend.pools))
    md, pool = draft.backend.forward_metadata, draft.runner.slots.req_pool_indices
    later = md.positions_casual.to(torch.int64) + 2
    rows = draft.backend.swa_store_rows(draft.runner.view, md, pool, later)
    assert rows.tolist() == (pool * draft.backend.ring + later % draft.backend.ring).tolist()
    assert rows.tolist() != md.unified.swa_loc.tolist()


class NewestFirst(DeepseekV4HipRadixBackend):
    """Windows in the order of the paged list."""

    def _aten_streams(self, built, pool):
        streams = super()._aten_streams(built, pool)
        n = int(streams.swa_indptr[1])
        streams.swa_indices[:n] = streams.swa_indices[:n].flip(0)
        return streams


class MovesTheMissing(DeepseekV4HipRadixBackend):
    """swa_pages added to -1 as well: a page that does not exist becomes the last ring's last row."""

    def _aten_streams(self, built, pool):
        streams = super()._aten_streams(built, pool)
        streams.hca_indices[streams.hca_indices == -1] = self.swa_pages - 1
        return streams


@pytest.mark.parametrize(
    ("fault", "mode", "field"),
    [
        (AssignsTheSchedule, Mode.DECODE, "indexer.schedule"),
        (KeepsDraftStates, Mode.TARGET_VERIFY, "c128_plan.plan_w"),
        (NewestFirst, Mode.DECODE, "unified.swa_indices"),
        (MovesTheMissing, Mode.DECODE, "unified.hca_indices"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, field):
    found = {}
    for cls in (fault, DeepseekV4HipRadixBackend):
        own = replayer(mode, ARMS[0], cls=cls, unified_kv=True)
        own.backend.pools.req_to_token[3, 256] = -1  # a page that is not assigned
        lines = own.differences(a_batch(mode, own.backend.pools, (10, 520, 125, 400), (1, 3, 5, 7)))
        found[cls] = {line.split("[")[0].split(":")[0] for line in lines}
    assert field in found[fault] and found[DeepseekV4HipRadixBackend] == set()


def test_streams_present_on_one_side_only_are_an_error():
    own = replayer(Mode.DECODE, ARMS[0], unified_kv=True)
    md = own.backend.forward_metadata
    with pytest.raises(AssertionError, match="unified is present at capture only"):
        md.copy_(replace(md, unified=None))
    assert isinstance(md.indexer, HipIndexerMetadata) and md.c1_flashmla_metadata is None


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"unified_ring": 100}, "hold the window of 128 tokens, got 100"),
        ({"unified_ring": 128, "swa_pages": 1000}, "swa_pages is 1000, the rings of 9 requests need 1152"),
    ],
)
def test_rings_that_cannot_work_are_refused_with_both_numbers(extra, words):
    c = config(unified_kv=True, **extra)
    with pytest.raises(ConfigError, match=words):
        DeepseekV4HipRadixBackend(c, pools_for(c)).init_cuda_graph_state(2, 2)
