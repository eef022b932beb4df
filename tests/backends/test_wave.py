"""Wave: the Triton backend's lists and splits at 32 bits, verify masks, and lists that the engine brings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError, tensors_of
from attn_graph.backends.batch import (
    BatchShape,
    ForwardBatch,
    SpecInfo,
    batch_sequence,
    live_batch,
    make_pools,
    with_unassigned_slots,
)
from attn_graph.backends.modes import ForwardMode
from attn_graph.backends.oracle import HostBatch
from attn_graph.backends.registry import lookup
from attn_graph.backends.wave import WaveBackend, WaveGivenLists
from attn_graph.profilers.conformance.faults.wave import (
    FullWidthSplits,
    PrefixPlusDrafts,
)
from attn_graph.profilers.counters import count
from attn_graph.profilers.graphs import GraphFactory
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, host_pools, replayed

Mode = ForwardMode
MODES = sorted(WaveBackend.modes)
BUCKET, N, CONTEXT = 4, 2, 120
ATEN, ATEN_GRAPH, FUSED, FUSED_GRAPH = ARMS
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def config(mode=Mode.DECODE, topk=1, context=CONTEXT, **extra) -> AttentionConfig:
    spec = {} if mode is Mode.DECODE else {"draft_tokens": N, "topk": topk, "draft_steps": 2}
    return AttentionConfig(page_size=16, max_context=context, extra=extra, **spec)


def pools_for(c: AttentionConfig, swa=False):
    return make_pools(rows=9, width=c.max_context + 8, page_size=16, swa=swa, seed=0, device=DEVICE)


def tokens_of(mode) -> int:
    return N if mode is Mode.TARGET_VERIFY else 1


def replayer(mode, arm, c=None, pools=None, lens=torch.int64, cls=WaveBackend, bucket=BUCKET) -> Replayer:
    c = c or config(mode)
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement.value != "eager")
    return Replayer.capture(
        backend, mode, bucket, arm.placement, tokens_per_req=tokens_of(mode), lens=lens,
        mask_context=c.max_context if c.topk > 1 else 0,
    )  # fmt: skip


def found(own: Replayer, mode) -> list[str]:
    c = own.backend.config
    reserve = N if mode is Mode.TARGET_VERIFY else 0
    shape = BatchShape(mode, BUCKET, c.page_size, c.max_context, tokens_of(mode), reserve, topk=c.topk)
    return [line for lines in replayed(own, batch_sequence(shape, own.backend.pools, 1)) for line in lines]


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize(("mode", "topk"), [(Mode.DECODE, 0), (Mode.TARGET_VERIFY, 1), (Mode.TARGET_VERIFY, 3)])
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, topk, arm):
    c = config(mode, topk)
    assert found(replayer(mode, arm, c, with_unassigned_slots(pools_for(c), 3)), mode) == []


def test_lists_and_query_offsets_have_32_bits_mask_offsets_64_and_windows_do_not_exist():
    own = replayer(Mode.TARGET_VERIFY, FUSED, config(Mode.TARGET_VERIFY, 2), pools_for(config(), swa=True))
    md = own.backend.forward_metadata
    assert {name: t.dtype for name, t in tensors_of(md).items()} == {
        "kv_indptr": torch.int32, "kv_indices": torch.int32, "qo_indptr": torch.int32, "mask_indptr": torch.int64,
        "custom_mask": torch.uint8,
    }  # fmt: skip
    assert md.kv_indices.shape == (BUCKET * CONTEXT,) and found(own, Mode.TARGET_VERIFY) == []


TABLE = [
    (Mode.DECODE, 1, {}, (9, 7, 0, 2)),
    (Mode.DECODE, 1, {"static_kv_splits": True}, (10, 7, 0, 1)),
    (Mode.TARGET_VERIFY, 1, {}, (13, 5, 0, 1)),
    (Mode.TARGET_VERIFY, 3, {}, (15, 6, 0, 1)),
]


@pytest.mark.parametrize(("mode", "topk", "extra", "wanted"), TABLE)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode, topk, extra, wanted):
    c = config(mode, topk, **extra)
    pools = pools_for(c)
    live = live_batch(mode, [33, 64], [2, 3], pools, tokens_of(mode), np.random.default_rng(0), topk=topk)
    for lens in (torch.int32, torch.int64):
        own = replayer(mode, ATEN, c, pools, lens).counts(live)
        assert (own.dispatches, own.views, own.syncs, own.triton) == wanted
    eager, graph = replayer(mode, FUSED, c, pools), replayer(mode, FUSED_GRAPH, c, pools)
    assert (eager.counts(live).dispatches, eager.counts(live).launches) == (0, 1)
    assert (graph.counts(live).dispatches, graph.counts(live).launches, graph.runner.graphs[BUCKET].nodes) == (0, 0, 1)
    if topk == 1 and not extra:
        assert lookup("wave").dispatches[str(mode)][0] == wanted[0]


@pytest.mark.parametrize("path", cases("wave"), ids=lambda p: p.stem)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    c = golden.config
    extra = golden.split_options()
    for replay in golden.replays(WaveBackend, arm, **extra):
        compared = [name for name in replay.expected if name in replay.golden]
        assert {"kv_indptr", "kv_indices"} <= set(compared)
        assert [line for name in compared for line in replay.flat_differences(name)] == []
    if arm is ATEN and c["release"].startswith("0.5.13"):
        own = golden.captured(WaveBackend, arm, max_bs=c["max_bs"], **extra)
        for i in range(c["replays"]):
            got, wanted = own.counts(golden.live(i)), golden.host(i)["dispatches_out_graph"]
            assert (got.dispatches, got.views, got.syncs, got.triton) == tuple(
                wanted[key] for key in ("aten", "view", "sync", "triton")
            )


class UpstreamMaskBuffer(WaveBackend):
    """max_bs * max_context cells: a mask has one row for each draft token, and draft tokens see each other."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.custom_mask = self.custom_mask[: max_bs * self.config.max_context]


