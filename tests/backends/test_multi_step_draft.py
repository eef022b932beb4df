"""Draft decode over every family of inner backends: shared tables, a hook for each step, one inner for all."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionBackend, AttentionConfig, ConfigError, NotCapturedError, tensors_of
from attn_graph.backends.batch import BatchShape, batch_sequence, live_batch, make_pools
from attn_graph.backends.modes import ForwardMode, Implementation
from attn_graph.backends.registry import lookup
from attn_graph.backends.wrappers.forwarding import Forwarding, forwards_hooks, hooks
from attn_graph.backends.wrappers.multi_step_draft import FAMILIES, MultiStepDraft, last_draft_column
from attn_graph.profilers.conformance.faults.multi_step_draft import (
    ConsecutiveBranches,
    FirstOfAllSlots,
    FollowersLeftAlone,
)
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, host_pools, replayed

Mode = ForwardMode
BUCKET, CONTEXT = 3, 100
ATEN, ATEN_GRAPH, FUSED, FUSED_GRAPH = ARMS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHAINS = ["trtllm_mha", "flashattention", "trtllm_mla", "flashmla", "dsa"]


def config(inner="triton", topk=1, steps=3, page_size=1, context=CONTEXT, **extra) -> AttentionConfig:
    page_size = 64 if inner in ("flashmla", "dsa") else 32 if inner == "trtllm_mla" else page_size
    return AttentionConfig(
        page_size=page_size, max_context=context, draft_tokens=4, topk=topk, draft_steps=steps,
        extra={"inner": inner, **extra},
    )  # fmt: skip


def pools_for(c: AttentionConfig, swa=False, width=None):
    width = width or last_draft_column(c) + 8
    return make_pools(rows=9, width=width, page_size=c.page_size, swa=swa, seed=0, device=DEVICE)


def replayer(arm, c, pools=None, lens=torch.int64, cls=MultiStepDraft, bucket=BUCKET) -> Replayer:
    wrapper = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement.value != "eager")
    return Replayer.capture(
        wrapper, Mode.DRAFT_DECODE, bucket, arm.placement, tokens_per_req=max(c.topk, 1), lens=lens,
        slots_per_token=c.draft_steps,
    )  # fmt: skip


def batches(c: AttentionConfig, pools, bucket=BUCKET):
    reserve = max(c.draft_steps, c.draft_tokens)
    shape = BatchShape(
        Mode.DRAFT_DECODE, bucket, c.page_size, c.max_context, max(c.topk, 1), reserve, topk=c.topk,
        draft_steps=c.draft_steps,
    )  # fmt: skip
    return batch_sequence(shape, pools, 1)


def found(own: Replayer) -> list[str]:
    few = list(batches(own.backend.config, own.backend.pools))[:6]  # up to the repeated pool row
    return [line for lines in replayed(own, few) for line in lines]


@pytest.mark.parametrize("arm", [ATEN, FUSED_GRAPH], ids=str)
@pytest.mark.parametrize(("topk", "steps", "page_size"), [(1, 3, 1), (1, 2, 16), (3, 3, 1), (2, 4, 16)])
def test_shared_tables_of_every_step_are_the_oracles(arm, topk, steps, page_size):
    assert found(replayer(arm, config(topk=topk, steps=steps, page_size=page_size))) == []


@pytest.mark.parametrize("arm", [ATEN, FUSED_GRAPH], ids=str)
@pytest.mark.parametrize("inner", CHAINS)
def test_steps_of_the_other_families_are_their_inner_backends_each_with_its_own_step(arm, inner):
    own = replayer(arm, config(inner, **{"num_sms": 8} if inner in ("flashmla", "dsa") else {}))
    assert found(own) == []
    steps = own.backend.metadata[Mode.DRAFT_DECODE, BUCKET]
    assert list(steps) == (["step0"] if inner == "dsa" else ["step0", "step1"])
    assert own.backend.inner(1) is own.backend.children[-1]


@pytest.mark.parametrize("extra", [{"static_kv_splits": True}, {"split_tile_size": 16, "deterministic": True}], ids=str)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_every_split_policy_serves_all_branches(arm, extra):
    assert found(replayer(arm, config(topk=2, **extra))) == []


@pytest.mark.parametrize("path", [p for p in cases("triton") if "_draft_" in p.name], ids=lambda p: p.stem)
@pytest.mark.parametrize("arm", [ATEN, FUSED], ids=str)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    c, counted = golden.config, 0
    extra = golden.split_options()
    for replay in golden.replays(MultiStepDraft, arm, **extra):
        live = replay.host["raw_bs"]
        for step in range(c["S"] - 1):
            indptr, indices = (replay.got[f"step{step}.{name}"] for name in ("kv_indptr", "kv_indices"))
            entries = int(replay.expected[f"step{step}.kv_indices"].live.sum())
            assert entries == indptr[live * max(c["K"], 1)]
            np.testing.assert_array_equal(indptr, replay.golden["@kv_indptr"][step][: len(indptr)])
            np.testing.assert_array_equal(indices[:entries], replay.golden["@kv_indices"][step][:entries])
            rows = c["B"] * max(c["K"], 1)
            splits = replay.got[f"step{step}.num_kv_splits"][:rows]
            np.testing.assert_array_equal(splits, replay.golden["@num_kv_splits"][:rows])
        if arm is ATEN:
            counted += 1
    if arm is ATEN and c["release"].startswith("0.5.13"):
        own = golden.captured(MultiStepDraft, arm, **extra)
        for i in range(counted):
            got, wanted = own.counts(golden.live(i)), golden.host(i)["dispatches_out_graph"]
            assert (got.dispatches, got.views, got.syncs, got.triton) == tuple(
                wanted[key] for key in ("aten", "view", "sync", "triton")
            )


# Tables that inner backends plan from.

PLANNED = [
    ("flashinfer", {"topk": 2, "page_size": 16}),
    ("flashinfer_mla", {}),
    ("aiter", {"topk": 2}),
    ("aiter", {"page_size": 16, "unified": True}),
    ("aiter", {"mla": True, "fp8": True, "num_sms": 12}),
]


def host_plan(md):
    return md.plans[0] if hasattr(md, "plans") else md.wrappers[0].plan


def lists_of(md):
    return md.wrappers[0] if hasattr(md, "wrappers") else md


@pytest.mark.parametrize("arm", [ATEN, FUSED_GRAPH], ids=str)
@pytest.mark.parametrize(("inner", "options"), PLANNED, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_planned_families_have_the_oracles_tables_and_what_they_make_of_them(arm, inner, options):
    own = replayer(arm, config(inner, context=64, **options))
    assert list(own.backend.metadata[Mode.DRAFT_DECODE, BUCKET]) == ["step0", "step1"]
    assert found(own) == []


@pytest.mark.parametrize("arm", [ATEN, FUSED_GRAPH], ids=str)
def test_unified_pages_of_a_sliding_window_and_their_write_slots_belong_to_the_step(arm):
    c = config("aiter", page_size=16, context=64)
    pools = pools_for(c, swa=True)
    own = Replayer.capture(
        MultiStepDraft(c, pools, arm.implementation, recorded=arm is FUSED_GRAPH), Mode.DRAFT_DECODE, BUCKET,
        arm.placement, slots_per_token=3,
    )  # fmt: skip
    for lengths in ([33, 60, 16], [5]):  # one request in three: as many slots as rows
        live = replace(batch_of(c, lengths, pools), out_cache_loc=np.arange(50, 50 + 3 * len(lengths)))
        assert own.differences(live) == []
        wanted = pools.full_to_swa[51 : 50 + 3 * len(lengths) : 3].tolist()
        assert own.backend.forward_metadata["step1"].swa_out_cache_loc.tolist()[: len(lengths)] == wanted


@pytest.mark.parametrize("arm", [ATEN, FUSED_GRAPH], ids=str)
@pytest.mark.parametrize("inner", ["flashinfer", "flashinfer_mla"])
def test_a_plan_is_made_for_every_batch_and_divides_the_list_of_its_own_step(arm, inner):
    own = replayer(arm, config(inner, topk=2 if inner == "flashinfer" else 1))
    for lengths in ([33, 64, 7], [80], [2, 3]):
        own.load(batch_of(own.backend.config, lengths, own.backend.pools))
        own.runner.replay()
        for step in own.backend.forward_metadata.values():
            plan = host_plan(step)
            np.testing.assert_array_equal(plan.kv_indptr, lists_of(step).kv_indptr.cpu())
            tiles = np.bincount(plan.work.request, minlength=len(plan.kv_indptr) - 1)
            np.testing.assert_array_equal(tiles, -(-np.diff(plan.kv_indptr) // plan.work.chunk))


@pytest.mark.parametrize(
    ("inner", "path"),
    [(inner, p) for inner in ("flashinfer", "flashinfer_mla", "aiter") for p in cases(inner) if "_draft_" in p.name],
    ids=lambda x: getattr(x, "stem", x),
)
@pytest.mark.parametrize("arm", [ATEN, FUSED_GRAPH], ids=str)
def test_recorded_cases_of_planned_families_are_reproduced(inner, path, arm):
    golden = Golden(path)
    c = golden.config
    # Unified attention has pages where the others have a list and its kv_indptr.
    unified = inner == "aiter" and "capture/out/step0.kv_indptr" not in golden.data
    extra = {"unified": unified, "mla": c["extra"].get("mla", False)} if inner == "aiter" else {}
    own = golden.captured(
        MultiStepDraft, arm, inner=inner, upstream_draft_plan=True, num_sms=c["cores"], fp8=True, **extra
    )
    for i in range(c["replays"]):
        live, prefixes = golden.live(i), (f"r{i}/out/", f"r{i}/live/")
        assert own.differences(live, i) == []
        found_here = {path: t.cpu().numpy() for path, t in tensors_of(own.backend.forward_metadata).items()}
        recorded = {name.split("/", 2)[2]: v for name, v in golden.data.items() if name.startswith(prefixes[0])}
        recorded |= {"live/" + n.split("/", 2)[2]: v for n, v in golden.data.items() if n.startswith(prefixes[1])}
        branches = live.batch_size * max(c["K"], 1)
        for step in range(c["S"] - 1):
            compared, whole = 0, False
            plan = host_plan(own.backend.forward_metadata[f"step{step}"]) if inner != "aiter" else None
            ours = {name.removeprefix(f"step{step}."): name for name in found_here if name.startswith(f"step{step}.")}
            lists = "wrappers.0.kv_" if inner == "flashinfer" else "kv_"
            if unified:
                compare_pages(live, step, c["P"], found_here, recorded)
                continue
            indptr = found_here[ours[lists + "indptr"]]
            entries = indptr[branches]
            indices = found_here[ours[lists + "indices"]][:entries]
            for name, value in recorded.items():
                last = name.rsplit(".", 1)[-1]
                if name.startswith("@"):
                    last, value = name.removesuffix("_scratch").removeprefix("@"), value[step]
                elif f"step{step}." not in name:
                    continue
                if last in ("kv_indptr", "paged_kv_indptr_buffer"):
                    np.testing.assert_array_equal(indptr, value[: len(indptr)], err_msg=name)
                elif last in ("kv_indices", "paged_kv_indices_buffer"):
                    there = min(entries, len(value))  # some are views that were cut at capture
                    np.testing.assert_array_equal(indices[:there], value[:there], err_msg=name)
                    whole = whole or there == entries
                elif last in ("indptr_cpu", "kv_indptr_cpu"):
                    np.testing.assert_array_equal(plan.kv_indptr, value, err_msg=name)
                elif last == "kv_len_arr_cpu":
                    np.testing.assert_array_equal(plan.kv_len, value, err_msg=name)
                else:
                    continue
                compared += 1
            assert whole and compared >= 2 + (inner != "aiter")


def compare_pages(live, step: int, page_size: int, ours, recorded) -> None:
    """Page tables of one step, in the live rows: those of padding come from the wrong place of the list."""
    tables = [name for name in (f"step{step}.kv_indices", f"step{step}.swa_page_table") if name in recorded]
    for name in tables:
        for r, length in enumerate(live.seq_lens):
            n = -(-(int(length) + step + 1) // page_size)
            np.testing.assert_array_equal(ours[name][r, :n], recorded[name][r, :n], err_msg=f"{name}[{r}]")
    assert tables


class PlansNothing(MultiStepDraft):
    """Replay that leaves inner backends alone, as with tables of which nobody plans: they divide an earlier batch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.family = replace(self.family, plans=False)


