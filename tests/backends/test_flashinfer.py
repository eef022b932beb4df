"""FlashInfer's wrappers: every mode, windows, encoders, packed masks, host plans, and upstream's faults."""

from __future__ import annotations

import json
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
from attn_graph.backends.flashinfer import FlashInferBackend
from attn_graph.backends.modes import Arm, ForwardMode
from attn_graph.backends.oracle import HostBatch, flashinfer
from attn_graph.backends.registry import lookup
from attn_graph.backends.schedules import MIN_KV_TILE, divide_kv, query_tile_rows
from attn_graph.profilers.conformance.faults.flashinfer import (
    CellsPackedThrough,
    EagerBuffer,
    SharedMask,
    StaleWindowStart,
    StepsForDraftTokens,
)
from attn_graph.profilers.counters import count
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer

Mode = ForwardMode
MODES = sorted(FlashInferBackend.modes)
BUCKET, N, STEPS, CONTEXT, WINDOW, BLOCK = 4, 4, 3, 150, 40, 8
ATEN, ATEN_GRAPH, FUSED, FUSED_GRAPH = ARMS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config(mode=Mode.DECODE, window=None, topk=1, context=CONTEXT, **extra) -> AttentionConfig:
    spec = {} if mode in (Mode.DECODE, Mode.DLLM_EXTEND) else {"draft_tokens": N, "topk": topk, "draft_steps": STEPS}
    if mode is Mode.DLLM_EXTEND:
        extra = {"dllm_block": BLOCK, **extra}
    return AttentionConfig(page_size=16, max_context=context, window=window, extra=extra, **spec)


def pools_for(c: AttentionConfig, swa=False, seed=0):
    return make_pools(rows=13, width=c.max_context + 24, page_size=c.page_size, swa=swa, seed=seed, device=DEVICE)


def tokens_of(mode) -> int:
    return {Mode.DECODE: 1, Mode.DRAFT_EXTEND: STEPS + 1, Mode.DLLM_EXTEND: BLOCK}.get(mode, N)


def shape_of(c: AttentionConfig, mode) -> BatchShape:
    least = tokens_of(mode) if mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2, Mode.DLLM_EXTEND) else 1
    return BatchShape(mode, BUCKET, c.page_size, c.max_context, tokens_of(mode), 0, least, c.topk)


def replayer(mode, arm, c=None, pools=None, cls=FlashInferBackend, bucket=BUCKET, **slots) -> Replayer:
    c = c or config(mode)
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement.value != "eager")
    mask_context = c.max_context if c.topk > 1 else 0
    encoder_fill = 20 if c.extra.get("encoder") else None
    return Replayer.capture(
        backend, mode, bucket, arm.placement, tokens_per_req=tokens_of(mode), mask_context=mask_context,
        encoder_fill=encoder_fill, **slots,
    )  # fmt: skip


def batches(own: Replayer, mode, seed=1):
    rng = np.random.default_rng(seed)
    for live in batch_sequence(shape_of(own.backend.config, mode), own.backend.pools, seed):
        if mode is Mode.DLLM_EXTEND:
            first = np.repeat(live.seq_lens, BLOCK) - BLOCK
            live = replace(live, positions=first + np.tile(np.arange(BLOCK), live.batch_size))
        if own.runner.slots.encoder_lens is not None:
            live = replace(
                live,
                seq_lens=np.minimum(live.seq_lens, CONTEXT - 24),
                encoder_lens=rng.integers(0, 25, live.batch_size).astype(np.int32),
            )
        yield live


def found(own: Replayer, mode, seed=1) -> list[str]:
    """Differences from the oracle, of the device tensors and of what the planner was given."""
    lines = []
    for number, live in enumerate(batches(own, mode, seed)):
        lines += own.differences(live, number)
        lines += plan_differences(own, own.load(live))
    return lines


def plan_differences(own: Replayer, batch: HostBatch) -> list[str]:
    """Compare what the last replay's planner was given with the oracle."""
    backend = own.backend
    md, lines, lists = backend.forward_metadata, [], backend._lists(Mode(batch.mode))
    for i, w in enumerate(md.wrappers):
        qo, kv = flashinfer.plan_arrays(
            batch, lists[i][1].name, offset=backend._offset(Mode(batch.mode)), window=backend.window,
            queries=md.queries,
        )  # fmt: skip
        for name, want in (("qo_indptr", qo), ("kv_indptr", kv)):
            if getattr(w.plan, name).tolist() != want:
                lines.append(f"wrappers.{i}.plan.{name}: {getattr(w.plan, name).tolist()}, expected {want}")
        work = w.plan.work
        if np.bincount(work.request, minlength=len(kv) - 1).min() < 1:
            lines.append(f"wrappers.{i}.plan.work leaves a request out")
    return lines


