"""FlashInfer's MLA wrapper: lists, host plans, draft steps, and upstream's faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
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
from attn_graph.backends.flashinfer import FlashInferDraftStep
from attn_graph.backends.flashinfer_mla import FlashInferMlaBackend, FlashInferMlaDraftStep
from attn_graph.backends.kernels.draft_kv_indices import build_draft_kv_indices
from attn_graph.backends.modes import Arm, ForwardMode
from attn_graph.backends.oracle import flashinfer
from attn_graph.backends.registry import lookup
from attn_graph.profilers.conformance.faults.flashinfer_mla import (
    EagerList,
)
from attn_graph.profilers.counters import count
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer

Mode = ForwardMode
MODES = sorted(FlashInferMlaBackend.modes)
BUCKET, N, STEPS, CONTEXT = 4, 4, 3, 150
ATEN, ATEN_GRAPH, FUSED, FUSED_GRAPH = ARMS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config(mode=Mode.DECODE, context=CONTEXT, **extra) -> AttentionConfig:
    spec = {} if mode is Mode.DECODE else {"draft_tokens": N, "topk": 1, "draft_steps": STEPS}
    return AttentionConfig(page_size=1, max_context=context, num_heads=16, num_kv_heads=1, extra=extra, **spec)


def pools_for(c: AttentionConfig, seed=0):
    return make_pools(rows=13, width=c.max_context + 8, page_size=16, swa=False, seed=seed, device=DEVICE)


def tokens_of(mode) -> int:
    return {Mode.DECODE: 1, Mode.DRAFT_EXTEND: STEPS + 1}.get(mode, N)


def replayer(mode, arm, c=None, pools=None, cls=FlashInferMlaBackend, bucket=BUCKET, **slots) -> Replayer:
    c = c or config(mode)
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement.value != "eager")
    return Replayer.capture(backend, mode, bucket, arm.placement, tokens_per_req=tokens_of(mode), **slots)


def found(own: Replayer, mode, seed=1) -> list[str]:
    """Differences from the oracle, of the device tensors and of what the planner was given."""
    c, lines = own.backend.config, []
    shape = BatchShape(mode, BUCKET, 16, c.max_context, tokens_of(mode), 0, N if mode is Mode.DRAFT_EXTEND else 1)
    for number, live in enumerate(batch_sequence(shape, own.backend.pools, seed)):
        lines += own.differences(live, number)
        batch = own.load(live)
        plan = own.backend.forward_metadata.plans[0]
        offset = N if mode is Mode.TARGET_VERIFY else 0
        qo, kv = flashinfer.plan_arrays(batch, "FULL", offset=offset, window=None, queries=tokens_of(mode))
        wanted = {"qo_indptr": qo, "kv_indptr": kv, "kv_len": [int(n) + offset for n in batch.seq_lens]}
        for name, want in wanted.items():
            if getattr(plan, name).tolist() != want:
                lines.append(f"plan.{name}: {getattr(plan, name).tolist()}, expected {want}")
        if sorted(set(plan.work.request.tolist())) != list(range(BUCKET)):
            lines.append("plan.work leaves a request out")
    return lines


def batch_of(mode, lengths, pools) -> LiveBatch:
    rows = 2 + np.arange(len(lengths))
    return live_batch(mode, lengths, rows, pools, tokens_of(mode), np.random.default_rng(0))


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_plans_with_the_same(mode, arm):
    c = config(mode)
    assert found(replayer(mode, arm, c, with_unassigned_slots(pools_for(c), 3)), mode) == []


# mode, dtype of seq_lens -> dispatches, views, syncs, Triton launches of the spec's table; then what the copies of
# upstream's full plan add
TABLE = [
    (Mode.DECODE, torch.int32, (13, 9, 0, 1), 0),
    (Mode.DECODE, torch.int64, (14, 9, 0, 1), 0),
    (Mode.TARGET_VERIFY, torch.int32, (12, 5, 0, 1), 5),
    (Mode.DRAFT_EXTEND, torch.int32, (14, 6, 0, 1), 5),
]


class BeforePlan(FlashInferMlaBackend):
    """The classic chain without the copies that upstream's full plan makes behind it."""

    def _hand_over(self, *_):
        pass


