"""trtllm_mha's sibling for latent attention: one shared block table, lengths, and nothing that the host must read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import BatchShape, batch_sequence, live_batch, make_pools, with_unassigned_slots
from attn_graph.backends.modes import ForwardMode, Implementation, Placement, TailPolicy
from attn_graph.backends.registry import lookup
from attn_graph.backends.trtllm_mla import TrtllmMlaBackend
from attn_graph.profilers.conformance.faults.trtllm_mla import FreshTable, PrefixOnly, TruncatingDivision
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
MODES = sorted(TrtllmMlaBackend.modes)
BUCKET, N = 4, 4


def config(mode=Mode.DECODE, page_size=32, max_context=200, **extra) -> AttentionConfig:
    spec = {} if mode is Mode.DECODE else {"draft_tokens": N, "topk": 1, "draft_steps": 3}
    return AttentionConfig(page_size=page_size, max_context=max_context, step_id=1, extra=extra, **spec)


def pools_for(c: AttentionConfig, seed=0):
    width = c.max_context + 4 + c.draft_tokens
    return make_pools(rows=13, width=width, page_size=c.page_size, swa=False, seed=seed, device="cpu")


def tokens_of(mode) -> int:
    return 1 if mode in (Mode.DECODE, Mode.DRAFT_DECODE) else N


def shape_of(c: AttentionConfig, mode) -> BatchShape:
    extend = mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
    reserve = 0 if extend or mode is Mode.DECODE else N
    return BatchShape(mode, BUCKET, c.page_size, c.max_context, tokens_of(mode), reserve, N if extend else 1)


def replayer(mode, arm, c=None, pools=None, lens=torch.int64, cls=TrtllmMlaBackend) -> Replayer:
    c = c or config(mode)
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement.value != "eager")
    return Replayer.capture(backend, mode, BUCKET, arm.placement, tokens_per_req=tokens_of(mode), lens=lens)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, arm):
    own = replayer(mode, arm)
    batches = batch_sequence(shape_of(own.backend.config, mode), own.backend.pools, seed=1)
    assert [d for d in replayed(own, batches) if d] == []


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
def test_every_page_size_that_divides_the_kernel_block(page_size, arm):
    c = config(Mode.TARGET_VERIFY, page_size)
    own = replayer(Mode.TARGET_VERIFY, arm, c, with_unassigned_slots(pools_for(c), seed=2))
    assert [d for d in replayed(own, batch_sequence(shape_of(c, Mode.TARGET_VERIFY), own.backend.pools, 3)) if d] == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.DRAFT_DECODE], ids=str)
def test_options_give_decode_lengths_of_its_own(mode, arm):
    c = config(mode, own_seq_lens=True, draft_step_offset=True)
    own = replayer(mode, arm, c)
    live = live_batch(mode, [31, 64, 190], [3, 5, 7], own.backend.pools, 1, np.random.default_rng(0))
    assert own.differences(live) == []
    added = 2 if mode is Mode.DRAFT_DECODE else 0
    assert own.backend.forward_metadata.seq_lens_k.tolist() == [31 + added, 64 + added, 190 + added, 1 + added]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode):
    table, _ = lookup("trtllm_mla").dispatches[str(mode)]
    live = live_batch(mode, [33, 64], [2, 3], pools_for(config(mode)), tokens_of(mode), np.random.default_rng(0))
    offset_cast = 0 if mode in (Mode.DECODE, Mode.DRAFT_DECODE) else 1
    for lens, wanted in ((torch.int32, table), (torch.int64, table + offset_cast)):
        classic = replayer(mode, ARMS[0], lens=lens).counts(live)
        assert (classic.dispatches, classic.triton, classic.syncs) == (wanted, 1, 0)
    eager, graph = replayer(mode, ARMS[2]), replayer(mode, ARMS[3])
    assert (eager.counts(live).dispatches, eager.counts(live).launches) == (0, 1)
    assert (graph.counts(live).dispatches, graph.counts(live).launches, graph.runner.graphs[BUCKET].nodes) == (0, 0, 1)


def test_own_lengths_cost_decode_the_two_dispatches_of_later_releases():
    live = live_batch(Mode.DECODE, [33], [2], pools_for(config()), 1, np.random.default_rng(0))
    assert replayer(Mode.DECODE, ARMS[0], config(own_seq_lens=True)).counts(live).dispatches == 3


def test_host_bounds_are_those_of_the_longest_batch_not_of_the_captured_one():
    for mode in MODES:
        md = replayer(mode, ARMS[3]).backend.forward_metadata
        added = 0 if mode in (Mode.DECODE, Mode.DRAFT_DECODE) else N
        assert (md.max_seq_len_k, md.max_seq_len, md.q_len) == (200, 200 + added, max(added, 1))
        extend = mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
        assert (md.max_seq_len_q, md.sum_seq_lens_q) == ((N, N * BUCKET) if extend else (None, None))


@pytest.mark.parametrize(
    ("page_size", "context", "columns"),
    [(64, 4096, 64), (64, 4097, 128), (64, 131072, 2048), (32, 32768, 1024), (16, 163840, 10240), (128, 1, 32)],
)
def test_table_width_is_rounded_to_the_kernels_groups(page_size, context, columns):
    c = AttentionConfig(page_size=page_size, max_context=context)
    pools = make_pools(rows=2, width=context + 4, page_size=page_size, swa=False, seed=0, device="cpu")
    backend = TrtllmMlaBackend(c, pools)
    backend.init_cuda_graph_state(1, 1)
    assert backend.table.shape == (1, columns) and (backend.table == -1).all()


class NoHeadroom(TrtllmMlaBackend):
    """Upstream sizes the table from the context alone, a verify near the limit has more pages than columns."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.table = self.table[:, : self.config.max_context // self.config.page_size].contiguous()

    def expected(self, batch, pools):
        right = TrtllmMlaBackend(self.config, self.pools)
        right.init_cuda_graph_state(self.max_bs, self.max_bs)
        return right.expected(batch, pools)


