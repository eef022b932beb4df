"""One batch whole and in halves: three backends that must agree about which rows are whose."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, fields, make_dataclass, replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionBackend, AttentionConfig, ConfigError, NotCapturedError
from attn_graph.backends.batch import (
    BatchShape,
    ForwardBatch,
    SpecInfo,
    batch_sequence,
    idle_batch,
    live_batch,
    make_pools,
)
from attn_graph.backends.modes import ForwardMode, Placement
from attn_graph.backends.oracle import HostBatch
from attn_graph.backends.registry import lookup, registered
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.backends.wrappers.forwarding import Forwarding, forwards_hooks, hooks
from attn_graph.backends.wrappers.tbo import BATCH_RULES, HOST_RULES, SPEC_RULES, TwoBatchOverlap, halves_of, split
from attn_graph.profilers.conformance.faults.tbo import HalvesForgottenAtCapture, HalvesNotRecorded
from attn_graph.profilers.counters import count
from golden_replays import DEVICE, Golden, cases
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
N, CONTEXT = 4, 100


@dataclass(frozen=True)
class Kind:
    inner: str
    mode: Mode
    topk: int = 1
    swa: bool = False

    @property
    def tokens(self) -> int:
        return 1 if self.mode is Mode.DECODE else N

    @property
    def config(self) -> AttentionConfig:
        spec = {} if self.mode is Mode.DECODE else {"draft_tokens": N, "topk": self.topk, "draft_steps": 3}
        page_size = 1 if self.topk > 1 and self.swa else 16
        return AttentionConfig(page_size, CONTEXT, extra={"inner": self.inner}, **spec)

    def pools(self):
        c = self.config
        return make_pools(rows=13, width=CONTEXT + 8, page_size=c.page_size, swa=self.swa, seed=0, device=DEVICE)

    def replayer(self, arm, bucket=4, cls=TwoBatchOverlap, pools=None, **kwargs) -> Replayer:
        recorded = arm.placement is not Placement.EAGER
        own = cls(self.config, pools or self.pools(), arm.implementation, recorded=recorded)
        mask_context = CONTEXT if self.topk > 1 else 0
        return Replayer.capture(
            own, self.mode, bucket, arm.placement, tokens_per_req=self.tokens, mask_context=mask_context, **kwargs
        )

    def live(self, lengths, pools):
        return live_batch(
            self.mode, lengths, range(1, len(lengths) + 1), pools, self.tokens, np.random.default_rng(0), topk=self.topk
        )

    def batches(self, bucket, pools):
        reserve = 0 if self.mode is Mode.DECODE else N
        shape = BatchShape(self.mode, bucket, 16, CONTEXT, self.tokens, reserve, topk=self.topk)
        yield from batch_sequence(shape, pools, seed=1)
        for live in range(1, bucket):  # the second half all padding, then partly
            yield self.live([30 + live] * live, pools)


KINDS = {
    "decode": Kind("trtllm_mha", Mode.DECODE, swa=True),
    "verify": Kind("trtllm_mha", Mode.TARGET_VERIFY, swa=True),
    "index lists": Kind("triton", Mode.DECODE),
    "index lists and masks": Kind("triton", Mode.TARGET_VERIFY, topk=3),
    "cascades": Kind("flashattention", Mode.TARGET_VERIFY, topk=3),
}


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_arm_writes_what_the_oracle_says_of_the_whole_and_of_both_halves(kind, arm):
    own = kind.replayer(arm)
    assert [d for d in replayed(own, kind.batches(4, own.backend.pools)) if d] == []
    assert own.backend.metadata[kind.mode, 4].keys() == {"primary", "child0", "child1"}


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("bucket", [1, 3])
@pytest.mark.parametrize("name", ["decode", "index lists and masks"])
def test_odd_sizes_leave_the_larger_half_last_and_one_request_has_no_first_half(name, bucket, arm):
    own = KINDS[name].replayer(arm, bucket)
    assert [d for d in replayed(own, KINDS[name].batches(bucket, own.backend.pools)) if d] == []
    children = own.backend.metadata[KINDS[name].mode, bucket].keys()
    assert children == {"primary", "child1"} | ({"child0"} if bucket > 1 else set())


def test_halves_cover_the_batch_without_overlap_whatever_its_size():
    for size in range(1, 10):
        halves = halves_of(size, size * N)
        rows = [r for half in halves for r in range(half.first, half.last)]
        assert rows == list(range(size)) and all(half.queries == N for half in halves)
        assert [half.index for half in halves] == ([1] if size == 1 else [0, 1])
        for live in range(size + 1):
            assert sum(half.live(live) for half in halves) == live


def test_sizes_that_share_a_half_keep_their_graphs():
    """8 splits into 4 and 4, 9 into 4 and 5: the second capture of a half of 4 must not disturb the first."""
    kind = KINDS["decode"]
    for arm in ARMS:
        own = kind.replayer(arm, bucket=8, max_bs=9)
        for size in (8, 9, 7, 9, 8):
            assert own.differences(kind.live([90 - size] * size, own.backend.pools), size) == []


# What the split costs, and what a fused rebuild launches.


def split_alone(own: Replayer):
    """Counts of the wrapper's own work."""
    for child in own.backend.children:
        child.init_forward_metadata_out_graph = lambda fb, in_capture=False: None
    return count(own.runner.rebuild, [own.runner.slots.seq_lens_cpu])