@pytest.mark.parametrize(("mode", "lens", "wanted", "copies"), TABLE, ids=str)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode, lens, wanted, copies):
    pools = pools_for(config(mode))
    live = batch_of(mode, [33, 64], pools)
    own = replayer(mode, ATEN, pools=pools, cls=BeforePlan, lens=lens).counts(live)
    assert (own.dispatches, own.views, own.syncs, own.triton) == wanted
    assert replayer(mode, ATEN, pools=pools, lens=lens).counts(live).dispatches == wanted[0] + copies
    eager, graph = replayer(mode, FUSED, pools=pools), replayer(mode, FUSED_GRAPH, pools=pools)
    assert (eager.counts(live).dispatches, eager.counts(live).launches) == (0, 1)
    assert (graph.counts(live).dispatches, graph.counts(live).launches) == (0, 0)
    assert graph.runner.graphs[BUCKET].nodes == 1


def test_the_registry_quotes_the_same_counts():
    quoted = lookup("flashinfer_mla").dispatches
    for mode, lens, wanted, copies in TABLE:
        if lens is torch.int32:
            assert quoted[str(mode)] == (wanted[0] + copies, None)


NAMES = {
    "kv_indptr_cpu": "kv_indptr", "qo_indptr_cpu": "qo_indptr", "kv_len_arr_cpu": "kv_len",
    "kv_indptr": "kv_indptr", "qo_indptr": "qo_indptr", "kv_len_arr": "kv_len",
}  # fmt: skip


@pytest.mark.parametrize("path", [p for p in cases("flashinfer_mla") if "_draft_" not in p.name], ids=lambda p: p.stem)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    own = golden.captured(FlashInferMlaBackend, arm)
    golden.captured = lambda *_, **__: own
    for replay in golden.replays(FlashInferMlaBackend, arm):
        plan, compared = own.backend.forward_metadata.plans[0], 0
        for name, value in replay.golden.items():
            last = name.rsplit(".", 1)[-1]
            if ".plan." in name and last in NAMES:
                np.testing.assert_array_equal(getattr(plan, NAMES[last]), value, err_msg=name)
            elif last == "kv_indices":
                n = int(replay.expected["kv_indices"].live.sum())
                np.testing.assert_array_equal(replay.got["kv_indices"][:n], value[:n], err_msg=name)
            elif last == "@kv_indptr_scratch":
                np.testing.assert_array_equal(replay.got["kv_indptr"], value[: golden.config["B"] + 1], err_msg=name)
            else:
                continue
            compared += 1
        assert compared >= 4


@pytest.mark.parametrize(
    "path",
    [p for p in cases("flashinfer_mla") if p.name.startswith("r13_") and "_draft_" not in p.name],
    ids=lambda p: p.stem,
)
def test_recorded_counts_of_the_release_whose_chain_this_is(path):
    golden = Golden(path)
    own = golden.captured(BeforePlan, ATEN, max_bs=golden.config["max_bs"])
    for i in range(golden.config["replays"]):
        wanted = golden.host(i)["dispatches_out_graph"]
        got = own.counts(golden.live(i))
        assert (got.dispatches, got.views, got.syncs, got.triton) == tuple(
            wanted[key] for key in ("aten", "view", "sync", "triton")
        )


