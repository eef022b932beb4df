"""trtllm_mha on inputs that once broke an engine, each by the number of its field report, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError, NotCapturedError, tensors_of
from attn_graph.backends.batch import LiveBatch, Pools, idle_batch, live_batch, make_pools
from attn_graph.backends.modes import Arm, ForwardMode, TailPolicy
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.profilers.conformance.subject import addresses, scalars_of
from conftest import HAS_GPU
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
DEVICE = "cuda" if HAS_GPU else "cpu"
every_arm = pytest.mark.parametrize("arm", ARMS, ids=str)


def tables(page_ids: dict[int, list[int]], page_size: int, pages: int, full_to_swa=None) -> Pools:
    """req_to_token whose rows hold the given pages; `pages` wide."""
    table = torch.zeros(max(page_ids) + 1, pages * page_size, dtype=torch.int32)
    for row, ids in page_ids.items():
        slots = torch.tensor(ids)[:, None] * page_size + torch.arange(page_size)
        table[row, : slots.numel()] = slots.reshape(-1)
    return Pools(table.to(DEVICE), None if full_to_swa is None else full_to_swa.to(DEVICE))


def request(mode: Mode, lens, rows, tokens_per_req=1, loc=None, accepted=None) -> LiveBatch:
    n = len(lens) * tokens_per_req
    loc = np.zeros(n, dtype=np.int64) if loc is None else np.asarray(loc, dtype=np.int64)
    accepted = None if accepted is None else np.asarray(accepted, dtype=np.int32)
    lens, rows = np.asarray(lens, dtype=np.int64), np.asarray(rows, dtype=np.int64)
    return LiveBatch(mode, rows, lens, loc, np.zeros(n, dtype=np.int64), accepted)


def captured(config: AttentionConfig, pools: Pools, arm: Arm, mode=Mode.DECODE, bucket=2, tokens_per_req=1, **options):
    recorded = arm.placement.value != "eager"
    backend = TrtllmMhaBackend(config, pools, arm.implementation, recorded=recorded)
    return Replayer.capture(backend, mode, bucket, arm.placement, tokens_per_req=tokens_per_req, **options)


def after(own: Replayer, live: LiveBatch):
    """The metadata after a replay on poison, and that it is as the oracle says throughout."""
    assert own.differences(live) == []
    return own.backend.metadata[own.runner.mode, own.runner.bucket]


@every_arm
def test_a01_replay_refills_what_the_graph_captured(arm):
    pools = tables({0: [3], 1: [1], 2: [5, 2, 7]}, page_size=4, pages=3)
    own = captured(AttentionConfig(4, 12), pools, arm)
    bound = own.backend.metadata[Mode.DECODE, 2]
    live = request(Mode.DECODE, [9, 4], [2, 0])
    md = after(own, live)
    assert md is bound
    assert md.cache_seqlens_int32.tolist() == [9, 4]
    assert md.cu_seqlens_k.tolist() == [0, 9, 13]
    assert md.page_table[0].tolist() == [5, 2, 7]
    assert md.page_table[1, :1].tolist() == [3]
    pools.req_to_token[2, 4:8] = torch.arange(24, 28)  # the scheduler gives the request another page
    assert after(own, live).page_table[0].tolist() == [5, 6, 7]


@every_arm
def test_a02_no_address_changes_however_the_allocator_is_shaken(arm):
    pools = make_pools(rows=9, width=132, page_size=16, swa=True, seed=0, device=DEVICE)
    own, rng = captured(AttentionConfig(16, 128), pools, arm, bucket=8), np.random.default_rng(0)
    there = addresses(own.backend.metadata[Mode.DECODE, 8])
    replays = 50 if HAS_GPU or arm.implementation.value == "aten" else 5
    for _ in range(replays):
        size = int(rng.integers(1, 9))
        block = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
        lens, rows = rng.integers(1, 129, size), rng.integers(1, 9, size)
        after(own, live_batch(Mode.DECODE, lens, rows, pools, 1, rng))
        assert addresses(own.backend.forward_metadata) == there
        del block


@every_arm
@pytest.mark.parametrize("page_size", [16, 1])
def test_a03_window_pages_map_the_page_s_first_token_and_then_divide(arm, page_size):
    full_to_swa = torch.zeros(13 * page_size + 1, dtype=torch.int64)
    for page, swa_page in ((10, 2), (11, 0), (3, 5)):
        full_to_swa[page * page_size : (page + 1) * page_size] = swa_page * page_size + torch.arange(page_size)
    full_to_swa[11 * page_size : 12 * page_size] = 0
    full_to_swa[-1] = -1
    pools = tables({1: [10, 11, 3]}, page_size, pages=3, full_to_swa=full_to_swa)
    own = captured(AttentionConfig(page_size, 3 * page_size), pools, arm, bucket=1)
    md = after(own, request(Mode.DECODE, [2 * page_size + 1], [1]))
    assert md.page_table.tolist() == [[10, 11, 3]]
    assert md.swa_page_table.tolist() == [[2, 0, 5]]


@every_arm
def test_a05_write_slots_are_a_snapshot_of_the_map(arm):
    full_to_swa = torch.zeros(17, dtype=torch.int64)
    full_to_swa[11], full_to_swa[4], full_to_swa[-1] = 40, 9, -1
    pools = tables({1: [1, 2], 2: [3]}, page_size=4, pages=3, full_to_swa=full_to_swa)
    own = captured(AttentionConfig(4, 12), pools, arm)
    md = after(own, request(Mode.DECODE, [4, 1], [1, 2], loc=[11, 4]))
    pools.full_to_swa.zero_()
    assert md.swa_out_cache_loc.tolist() == [40, 9]


SPEC = {"draft_tokens": 4, "topk": 1, "draft_steps": 3}


@every_arm
@pytest.mark.parametrize(
    ("mode", "queries"), [(Mode.DRAFT_EXTEND_V2, [0, 4, 8, 12]), (Mode.DRAFT_EXTEND, [0, 1, 4, 6])], ids=str
)
def test_a06_queries_have_a_fixed_stride_in_v2_and_a_running_sum_in_v1(arm, mode, queries):
    pools = make_pools(rows=4, width=72, page_size=16, swa=False, seed=0, device=DEVICE)
    own = captured(AttentionConfig(16, 64, **SPEC), pools, arm, mode, bucket=3, tokens_per_req=4)
    md = after(own, request(mode, [10, 20, 30], [1, 2, 3], 4, accepted=[1, 3, 2]))
    assert md.cu_seqlens_q.tolist() == queries
    if mode is Mode.DRAFT_EXTEND_V2:
        assert md.max_seq_len_q == 4
    else:
        eager_chain = arm == ARMS[0]  # only it hands the live maximum on; a graph has baked the captured width
        assert md.max_seq_len_q == (3 if eager_chain else 4)


@every_arm
def test_a10_the_table_has_room_for_drafts_of_a_request_at_the_context_limit(arm):
    pools = make_pools(rows=3, width=140, page_size=64, swa=False, seed=0, device=DEVICE)
    own = captured(AttentionConfig(64, 128, **SPEC), pools, arm, Mode.TARGET_VERIFY, tokens_per_req=4)
    for length, columns in ((124, 2), (126, 3), (128, 3)):
        md = after(own, request(Mode.TARGET_VERIFY, [length, 1], [1, 2], 4))
        assert md.cache_seqlens_int32.tolist() == [length + 4, 5]
        wanted = (pools.req_to_token[1, : columns * 64 : 64] // 64).tolist()
        assert md.page_table[0, :columns].tolist() == wanted
        assert md.page_table.shape[1] == 3
        assert md.page_table[1, 0] == pools.req_to_token[2, 0] // 64  # the next row's first column is its own


def test_a10_a_table_of_tokens_that_is_too_narrow_is_refused_by_name():
    pools = make_pools(rows=3, width=128, page_size=64, swa=False, seed=0, device=DEVICE)
    with pytest.raises(ConfigError, match=r"page_table needs 3 columns of 64 tokens, but req_to_token is only 128"):
        captured(AttentionConfig(64, 128, **SPEC), pools, ARMS[3], Mode.TARGET_VERIFY, tokens_per_req=4)


@every_arm
@pytest.mark.parametrize(("length", "pages"), [(2048, 64), (2049, 65), (4096, 128)])
def test_a14_every_page_is_filled_at_page_size_32(arm, length, pages):
    pools = make_pools(rows=2, width=4100, page_size=32, swa=False, seed=0, device=DEVICE)
    own = captured(AttentionConfig(32, 4096), pools, arm, bucket=1)
    own.load(request(Mode.DECODE, [length], [1]))
    md = own.backend.metadata[Mode.DECODE, 1]
    with own.stream():
        md.page_table.fill_(-7)
        own.runner.replay()
    assert (md.page_table[0, :pages] == pools.req_to_token[1, : pages * 32 : 32] // 32).all()


@every_arm
def test_a21_a_size_that_was_never_captured_is_refused_with_the_captured_ones(arm):
    pools = make_pools(rows=6, width=68, page_size=16, swa=False, seed=0, device=DEVICE)
    own = captured(AttentionConfig(16, 64), pools, arm, bucket=2, max_bs=4)
    with pytest.raises(NotCapturedError, match="batch size 5 exceeds the captured sizes 2, 4"):
        own.load(request(Mode.DECODE, [1] * 5, [1] * 5))
    with pytest.raises(NotCapturedError, match="batch size 3 was not captured for mode decode; captured sizes: 2, 4"):
        own.backend.init_forward_metadata_out_graph(own.runner.capture_batch(3))


@every_arm
def test_a23_an_idle_rank_replays_one_filler_row(arm):
    pools = make_pools(rows=3, width=68, page_size=16, swa=True, seed=0, device=DEVICE)
    before = {name: t.clone() for name, t in tensors_of(pools).items()}
    own = captured(AttentionConfig(16, 64), pools, arm, bucket=1)
    md = after(own, idle_batch())
    assert md.cache_seqlens_int32.tolist() == [1]
    assert md.cu_seqlens_k.tolist() == [0, 1]
    assert md.page_table[0, 0] == md.swa_page_table[0, 0] == md.swa_out_cache_loc[0] == 0
    assert all(torch.equal(t, before[name]) for name, t in tensors_of(pools).items())


@every_arm
def test_a24_draft_extend_v2_counts_prefix_and_new_tokens(arm):
    pools = make_pools(rows=3, width=72, page_size=16, swa=False, seed=0, device=DEVICE)
    own = captured(AttentionConfig(16, 64, **SPEC), pools, arm, Mode.DRAFT_EXTEND_V2, tokens_per_req=4)
    prefix = np.array([40, 7])
    md = after(own, request(Mode.DRAFT_EXTEND_V2, prefix + 4, [1, 2], 4, accepted=[2, 4]))
    assert md.cache_seqlens_int32.tolist() == [44, 11]
    assert md.cu_seqlens_k.tolist() == [0, 44, 55]


@every_arm
def test_a26_prefix_sums_are_at_the_address_that_was_captured(arm):
    pools = make_pools(rows=3, width=68, page_size=16, swa=False, seed=0, device=DEVICE)
    own = captured(AttentionConfig(16, 64), pools, arm)
    address = own.backend.metadata[Mode.DECODE, 2].cu_seqlens_k
    after(own, request(Mode.DECODE, [5, 9], [1, 2]))
    assert address.tolist() == [0, 5, 14]


@every_arm
def test_a27_no_host_number_of_the_captured_plan_limits_a_longer_batch(arm):
    pools = make_pools(rows=2, width=2440, page_size=64, swa=False, seed=0, device=DEVICE)
    own = captured(AttentionConfig(64, 2432), pools, arm, bucket=1)
    plans = []
    for length, pages in ((35, 1), (2400, 38), (35, 1)):
        md = after(own, request(Mode.DECODE, [length], [1]))
        assert md.page_table[0, :pages].tolist() == (pools.req_to_token[1, : pages * 64 : 64] // 64).tolist()
        plans.append(scalars_of(own.backend.forward_metadata))
    differing = {name for name in plans[0] if plans[0][name] != plans[1][name]}
    assert differing == ({"max_seq_len_k"} if arm == ARMS[0] else set())
    assert plans[0] == plans[2]


# What has no number.


@pytest.mark.parametrize("arm", ARMS[2:], ids=str)  # the classic chain has the tail that its operations leave
@pytest.mark.parametrize("tail", list(TailPolicy), ids=str)
def test_the_fused_rebuild_leaves_whichever_tail_it_is_asked_for(arm, tail):
    pools = make_pools(rows=4, width=116, page_size=16, swa=True, seed=0, device=DEVICE)
    recorded = arm.placement.value != "eager"
    backend = TrtllmMhaBackend(AttentionConfig(16, 112), pools, arm.implementation, recorded=recorded, tail=tail)
    own = Replayer.capture(backend, Mode.DECODE, 3, arm.placement)
    batches = [
        request(Mode.DECODE, lens, [1, 2, 3][: len(lens)]) for lens in ([1, 112, 17], [112] * 3, [1, 2, 3], [40])
    ]
    assert list(replayed(own, batches)) == [[]] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 2}, "topk of at most 1, got 2"),
        ({"draft_tokens": 0}, "mode target_verify needs draft_tokens > 0, got 0"),
    ],
)
def test_what_the_backend_cannot_do_is_refused_before_anything_is_captured(change, message):
    pools = make_pools(rows=3, width=140, page_size=64, swa=False, seed=0, device=DEVICE)
    config = replace(AttentionConfig(64, 100, **SPEC), **change)
    with pytest.raises(ConfigError, match=message):
        captured(config, pools, ARMS[3], Mode.TARGET_VERIFY, tokens_per_req=4)


@every_arm
def test_slots_of_all_draft_steps_at_once_are_refused(arm):
    pools = make_pools(rows=3, width=72, page_size=16, swa=True, seed=0, device=DEVICE)
    own = captured(AttentionConfig(16, 64, **SPEC), pools, arm, Mode.DRAFT_DECODE)
    own.load(request(Mode.DRAFT_DECODE, [5, 6], [1, 2]))
    batch = replace(own.runner.view, out_cache_loc=torch.zeros(6, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ConfigError, match=r"6 slots, swa_out_cache_loc 2 .* pass the slots of this step only"):
        own.backend.init_forward_metadata(batch)


def test_a_length_past_the_context_limit_is_refused_when_the_batch_is_loaded():
    pools = make_pools(rows=3, width=72, page_size=16, swa=False, seed=0, device=DEVICE)
    own = captured(AttentionConfig(16, 64), pools, ARMS[3])
    with pytest.raises(ConfigError, match="65 tokens, more than max_context 64"):
        own.load(request(Mode.DECODE, [65, 1], [1, 2]))