def batch_of(mode, lengths, pools, topk=1) -> LiveBatch:
    rows = 2 + np.arange(len(lengths))
    return live_batch(mode, lengths, rows, pools, tokens_of(mode), np.random.default_rng(0), topk=topk)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("swa", [False, True], ids=["full", "window"])
def test_every_arm_writes_what_the_oracle_says_and_plans_with_the_same(mode, arm, swa):
    c = config(mode, WINDOW if swa and mode is not Mode.DLLM_EXTEND else None)
    assert found(replayer(mode, arm, c, with_unassigned_slots(pools_for(c, swa), 3)), mode) == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_tree_masks_are_packed_for_each_wrappers_own_columns(arm, window):
    c = config(Mode.TARGET_VERIFY, window, topk=3)
    assert found(replayer(Mode.TARGET_VERIFY, arm, c), Mode.TARGET_VERIFY) == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_encoder_and_decoder_tokens_are_lists_of_their_own(arm):
    c = config(encoder=True)
    assert found(replayer(Mode.DECODE, arm, c), Mode.DECODE) == []


@pytest.mark.parametrize("arm", [ATEN, FUSED_GRAPH], ids=str)
def test_diffusion_blocks_may_read_their_own_tokens_from_the_pages(arm):
    c = config(Mode.DLLM_EXTEND, use_ragged=False)
    assert found(replayer(Mode.DLLM_EXTEND, arm, c), Mode.DLLM_EXTEND) == []


def test_a_sliding_window_pool_has_a_window_even_if_nobody_says_how_long_it_is():
    c = config()
    own = replayer(Mode.DECODE, FUSED_GRAPH, c, pools_for(c, swa=True))
    assert own.backend.window == CONTEXT // 4 and len(own.backend.forward_metadata.wrappers) == 2
    assert found(own, Mode.DECODE) == []


def test_int32_lengths_change_nothing():
    for arm in ARMS:
        assert found(replayer(Mode.DECODE, arm, config(window=WINDOW), lens=torch.int32), Mode.DECODE) == []


# mode, window, swa, encoder -> dispatches, views, syncs, Triton launches of the spec's table; then what the copies of
# upstream's full plan add
TABLE = [
    (Mode.DECODE, None, False, False, (15, 9, 0, 1), 0),
    (Mode.DECODE, WINDOW, False, False, (32, 15, 1, 2), 0),
    (Mode.DECODE, WINDOW, True, False, (44, 20, 3, 2), 0),
    (
        Mode.DECODE,
        None,
        False,
        True,
        (31, 16, 1, 2),
        0,
    ),  # and a copy of the encoder lengths to the host, where there is another device
    (Mode.TARGET_VERIFY, None, False, False, (11, 5, 0, 1), 4),
    (Mode.DRAFT_EXTEND, None, False, False, (13, 6, 0, 1), 4),
    (Mode.DRAFT_EXTEND_V2, None, False, False, (10, 5, 0, 1), 4),
]


@pytest.mark.parametrize(("mode", "window", "swa", "encoder", "wanted", "copies"), TABLE)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode, window, swa, encoder, wanted, copies):
    c = config(mode, window, **({"encoder": True} if encoder else {}))
    pools = pools_for(c, swa)
    live = batch_of(mode, [33, 64], pools)
    if encoder:
        live = replace(live, encoder_lens=np.array([5, 9], dtype=np.int32))

    own = replayer(mode, ATEN, c, pools, cls=BeforePlan).counts(live)
    copied = int(encoder and DEVICE == "cuda")
    assert (own.dispatches - copied, own.views, own.syncs, own.triton) == wanted
    assert replayer(mode, ATEN, c, pools).counts(live).dispatches == wanted[0] + copies + copied
    eager, graph = replayer(mode, FUSED, c, pools), replayer(mode, FUSED_GRAPH, c, pools)
    assert (eager.counts(live).dispatches, eager.counts(live).triton) == (copied, 1)
    assert (graph.counts(live).dispatches, graph.counts(live).triton) == (copied, 0)
    assert graph.runner.graphs[BUCKET].nodes == 1