class HooksFirst(MultiStepDraft):
    """Inner backends make their pages of the tables before these are filled."""

    def init_forward_metadata_out_graph(self, fb, in_capture=False):
        super().init_forward_metadata_out_graph(fb, in_capture)
        if not in_capture:
            self.tables.kv_indices.fill_(7)
            self.forward_hook("init_forward_metadata_out_graph", fb)
            self._rebuild(fb, self.forward_metadata)


def test_inner_backends_must_plan_at_replay_and_behind_the_tables():
    c = config("flashinfer", topk=2)
    own = replayer(FUSED, c, cls=PlansNothing)
    own.load(batch_of(c, [33, 64], own.backend.pools))
    own.runner.replay()
    step = own.backend.forward_metadata["step0"]
    assert host_plan(step).kv_indptr.tolist() != lists_of(step).kv_indptr.tolist()
    paged = replayer(FUSED, config("aiter", page_size=16, context=64, unified=True), cls=HooksFirst)
    assert any("step0.kv_indices" in line for line in found(paged))


def test_a_planned_family_costs_one_launch_for_its_tables_and_one_for_what_each_step_makes_of_them():
    for inner, options, launches in (
        ("flashinfer", {"topk": 2}, 1), ("flashinfer_mla", {}, 1), ("aiter", {}, 1),
        ("aiter", {"page_size": 16, "unified": True}, 3), ("aiter", {"mla": True, "fp8": True, "num_sms": 12}, 3),
    ):  # fmt: skip
        c = config(inner, **options)
        pools = pools_for(c)
        live = batch_of(c, [33, 64], pools)
        eager, graph = replayer(FUSED, c, pools), replayer(FUSED_GRAPH, c, pools)
        got = eager.counts(live)
        assert (got.dispatches, got.launches, got.syncs) == (0, launches, 0)
        assert eager.backend.allowances.fused_launches == launches
        got = graph.counts(live)
        assert (got.dispatches, got.launches, graph.runner.graphs[BUCKET].nodes) == (0, 0, launches)