class StepOfADraft:
    """One draft step over tables filled as the multi-step wrapper fills them."""

    def __init__(self, cls, c: AttentionConfig, pools, bucket: int, step: int, **extra) -> None:
        self.topk, self.bucket = max(c.topk, 1), bucket
        c = replace(c, step_id=step, extra=c.extra | extra)
        self.backend = cls(c, pools, Arm.parse("fused-eager").implementation, recorded=False)
        self.backend.init_cuda_graph_state(bucket, bucket * self.topk)
        branches = bucket * self.topk
        self.kv_indptr = torch.zeros(c.draft_steps, branches + 1, dtype=torch.int32, device=DEVICE)
        capacity = branches * (c.max_context + c.draft_steps)
        self.kv_indices = torch.zeros(c.draft_steps, capacity, dtype=torch.int32, device=DEVICE)
        batch = replace(
            live_batch(Mode.DRAFT_DECODE, [1], [1], pools, 1, np.random.default_rng(0)), mode=Mode.DRAFT_DECODE
        )
        self.host = self.replay(batch, in_capture=True)

    def replay(self, live: LiveBatch, in_capture=False):
        """Fill the tables, re-plan; the plan."""
        b, live_rows, step = self.bucket, live.batch_size, self.backend.config.step_id
        lens, rows = np.ones(b, dtype=np.int64), np.zeros(b, dtype=np.int64)
        lens[:live_rows], rows[:live_rows] = live.seq_lens, live.req_pool_indices
        positions = np.zeros(b * self.topk, dtype=np.int64)
        positions[: live_rows * self.topk] = np.repeat(live.seq_lens, self.topk)
        mirror = torch.from_numpy(lens)
        lens, rows, positions = (torch.from_numpy(x).to(DEVICE) for x in (lens, rows, positions))
        build_draft_kv_indices(
            req_pool_indices=rows, req_to_token=self.backend.pools.req_to_token, lens=lens, positions=positions,
            kv_indices=self.kv_indices, kv_indptr=self.kv_indptr, topk=self.topk,
            page_size=self.backend.config.page_size,
        )  # fmt: skip
        spec = SpecInfo(topk=self.topk, kv_indptr=self.kv_indptr[step], kv_indices=self.kv_indices[step])
        batch = ForwardBatch(
            Mode.DRAFT_DECODE, b, rows, lens, seq_lens_cpu=mirror, positions=positions, spec_info=spec,
            num_padding=b - live_rows,
        )  # fmt: skip
        self.counts = count(lambda: self.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture))
        md = self.backend.forward_metadata
        return md.plans[0] if hasattr(md, "plans") else md.wrappers[0].plan


DRAFTS = [(FlashInferMlaDraftStep, p) for p in cases("flashinfer_mla") if "_draft_" in p.name] + [
    (FlashInferDraftStep, p) for p in cases("flashinfer") if "_draft_" in p.name
]


@pytest.mark.parametrize(("cls", "path"), DRAFTS, ids=lambda x: getattr(x, "stem", getattr(x, "__name__", "")))
def test_recorded_draft_steps_are_planned_as_upstream_does(cls, path):
    golden = Golden(path)
    c = golden.config
    upstream = {"upstream_draft_plan": True} if cls is FlashInferMlaDraftStep else {}
    for step in range(c["S"] - 1):
        own = StepOfADraft(cls, golden.attention_config(), golden.pools(), c["B"], step, **upstream)
        for i in range(c["replays"]):
            live = golden.live(i)
            plan, compared = own.replay(live), 0
            assert own.counts.dispatches == 0
            for key, value in golden.data.items():
                if not key.startswith(f"r{i}/") or f"/step{step}." not in key:
                    continue
                last = key.rsplit(".", 1)[-1]
                if last in NAMES:
                    np.testing.assert_array_equal(getattr(plan, NAMES[last]), value, err_msg=key)
                elif last == "indptr_cpu":
                    np.testing.assert_array_equal(plan.kv_indptr, value, err_msg=key)
                elif last in ("kv_indices", "paged_kv_indices_buffer"):
                    n = int(own.kv_indptr[step, live.batch_size * own.topk])
                    np.testing.assert_array_equal(own.kv_indices[step, :n].cpu().numpy(), value[:n], err_msg=key)
                else:
                    continue
                compared += 1
            assert compared >= 2