def test_without_a_mirror_the_plan_reads_the_prefix_sums_back():
    c = config()
    own = replayer(Mode.DECODE, ATEN, c)
    own.load(batch_of(Mode.DECODE, [33, 64], own.backend.pools))
    batch = replace(own.runner.view, seq_lens_cpu=None)
    counted = count(lambda: own.backend.init_forward_metadata_out_graph(batch))
    there_and_back = 0 if DEVICE == "cpu" else 1
    assert (counted.dispatches, counted.views, counted.triton) == (7 + there_and_back, 5, 1)
    assert own.backend.forward_metadata.wrappers[0].plan.kv_indptr.tolist() == [0, 33, 97, 98, 99]


def test_the_registry_quotes_the_same_counts():
    quoted = lookup("flashinfer").dispatches
    for mode, window, swa, encoder, wanted, copies in TABLE:
        if window is None and not encoder:
            assert quoted[str(mode)][0] == wanted[0] + copies
        if swa:
            assert quoted[str(mode)][1] == wanted[0]


# Names in the recorded files -> what they are of ours.
BOUND = {
    f"paged_{name}_{suffix}": name for name in ("kv_indptr", "kv_indices") for suffix in ("buffer", "buf")
}  # the decode and the prefill wrapper's names
PLANNED = {"indptr_cpu": "kv_indptr", "kv_indptr": "kv_indptr", "kv_indptr_cpu": "kv_indptr",
           "qo_indptr": "qo_indptr", "qo_indptr_cpu": "qo_indptr"}  # fmt: skip


def recorded_differences(replay, own: Replayer) -> tuple[int, list[str]]:
    """(fields compared, differences) of one replay. Upstream's window list of a verify begins in the wrong place."""
    compared, lines, md = 0, [], own.backend.forward_metadata
    window_verify = own.backend.config.window and own.runner.mode is Mode.TARGET_VERIFY
    for name, value in replay.golden.items():
        if ".bound." not in name and ".plan." not in name:
            continue
        which, last = int(name[name.index("[") + 1 : name.index("]")]), name.rsplit(".", 1)[1]
        plan, ours = md.wrappers[which].plan, f"wrappers.{which}."
        wrong_start = window_verify and which == 0
        if last in BOUND or last in ("kv_indices", "paged_kv_indices"):
            field = ours + BOUND.get(last, "kv_indices")
            got = replay.got[field][: int(replay.expected[field].live.sum())]
            if wrong_start and field.endswith("kv_indices"):
                got = from_the_start(own, np.diff(plan.kv_indptr))
            same = np.array_equal(got, value[: len(got)])
        elif last in PLANNED:
            same = np.array_equal(getattr(plan, PLANNED[last]), value)
        elif last == "custom_mask" and not wrong_start:
            sizes = np.diff(plan.kv_indptr) * md.queries
            parts = np.split(value[: sizes.sum()], np.cumsum(sizes)[:-1])
            want = np.concatenate([np.packbits(p, bitorder="little") for p in parts])
            same = np.array_equal(replay.got[ours + "custom_mask"][: len(want)], want)
        else:
            continue
        compared += 1
        lines += [] if same else [name]
    if "swa_out_cache_loc" in replay.golden:
        lines += replay.differences("swa_out_cache_loc")
    return compared, lines


def from_the_start(own: Replayer, lengths) -> np.ndarray:
    """A list as upstream builds it: the right lengths, from each request's first token."""
    table, pool = (x.cpu().numpy() for x in (own.backend.pools.req_to_token, own.runner.slots.req_pool_indices))
    return np.concatenate([table[row, :n] for row, n in zip(pool, lengths, strict=False)])


def captured(golden: Golden, arm: Arm, cls=FlashInferBackend, **sizes) -> Replayer:
    """The file's backend, captured once: `golden.replays` uses it too."""
    c = golden.config
    extra = {}
    if golden.mode is Mode.DLLM_EXTEND:
        captured_host = json.loads(str(golden.data["capture/host"]))
        extra = {"dllm_block": c["tokens_per_req"], "use_ragged": captured_host.get("use_ragged", True)}
    if not c["encoder"]:
        own = golden.captured(cls, arm, **extra, **sizes)
    else:
        live, encoder_lens = golden.live, golden.data["capture/in/encoder_lens"]
        golden.live = lambda i, step=0: replace(live(i, step), encoder_lens=golden.data[f"r{i}/in/encoder_lens"])
        backend = cls(
            golden.attention_config(encoder=True), golden.pools(), arm.implementation,
            recorded=arm.placement.value != "eager",
        )  # fmt: skip
        lens = getattr(torch, c["seq_lens_static_dtype"].removeprefix("torch."))
        own = Replayer.capture(
            backend, golden.mode, c["B"], arm.placement, fill=c["fill"], lens=lens, encoder_fill=int(encoder_lens[0]),
            **sizes,
        )  # fmt: skip
    golden.captured = lambda *_, **__: own
    return own