# Steps that differ in where they write.

SLOTS_ONLY = [("deepseek_v4", {}), ("deepseek_v4_hip_radix", {"unified_kv": True})]


def v4_config(inner, steps=4, **extra) -> AttentionConfig:
    return AttentionConfig(
        page_size=256, max_context=300, draft_tokens=4, topk=1, draft_steps=steps, window=128,
        extra={"inner": inner, "num_sms": 6, **extra},
    )  # fmt: skip


def v4_replayer(arm, c, cls=MultiStepDraft, pools=None, lens=torch.int64, bucket=BUCKET, slots=None) -> Replayer:
    wrapper = cls(c, pools or pools_for(c, swa=True), arm.implementation, recorded=arm.placement.value != "eager")
    return Replayer.capture(
        wrapper, Mode.DRAFT_DECODE, bucket, arm.placement, lens=lens, slots_per_token=slots or c.draft_steps,
    )  # fmt: skip


def with_all_slots(live, pools, steps):
    """The batch with the slots of all steps, each request's from a page of its own."""
    first = 4 * (5 + 40 * np.arange(live.batch_size, dtype=np.int64))
    return replace(live, out_cache_loc=(first[:, None] + 4 * np.arange(steps)).ravel())


@pytest.mark.parametrize("lens", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("arm", [ATEN, ATEN_GRAPH, FUSED_GRAPH], ids=str)
@pytest.mark.parametrize(("inner", "options"), SLOTS_ONLY, ids=lambda x: x if isinstance(x, str) else "")
def test_steps_share_the_first_ones_metadata_and_write_to_their_own_column(inner, options, arm, lens):
    c = v4_config(inner, **options)
    pools = pools_for(c, swa=True)
    own = v4_replayer(arm, c, pools=pools, lens=lens)
    for lengths in ([256, 4, 255], [128], [8, 12]):
        live = with_all_slots(batch_of(c, lengths, pools), pools, c.draft_steps)
        assert own.differences(live) == []
        for step in range(3):
            md = own.backend.inner(step).forward_metadata
            column = live.out_cache_loc.reshape(-1, 4)[:, step]
            n = len(lengths)
            assert md is own.backend.forward_metadata[f"step{step}"]
            assert md.raw_out_loc.tolist() == [*column, *[0] * (BUCKET - n)] and md.raw_out_loc.dtype is lens
            assert md.swa_out_cache_loc[:n].tolist() == pools.full_to_swa[torch.from_numpy(column)].tolist()
            ends = [s // 4 if length % 4 == 0 else 0 for s, length in zip(column, lengths, strict=True)]
            assert md.c4_out_loc[:n].tolist() == ends and any(ends)


@pytest.mark.parametrize("arm", [ATEN, FUSED], ids=str)
def test_slots_of_one_step_serve_every_step_as_they_are(arm):
    c = v4_config("deepseek_v4", steps=3)
    own = v4_replayer(arm, c, bucket=2, slots=1)
    every = batch_of(c, [17, 260], own.backend.pools)
    assert own.differences(replace(every, out_cache_loc=every.out_cache_loc[::3])) == []


def test_steps_alias_what_their_wrapper_says_and_nothing_else():
    own = v4_replayer(FUSED, v4_config("deepseek_v4_hip_radix", unified_kv=True))
    at: dict[int, set[str]] = {}
    for path, t in tensors_of(own.backend.metadata[Mode.DRAFT_DECODE, BUCKET]).items():
        at.setdefault(t.data_ptr(), set()).add(path)
    groups = own.backend.allowances.aliases
    for names in at.values():
        assert len(names) == 1 or frozenset(names) in groups
    schedules = [own.backend.inner(i).forward_metadata for i in range(3)]
    assert len({id(md) for md in schedules}) == 3


def test_each_steps_attention_fills_a_schedule_of_its_own_again_after_a_warm_up():
    own = v4_replayer(FUSED, v4_config("deepseek_v4"))
    before = [own.backend.inner(i).forward_metadata.c1_flashmla_metadata for i in range(3)]
    own.backend.on_after_cuda_graph_warmup()
    after = [own.backend.inner(i).forward_metadata.c1_flashmla_metadata for i in range(3)]
    assert len({id(schedule) for schedule in before + after}) == 6


def test_steps_that_differ_in_slots_only_cost_one_rebuild_and_one_launch_more():
    for steps, launches in ((2, 1), (3, 2), (5, 2)):
        c = v4_config("deepseek_v4", steps)
        pools = pools_for(c, swa=True)
        live = with_all_slots(batch_of(c, [33, 64], pools), pools, steps)
        eager, graph = (v4_replayer(arm, c, pools=pools) for arm in (FUSED, FUSED_GRAPH))
        for own, wanted in ((eager, (1, 1, 0, launches)), (graph, (0, 0, 0, 0))):
            got = own.counts(live)  # inner 0's view of its column is all that is dispatched
            assert (got.dispatches, got.views, got.syncs, got.launches) == wanted
        assert graph.runner.graphs[BUCKET].nodes == launches


@pytest.mark.parametrize("path", [p for p in cases("deepseek_v4") if "_draft_" in p.name], ids=lambda p: p.stem)
@pytest.mark.parametrize("arm", [ATEN, FUSED_GRAPH], ids=str)
def test_recorded_cases_of_slots_only_families_are_reproduced(path, arm):
    """But for locations: upstream's are the first B of all slots, which is no step's column."""
    golden = Golden(path)
    c, told = golden.config, json.loads(str(golden.data["capture/host"]))
    kept = next((value for name, value in told.items() if name.endswith("c4_sparse_topk")), 512)
    wrapper = MultiStepDraft(
        golden.attention_config(inner="deepseek_v4", num_sms=12, index_topk=kept), golden.pools(), arm.implementation,
        recorded=arm is FUSED_GRAPH,
    )  # fmt: skip
    lens = getattr(torch, c["seq_lens_static_dtype"].removeprefix("torch."))
    own = Replayer.capture(
        wrapper, Mode.DRAFT_DECODE, c["B"], arm.placement, fill=c["fill"], lens=lens, slots_per_token=c["S"]
    )
    wrong = 0
    for i in range(c["replays"]):
        slots = golden.data[f"r{i}/in/out_cache_loc"]
        live = replace(golden.live(i), out_cache_loc=slots)
        assert own.differences(live, i) == []
        for step in range(c["S"] - 1):
            compared = 0
            for name, got in tensors_of(own.backend.forward_metadata[f"step{step}"]).items():
                key = f"r{i}/out/step{step}.{name}"
                if key not in golden.data or name == "c4_sparse_page_indices":
                    continue
                got, wanted = got.cpu().numpy(), golden.data[key]
                if name in ("raw_out_loc", "c4_out_loc", "c128_out_loc"):
                    wrong += not np.array_equal(got, wanted)
                    continue
                np.testing.assert_array_equal(got, wanted, err_msg=key)
                compared += 1
            assert compared >= 10, compared
    assert wrong > 0


@pytest.mark.parametrize("fault", [FirstOfAllSlots, FollowersLeftAlone])
def test_locations_of_no_step_and_of_an_earlier_batch_are_found(fault):
    c = v4_config("deepseek_v4")
    own = v4_replayer(ATEN, c, fault)
    live = with_all_slots(batch_of(c, [256, 4, 255], own.backend.pools), own.backend.pools, 4)
    lines = own.differences(live)
    assert lines and all("out" in line for line in lines)
    assert {line.split(".")[0] for line in lines} >= {"step1", "step2"}


def batch_of(c, lengths, pools):
    return live_batch(
        Mode.DRAFT_DECODE, lengths, 2 + np.arange(len(lengths)), pools, max(c.topk, 1), np.random.default_rng(0),
        topk=c.topk, draft_steps=c.draft_steps, page_size=c.page_size,
    )  # fmt: skip


@pytest.mark.parametrize(("topk", "steps"), [(1, 2), (1, 5), (4, 3)])
def test_counts_do_not_grow_with_steps_or_branches_and_fused_is_one_launch(topk, steps):
    c = config(topk=topk, steps=steps)
    pools = pools_for(c)
    live = batch_of(c, [33, 64], pools)
    own = replayer(ATEN, c, pools).counts(live)
    assert (own.dispatches, own.views, own.syncs, own.triton) == (2, 2, 0, 2)
    assert lookup("multi_step_draft", "wrapper").dispatches["draft_decode"][0] == own.dispatches
    eager, graph = replayer(FUSED, c, pools), replayer(FUSED_GRAPH, c, pools)
    assert (eager.counts(live).dispatches, eager.counts(live).launches) == (0, 1)
    assert (graph.counts(live).dispatches, graph.counts(live).launches, graph.runner.graphs[BUCKET].nodes) == (0, 0, 1)


def test_per_step_families_take_what_their_inner_backend_takes_for_each_step():
    c = config("trtllm_mha", steps=4)
    pools = pools_for(c)
    live = batch_of(c, [33, 64], pools)
    assert replayer(ATEN, c, pools).counts(live).dispatches == 3 * lookup("trtllm_mha").dispatches["draft_decode"][0]
    graph = replayer(FUSED_GRAPH, c, pools)
    assert (graph.counts(live).launches, graph.runner.graphs[BUCKET].nodes) == (0, 3)


def test_each_step_writes_its_own_column_of_the_write_slots():
    """A13: 2 requests, 3 steps: request-major, steps innermost."""
    c = config("trtllm_mha", steps=4)
    pools = pools_for(c, swa=True)
    wrapper = MultiStepDraft(c, pools, Implementation.FUSED, recorded=False)
    own = Replayer.capture(wrapper, Mode.DRAFT_DECODE, 2, slots_per_token=4)
    live = replace(batch_of(c, [33, 64], pools), out_cache_loc=np.arange(100, 108))
    batch = own.load(live)
    own.runner.replay()
    for step in range(3):
        wanted = pools.full_to_swa[[100 + step, 104 + step]].tolist()
        assert wrapper.forward_metadata[f"step{step}"].swa_out_cache_loc.tolist() == wanted
    assert (
        wrapper.expected(batch, host_pools(pools))["step1.swa_out_cache_loc"].values.tolist()
        == pools.full_to_swa[[101, 105]].tolist()
    )


# Hooks.


class Spy(AttentionBackend):
    """Notes every hook it gets."""

    modes = frozenset({Mode.DRAFT_DECODE})

    def __init__(self):
        self.calls = []
        self.metadata = {(Mode.DRAFT_DECODE, 1): {}}

    def on_tomorrow(self, fb):
        self.calls.append("on_tomorrow")

    def bind(self, fb): ...
    def rebuild_aten(self, fb, md): ...
    def rebuild_aten_static(self, fb, md): ...
    def rebuild_fused(self, fb, md): ...
    def expected(self, batch, pools): ...
    def init_cuda_graph_state(self, max_bs, max_num_tokens): ...


for _name in hooks():
    setattr(Spy, _name, lambda self, *args, _name=_name, **kwargs: self.calls.append((_name, kwargs.get("in_capture"))))


def spied(inner) -> tuple[MultiStepDraft, list[Spy], object]:
    c = config(inner)
    own = replayer(FUSED, c, bucket=1)
    wrapper, spies = own.backend, [Spy() for _ in own.backend.children]
    wrapper._inners = spies
    return wrapper, spies, own.runner.capture_batch(1)


def called(wrapper, spies, name, *args, **kwargs) -> list[list]:
    for spy in spies:
        spy.calls.clear()
    getattr(wrapper, name)(*args, **kwargs)
    return [spy.calls for spy in spies]


@pytest.mark.parametrize("inner", ["trtllm_mha", "flashmla"])
def test_every_hook_of_the_contract_reaches_every_inner_backend(inner):
    wrapper, spies, batch = spied(inner)
    for name in hooks():
        takes = [p for p in inspect.signature(getattr(AttentionBackend, name)).parameters if p != "self"]
        args = {(): (), ("max_bs", "max_num_tokens"): (1, 1)}.get(tuple(takes), (batch,))
        wanted = {
            "init_forward_metadata": ["init_forward_metadata_out_graph", "init_forward_metadata_in_graph"],
        }.get(name, [name])
        for calls in called(wrapper, spies, name, *args):
            assert [call for call, _ in calls] == wanted
    for calls in called(wrapper, spies, "init_forward_metadata_out_graph", batch, in_capture=True):
        assert calls == [("init_forward_metadata_out_graph", True)]


def test_shared_tables_leave_inner_backends_alone_at_replay_but_not_at_capture_or_in_the_graph():
    wrapper, spies, batch = spied("triton")
    assert called(wrapper, spies, "init_forward_metadata_out_graph", batch) == [[], []]
    for name, kwargs in (
        ("init_forward_metadata_out_graph", {"in_capture": True}),
        ("init_forward_metadata_in_graph", {}),
    ):
        assert [[call for call, _ in calls] for calls in called(wrapper, spies, name, batch, **kwargs)] == [[name]] * 2


def test_a_hook_added_to_the_contract_later_is_forwarded_without_anybody_writing_it(monkeypatch):
    """A22: a wrapper that inherits a hook which does nothing drops it, and no error says so."""
    monkeypatch.setattr(AttentionBackend, "on_tomorrow", lambda self, fb: None, raising=False)

    @forwards_hooks
    class Tomorrow(MultiStepDraft):
        children = (Spy(), Spy())

    assert "on_tomorrow" in vars(Tomorrow) and "on_tomorrow" not in vars(Forwarding)
    object.__new__(Tomorrow).on_tomorrow(None)
    assert [spy.calls for spy in Tomorrow.children] == [["on_tomorrow"]] * 2


# Faults.


class OffsetsFromPositions(MultiStepDraft):
    """Lists laid out by positions: right on live rows, and one entry short on each padded branch."""

    def rebuild_aten(self, fb, md):
        rows = fb.positions[:: max(self.config.topk, 1)]
        super().rebuild_aten(replace(fb, seq_lens=rows.contiguous()), md)


class OneStepShort(MultiStepDraft):
    """Step i's own token left out of its indptr."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        for step in md.values():
            step.kv_indptr[1:] -= torch.arange(1, len(step.kv_indptr), dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("fault", "field"),
    [(OffsetsFromPositions, "kv_indices"), (ConsecutiveBranches, "kv_indices"), (OneStepShort, "kv_indptr")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_the_comparison_catches(fault, field):
    own = replayer(ATEN, config(topk=2, page_size=16), cls=fault)
    assert any(field in line for line in found(own))


def test_rows_sized_without_the_topk_factor_are_not_what_we_allocate():
    """A08: 2 requests of 1,024 tokens and 8 branches need more than 9,600 entries a step; without topk, 2,048."""
    c = config(topk=8, context=1024)
    wrapper = MultiStepDraft(c, pools_for(c))
    wrapper.init_cuda_graph_state(2, 16)
    assert wrapper.tables.kv_indices.shape == (3, 2 * 8 * 1027)


def test_at_the_context_limit_no_step_reaches_into_the_next_ones_row():
    c = config(topk=2, steps=3, context=40)
    own = replayer(FUSED, c)
    live = batch_of(c, [40, 40, 40], own.backend.pools)
    assert own.differences(live) == []
    ends = [step.kv_indptr[-1].item() for step in own.backend.forward_metadata.values()]
    assert ends == [3 * 2 * 41, 3 * 2 * 42] and own.backend.tables.kv_indices.shape[1] == 3 * 2 * 43


@pytest.mark.parametrize("inner", ["triton", "flashinfer", "deepseek_v4"])
def test_one_step_has_no_inner_backend_and_nothing_to_do(inner):
    """A23."""
    own = replayer(FUSED_GRAPH, config(inner, steps=1))
    own.load(batch_of(own.backend.config, [5], own.backend.pools))
    own.runner.replay()
    assert own.backend.children == [] and own.backend.forward_metadata == {} and own.backend.seq_len_fill_value == 1


def test_metadata_stays_where_it_was_captured_and_inputs_stay_as_they_were():
    own = replayer(FUSED, config(topk=2))
    steps = own.backend.metadata[Mode.DRAFT_DECODE, BUCKET]
    before = {path: t.data_ptr() for path, t in tensors_of(steps).items()}
    batch = own.runner.capture_batch(BUCKET)
    spec = batch.spec_info
    own.backend.init_forward_metadata_out_graph(batch)
    assert spec.kv_indptr is None and spec.kv_indices is None  # the engine's object is not written to
    assert {path: t.data_ptr() for path, t in tensors_of(own.backend.forward_metadata).items()} == before
    assert before["step0.num_kv_splits"] == before["step1.num_kv_splits"]
    assert before["step0.kv_indices"] != before["step1.kv_indices"]


@pytest.mark.parametrize(
    ("c", "words"),
    [
        (config("cutlass_mla"), "no inner backend 'cutlass_mla'. It has: triton"),
        (config(steps=0), "draft_steps of at least 1, got 0"),
        (
            config(topk=4, steps=3, context=110),
            "112 tokens wide, but draft slots of 4 branches and 3 steps .* column 122",
        ),
        (config("trtllm_mha", topk=2), "topk of at most 1, got 2"),
        (config(topk=8, context=2**20, steps=2), r"\(2\*\*31 or more\)"),
    ],
    ids=["unknown", "steps", "narrow", "topk", "int32"],
)
def test_configurations_that_cannot_work_are_refused(c, words):
    pools = make_pools(rows=3, width=112, page_size=1, swa=False, seed=0, device="cpu")
    with pytest.raises(ConfigError, match=words):
        MultiStepDraft(c, pools).init_cuda_graph_state(300, 2400)
    assert FAMILIES["triton"].shares_tables


def test_sizes_that_were_not_captured_and_positions_of_too_few_branches_are_refused():
    own = replayer(FUSED, config(topk=2))
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(NotCapturedError, match="batch size 2 was not captured"):
        own.backend.init_forward_metadata_out_graph(replace(batch, batch_size=2))
    with pytest.raises(ConfigError, match="positions has 3 entries, 3 requests of 2 branches need 6"):
        own.backend.init_forward_metadata_out_graph(replace(batch, positions=batch.positions[:3]), in_capture=True)
    with pytest.raises(ConfigError, match="batch size 9 exceeds the buffers' 3 rows"):
        own.backend.init_forward_metadata_out_graph(replace(batch, batch_size=9), in_capture=True)
    with pytest.raises(ConfigError, match="use multi_step_draft"):
        own.backend.children[0].bind(batch)