@pytest.mark.parametrize(
    ("name", "bucket", "wanted"),
    [
        ("decode", 1, (7, 5, 1)),
        ("decode", 2, (14, 10, 2)),
        ("decode", 8, (14, 10, 2)),
        ("verify", 2, (20, 16, 2)),
        ("index lists and masks", 2, (38 - 8, 18 + 2, 4)),
        ("index lists and masks", 5, (46 - 8, 18 + 4, 6)),
        ("index lists and masks", 8, (62 - 8, 18 + 8, 10)),
    ],
)
def test_a_split_costs_views_and_work_on_the_host_only(name, bucket, wanted):
    kind = KINDS[name]
    own = kind.replayer(ARMS[0], bucket)
    own.load(kind.live([40] * bucket, own.backend.pools))
    counts = split_alone(own)
    assert (counts.dispatches, counts.views, counts.syncs) == wanted and counts.launches == 0
    if kind.topk == 1 and bucket > 1:
        assert lookup("tbo", "wrapper").dispatches[str(kind.mode)] == (wanted[0], wanted[0])


@pytest.mark.parametrize("name", KINDS)
def test_a_fused_rebuild_is_a_launch_for_each_set_and_one_for_what_halves_do_not_see(name):
    kind = KINDS[name]
    eager, graph = kind.replayer(ARMS[2]), kind.replayer(ARMS[3])
    live = kind.live([40, 50, 60], eager.backend.pools)
    assert eager.counts(live).launches == eager.backend.allowances.fused_launches == 4
    counts = graph.counts(live)
    assert (counts.dispatches, counts.launches) == (0, 0)
    assert graph.runner.graphs[4].nodes in (4, None)  # a CUDA graph does not tell


def test_a_backend_without_graph_support_gets_no_halves(monkeypatch):
    monkeypatch.setattr(TrtllmMhaBackend, "tbo_supports_cuda_graph", False, raising=False)
    own = KINDS["decode"].replayer(ARMS[3])
    assert own.backend.children == (own.backend.primary,) and own.backend.allowances.fused_launches == 1
    assert own.differences(KINDS["decode"].live([33, 64], own.backend.pools)) == []
    assert own.backend.metadata[Mode.DECODE, 4].keys() == {"primary"}


# Rows of the field's regressions.


