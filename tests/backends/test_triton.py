"""CSR metadata with KV splits: every mode, window and mask, the classic chain, one launch, and upstream's faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import (
    BatchShape,
    LiveBatch,
    batch_sequence,
    live_batch,
    make_pools,
    with_unassigned_slots,
)
from attn_graph.backends.modes import Arm, ForwardMode
from attn_graph.backends.registry import lookup
from attn_graph.backends.triton import TritonBackend
from attn_graph.profilers.conformance.faults.triton import (
    FrozenLists,
    MaskOfTheWindow,
    StepsForDraftTokens,
    UnpaddedSplits,
    WholePrefix,
    WindowPlusOne,
)
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, host_pools, replayed, with_chain_masks

Mode = ForwardMode
MODES = sorted(TritonBackend.modes)
BUCKET, N, STEPS, CONTEXT, WINDOW = 4, 4, 3, 150, 40
ATEN, ATEN_GRAPH, FUSED, FUSED_GRAPH = ARMS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config(mode=Mode.DECODE, window=None, topk=1, context=CONTEXT, **extra) -> AttentionConfig:
    spec = {} if mode is Mode.DECODE else {"draft_tokens": N, "topk": topk, "draft_steps": STEPS}
    return AttentionConfig(page_size=16, max_context=context, window=window, extra=extra, **spec)


def pools_for(c: AttentionConfig, swa=False, seed=0):
    return make_pools(rows=13, width=c.max_context + 4, page_size=c.page_size, swa=swa, seed=seed, device=DEVICE)


def tokens_of(mode) -> int:
    return {Mode.DECODE: 1, Mode.DRAFT_EXTEND: STEPS + 1}.get(mode, N)


def shape_of(c: AttentionConfig, mode) -> BatchShape:
    reserve = N if mode is Mode.TARGET_VERIFY else 0
    least = N if mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2) else 1
    return BatchShape(mode, BUCKET, c.page_size, c.max_context, tokens_of(mode), reserve, least, c.topk)


def replayer(mode, arm, c=None, pools=None, lens=torch.int64, cls=TritonBackend, bucket=BUCKET) -> Replayer:
    c = c or config(mode)
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement.value != "eager")
    mask_context = c.max_context if c.topk > 1 else 0
    return Replayer.capture(
        backend, mode, bucket, arm.placement, tokens_per_req=tokens_of(mode), lens=lens, mask_context=mask_context
    )


def found(own: Replayer, mode, seed=1) -> list[str]:
    batches = batch_sequence(shape_of(own.backend.config, mode), own.backend.pools, seed)
    return [line for lines in replayed(own, batches) for line in lines]


def batch_of(mode, lengths, pools, topk=1) -> LiveBatch:
    rows = 2 + np.arange(len(lengths))
    return live_batch(mode, lengths, rows, pools, tokens_of(mode), np.random.default_rng(0), topk=topk)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("swa", [False, True], ids=["full", "window"])
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, arm, swa):
    c = config(mode, WINDOW if swa else None)
    assert found(replayer(mode, arm, c, with_unassigned_slots(pools_for(c, swa), 3)), mode) == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_tree_masks_follow_their_requests_through_padding_and_idle_steps(arm):
    c = config(Mode.TARGET_VERIFY, WINDOW, topk=3)
    assert found(replayer(Mode.TARGET_VERIFY, arm, c), Mode.TARGET_VERIFY) == []


@pytest.mark.parametrize("arm", [ATEN, FUSED_GRAPH], ids=str)
@pytest.mark.parametrize(
    "extra",
    [
        {"static_kv_splits": True}, {"split_tile_size": 16}, {"split_tile_size": 16, "deterministic": True},
        {"deterministic": True}, {"use_mla": True}, {"core_count": 8},
    ],
    ids=str,
)  # fmt: skip
def test_every_split_policy_is_the_oracles(arm, extra):
    c = config(Mode.DECODE, WINDOW, **extra)
    assert found(replayer(Mode.DECODE, arm, c), Mode.DECODE) == []


def test_a_tile_bounds_the_splits_and_only_determinism_makes_it_their_size():
    """Four requests of 100 tokens keep four cores busy unsplit."""
    for extra, most, splits in (
        ({"split_tile_size": 16, "core_count": 4}, 10, 1),
        ({"split_tile_size": 16, "core_count": 4, "deterministic": True}, 10, 7),
        ({"deterministic": True}, 1, 1),
    ):
        for arm in (ATEN, FUSED):
            own = replayer(Mode.DECODE, arm, config(Mode.DECODE, **extra))
            assert own.differences(batch_of(Mode.DECODE, [100] * BUCKET, own.backend.pools)) == []
            found_splits = own.backend.forward_metadata.num_kv_splits[:BUCKET].tolist()
            assert (own.backend.splits.max_splits, found_splits) == (most, [splits] * BUCKET)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_chain_may_bring_its_mask_too(arm, window):
    """Engines hand over a mask for topk 1 as well, all of it or, in an idle step, one of the runner's."""
    c = config(Mode.TARGET_VERIFY, window)
    backend = TritonBackend(c, pools_for(c), arm.implementation, recorded=arm.placement.value != "eager")
    own = Replayer.capture(
        backend, Mode.TARGET_VERIFY, BUCKET, arm.placement, tokens_per_req=N, mask_context=c.max_context
    )
    for number, live in enumerate(with_chain_masks(batch_sequence(shape_of(c, Mode.TARGET_VERIFY), backend.pools, 1))):
        assert own.differences(live, number) == []
        assert "custom_mask" in own.backend.expected(own.load(live), host_pools(backend.pools))


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_more_programs_than_tokens_and_int32_lengths_change_nothing(arm):
    c = config(Mode.DECODE, WINDOW)
    assert found(replayer(Mode.DECODE, arm, c, lens=torch.int32), Mode.DECODE) == []


