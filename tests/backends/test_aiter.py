"""AITER: lists, page tables, tree masks, MLA schedules, every mode and option, and upstream's faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.aiter import AiterBackend, AiterDraftStep
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import (
    BatchShape,
    ForwardBatch,
    LiveBatch,
    SpecInfo,
    batch_sequence,
    live_batch,
    make_pools,
    with_unassigned_slots,
)
from attn_graph.backends.kernels.mla_work_plan import MlaPlanBuffers, launch_mla_plan
from attn_graph.backends.modes import Arm, ForwardMode
from attn_graph.backends.registry import lookup
from attn_graph.backends.schedules import mla_work_even, mla_work_filling
from attn_graph.profilers.conformance.faults.aiter import (
    AcceptedStride,
    FillOfOne,
    UnmappedPages,
    UnwrittenTable,
    VerifyOfThePrefix,
)
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, with_chain_masks

Mode = ForwardMode
MODES = sorted(AiterBackend.modes)
BUCKET, N, STEPS, CONTEXT, SMS = 4, 4, 3, 150, 8
ATEN, ATEN_GRAPH, FUSED, FUSED_GRAPH = ARMS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MLA, UNIFIED = {"mla": True}, {"unified": True}


def config(mode=Mode.DECODE, topk=1, context=CONTEXT, page_size=16, heads=16, **extra) -> AttentionConfig:
    spec = {} if mode is Mode.DECODE else {"draft_tokens": N, "topk": topk, "draft_steps": STEPS}
    extra = {"num_sms": SMS, **extra}
    return AttentionConfig(page_size=page_size, max_context=context, num_heads=heads, extra=extra, **spec)


def pools_for(c: AttentionConfig, swa=False, seed=0):
    return make_pools(rows=13, width=c.max_context + 8, page_size=c.page_size, swa=swa, seed=seed, device=DEVICE)


def tokens_of(mode) -> int:
    return {Mode.DECODE: 1, Mode.DRAFT_EXTEND: STEPS + 1}.get(mode, N)


def replayer(mode, arm, c=None, pools=None, cls=AiterBackend, bucket=BUCKET, **slots) -> Replayer:
    c = c or config(mode)
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement.value != "eager")
    slots = {"mask_context": c.max_context if c.topk > 1 else 0} | slots
    return Replayer.capture(backend, mode, bucket, arm.placement, tokens_per_req=tokens_of(mode), **slots)


def found(own: Replayer, mode, seed=1) -> list[str]:
    c = own.backend.config
    least = tokens_of(mode) if mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2) else 1
    shape = BatchShape(mode, BUCKET, c.page_size, c.max_context, tokens_of(mode), 0, least, c.topk)
    batches = batch_sequence(shape, own.backend.pools, seed)
    return [line for number, live in enumerate(batches) for line in own.differences(live, number)]


def batch_of(mode, lengths, pools, topk=1) -> LiveBatch:
    rows = 2 + np.arange(len(lengths))
    return live_batch(mode, lengths, rows, pools, tokens_of(mode), np.random.default_rng(0), topk=topk)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    ("extra", "swa"), [({}, False), (MLA, False), (UNIFIED, False), ({}, True)], ids=["list", "mla", "unified", "swa"]
)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, arm, extra, swa):
    c = config(mode, **extra)
    assert found(replayer(mode, arm, c, with_unassigned_slots(pools_for(c, swa), 3)), mode) == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("swa", [False, True])
def test_pages_of_one_token_are_written_too(arm, swa):
    c = config(page_size=1, context=60, **UNIFIED)
    assert found(replayer(Mode.DECODE, arm, c, pools_for(c, swa)), Mode.DECODE) == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_tree_masks_follow_their_requests_through_padding_and_idle_steps(arm):
    c = config(Mode.TARGET_VERIFY, topk=3)
    assert found(replayer(Mode.TARGET_VERIFY, arm, c), Mode.TARGET_VERIFY) == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize(("extra", "swa"), [({}, False), (UNIFIED, False), ({}, True)], ids=["list", "unified", "swa"])
def test_a_chain_may_bring_its_mask_too_where_pages_do_not_serve_it(arm, extra, swa):
    c = config(Mode.TARGET_VERIFY, unified_verify=False, **extra)
    own = replayer(Mode.TARGET_VERIFY, arm, c, pools_for(c, swa), mask_context=c.max_context)
    shape = BatchShape(Mode.TARGET_VERIFY, BUCKET, c.page_size, c.max_context, N)
    for number, live in enumerate(with_chain_masks(batch_sequence(shape, own.backend.pools, 1))):
        assert own.differences(live, number) == []
        md = own.backend.forward_metadata
        assert md.custom_mask is not None and md.kv_indptr is not None and md.swa_page_table is None


# Sixteen 8-bit heads, a fold of three, and the two plans that fill multiprocessors; queries of 128 heads are a ladder.
SCHEDULES = [
    {"heads": 16, "fp8": True}, {"heads": 48}, {"heads": 32}, {"heads": 128, "fp8": True},
    {"heads": 16, "fp8": True, "gfx942": True},
]  # fmt: skip


@pytest.mark.parametrize("arm", [ATEN, ATEN_GRAPH, FUSED_GRAPH], ids=str)
@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND], ids=str)
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_persistent_mla_gets_its_schedule_from_the_same_launch(mode, arm, options):
    c = config(mode, mla=True, context=500, **options)
    own = replayer(mode, arm, c)
    assert own.backend.persistent
    live = [batch_of(mode, lengths, own.backend.pools) for lengths in ([480, 9, 300, 17], [5, 4, 4, 6], [400, 33])]
    assert [line for i, batch in enumerate(live) for line in own.differences(batch, i)] == []
    work = own.backend.forward_metadata.work
    assert own.backend.work_metadata.tolist() == [work.work_indptr.data_ptr(), work.work_info_set.data_ptr()]


def test_kernels_without_a_persistent_form_get_no_schedule():
    for heads, fp8, persistent in ((16, False, False), (4, False, False), (128, False, False), (64, False, True)):
        backend = AiterBackend(config(mla=True, heads=heads, fp8=fp8), pools_for(config()))
        assert backend.persistent is persistent
    assert not AiterBackend(config(mla=True, heads=64, persistent=False), pools_for(config())).persistent


def test_data_parallel_attention_splits_no_request_over_more_than_its_share_of_the_device():
    for dp, bucket, most in ((False, BUCKET, 32), (True, BUCKET, 2), (True, 1, SMS)):
        c = config(Mode.TARGET_VERIFY, mla=True, heads=32, context=500, dp_attention=dp)
        for arm in (ATEN, FUSED_GRAPH):
            own = replayer(Mode.TARGET_VERIFY, arm, c, bucket=bucket)
            assert own.backend.plans[Mode.TARGET_VERIFY, bucket].max_splits == most
            assert own.differences(batch_of(Mode.TARGET_VERIFY, [480] * bucket, own.backend.pools)) == []


def cut(work, kv_lens, fold, ladder=False) -> bool:
    """Whether the works cut each tile's tokens into consecutive ranges, and every multiprocessor's share is its own."""
    starts = np.concatenate([[0], np.cumsum(kv_lens)])
    at = {}
    for tile, _, _, _, begin, end, behind, _ in work.info:
        request = tile // fold
        stop = starts[request] + max(kv_lens[request] - (fold - 1 - tile % fold if ladder else 0), 0)
        if begin != at.get(tile, starts[request]) or end + behind != stop:
            return False
        at[tile] = end
    ends = all(
        at.get(t) == starts[t // fold] + max(kv_lens[t // fold] - (fold - 1 - t % fold if ladder else 0), 0)
        for t in range(len(kv_lens) * fold)
    )
    return ends and work.indptr[-1] == len(work.info) and work.indptr == sorted(work.indptr)


@pytest.mark.parametrize("seed", range(40))
def test_schedules_cover_every_token_once_and_the_device_makes_the_same(seed):
    rng = np.random.default_rng(seed)
    b, fold, queries = int(rng.integers(1, 7)), int(rng.choice([1, 1, 3])), int(rng.choice([1, 4]))
    kv = rng.integers(0, int(rng.choice([20, 500, 5000])), b)
    cus, most = int(rng.choice([4, 16])), int(rng.choice([4, 32]))
    fixed, filling, ladder = int(rng.choice([0, 16])), bool(seed % 2), fold > 1 and bool(rng.integers(0, 2))
    if filling:
        work = mla_work_filling(kv, queries, cus, most, fold=fold, ladder=ladder)
    else:
        work = mla_work_even(kv, queries, cus, most, fold=fold, fixed_splits=fixed, ladder=ladder)
        shares = np.diff(work.indptr)
        assert shares.max() - shares.min() <= 1
    assert cut(work, kv, fold, ladder)
    tiles = b * fold
    works = tiles * max(most, 16) + cus
    sizes = (cus + 1,), (works, 8), (tiles + 1,), (tiles, 2), (works,)
    out = [torch.full(size, -7, dtype=torch.int32, device=DEVICE) for size in sizes]
    indptr = torch.tensor([0, *np.cumsum(kv)], dtype=torch.int32, device=DEVICE)
    launch_mla_plan(indptr, MlaPlanBuffers(*out, fold, queries, cus, most, fixed, 16, filling, ladder), b)
    wanted = work.indptr, work.info, work.reduce_indptr, work.reduce_final, work.reduce_partial
    for got, want in zip(out, wanted, strict=True):
        assert got[: len(want)].tolist() == [list(x) if isinstance(x, tuple) else x for x in want]
    assert (out[2][len(work.reduce_indptr) :] == work.reduce_indptr[-1]).all()
    assert (out[1][len(work.info) :] == -7).all()


def test_a_merged_last_chunk_reaches_the_end_and_a_schedule_that_stops_short_is_noticed():
    """Upstream extends the last work only while there are two: lengths 17 to 20 lose their last 1 to 4 tokens."""
    for length in (17, 20):
        work = mla_work_even([length], 1, 4, 32, fixed_splits=16)
        assert cut(work, [length], 1) and len(work.info) == 1 and work.info[0][5] == length
        short = replace(work, info=[(*work.info[0][:5], 16, length - 16, 0)])
        assert not cut(short, [length], 1)
    assert len(mla_work_even([21], 1, 4, 32, fixed_splits=16).info) == 2


def test_short_requests_do_not_divide_by_zero():
    """Upstream's split count is 0 below 196 tokens."""
    assert [len(mla_work_even([n], 1, 80, 32).info) for n in (1, 195, 196, 500)] == [1, 1, 1, 2]