def test_after_capture_each_of_the_three_has_its_own_size_and_an_unknown_size_is_named():
    own = KINDS["decode"].replayer(ARMS[2])
    backend, view = own.backend, own.runner.capture_batch(4)
    sizes = [[b for _, b in child.metadata] for child in backend.children]
    assert sizes == [[4], [2], [2]]
    backend.init_forward_metadata_out_graph(view)
    with pytest.raises(NotCapturedError, match="batch size 5 was not captured for mode decode; captured sizes: 4"):
        backend.init_forward_metadata_out_graph(replace(view, batch_size=5))


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_an_idle_rank_writes_to_the_reserved_page_only(arm):
    kind = KINDS["decode"]
    own = kind.replayer(arm)
    own.differences(kind.live([40, 50, 60, 70], own.backend.pools))
    assert own.differences(idle_batch()) == []
    for part in own.backend.forward_metadata.values():
        assert not part.page_table[:, 0].any() and not part.swa_out_cache_loc.any()


def test_write_slots_of_live_requests_alone_leave_the_second_half_padding():
    kind = KINDS["verify"]
    for arm in ARMS:
        own = kind.replayer(arm)
        live = kind.live([40], own.backend.pools)
        assert own.differences(live) == []
        halves = own.backend.forward_metadata
        assert halves["child0"].swa_out_cache_loc.shape == halves["child1"].swa_out_cache_loc.shape == (2 * N,)
        assert not halves["child1"].swa_out_cache_loc.any() and not halves["child0"].swa_out_cache_loc[N:].any()


def test_halves_see_views_of_what_the_whole_batch_sees():
    own = KINDS["index lists and masks"].replayer(ARMS[0])
    batch = own.runner.capture_batch(4)
    primary, first, second = (part.seen for part in own.backend.parts(batch))
    assert primary is batch
    for half, at in ((first, 0), (second, 2)):
        assert half.seq_lens.data_ptr() == batch.seq_lens[at:].data_ptr()
        assert half.req_pool_indices.data_ptr() == batch.req_pool_indices[at:].data_ptr()
        assert half.positions.data_ptr() == batch.positions[at * N :].data_ptr()
        assert (half.batch_size, half.seq_lens_sum, half.forward_mode) == (2, 2, Mode.TARGET_VERIFY)


# Hooks.


def spies(own: TwoBatchOverlap) -> Counter:
    seen: Counter = Counter()
    for name, child in (("primary", own.primary), *((f"halves.{i}", half) for i, half in enumerate(own.halves))):
        for hook in hooks():

            def spy(*args, name=name, hook=hook, **kwargs):
                seen[name, hook, kwargs.get("in_capture")] += 1
                order.append(name)

            setattr(child, hook, spy)
    order: list[str] = []
    own.order = order
    return seen


@pytest.mark.parametrize("bucket", [1, 4])
def test_every_hook_of_the_contract_reaches_the_whole_first_and_then_each_half_that_has_requests(bucket):
    own = KINDS["decode"].replayer(ARMS[2], bucket)
    batch, backend = own.runner.capture_batch(bucket), own.backend
    for name in hooks():
        seen = spies(backend)
        takes = tuple(inspect.signature(getattr(AttentionBackend, name)).parameters)[1:]
        args = {(): (), ("max_bs", "max_num_tokens"): (bucket, bucket)}.get(takes, (batch,))
        getattr(backend, name)(*args)
        if name == "init_forward_metadata":
            continue
        wanted = dict.fromkeys(["primary", "halves.0", "halves.1"], 1) if not args else backend.forwarding(batch, name)
        if name == "init_cuda_graph_state":
            wanted = dict.fromkeys(["primary", "halves.0", "halves.1"], 1)
        assert {child: n for (child, _, _), n in seen.items()} == wanted
        assert backend.order[0] == "primary"
    seen = spies(backend)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert {key[1:] for key in seen} == {("init_forward_metadata_out_graph", True)}


def test_a_hook_added_to_the_contract_later_is_forwarded_without_anybody_writing_it(monkeypatch):
    monkeypatch.setattr(AttentionBackend, "on_tomorrow", lambda self, fb: None, raising=False)

    @forwards_hooks
    class Tomorrow(Forwarding):
        """The base as it will be made then."""

    own = KINDS["decode"].replayer(ARMS[2])
    seen = spies(own.backend)
    Tomorrow.on_tomorrow(own.backend, own.runner.capture_batch(4))
    assert seen == {(child, "on_tomorrow", None): 1 for child in ("primary", "halves.0", "halves.1")}


