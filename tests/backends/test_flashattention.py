"""Page tables as everywhere; what is its own: cascades over draft trees, local chunks, an encoder in front."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import (
    BatchShape,
    LiveBatch,
    batch_sequence,
    draft_room,
    live_batch,
    make_pools,
    with_unassigned_slots,
)
from attn_graph.backends.flashattention import FlashAttentionBackend
from attn_graph.backends.modes import ForwardMode, Implementation, Placement, TailPolicy
from attn_graph.backends.oracle import flashattention as oracle
from attn_graph.backends.registry import lookup
from attn_graph.profilers.conformance.faults.flashattention import (
    AcceptedQueries,
    ChunkOfTheBatch,
    ConsecutivePages,
    MaskLimitOfCapture,
    OneColumnView,
    PrefixOnly,
    StepsOutermost,
    TokenMapOnPages,
    UnsharedPrefix,
    cut_chunk,
)
from golden_replays import DEVICE, Golden, cases
from rebuilds import ARMS, Replayer, host_pools, replayed

Mode = ForwardMode
BUCKET, N, K, S = 4, 4, 2, 3


@dataclass(frozen=True)
class Kind:
    """A configuration, and what its classic rebuild dispatches with int32 lengths: (ATen, launches of its own)."""

    mode: Mode
    page_size: int
    counts: tuple[int, int]
    topk: int = 1
    swa: bool = False
    window: int | None = None
    extra: dict = field(default_factory=dict)
    step_id: int = 1
    max_context: int = 100

    @property
    def tree(self) -> bool:
        return self.topk > 1

    @property
    def drafts(self) -> bool:
        return self.mode is Mode.DRAFT_DECODE

    @property
    def steps_at_once(self) -> int:
        return S if self.tree and self.drafts else 0

    @property
    def tokens(self) -> int:
        return {Mode.DECODE: 1, Mode.DRAFT_DECODE: self.topk}.get(self.mode, N)

    @property
    def config(self) -> AttentionConfig:
        spec = {} if self.mode is Mode.DECODE else {"draft_tokens": N, "topk": self.topk, "draft_steps": S}
        step = self.step_id if self.drafts else 0
        return AttentionConfig(
            self.page_size, self.max_context, window=self.window, step_id=step, extra=self.extra, **spec
        )

    def pools(self, seed=0):
        room = draft_room(self.topk, S, self.page_size) if self.tree and self.drafts else N
        width = self.max_context + max(room, N) + 4 + self.extra.get("encoder_tokens", 0)
        return make_pools(rows=13, width=width, page_size=self.page_size, swa=self.swa, seed=seed, device=DEVICE)

    def batches(self, pools):
        extend = self.mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
        reserve = 0 if extend or self.mode is Mode.DECODE else N
        shape = BatchShape(
            self.mode, BUCKET, self.page_size, self.max_context, self.tokens, reserve, N if extend else 1,
            self.topk, self.steps_at_once,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        for live in batch_sequence(shape, pools, seed=1):
            longest = self.extra.get("encoder_tokens", 0)
            yield replace(live, encoder_lens=rng.integers(0, longest + 1, live.batch_size).astype(np.int32))

    def live(self, lengths, rows, pools, seed=0) -> LiveBatch:
        rng = np.random.default_rng(seed)
        return live_batch(
            self.mode, lengths, rows, pools, self.tokens, rng,
            topk=self.topk, draft_steps=self.steps_at_once, page_size=self.page_size,
        )  # fmt: skip

    def replayer(self, arm, pools=None, cls=FlashAttentionBackend, **kwargs) -> Replayer:
        recorded = arm.placement is not Placement.EAGER
        backend = cls(self.config, pools or self.pools(), arm.implementation, recorded=recorded)
        options = {
            "tokens_per_req": self.tokens,
            "mask_context": self.max_context if self.tree else 0,
            "slots_per_token": self.steps_at_once or 1,
            "encoder_fill": 7 if "encoder_tokens" in self.extra else None,
        }
        return Replayer.capture(backend, self.mode, BUCKET, arm.placement, **options | kwargs)


LOCAL, ENCODER = {"local_chunk": 48}, {"encoder_tokens": 24}
KINDS = {
    "decode": Kind(Mode.DECODE, 16, (7, 1)),
    "decode of single tokens": Kind(Mode.DECODE, 1, (5, 1)),
    "decode, window": Kind(Mode.DECODE, 16, (10, 1), swa=True),
    "decode, local": Kind(Mode.DECODE, 16, (35, 1), extra=LOCAL),
    "decode of single tokens, local": Kind(Mode.DECODE, 1, (33, 1), extra=LOCAL),
    "decode, local, window": Kind(Mode.DECODE, 16, (38, 1), swa=True, extra=LOCAL),
    "decode, encoder": Kind(Mode.DECODE, 1, (29, 1), extra=ENCODER),
    "draft": Kind(Mode.DRAFT_DECODE, 16, (7, 1)),
    "draft of a tree": Kind(Mode.DRAFT_DECODE, 16, (35, 0), K),
    "draft of a tree of single tokens": Kind(Mode.DRAFT_DECODE, 1, (17, 0), K),
    "verify": Kind(Mode.TARGET_VERIFY, 16, (16, 0)),
    "verify, window": Kind(Mode.TARGET_VERIFY, 16, (25, 0), swa=True),
    "verify of a tree": Kind(Mode.TARGET_VERIFY, 16, (56, 0), K),
    "verify of a tree, window": Kind(Mode.TARGET_VERIFY, 1, (65, 1), K, window=32),
    "verify of a tree, window and pool": Kind(Mode.TARGET_VERIFY, 1, (74, 1), K, window=32, swa=True),
    "extend": Kind(Mode.DRAFT_EXTEND, 16, (19, 0)),
    "extend, fixed width": Kind(Mode.DRAFT_EXTEND_V2, 16, (18, 0)),
    "extend, fixed width, window": Kind(Mode.DRAFT_EXTEND_V2, 16, (27, 0), swa=True),
}


@pytest.fixture(params=KINDS, ids=str)
def kind(request) -> Kind:
    return KINDS[request.param]


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(kind, arm):
    pools = with_unassigned_slots(kind.pools(), seed=2)
    own = kind.replayer(arm, pools)
    assert [d for d in replayed(own, kind.batches(pools)) if d] == []


def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(kind):
    pools = kind.pools()
    live = kind.live([33, 64], [2, 3], pools)
    classic = kind.replayer(ARMS[0], pools, lens=torch.int32, max_bs=BUCKET + 1).counts(live)
    dispatches, launches = kind.counts
    # Lengths to the host, indices and results back: a CPU has no such copies.
    round_trips = 6 if kind.extra == LOCAL and DEVICE == "cuda" else 0
    assert (classic.dispatches, classic.triton) == (dispatches + round_trips, launches)
    reads_device = kind.extra in (LOCAL, ENCODER)
    assert classic.syncs == (2 if reads_device else 1)
    eager, graph = kind.replayer(ARMS[2], pools), kind.replayer(ARMS[3], pools)
    eager_counts, graph_counts = eager.counts(live), graph.counts(live)
    assert (eager_counts.dispatches, eager_counts.launches) == (0, 1)
    assert (graph_counts.dispatches, graph_counts.launches) == (0, 0)
    assert graph.runner.graphs[BUCKET].nodes in (1, None)  # a CUDA graph does not tell


def test_the_registry_says_what_is_counted():
    table = lookup("flashattention").dispatches
    for name, swa in (("decode", 1), ("verify", 1), ("extend, fixed width", 1), ("draft", 0), ("extend", 0)):
        kind = KINDS[name]
        assert table[str(kind.mode)][0] == kind.counts[0]
        if swa:
            assert table[str(kind.mode)][1] == KINDS[f"{name}, window"].counts[0]


def test_extends_of_unset_widths_take_the_captured_one():
    kind = KINDS["extend, fixed width"]
    for arm in (ARMS[0], ARMS[2]):
        own = kind.replayer(arm, lens=torch.int32, max_bs=BUCKET + 1)
        own.load(kind.live([33, 64], [2, 3], own.backend.pools))
        view = own.runner.view
        blind = replace(view, spec_info=replace(view.spec_info, extend_seq_lens=None))
        backend = own.backend
        with own.stream():
            backend.init_forward_metadata_out_graph(blind, in_capture=True)
            md = backend.forward_metadata
            md.cu_seqlens_q[1:].fill_(-7)
            backend.init_forward_metadata_out_graph(blind)
        assert md.cu_seqlens_q.tolist() == [0, 4, 8, 12, 16]


def test_a_table_row_keeps_to_itself_at_every_page_size():
    for page_size in (1, 8, 24, 64):
        kind = replace(KINDS["verify"], page_size=page_size)
        for arm in (ARMS[0], ARMS[2]):
            pools = kind.pools()
            own = kind.replayer(arm, pools)
            assert own.differences(kind.live([96, 95, 1, 64], [2, 3, 4, 5], pools)) == []


# Trees by hand.


def tree_of_two(page_size, step_id, slots, length, steps) -> tuple[Replayer, LiveBatch]:
    config = AttentionConfig(page_size, 32, draft_tokens=N, topk=2, draft_steps=steps, step_id=step_id)
    pools = make_pools(rows=4, width=120, page_size=page_size, swa=False, seed=0, device=DEVICE)
    rows = len(slots) // (2 * steps)
    live = LiveBatch(
        Mode.DRAFT_DECODE, np.arange(1, rows + 1), np.full(rows, length), np.array(slots), np.full(2 * rows, length)
    )
    own = Replayer.capture(
        FlashAttentionBackend(config, pools), Mode.DRAFT_DECODE, rows, Placement.GRAPH,
        tokens_per_req=2, slots_per_token=steps,
    )  # fmt: skip
    return own, live


def test_a_branch_reads_the_pages_of_its_own_slots_however_far_apart():
    own, live = tree_of_two(8, 4, [14, 15, 40, 41, 42, 22, 23, 64, 65, 66], length=14, steps=5)
    assert own.differences(live) == []
    md = own.backend.forward_metadata
    assert md.expand.page_table[:, :2].tolist() == [[1, 5], [2, 8]]
    assert md.expand.cache_seqlens_int32.tolist() == [11, 11]  # six slots of the shared page, five of its own
    assert md.cache_seqlens_int32.tolist() == [8]


def test_slots_of_a_branch_are_consecutive_in_the_flat_list():
    own, live = tree_of_two(1, 2, list(range(100, 112)), length=5, steps=3)
    assert own.differences(live) == []
    rows = own.backend.forward_metadata.expand.page_table[:, :3].tolist()
    assert rows == [[100, 101, 102], [103, 104, 105], [106, 107, 108], [109, 110, 111]]


def test_a_query_reads_the_draft_tokens_it_sees_in_order_and_padding_reads_the_padding_slot():
    kind = KINDS["verify of a tree"]
    own = kind.replayer(ARMS[3])
    live = kind.live([5], [2], own.backend.pools)
    sees = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=bool)
    mask = np.hstack([np.ones((N, 5), dtype=bool), sees]).ravel()
    assert own.differences(replace(live, custom_mask=mask)) == []
    expand = own.backend.forward_metadata.expand
    a, b, c, d = own.backend.pools.req_to_token[2, 5:9].tolist()
    assert expand.page_table[:N].tolist() == [[a, b, c, d], [a, b, c, d], [a, c, b, d], [a, c, d, b]]
    assert expand.cache_seqlens_int32.tolist() == [1, 2, 2, 3] + [N] * (3 * N)
    assert not expand.page_table[N:].any()


def test_trees_of_any_size_and_of_many_requests():
    for n, bucket in ((3, 2), (5, 9), (1, 40)):
        config = AttentionConfig(16, 40, draft_tokens=n, topk=2, draft_steps=2)
        pools = make_pools(rows=50, width=60, page_size=16, swa=False, seed=0, device=DEVICE)
        for arm in (ARMS[1], ARMS[3]):
            own = Replayer.capture(
                FlashAttentionBackend(config, pools, arm.implementation), Mode.TARGET_VERIFY, bucket, arm.placement,
                tokens_per_req=n, mask_context=40,
            )  # fmt: skip
            lengths = np.resize([1, 15, 16, 17, 40 - n], bucket - 1)
            live = live_batch(
                Mode.TARGET_VERIFY, lengths, 1 + np.arange(bucket - 1), pools, n, np.random.default_rng(0), topk=2
            )
            assert own.differences(live) == []


def test_sums_over_all_queries_are_whole_after_many_replays_of_one_counter():
    kind = KINDS["verify of a tree, window and pool"]
    pools = kind.pools()
    own = kind.replayer(ARMS[3], pools)
    for seed in range(4):
        assert own.differences(kind.live([9, 50, 3], [1, 2, 3], pools, seed), seed) == []
    assert own.backend.arrived.item() == 0


# Regressions of the field, with their numbers.


def test_a_replay_refills_the_captured_tables_from_the_rows_of_today():
    pools = make_pools(rows=4, width=20, page_size=4, swa=False, seed=0, device=DEVICE)
    for row, ids in ((0, [3]), (1, [1]), (2, [5, 2, 7])):
        pools.req_to_token[row, : 4 * len(ids)] = (
            torch.tensor(ids)[:, None].mul(4).add(torch.arange(4)).ravel().to(torch.int32)
        )
    for arm in ARMS:
        backend = FlashAttentionBackend(
            AttentionConfig(4, 16), pools, arm.implementation, recorded=arm.placement is not Placement.EAGER
        )
        own = Replayer.capture(backend, Mode.DECODE, 2, arm.placement)
        for pages in ([5, 2, 7], [5, 6, 7]):
            pools.req_to_token[2, 4:8] = torch.arange(4) + 4 * pages[1]
            live = live_batch(Mode.DECODE, [9, 4], [2, 0], pools, 1, np.random.default_rng(0))
            assert own.differences(live) == []
            md = backend.metadata[Mode.DECODE, 2]
            assert md.cache_seqlens_int32.tolist() == [9, 4] and md.cu_seqlens_k.tolist() == [0, 9, 13]
            assert md.page_table[0, :3].tolist() == pages and md.page_table[1, 0] == 3


def test_fixed_width_extends_count_captured_queries_and_the_older_ones_accepted_tokens():
    for name, wanted in (("extend, fixed width", [0, 4, 8, 12]), ("extend", [0, 1, 4, 6])):
        kind = KINDS[name]
        for arm in ARMS:
            pools = kind.pools()
            own = kind.replayer(arm, pools)
            live = replace(
                kind.live([44, 11, 9], [1, 2, 3], pools), num_accept_tokens=np.array([1, 3, 2], dtype=np.int32)
            )
            assert own.differences(live) == []
            md = own.backend.forward_metadata
            assert md.cu_seqlens_q[:4].tolist() == wanted
            assert md.cache_seqlens_int32[:2].tolist() == [44, 11] and md.cu_seqlens_k[:3].tolist() == [0, 44, 55]
            if arm.placement is Placement.GRAPH:
                assert md.max_seq_len_q == N


def test_window_tables_hold_the_pages_of_mapped_tokens():
    pools = make_pools(rows=2, width=60, page_size=16, swa=True, seed=0, device=DEVICE)
    full = torch.zeros(16 * 13 + 1, dtype=torch.int64, device=DEVICE)
    full[-1] = -1
    for page, to in ((10, 2), (11, 0), (3, 5)):
        full[16 * page : 16 * page + 16] = 16 * to + torch.arange(16, device=DEVICE)
    for at, page in enumerate((10, 11, 3)):
        pools.req_to_token[1, 16 * at : 16 * at + 16] = 16 * page + torch.arange(16)
    pools = replace(pools, full_to_swa=full)
    live = live_batch(Mode.DECODE, [33], [1], pools, 1, np.random.default_rng(0))
    for arm in ARMS:
        backend = FlashAttentionBackend(
            AttentionConfig(16, 48, extra={"local_chunk": 32}), pools, arm.implementation,
            recorded=arm.placement is not Placement.EAGER,
        )  # fmt: skip
        own = Replayer.capture(backend, Mode.DECODE, 1, arm.placement)
        assert own.differences(live) == []
        md = backend.forward_metadata
        assert md.swa_page_table[0, :3].tolist() == [2, 0, 5]
        assert md.local_attn_metadata.local_block_table[0, 0] == 5
        assert md.local_attn_metadata.local_seqused_k.tolist() == [1]


def test_a_long_batch_after_a_short_one_finds_tables_and_bounds_of_full_size():
    kind = Kind(Mode.DECODE, 64, (7, 1), max_context=2400)
    pools = kind.pools()
    own = kind.replayer(ARMS[3], pools)
    bounds = own.backend.forward_metadata.max_seq_len_k
    for length, pages in ((35, 1), (2400, 38), (35, 1)):
        assert own.differences(kind.live([length], [2], pools)) == []
        md = own.backend.forward_metadata
        assert (md.page_table[0] > 0).sum() == pages and md.max_seq_len_k == bounds == 2400


# Faults of upstream, and near ones; each is what the comparison must notice.


@pytest.mark.parametrize(
    ("fault", "kind_name", "arm", "fields"),
    [
        (ChunkOfTheBatch, "decode, local", ARMS[0], "local_attn_metadata"),
        (TokenMapOnPages, "decode, local, window", ARMS[0], "local_attn_metadata.local_block_table"),
        (ConsecutivePages, "draft of a tree", ARMS[1], "expand.page_table"),
        (StepsOutermost, "draft of a tree of single tokens", ARMS[1], "expand.page_table"),
        (UnsharedPrefix, "draft of a tree", ARMS[1], "cache_seqlens_int32"),
        (MaskLimitOfCapture, "verify of a tree", ARMS[1], "expand"),
        (AcceptedQueries, "extend, fixed width", ARMS[2], "cu_seqlens_q"),
        (PrefixOnly, "verify", ARMS[2], ""),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, kind_name, arm, fields):
    kind = KINDS[kind_name]
    own = kind.replayer(arm, cls=fault)
    found = [d for ds in replayed(own, kind.batches(own.backend.pools)) for d in ds]
    assert found and all(d.startswith(fields) for d in found)


def test_a_view_of_the_wrong_width_is_noticed_before_anything_runs():
    kind = KINDS["decode, local"]
    own = kind.replayer(ARMS[2], cls=OneColumnView)
    with pytest.raises(AssertionError, match=r"\(4, 1\), \(4, 3\)"):
        own.differences(kind.live([33], [2], own.backend.pools))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (replace(KINDS["verify"], max_context=300), "19 columns of 16 tokens.*only 108 tokens wide"),
        (replace(KINDS["verify of a tree, window"], page_size=16), "sliding window needs page_size 1, got 16"),
        (replace(KINDS["decode, local"], extra={"local_chunk": 40}), "whole pages of 16 tokens, got 40"),
        (replace(KINDS["decode, encoder"], page_size=16), "page_size must be 1, got 16"),
        (replace(KINDS["decode, encoder"], window=32), "no model has both"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_both_numbers(kind, words):
    pools = make_pools(rows=3, width=108, page_size=kind.page_size, swa=kind.swa, seed=0, device=DEVICE)
    with pytest.raises(ConfigError, match=words):
        FlashAttentionBackend(kind.config, pools).init_cuda_graph_state(2, 8)


def test_batches_that_cannot_work_are_refused():
    kind = KINDS["verify of a tree"]
    pools = kind.pools()
    batch = kind.replayer(ARMS[3], pools).runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match="batch size 9 exceeds the buffers' 4 rows"):
        kind.replayer(ARMS[3]).backend.bind(replace(batch, batch_size=9))
    with pytest.raises(ConfigError, match="has 3 tokens per request, draft_tokens is 4"):
        kind.replayer(ARMS[3], tokens_per_req=3)
    with pytest.raises(ConfigError, match="target_verify needs draft_tokens > 0"):
        KINDS["decode"].replayer(ARMS[3]).backend.bind(batch)
    with pytest.raises(ConfigError, match=r"fused cascades.*live cells only, got tail static_full"):
        backend = FlashAttentionBackend(kind.config, pools, Implementation.FUSED, tail=TailPolicy.STATIC_FULL)
        backend.init_cuda_graph_state(4, 16)
    drafting = KINDS["draft of a tree"]
    with pytest.raises(ConfigError, match="no sliding-window pool"):
        replace(drafting, page_size=1, swa=True).replayer(ARMS[3])
    with pytest.raises(ConfigError, match="must hold 2 x 3 slots a request, got 8"):
        drafting.replayer(ARMS[1], slots_per_token=1)
    with pytest.raises(ConfigError, match="encoder_lens of 25 tokens do not fit encoder_page_table, which has 24"):
        own = KINDS["decode, encoder"].replayer(ARMS[0])
        own.runner.slots.encoder_lens.fill_(25)
        own.backend.init_forward_metadata_out_graph(own.runner.capture_batch(BUCKET))
    with pytest.raises(ConfigError, match="need 4 page_table columns, the buffer has 3"):
        own = replace(KINDS["decode"], max_context=48).replayer(ARMS[0], pools)
        view = replace(own.runner.capture_batch(BUCKET), seq_lens_cpu=torch.full((BUCKET,), 49))
        own.backend.init_forward_metadata_out_graph(view)


# Recorded cases.


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("path", cases("flashattention"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    c, extra = golden.config, {}
    if c["extra"].get("local_chunk"):
        extra["local_chunk"] = c["extra"]["local_chunk"]
    if c["encoder"]:
        extra["encoder_tokens"] = c["extra"].get("encoder_max", c["C"])
    drafts = golden.mode is Mode.DRAFT_DECODE
    for step in range(c["S"] - 1) if drafts else [0]:
        for i, replay in enumerate(golden.replays(FlashAttentionBackend, arm, step, **extra)):
            compared = set()
            for path_ in replay.expected:
                name = recorded_name(path_, step if drafts else None)
                if name not in replay.golden or path_.startswith("local_attn_metadata"):
                    continue
                compared.add(path_)
                # Upstream's tables end with the context; a verify at the limit needs one column more.
                assert replay.differences(path_, name, within_recorded="at_max" in path.stem) == []
            assert {"cache_seqlens_int32", "page_table", "cu_seqlens_q"} <= compared
            assert ("expand.page_table" in compared) == ("expand.page_table" in replay.expected)
            if "local_chunk" in extra:
                compare_local(golden, i, replay)


def recorded_name(path: str, step: int | None) -> str:
    if step is None:
        return path
    return path.replace("expand.", f"expand{step}.") if path.startswith("expand.") else f"step{step}.{path}"


def compare_local(golden: Golden, i: int, replay) -> None:
    """Older engines cut the chunk to the batch: where that changes it, their formula is compared and not our value."""
    c = golden.config
    chunk, lens = c["extra"]["local_chunk"], replay.got["cache_seqlens_int32"]
    used = chunk if c["release"] == "0.5.23" else cut_chunk(chunk, int(lens.max()), c["P"])
    expected = replay.expected
    if used != chunk:
        own = golden.captured(FlashAttentionBackend, ARMS[0], local_chunk=chunk)
        batch = own.load(golden.live(i))
        sizes = oracle.Sizes(
            c["P"], own.backend.config.table_columns, 0, 0, 0, False, used, 0, TailPolicy.BATCH_MAX
        )  # fmt: skip
        expected = oracle.expected(batch, host_pools(own.backend.pools), sizes)
    for name in ("local_query_start_loc", "local_seqused_k", "local_block_table"):
        if name == "local_block_table" and c["swa"] and c["P"] > 1 and c["release"] != "0.5.23":
            continue  # upstream looks page ids up in the map of tokens
        want, recorded = expected[f"local_attn_metadata.{name}"], replay.golden[f"@{name}"]
        there = tuple(slice(n) for n in want.values.shape)
        np.testing.assert_array_equal(recorded[there][want.live], want.values[want.live])