@pytest.mark.parametrize(
    ("fault", "mode", "field"),
    [
        (TruncatingDivision, Mode.DECODE, "block_kv_indices"),
        (FreshTable, Mode.DECODE, "block_kv_indices"),
        (PrefixOnly, Mode.TARGET_VERIFY, "seq_lens_k"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, field):
    c = config(mode)
    own = replayer(mode, ARMS[0], c, with_unassigned_slots(pools_for(c), seed=0), cls=fault)
    found = [d for ds in replayed(own, batch_sequence(shape_of(c, mode), own.backend.pools, 1)) for d in ds]
    assert any(d.startswith(field) for d in found)


def test_a_verify_at_the_context_limit_stays_inside_its_row_even_where_the_table_is_too_narrow():
    c = config(Mode.TARGET_VERIFY, page_size=128, max_context=256)
    pools = pools_for(c)
    live = live_batch(Mode.TARGET_VERIFY, [255, 130], [2, 3], pools, N, np.random.default_rng(0))
    assert replayer(Mode.TARGET_VERIFY, ARMS[2], c, pools).differences(live) == []
    own = replayer(Mode.TARGET_VERIFY, ARMS[2], c, pools, cls=NoHeadroom)
    own.load(live)
    own.backend.table.fill_(-7)
    own.runner.replay()
    table = pools.req_to_token[:, [0, 128]] // 128
    assert own.backend.table.tolist()[:2] == [table[2].tolist(), table[3].tolist()]


def test_modes_keep_their_own_lengths_and_share_the_table():
    c = config(Mode.TARGET_VERIFY)
    backend = TrtllmMlaBackend(c, pools_for(c))
    verify = Replayer.capture(backend, Mode.TARGET_VERIFY, BUCKET, Placement.GRAPH, tokens_per_req=N)
    batch = verify.runner.capture_batch(BUCKET)
    bound = [backend.metadata[Mode.TARGET_VERIFY, BUCKET]]
    bound += [backend.bind(replace(batch, forward_mode=m)) for m in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)]
    assert len({md.block_kv_indices.data_ptr() for md in bound}) == 1
    assert len({md.seq_lens_k.data_ptr() for md in bound}) == 3


@pytest.mark.parametrize(
    ("c", "tail", "words"),
    [
        (AttentionConfig(page_size=256, max_context=300), None, "must divide 128"),
        (AttentionConfig(page_size=48, max_context=300), None, "must divide 128"),
        (AttentionConfig(page_size=32, max_context=100, draft_tokens=4, topk=2), None, "topk is at most 1"),
        (AttentionConfig(page_size=32, max_context=900), None, "29 columns of 32 tokens .* only 200 tokens"),
        (AttentionConfig(page_size=32, max_context=100), TailPolicy.STATIC_FULL, "static_full"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_both_numbers(c, tail, words):
    pools = make_pools(rows=3, width=200, page_size=1, swa=False, seed=0, device="cpu")
    with pytest.raises(ConfigError, match=words):
        TrtllmMlaBackend(c, pools, Implementation.FUSED, tail=tail).init_cuda_graph_state(2, 8)


def test_a_capture_with_another_query_width_or_too_many_rows_is_refused():
    c = config(Mode.DRAFT_EXTEND)
    with pytest.raises(ConfigError, match="3 tokens per request, draft_tokens is 4"):
        Replayer.capture(TrtllmMlaBackend(c, pools_for(c)), Mode.DRAFT_EXTEND, 2, Placement.GRAPH, tokens_per_req=3)
    own = replayer(Mode.DECODE, ARMS[3])
    with pytest.raises(ConfigError, match=r"batch size 9 is not within 1\.\.4"):
        own.backend.bind(replace(own.runner.capture_batch(BUCKET), batch_size=9))
    with pytest.raises(ConfigError, match="target_verify needs draft_tokens > 0"):
        own.backend.bind(replace(own.runner.capture_batch(BUCKET), forward_mode=Mode.TARGET_VERIFY))


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("path", cases("trtllm_mla"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    steps = range(golden.config["S"] - 1) if golden.mode is Mode.DRAFT_DECODE else [0]
    for step in steps:
        prefix = f"step{step}." if golden.mode is Mode.DRAFT_DECODE else ""
        own_seq_lens = f"capture/out/{prefix}seq_lens_k" in golden.data
        for replay in golden.replays(TrtllmMlaBackend, arm, step, own_seq_lens=own_seq_lens):
            recorded = {name.removeprefix(prefix) for name in replay.golden if name.startswith(prefix)}
            assert "block_kv_indices" in recorded
            for field in replay.expected.keys() & recorded:
                # Upstream's table ends with the context; a verify at the limit may need a column more.
                assert replay.differences(field, prefix + field, within_recorded="at_max" in path.stem) == []