def test_a_mask_of_full_contexts_fits_ours_and_not_upstreams_buffer():
    c = config(Mode.TARGET_VERIFY, topk=2)
    pools = pools_for(c)
    live = live_batch(
        Mode.TARGET_VERIFY, [CONTEXT] * BUCKET, [1, 2, 3, 4], pools, N, np.random.default_rng(0), topk=2
    )  # fmt: skip
    assert replayer(Mode.TARGET_VERIFY, FUSED, c, pools).differences(live) == []
    with pytest.raises(ConfigError, match=r"custom_mask has 976 cells, its buffer holds 480"):
        replayer(Mode.TARGET_VERIFY, FUSED, c, pools, cls=UpstreamMaskBuffer)


@pytest.mark.parametrize(
    ("fault", "mode", "field"),
    [(PrefixPlusDrafts, Mode.TARGET_VERIFY, "kv_indptr"), (FullWidthSplits, Mode.DECODE, "num_kv_splits")],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, field):
    assert any(line.startswith(field) for line in found(replayer(mode, ATEN, cls=fault), mode))


@pytest.mark.parametrize("mode", [m for m in Mode if m.captured is m and m not in MODES], ids=str)
def test_other_modes_are_refused_at_capture(mode):
    own = replayer(Mode.TARGET_VERIFY, FUSED)
    batch = replace(own.runner.capture_batch(BUCKET), forward_mode=mode)
    with pytest.raises(ConfigError, match=f"has no mode {mode}"):
        own.backend.init_forward_metadata_out_graph(batch, in_capture=True)


# Lists that the engine brings.