# mode, options, swa, topk, page size, columns full -> dispatches, Triton launches of the spec's table
TABLE = [
    (Mode.DECODE, MLA, False, 1, 16, (12, 1)),
    (Mode.DECODE, {}, False, 1, 16, (6, 1)),
    (Mode.DECODE, UNIFIED, False, 1, 16, (12, 0)),
    (Mode.DECODE, UNIFIED, False, 1, 1, (9, 0)),  # 6, and the three that write the table
    (Mode.DECODE, {}, True, 1, 16, (26, 0)),
    (Mode.TARGET_VERIFY, MLA, False, 1, 16, (11, 1)),
    (Mode.TARGET_VERIFY, UNIFIED, False, 1, 16, (14, 2)),
    (Mode.TARGET_VERIFY, {}, True, 1, 16, (22, 2)),
    (Mode.TARGET_VERIFY, {}, False, 2, 16, (18, 1)),
    (Mode.DRAFT_EXTEND_V2, MLA, False, 1, 16, (13, 1)),
    (Mode.DRAFT_EXTEND, MLA, False, 1, 16, (13, 1)),
]


@pytest.mark.parametrize(("mode", "extra", "swa", "topk", "page", "wanted"), TABLE)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode, extra, swa, topk, page, wanted):
    c = config(mode, topk, page_size=page, **extra)
    pools = pools_for(c, swa)
    live = batch_of(mode, [33, 64], pools, topk)
    own = replayer(mode, ATEN, c, pools, lens=torch.int32).counts(live)
    assert (own.dispatches, own.triton, own.syncs) == (*wanted, 1)
    eager, graph = replayer(mode, FUSED, c, pools), replayer(mode, FUSED_GRAPH, c, pools)
    assert (eager.counts(live).dispatches, eager.counts(live).launches) == (0, 1)
    assert (graph.counts(live).dispatches, graph.counts(live).launches, graph.runner.graphs[BUCKET].nodes) == (0, 0, 1)