# mode, window, swa, mask -> dispatches, views, syncs, Triton launches of the spec's table
TABLE = [
    (Mode.DECODE, None, False, 1, {}, (8, 6, 0, 2)),
    (Mode.DECODE, None, False, 1, {"static_kv_splits": True}, (9, 6, 0, 1)),
    (Mode.DECODE, None, False, 1, {"split_tile_size": 16, "deterministic": True}, (12, 6, 0, 1)),
    (Mode.DECODE, WINDOW, False, 1, {}, (17, 11, 0, 4)),
    (Mode.DECODE, WINDOW, True, 1, {}, (30, 17, 2, 4)),
    (Mode.TARGET_VERIFY, None, False, 1, {}, (13, 5, 0, 1)),
    (Mode.TARGET_VERIFY, None, False, 3, {}, (15, 6, 0, 1)),
    (Mode.TARGET_VERIFY, WINDOW, False, 3, {}, (25, 11, 0, 2)),
    (Mode.TARGET_VERIFY, WINDOW, True, 3, {}, (38, 17, 2, 2)),
    (Mode.DRAFT_EXTEND, None, False, 1, {}, (8, 4, 0, 1)),
    (Mode.DRAFT_EXTEND_V2, None, False, 1, {}, (11, 5, 0, 1)),
]


@pytest.mark.parametrize(("mode", "window", "swa", "topk", "extra", "wanted"), TABLE)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode, window, swa, topk, extra, wanted):
    c = config(mode, window, topk, **extra)
    pools = pools_for(c, swa)
    live = batch_of(mode, [33, 64], pools, topk)
    own = replayer(mode, ATEN, c, pools, torch.int32).counts(live)
    assert (own.dispatches, own.views, own.syncs, own.triton) == wanted
    eager, graph = replayer(mode, FUSED, c, pools), replayer(mode, FUSED_GRAPH, c, pools)
    assert (eager.counts(live).dispatches, eager.counts(live).launches) == (0, 1)
    assert (graph.counts(live).dispatches, graph.counts(live).launches, graph.runner.graphs[BUCKET].nodes) == (0, 0, 1)


def test_the_registry_quotes_these_counts_and_int64_lengths_cost_a_cast_more():
    plain = {str(m): counts[0] for m, window, swa, topk, extra, counts in TABLE if not (window or extra or topk > 1)}
    quoted = {mode: counts[0] for mode, counts in lookup("triton").dispatches.items()}
    assert quoted == {**plain, "idle": plain["decode"]}
    live = batch_of(Mode.DRAFT_EXTEND_V2, [33], pools_for(config()))
    cast = replayer(Mode.DRAFT_EXTEND_V2, ATEN, lens=torch.int64).counts(live).dispatches
    assert cast == quoted["draft_extend_v2"] + 1


def fields_of(golden: Golden, replay) -> list[str]:
    """Fields to compare: what the file has, less what upstream binds but never fills in draft extend."""
    skipped = {"window_kv_indptr"} if golden.config["mode"].startswith("dext") else set()
    return [name for name in replay.expected if name in replay.golden and name not in skipped]