class Given:
    """A captured WaveGivenLists and the engine's static lists, which a recorded rebuild reads whole."""

    def __init__(self, arm, cls=WaveGivenLists, topk=2):
        c = AttentionConfig(page_size=16, max_context=CONTEXT, draft_tokens=N, topk=topk, draft_steps=2)
        self.topk, self.rng = topk, np.random.default_rng(0)
        self.backend = cls(c, pools_for(c), arm.implementation, recorded=arm.placement.value != "eager")
        self.backend.init_cuda_graph_state(BUCKET, BUCKET * topk)
        self.indptr = torch.arange(BUCKET * topk + 1, dtype=torch.int32, device=DEVICE)
        self.indices = torch.zeros(BUCKET * topk * CONTEXT, dtype=torch.int64, device=DEVICE)
        self.batch = ForwardBatch(
            forward_mode=Mode.DRAFT_DECODE,
            batch_size=BUCKET,
            req_pool_indices=torch.zeros(BUCKET, dtype=torch.int64, device=DEVICE),
            seq_lens=torch.ones(BUCKET, dtype=torch.int64, device=DEVICE),
            spec_info=SpecInfo(kv_indptr=self.indptr, kv_indices=self.indices),
        )
        self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.graph = GraphFactory(DEVICE)()
        self.graph.capture(lambda: self.backend.init_forward_metadata_in_graph(self.batch))
        self.bound = tensors_of(self.backend.metadata[Mode.DRAFT_DECODE, BUCKET])

    def live(self, lengths) -> ForwardBatch:
        """Fill the static lists; the batch of this step, with lists of its own length."""
        ends = np.cumsum(np.repeat(np.array(lengths) + 1, self.topk))
        self.indptr[1:] = torch.from_numpy(ends.astype(np.int32))
        self.indices[: ends[-1]] = torch.from_numpy(self.rng.integers(0, 1000, ends[-1]))
        self.batch.seq_lens.copy_(torch.tensor(lengths))
        spec = SpecInfo(kv_indptr=self.indptr.clone(), kv_indices=self.indices[: ends[-1]].clone())
        return replace(self.batch, spec_info=spec)

    def differences(self, lengths) -> list[str]:
        """Poison, replay, compare; the names of the fields that are not as the oracle says."""
        live = self.live(lengths)
        host = HostBatch(
            "draft_decode", np.zeros(BUCKET), np.array(lengths), np.zeros(0), 1,
            kv_indptr=live.spec_info.kv_indptr.cpu().numpy(), kv_indices=live.spec_info.kv_indices.cpu().numpy(),
        )  # fmt: skip
        words = self.backend.expected(host, host_pools(self.backend.pools))
        for name, want in words.items():
            self.bound[name].fill_(-7)
            assert self.bound[name].shape == want.values.shape
        self.backend.init_forward_metadata_out_graph(live)
        synchronise()
        self.graph.launch()
        synchronise()
        left = {name: np.where(want.written, want.values, -7) for name, want in words.items()}
        return [name for name, cells in left.items() if not np.array_equal(self.bound[name].cpu().numpy(), cells)]


def synchronise() -> None:
    """The graph has a stream of its own."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


LENGTHS = ([1, 1, 1, 1], [5, 90, 1, 119], [CONTEXT - 1] * 4, [2, 1, 3, 1])


@pytest.mark.parametrize("arm", [ATEN, FUSED, FUSED_GRAPH], ids=str)
@pytest.mark.parametrize("topk", [1, 2])
def test_given_lists_are_copied_as_far_as_they_go_with_splits_for_every_branch(arm, topk):
    given = Given(arm, topk=topk)
    assert [given.differences(lengths) for lengths in LENGTHS] == [[]] * len(LENGTHS)


def test_the_recorded_classic_chain_copies_the_whole_static_list():
    given = Given(ATEN_GRAPH)
    assert [set(given.differences(lengths)) <= {"kv_indices"} for lengths in LENGTHS] == [True] * len(LENGTHS)
    torch.testing.assert_close(given.bound["kv_indices"][: len(given.indices)], given.indices.to(torch.int32))


def test_given_lists_cost_the_tables_six_dispatches_or_one_launch():
    for arm, wanted in ((ATEN, (6, 4, 0, 1)), (FUSED, (0, 0, 0, 1))):
        given = Given(arm)
        live = given.live([5, 6, 7, 8])
        got = count(lambda given=given, live=live: given.backend.init_forward_metadata_out_graph(live))
        assert (got.dispatches, got.views, got.syncs, got.triton) == wanted


class BoundToTheEngines(WaveGivenLists):
    """Upstream: the captured graph reads the engine's tensors of that moment, replay refreshes others."""

    def bind(self, fb):
        md = super().bind(fb)
        md.kv_indptr, md.kv_indices = fb.spec_info.kv_indptr.clone(), torch.zeros_like(self.kv_indices)
        return md

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, replace(md, kv_indptr=self.kv_indptr, kv_indices=self.kv_indices))


def test_lists_bound_at_capture_and_refreshed_elsewhere_are_caught():
    assert {"kv_indptr", "kv_indices"} <= set(Given(FUSED, BoundToTheEngines).differences([5, 6, 7, 8]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_indptr": None}, "needs the kv_indptr and kv_indices"),
        ({"kv_indptr": torch.zeros(20, dtype=torch.int32)}, r"19 branches and 960 entries do not fit kv_indptr \(8\)"),
        ({"kv_indptr": torch.zeros(8, dtype=torch.int32)}, "7 branches, not a multiple of the 4 requests"),
    ],
)
def test_lists_that_do_not_fit_are_refused(change, words):
    given = Given(FUSED)
    batch = replace(given.batch, spec_info=replace(given.batch.spec_info, **change))
    with pytest.raises(ConfigError, match=words):
        given.backend.init_forward_metadata_out_graph(batch)