def test_the_registry_quotes_the_same_counts():
    quoted = lookup("aiter").dispatches
    assert quoted["decode"] == (6, 26) and quoted["draft_extend"] == quoted["draft_extend_v2"] == (13, 19)
    assert quoted["target_verify"] == (16, 22)  # the list and its mask offsets, without a mask's two


def unified_of(golden: Golden) -> dict:
    """Options of a recorded case: unified attention has pages where the others have a list and its kv_indptr."""
    c, flat = golden.config, "capture/out/kv_indptr" in golden.data
    extra = {"mla": c["extra"].get("mla", False), "unified": not flat}
    return extra | ({"unified_verify": False} if flat and golden.mode is Mode.TARGET_VERIFY else {})


def recorded(release: str = "") -> list:
    return [p for p in cases("aiter") if p.name.startswith(release) and "_draft_" not in p.name]


@pytest.mark.parametrize("path", recorded(), ids=lambda p: p.stem)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    c = golden.config
    unwritten = c["P"] == 1 and unified_of(golden)["unified"] and golden.mode is Mode.DECODE and not c["swa"]
    for replay in golden.replays(AiterBackend, arm, **unified_of(golden)):
        compared = 0
        for name in ("kv_indptr", "kv_indices", "qo_indptr", "kv_last_page_len", "mask_indptr", "custom_mask",
                     "swa_page_table"):  # fmt: skip
            if name not in replay.golden or name not in replay.expected:
                continue
            compared += 1
            if name == "kv_indices" and unwritten:
                assert (replay.golden[name] == -7).all()  # upstream never writes this table
            elif replay.golden[name].ndim == 2:
                assert replay.differences(name, rows=c["B"]) == []
            else:
                assert replay.flat_differences(name) == []
        assert compared >= 1
        if "swa_out_cache_loc" in replay.golden:
            want = replay.golden["swa_out_cache_loc"]
            assert replay.got["swa_out_cache_loc"][: len(want)].tolist() == want.tolist()