@pytest.mark.parametrize("path", [p for p in cases("triton") if "_draft_" not in p.name], ids=lambda p: p.stem)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    for replay in golden.replays(TritonBackend, arm, **golden.split_options()):
        compared = fields_of(golden, replay)
        assert {"kv_indptr", "kv_indices"} <= set(compared)
        assert [line for name in compared for line in replay.flat_differences(name)] == []


@pytest.mark.parametrize(
    "path", [p for p in cases("triton") if p.name.startswith("r13_") and "_draft_" not in p.name], ids=lambda p: p.stem
)
def test_recorded_counts_of_the_release_whose_chain_this_is(path):
    golden = Golden(path)
    c = golden.config
    own = golden.captured(TritonBackend, ATEN, max_bs=c["max_bs"], **golden.split_options())
    for i in range(c["replays"]):
        wanted = golden.host(i)["dispatches_out_graph"]
        got = own.counts(golden.live(i))
        assert (got.dispatches, got.views, got.syncs, got.triton) == tuple(
            wanted[key] for key in ("aten", "view", "sync", "triton")
        )


@pytest.mark.parametrize(
    ("fault", "mode", "field"),
    [
        (StepsForDraftTokens, Mode.DRAFT_EXTEND_V2, "qo_indptr"),
        (WholePrefix, Mode.DRAFT_EXTEND_V2, "kv_indptr"),
        (MaskOfTheWindow, Mode.TARGET_VERIFY, "mask_indptr"),
        (WindowPlusOne, Mode.DECODE, "window_kv_indptr"),
        (FrozenLists, Mode.DECODE, "kv_indptr"),
        (UnpaddedSplits, Mode.DECODE, "num_kv_splits"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, field):
    c = config(mode, WINDOW)

    class Faulty(fault):
        def expected(self, batch, pools):
            right = TritonBackend(self.config, self.pools, self.implementation, recorded=self.recorded)
            right.init_cuda_graph_state(self.max_bs, self.max_tokens)
            right.metadata = self.metadata
            return right.expected(batch, pools)

    assert any(line.startswith(field) for line in found(replayer(mode, ATEN, c, cls=Faulty), mode))


@pytest.mark.parametrize("arm", [ATEN, FUSED], ids=str)
@pytest.mark.parametrize(
    ("mode", "tokens", "wanted"), [(Mode.DRAFT_EXTEND_V2, 8, [0, 8, 16]), (Mode.DRAFT_EXTEND, 4, [0, 4, 8])], ids=str
)
def test_draft_extend_v2_lays_queries_out_by_draft_tokens_and_v1_by_steps(arm, mode, tokens, wanted):
    """A07."""
    c = AttentionConfig(page_size=1, max_context=64, draft_tokens=8, topk=4, draft_steps=3)
    backend = TritonBackend(c, pools_for(c), arm.implementation, recorded=False)
    own = Replayer.capture(backend, mode, 2, tokens_per_req=tokens)
    own.load(live_batch(mode, [20, 30], [2, 3], backend.pools, tokens, np.random.default_rng(0)))
    own.runner.replay()
    assert backend.forward_metadata.qo_indptr.tolist() == wanted
    assert backend.forward_metadata.max_extend_len == tokens


def test_the_mask_buffer_holds_two_requests_at_the_context_limit():
    """A11: sized from the context alone it would hold 512 cells, and two full requests of 4 tokens need 544."""
    c = config(Mode.TARGET_VERIFY, topk=2, context=64)
    pools = pools_for(c)
    for lengths in ([64, 64], [60, 60]):
        own = replayer(Mode.TARGET_VERIFY, FUSED, c, pools, bucket=2)
        live = batch_of(Mode.TARGET_VERIFY, lengths, pools, topk=2)
        assert live.custom_mask.shape[0] == 2 * N * (lengths[0] + N)
        assert own.differences(live) == []
    assert own.backend.custom_mask.shape[0] == 544
    too_long = replace(live, custom_mask=np.ones(545, dtype=bool))
    batch = own.runner.capture_batch(2)
    spec = replace(batch.spec_info, custom_mask=torch.from_numpy(too_long.custom_mask))
    with pytest.raises(ConfigError, match=r"custom_mask has 545 cells, its buffer holds 544"):
        own.backend.init_forward_metadata_out_graph(replace(batch, spec_info=spec))


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_write_slots_are_a_snapshot_of_the_map(arm):
    """A05: what the scheduler does to the map after the rebuild must not reach the slots."""
    c = config()
    pools = pools_for(c, swa=True)
    own = replayer(Mode.DECODE, arm, c, pools)
    live = batch_of(Mode.DECODE, [33, 64, 65, 2], pools)
    own.load(live)
    own.runner.replay()
    wanted = pools.full_to_swa[torch.from_numpy(live.out_cache_loc)].tolist()
    pools.full_to_swa[:-1] = 0
    assert own.backend.forward_metadata.swa_out_cache_loc.tolist() == wanted and any(wanted)


def test_a_changed_table_row_is_read_again_at_the_next_replay():
    """A01, for index lists."""
    c = config()
    pools = pools_for(c)
    own = replayer(Mode.DECODE, FUSED_GRAPH, c, pools)
    live = batch_of(Mode.DECODE, [9, 4], pools)
    for _ in range(2):
        own.load(live)
        own.runner.replay()
        md = own.backend.forward_metadata
        assert md.kv_indptr.tolist() == [0, 9, 13, 14, 15]
        assert md.kv_indices[:13].tolist() == pools.req_to_token[2, :9].tolist() + pools.req_to_token[3, :4].tolist()
        pools.req_to_token[2, 5] += 1000


def test_modes_and_sizes_share_one_storage_so_a_graph_is_valid_behind_its_own_hook_only():
    c = config(Mode.TARGET_VERIFY)
    own = replayer(Mode.TARGET_VERIFY, FUSED, c)
    batch = own.runner.capture_batch(BUCKET)
    bound = [own.backend.bind(replace(batch, forward_mode=mode)) for mode in MODES]
    assert len({md.kv_indptr.data_ptr() for md in bound}) == len({md.kv_indices.data_ptr() for md in bound}) == 1


@pytest.mark.parametrize("implementation", ["aten", "fused"])
def test_recorded_draft_extend_refuses_to_bake_a_missing_length(implementation):
    c = config(Mode.DRAFT_EXTEND_V2)
    own = replayer(Mode.DRAFT_EXTEND_V2, Arm.parse(f"{implementation}-graph"), c)
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match="extend_seq_lens is None"):
        own.backend.init_forward_metadata_in_graph(
            replace(batch, spec_info=replace(batch.spec_info, extend_seq_lens=None))
        )


def test_captures_and_sizes_that_cannot_work_are_refused_with_both_numbers():
    c = config(Mode.TARGET_VERIFY, topk=2)
    own = replayer(Mode.TARGET_VERIFY, FUSED, c)
    batch = own.runner.capture_batch(BUCKET)
    lens = torch.ones(BUCKET, dtype=torch.int32)
    for wrong, words in (
        ({"batch_size": 9}, "batch size 9 exceeds the buffers' 4 rows"),
        ({"encoder_lens": lens}, "encoder_lens must be None"),
        ({"forward_mode": Mode.DRAFT_DECODE}, "has no mode draft_decode"),
    ):
        with pytest.raises(ConfigError, match=words):
            own.backend.init_forward_metadata_out_graph(replace(batch, **wrong), in_capture=True)
    with pytest.raises(ConfigError, match="captured with a custom_mask, replayed without one"):
        own.backend.init_forward_metadata_out_graph(
            replace(batch, spec_info=replace(batch.spec_info, custom_mask=None))
        )
    with pytest.raises(ConfigError, match="needs draft_tokens > 0"):
        own.backend.config = config()
        own.backend.bind(batch)
    narrow = make_pools(rows=3, width=100, page_size=1, swa=False, seed=0, device="cpu")
    with pytest.raises(ConfigError, match="100 tokens wide, max_context is 150"):
        TritonBackend(config(), narrow).init_cuda_graph_state(1, 1)
    with pytest.raises(ConfigError, match="20000 lists of 150000 tokens have 3000000000 entries"):
        TritonBackend(config(context=150000), narrow).init_cuda_graph_state(20000, 20000)
    with pytest.raises(ConfigError, match="num_token_non_padded is None"):
        graph = replayer(Mode.TARGET_VERIFY, FUSED_GRAPH, c)
        graph.backend.init_forward_metadata_in_graph(
            replace(graph.runner.capture_batch(BUCKET), num_token_non_padded=None)
        )