@pytest.mark.parametrize(("upstream", "right"), [(False, True), (True, False)])
def test_a_draft_plan_starts_where_the_list_does_and_upstreams_does_not(upstream, right):
    """Upstream ignores the step's own tokens: request 1 begins in request 0's drafts."""
    c = config(Mode.DRAFT_DECODE)
    own = StepOfADraft(FlashInferMlaDraftStep, c, pools_for(c), 3, step=1, upstream_draft_plan=upstream)
    plan = own.replay(batch_of(Mode.DRAFT_DECODE, [5, 9], own.backend.pools))
    assert (plan.kv_indptr.tolist() == own.kv_indptr[1].tolist() == [0, 7, 18, 20]) is right
    first = own.kv_indices[1, plan.kv_indptr[1]].item()
    assert (first == own.backend.pools.req_to_token[3, 0].item()) is right


def test_a_draft_step_alone_is_refused():
    c = config(Mode.DRAFT_DECODE)
    with pytest.raises(ConfigError, match="use multi_step_draft"):
        replayer(Mode.DRAFT_DECODE, FUSED, c, cls=FlashInferMlaDraftStep)


class StaleMirror(FlashInferMlaBackend):
    """A plan from the lengths of the step before: the kernel never looks at the device's."""

    before = None

    def plan(self, fb, md):
        now, before = fb.seq_lens_cpu.clone(), self.before
        self.before = now
        super().plan(fb if before is None else replace(fb, seq_lens_cpu=before), md)


class VerifyWithoutDrafts(FlashInferMlaBackend):
    """A26's neighbour: the plan's lengths without the draft tokens that the list has."""

    def _lens_on_host(self, fb):
        return super()._lens_on_host(fb) - self._offset(fb.forward_mode)


@pytest.mark.parametrize(
    ("fault", "mode", "arm", "field"),
    [
        (StaleMirror, Mode.DECODE, FUSED, "plan.kv_len"),
        (VerifyWithoutDrafts, Mode.TARGET_VERIFY, FUSED_GRAPH, "plan.kv_indptr"),
        (EagerList, Mode.DECODE, ATEN, "kv_indices"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, arm, field):
    assert any(line.startswith(field) for line in found(replayer(mode, arm, cls=fault), mode))


def test_a_verify_of_full_requests_fits_the_list():
    """Upstream sizes the list from the context alone: two requests at the limit need 2 * N entries more."""
    c = config(Mode.TARGET_VERIFY, context=64)
    for arm in ARMS:
        own = replayer(Mode.TARGET_VERIFY, arm, c, bucket=2)
        assert own.differences(batch_of(Mode.TARGET_VERIFY, [64, 64], own.backend.pools)) == []
        assert own.backend.forward_metadata.kv_indptr[-1] == 2 * (64 + N) > 2 * 64


def test_captures_and_sizes_that_cannot_work_are_refused_with_both_numbers():
    own = replayer(Mode.TARGET_VERIFY, FUSED)
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match="batch size 9 exceeds the buffers' 4 rows"):
        own.backend.init_forward_metadata_out_graph(replace(batch, batch_size=9), in_capture=True)
    with pytest.raises(ConfigError, match="has no mode draft_extend_v2"):
        wrong = replace(batch, forward_mode=Mode.DRAFT_EXTEND_V2)
        own.backend.init_forward_metadata_out_graph(wrong, in_capture=True)
    with pytest.raises(ConfigError, match="seq_lens_cpu is None"):
        own.backend.init_forward_metadata_out_graph(replace(batch, seq_lens_cpu=None))
    with pytest.raises(ConfigError, match="needs draft_tokens > 0"):
        own.backend.config = config()
        own.backend.bind(batch)
    narrow = make_pools(rows=3, width=100, page_size=1, swa=False, seed=0, device=DEVICE)
    with pytest.raises(ConfigError, match="100 tokens wide, max_context is 150"):
        FlashInferMlaBackend(config(), narrow).init_cuda_graph_state(1, 1)
    with pytest.raises(ConfigError, match="topk of at most 1, got 2"):
        FlashInferMlaBackend(replace(config(), topk=2), narrow).init_cuda_graph_state(1, 1)