@pytest.mark.parametrize("path", recorded("r13_"), ids=lambda p: p.stem)
def test_recorded_counts_of_the_release_whose_chain_this_is(path):
    golden = Golden(path)
    c = golden.config
    own = golden.captured(AiterBackend, ATEN, max_bs=c["max_bs"], **unified_of(golden))
    pages = own.backend.unified and golden.mode is Mode.DECODE
    if c["P"] == 1 and pages and not c["swa"]:
        pytest.skip("upstream writes no table here, ours takes three dispatches to")
    for i in range(c["replays"]):
        live, wanted = golden.live(i), golden.host(i)["dispatches_out_graph"]
        got = own.counts(live)
        # A copy as wide as the whole table takes upstream one slice less.
        full = pages and -(-int(max(live.seq_lens, default=1)) // c["P"]) == -(-c["C"] // c["P"])
        tables = full * (1 + (own.backend.swa_page_table is not None))
        assert (got.dispatches - tables, got.views - tables, got.syncs, got.triton) == tuple(
            wanted[key] for key in ("aten", "view", "sync", "triton")
        )


def step_over(c, pools, bs, kv_indptr, kv_indices, arm=FUSED):
    """One draft step's backend over a given list, captured; and its batch."""
    backend = AiterDraftStep(c, pools, arm.implementation, recorded=False)
    backend.init_cuda_graph_state(bs, bs)
    spec = SpecInfo(topk=1, kv_indptr=kv_indptr, kv_indices=kv_indices)
    lens = torch.ones(bs, dtype=torch.int64, device=DEVICE)
    batch = ForwardBatch(
        Mode.DRAFT_DECODE, bs, torch.zeros_like(lens), lens, lens.cpu(), out_cache_loc=torch.arange(bs, device=DEVICE),
        spec_info=spec,
    )  # fmt: skip
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    return backend, batch


@pytest.mark.parametrize("arm", [ATEN, FUSED], ids=str)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("swa", [False, True])
def test_a_draft_step_turns_its_list_into_pages(arm, page, swa):
    c = config(Mode.DRAFT_DECODE, page_size=page, **UNIFIED)
    pools = pools_for(c, swa)
    lengths = [33, 1, 64]
    slots = torch.cat([pools.req_to_token[2 + r, :n] for r, n in enumerate(lengths)])
    indptr = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)
    backend, batch = step_over(c, pools, 3, indptr, slots, arm)
    backend.page_table.fill_(-7)
    backend.init_forward_metadata_out_graph(batch)
    md = backend.forward_metadata
    assert md.kv_indptr is None and md.qo_indptr.tolist() == [0, 1, 2, 3]
    for r, n in enumerate(lengths):
        first = pools.req_to_token[2 + r, :n:page].to(torch.int64)
        assert md.kv_indices[r].tolist() == [*(first // page).tolist(), *[-7] * (md.kv_indices.shape[1] - len(first))]
        if swa:
            assert md.swa_page_table[r, : len(first)].tolist() == (pools.full_to_swa[first] // page).tolist()
    if swa:
        assert md.swa_out_cache_loc.tolist() == pools.full_to_swa[:3].tolist()


def test_a_draft_step_of_mla_plans_what_its_list_holds():
    c = config(Mode.DRAFT_DECODE, heads=32, **MLA)
    indptr = torch.tensor([0, 40, 140], dtype=torch.int32, device=DEVICE)
    for arm in (ATEN, FUSED):
        backend, batch = step_over(c, pools_for(c), 2, indptr, torch.zeros(140, dtype=torch.int32, device=DEVICE), arm)
        backend.init_forward_metadata_out_graph(batch)
        want = mla_work_filling([40, 100], 1, SMS, 32, fold=2)
        assert backend.forward_metadata.work.work_info_set[: len(want.info)].tolist() == [list(x) for x in want.info]


def test_trees_draft_from_lists_alone():
    c = config(Mode.DRAFT_DECODE, topk=2)
    indptr, slots = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (5, 10))
    backend, _ = step_over(c, pools_for(c), 2, indptr, slots)
    md = backend.forward_metadata
    assert md.kv_indptr is indptr and md.kv_indices is slots and md.qo_indptr is None
    with pytest.raises(ConfigError, match="topk is at most 1; got 2"):
        step_over(config(Mode.DRAFT_DECODE, topk=2, **MLA), pools_for(c), 2, indptr, slots)


@pytest.mark.parametrize(
    ("fault", "mode", "options", "swa", "field"),
    [
        (UnwrittenTable, Mode.DECODE, {"page_size": 1, **UNIFIED}, False, "kv_indices"),
        (UnmappedPages, Mode.DECODE, {}, True, "swa_page_table"),
        (AcceptedStride, Mode.DRAFT_EXTEND_V2, {}, False, "qo_indptr"),
        (VerifyOfThePrefix, Mode.TARGET_VERIFY, MLA, False, "kv_indptr"),
        (FillOfOne, Mode.TARGET_VERIFY, MLA, False, "kv_indptr"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, options, swa, field):
    c = config(mode, **options)

    class Faulty(fault):
        def expected(self, batch, pools):
            right = AiterBackend(self.config, self.pools, self.implementation, recorded=self.recorded)
            right.metadata = self.metadata
            return right.expected(batch, pools)

    own = replayer(mode, ATEN, c, pools_for(c, swa), cls=Faulty)
    assert any(line.startswith(field) for line in found(own, mode))


def test_the_list_has_an_entry_for_every_token():
    """A09: 1,111 tokens at page size 16; a list sized in pages has 1,024 entries."""
    c = config(context=4096)
    pools = pools_for(c)
    own = replayer(Mode.DECODE, FUSED, c, pools)
    assert own.differences(batch_of(Mode.DECODE, [700, 400, 10, 1], pools)) == []
    assert own.backend.forward_metadata.kv_indptr[-1] == 1111 < own.backend.kv_indices.shape[0]


def test_padding_has_the_length_of_the_drafts():
    assert AiterBackend(config(Mode.TARGET_VERIFY), pools_for(config())).seq_len_fill_value == N
    assert AiterBackend(config(), pools_for(config())).seq_len_fill_value == 1


def test_captures_and_sizes_that_cannot_work_are_refused_with_both_numbers():
    c = config(Mode.TARGET_VERIFY, topk=2)
    own = replayer(Mode.TARGET_VERIFY, FUSED, c)
    batch = own.runner.capture_batch(BUCKET)
    for wrong, words in (
        ({"batch_size": 9}, "batch size 9 exceeds the buffers' 4 rows"),
        ({"forward_mode": Mode.DRAFT_DECODE}, "has no mode draft_decode"),
        ({"forward_mode": Mode.DRAFT_EXTEND_V2}, "has no draft_extend_v2 for trees"),
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
    narrow = make_pools(rows=3, width=100, page_size=1, swa=False, seed=0, device=DEVICE)
    for options, words in (
        ({}, "100 tokens wide, but max_context 150 needs 150"),
        (UNIFIED, "100 tokens wide, but max_context 150 needs 145"),
        ({**UNIFIED, **MLA}, "unified attention has no MLA"),
    ):
        with pytest.raises(ConfigError, match=words):
            AiterBackend(config(**options), narrow).init_cuda_graph_state(1, 1)
    full = replayer(Mode.TARGET_VERIFY, ATEN, config(Mode.TARGET_VERIFY, mla=True))
    with pytest.raises(ConfigError, match=r"kv_indices holds 616 entries, this batch has 9999"):
        full.backend.init_forward_metadata_out_graph(replace(full.runner.capture_batch(BUCKET), seq_lens_sum=9999))
    assert Arm.parse("aten-eager") == ATEN