def recorded(release: str = "") -> list:
    return [p for p in cases("flashinfer") if p.name.startswith(release) and "_draft_" not in p.name]


@pytest.mark.parametrize("path", recorded(), ids=lambda p: p.stem)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    own = captured(golden, arm)
    for replay in golden.replays(FlashInferBackend, arm):
        compared, lines = recorded_differences(replay, own)
        assert compared >= 2 and lines == []


class BeforePlan(FlashInferBackend):
    """The classic chain without what upstream's full plan does behind it."""

    def _hand_over(self, *_):
        pass

    def _pack(self, *_):
        pass


@pytest.mark.parametrize("path", recorded("r13_"), ids=lambda p: p.stem)
def test_recorded_counts_of_the_release_whose_chain_this_is(path):
    golden = Golden(path)
    own = captured(golden, ATEN, BeforePlan, max_bs=golden.config["max_bs"])
    for i in range(golden.config["replays"]):
        wanted = golden.host(i)["dispatches_out_graph"]
        got = own.counts(golden.live(i))
        assert (got.dispatches, got.views, got.syncs, got.triton) == tuple(
            wanted[key] for key in ("aten", "view", "sync", "triton")
        )


class UnpaddedMirror(FlashInferBackend):
    """A plan from the live requests' lengths: padding rows keep the lengths of the batch before."""

    def plan(self, fb, md):
        mirror = fb.seq_lens_cpu.clone()
        mirror[fb.batch_size - fb.num_padding :] = 0
        super().plan(replace(fb, seq_lens_cpu=mirror), md)