# Faults.


class MaskFromTheStart(TwoBatchOverlap):
    """The second half's mask taken from the first half's beginning."""

    def half_of_mask(self, fb, half):
        return fb.spec_info.custom_mask


def test_halves_forgotten_at_capture_are_named_by_their_size_at_the_first_replay():
    own = KINDS["decode"].replayer(ARMS[0], cls=HalvesForgottenAtCapture)
    own.load(KINDS["decode"].live([40, 50, 60, 70], own.backend.pools))
    with pytest.raises(NotCapturedError, match="batch size 2 was not captured for mode decode"):
        own.runner.rebuild()


@pytest.mark.parametrize(
    ("fault", "name", "arm", "child"),
    [
        (HalvesNotRecorded, "decode", ARMS[3], "child"),
        (MaskFromTheStart, "index lists and masks", ARMS[0], "child"),
        (MaskFromTheStart, "index lists and masks", ARMS[3], "child1"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, name, arm, child):
    kind = KINDS[name]
    own = kind.replayer(arm, cls=fault)
    found = [d for ds in replayed(own, kind.batches(4, own.backend.pools)) for d in ds]
    assert found and all(d.startswith(child) for d in found)


# What cannot be split.


def test_every_field_of_a_batch_has_a_rule_and_one_without_is_refused():
    for kind, rules in ((ForwardBatch, BATCH_RULES), (SpecInfo, SPEC_RULES), (HostBatch, HOST_RULES)):
        assert {f.name for f in fields(kind)} == rules.keys()
    later = make_dataclass("Later", [("seq_lens", object), ("invented", object, None)])
    half = halves_of(2, 2)[0]
    assert split(later(torch.ones(2)), BATCH_RULES, half)["seq_lens"].shape == (1,)
    with pytest.raises(ConfigError, match=r"no rule for splitting Later\.invented"):
        split(later(torch.ones(2), torch.ones(2)), BATCH_RULES, half)


def test_batches_that_cannot_be_split_are_refused():
    own = KINDS["verify"].replayer(ARMS[0])
    batch = own.runner.capture_batch(4)
    spec = replace(batch.spec_info, kv_indptr=torch.zeros(5))
    for wrong in ({"encoder_lens": torch.ones(4)}, {"spec_info": spec}):
        with pytest.raises(ConfigError, match="cannot split encoder_lens or kv index lists"):
            own.backend.init_forward_metadata_out_graph(replace(batch, **wrong), in_capture=True)
    masked = KINDS["index lists and masks"].replayer(ARMS[0])
    masked.load(KINDS["index lists and masks"].live([40, 50, 60], masked.backend.pools))
    with pytest.raises(ConfigError, match=r"seq_lens_cpu is None: .* tree mask"):
        masked.backend.init_forward_metadata_out_graph(replace(masked.runner.view, seq_lens_cpu=None))
    with pytest.raises(ConfigError, match="has no mode draft_extend"):
        extend = replace(batch, forward_mode=Mode.DRAFT_EXTEND)
        own.backend.init_forward_metadata_out_graph(extend, in_capture=True)


# Recorded cases.


def inner_of(stem: str) -> str:
    """``r15_trtllm_mha_decode`` -> ``trtllm_mha``."""
    names = [name for name, info in registered().items() if info.kind == "backend" and f"_{name}_" in f"{stem}_"]
    return max(names, key=len)


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("path", cases("tbo"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    c = golden.config
    for replay in golden.replays(TwoBatchOverlap, arm, inner=inner_of(path.stem), **golden.split_options()):
        fields_ = [name for name in replay.expected if name in replay.golden]
        first = {"child0"} if c["B"] > 1 else set()
        assert {name.split(".")[0] for name in fields_} == {"primary", "child1"} | first
        for name in fields_:
            flat = replay.golden[name].ndim == 1
            assert (replay.flat_differences(name) if flat else replay.differences(name)) == []