@pytest.mark.parametrize(
    ("fault", "mode", "window", "topk", "arm", "field"),
    [
        (StaleWindowStart, Mode.TARGET_VERIFY, WINDOW, 1, FUSED, "wrappers.0.kv_indices"),
        (SharedMask, Mode.TARGET_VERIFY, WINDOW, 3, FUSED, "wrappers.0.custom_mask"),
        (CellsPackedThrough, Mode.TARGET_VERIFY, None, 3, FUSED, "wrappers.0.custom_mask"),
        (EagerBuffer, Mode.DECODE, None, 1, ATEN, "wrappers.0.kv_indptr"),
        (UnpaddedMirror, Mode.DECODE, None, 1, FUSED, "wrappers.0.plan.kv_indptr"),
        (StepsForDraftTokens, Mode.DRAFT_EXTEND_V2, None, 1, FUSED, "qo_indptr"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, mode, window, topk, arm, field):
    c = config(mode, window, topk)
    assert any(line.startswith(field) for line in found(replayer(mode, arm, c, cls=fault), mode))


def test_a_captured_plan_follows_the_batch_from_long_to_short():
    """A27: chunks and tiles are no constants of the capture."""
    c = config(context=2500, num_sms=8)
    own = replayer(Mode.DECODE, FUSED_GRAPH, c, pools_for(c), bucket=1)
    chunks = []
    for length in (35, 2400, 35):
        own.load(batch_of(Mode.DECODE, [length], own.backend.pools))
        with own.stream():
            own.runner.rebuild()
        work = own.backend.forward_metadata.wrappers[0].plan.work
        chunks.append((work.chunk, len(work.request)))
    assert chunks[0] == chunks[2] == (MIN_KV_TILE, 1) and chunks[1][1] == 2  # 16 tiles over 8 KV heads


def covered(plan, kv_lens, query_tiles) -> bool:
    """Whether the tiles cut each (request, query tile) into consecutive, non-empty chunks that end with its KV."""
    seen = {}
    for r, q, k in zip(plan.request, plan.query_tile, plan.kv_tile, strict=True):
        if k != seen.get((r, q), 0):
            return False
        seen[r, q] = k + 1
    every = {(r, q) for r, n in enumerate(query_tiles) for q in range(n)}
    ends = all((n - 1) * plan.chunk < max(kv_lens[r], 1) <= n * plan.chunk for (r, _), n in seen.items())
    return seen.keys() == every and ends


def tiles_of(chunk, kv_lens, query_tiles) -> int:
    return sum(-(-max(kv, 1) // chunk) * q for kv, q in zip(kv_lens, query_tiles, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_tiles_cover_every_token_once_and_are_as_small_as_the_device_allows(seed):
    rng = np.random.default_rng(seed)
    b = int(rng.integers(1, 40))
    kv = rng.integers(0, int(rng.choice([50, 3000, 100000])), b)
    q = rng.integers(1, 4, b)
    most = int(rng.choice([16, 64, 264]))
    plan = divide_kv(kv, q, most)
    assert covered(plan, kv, q)
    tiles = len(plan.request)
    assert tiles == tiles_of(plan.chunk, kv, q)
    if q.sum() < most:
        assert tiles <= most
        assert plan.chunk == MIN_KV_TILE or tiles_of(plan.chunk - 1, kv, q) > most
    else:
        assert tiles == q.sum()  # the device is full without splitting anything
    whole = divide_kv(kv, q, most, split=False)
    assert covered(whole, kv, q) and len(whole.request) == q.sum()


def test_a_plan_that_drops_a_chunk_or_overlaps_is_noticed():
    kv, q = np.array([1000, 3]), np.array([1, 2])
    plan = divide_kv(kv, q, 8)
    assert covered(plan, kv, q)
    cut = replace(plan, request=plan.request[:-1], query_tile=plan.query_tile[:-1], kv_tile=plan.kv_tile[:-1])
    twice = replace(plan, kv_tile=np.zeros_like(plan.kv_tile))
    assert not covered(cut, kv, q) and not covered(twice, kv, q)


def test_query_tiles_follow_the_rows_that_share_a_kv_head():
    assert [query_tile_rows(*x) for x in ((1, 4), (4, 4), (8, 4), (16, 4), (17, 4))] == [16, 16, 64, 64, 128]


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_write_slots_are_a_snapshot_of_the_map(arm):
    """A05: what the scheduler does to the map after the rebuild must not reach the slots."""
    c = config()
    pools = pools_for(c, swa=True)
    own = replayer(Mode.DECODE, arm, c, pools)
    live = batch_of(Mode.DECODE, [33, 64, 65, 2], pools)
    own.load(live)
    with own.stream():
        own.runner.replay()
    wanted = pools.full_to_swa[torch.from_numpy(live.out_cache_loc).to(DEVICE)].tolist()
    pools.full_to_swa[:-1] = 0
    assert own.backend.forward_metadata.swa_out_cache_loc.tolist() == wanted and any(wanted)


def test_captures_and_sizes_that_cannot_work_are_refused_with_both_numbers():
    c = config(Mode.TARGET_VERIFY, topk=2)
    own = replayer(Mode.TARGET_VERIFY, FUSED, c)
    batch = own.runner.capture_batch(BUCKET)
    lens = torch.ones(BUCKET, dtype=torch.int32)
    for wrong, words in (
        ({"batch_size": 9}, "batch size 9 exceeds the buffers' 4 rows"),
        ({"encoder_lens": lens}, "encoder is False, but encoder_lens is given"),
        ({"forward_mode": Mode.DRAFT_DECODE}, "has no mode draft_decode"),
        ({"forward_mode": Mode.DLLM_EXTEND}, "has blocks of 4 tokens, dllm_block is 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            own.backend.init_forward_metadata_out_graph(replace(batch, **wrong), in_capture=True)
    with pytest.raises(ConfigError, match="captured with a custom_mask, replayed without one"):
        own.backend.init_forward_metadata_out_graph(
            replace(batch, spec_info=replace(batch.spec_info, custom_mask=None))
        )
    diffusion = replayer(Mode.DLLM_EXTEND, FUSED)
    diffusion.backend.config = config(Mode.DLLM_EXTEND, WINDOW)
    with pytest.raises(ConfigError, match="no window under mode dllm_extend, got 40"):
        diffusion.backend.bind(diffusion.runner.capture_batch(BUCKET))
    with pytest.raises(ConfigError, match="needs draft_tokens > 0"):
        own.backend.config = config()
        own.backend.bind(batch)
    narrow = make_pools(rows=3, width=100, page_size=1, swa=False, seed=0, device=DEVICE)
    with pytest.raises(ConfigError, match="100 tokens wide, max_context is 150"):
        FlashInferBackend(config(), narrow).init_cuda_graph_state(1, 1)
    with pytest.raises(ConfigError, match="20000 lists of 150000 tokens have 3000000000 entries"):
        FlashInferBackend(config(context=150000), narrow).init_cuda_graph_state(20000, 20000)
    with pytest.raises(ConfigError, match=r"window \(40\) and an encoder"):
        FlashInferBackend(config(window=WINDOW, encoder=True), pools_for(c)).init_cuda_graph_state(1, 1)
