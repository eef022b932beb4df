"""Tables of one width for the whole batch, lengths of the backend's own, and the host list of the attention op."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attn_graph.backends.ascend import WIDE, AscendBackend
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import (
    BatchShape,
    batch_sequence,
    idle_batch,
    live_batch,
    make_pools,
    with_unassigned_slots,
)
from attn_graph.backends.modes import ForwardMode, Placement, TailPolicy
from attn_graph.backends.oracle.ascend import host_lengths
from attn_graph.backends.registry import lookup
from attn_graph.profilers.conformance.faults.ascend import AliasedLengths, RowWidths, StaleTails
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
MODES = sorted(AscendBackend.modes)
BUCKET, N, STEP, DLLM_BLOCK = 4, 4, 1, 4


def config(mode, page_size=16, max_context=200, window=None, **extra) -> AttentionConfig:
    plain = mode in (Mode.DECODE, Mode.DLLM_EXTEND)
    spec = {} if plain else {"draft_tokens": N, "topk": 1, "draft_steps": 3, "step_id": STEP}
    return AttentionConfig(page_size=page_size, max_context=max_context, window=window, extra=extra, **spec)


def pools_for(c: AttentionConfig, swa=False, seed=0):
    return make_pools(rows=9, width=c.max_context + 12, page_size=c.page_size, swa=swa, seed=seed, device="cpu")


def tokens_of(mode) -> int:
    return DLLM_BLOCK if mode is Mode.DLLM_EXTEND else N if mode in WIDE else 1


def batches(c, mode, pools):
    extend = mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
    reserve = 0 if extend or mode is Mode.DECODE else 4
    shape = BatchShape(mode, BUCKET, c.page_size, c.max_context, tokens_of(mode), reserve, N if extend else 1)
    return batch_sequence(shape, pools, seed=1)


def replayer(mode, arm, c=None, pools=None, cls=AscendBackend, **kwargs) -> Replayer:
    c = c or config(mode)
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement is not Placement.EAGER)
    return Replayer.capture(backend, mode, BUCKET, arm.placement, tokens_per_req=tokens_of(mode), **kwargs)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, arm):
    own = replayer(mode, arm)
    assert [d for d in replayed(own, batches(own.backend.config, mode, own.backend.pools)) if d] == []


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.TARGET_VERIFY], ids=str)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_sliding_windows_masks_and_missing_slots(mode, arm):
    c = config(mode, window=40, swa_mask=True)
    own = replayer(mode, arm, c, with_unassigned_slots(pools_for(c, swa=True), seed=2), lens=torch.int32)
    assert [d for d in replayed(own, batches(c, mode, own.backend.pools)) if d] == []


@pytest.mark.parametrize("page_size", [1, 128])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_other_page_sizes(page_size, arm):
    c = config(Mode.TARGET_VERIFY, page_size)
    own = replayer(Mode.TARGET_VERIFY, arm, c, pools_for(c, swa=True))
    live = live_batch(Mode.TARGET_VERIFY, [1, 127, 196], [3, 5, 7], own.backend.pools, N, np.random.default_rng(0))
    assert own.differences(live) == []


@pytest.mark.parametrize("swa", [False, True], ids=["full", "swa"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode, swa):
    pools = pools_for(config(mode), swa)
    live = live_batch(mode, [33, 64], [2, 3], pools, tokens_of(mode), np.random.default_rng(0))
    classic, eager, graph = (replayer(mode, ARMS[i], pools=pools).counts(live) for i in (0, 2, 3))
    assert classic.dispatches == lookup("ascend").dispatches[str(mode)][swa]
    assert (classic.triton, classic.syncs) == (0, 1)
    assert (eager.dispatches, eager.launches, graph.dispatches, graph.launches) == (0, 1, 0, 0)


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_host_list_holds_live_lengths_and_zeros(mode, arm):
    own = replayer(mode, arm)
    md = own.backend.metadata[mode, BUCKET]
    assert md.seq_lens_cpu_list == [0] * BUCKET
    assert md.seq_lens_list_cumsum == ([4, 8, 12, 16] if mode is Mode.DLLM_EXTEND else None)
    added = {Mode.TARGET_VERIFY: N, Mode.DRAFT_DECODE: STEP + 1}.get(mode, 0)
    for live in (
        live_batch(mode, [33, 64], [2, 3], own.backend.pools, tokens_of(mode), np.random.default_rng(0)),
        idle_batch(),
    ):
        batch = own.load(live)
        assert own.backend.actual_seq_lengths_kv(own.runner.view) == host_lengths(batch, added)
    assert own.backend.actual_seq_lengths_kv(own.runner.view) == [0] * BUCKET


def test_draft_tokens_are_visible_to_windowed_layers():
    c = config(Mode.TARGET_VERIFY, window=40, swa_mask=True)
    own = replayer(Mode.TARGET_VERIFY, ARMS[3], c, pools_for(c, swa=True))
    own.load(live_batch(Mode.TARGET_VERIFY, [100], [2], own.backend.pools, N, np.random.default_rng(0)))
    own.runner.replay()
    attended = (~own.backend.forward_metadata.swa_mask[0, 0]).nonzero().flatten().tolist()
    assert attended == list(range(64, 104))


def test_lengths_that_alias_the_runner_grow_with_every_capture_and_rebuild():
    c = config(Mode.TARGET_VERIFY)
    own = replayer(Mode.TARGET_VERIFY, ARMS[0], c, cls=AliasedLengths, lens=torch.int32)
    assert own.runner.slots.seq_lens.tolist() == [N] * BUCKET  # nothing but the capture has run
    own.load(live_batch(Mode.TARGET_VERIFY, [100], [2], own.backend.pools, N, np.random.default_rng(0)))
    for _ in range(2):
        own.runner.rebuild()
    assert own.runner.slots.seq_lens.tolist() == [108, 8, 8, 8]
    right = replayer(Mode.TARGET_VERIFY, ARMS[0], c, lens=torch.int32)
    right.load(live_batch(Mode.TARGET_VERIFY, [100], [2], own.backend.pools, N, np.random.default_rng(0)))
    for _ in range(2):
        right.runner.rebuild()
    assert right.backend.forward_metadata.seq_lens.tolist() == [104, 4, 4, 4]
    assert right.runner.slots.seq_lens.tolist() == [100, 0, 0, 0]


class MaskWithoutDrafts(AscendBackend):
    """Upstream: the mask ends where the prefix does, so windowed layers do not see the draft."""

    def _aten_mask(self, md):
        md.seq_lens -= self.config.draft_tokens
        super()._aten_mask(md)
        md.seq_lens += self.config.draft_tokens


@pytest.mark.parametrize(
    ("fault", "field"),
    [(RowWidths, "block_tables["), (StaleTails, "block_tables["), (MaskWithoutDrafts, "swa_mask")],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_comparison_catches(fault, field):
    c = config(Mode.TARGET_VERIFY, window=40, swa_mask=True)
    own = replayer(Mode.TARGET_VERIFY, ARMS[0], c, pools_for(c, swa=True), cls=fault)
    found = [d for ds in replayed(own, batches(c, Mode.TARGET_VERIFY, own.backend.pools)) for d in ds]
    assert found and all(d.startswith(field) for d in found)


@pytest.mark.parametrize(
    ("c", "tail", "words"),
    [
        (config(Mode.DECODE, max_context=400), None, "25 columns of 16 tokens.* only 212 tokens wide"),
        (config(Mode.DECODE, swa_mask=True), None, "swa_mask needs a window .* got window None and map False"),
        (config(Mode.DECODE), TailPolicy.LIVE_ONLY, "got tail live_only"),
    ],
)
def test_options_that_cannot_work_are_refused(c, tail, words):
    with pytest.raises(ConfigError, match=words):
        AscendBackend(c, pools_for(config(Mode.DECODE)), tail=tail).init_cuda_graph_state(2, 2)


def test_batches_that_do_not_fit_are_refused():
    own = replayer(Mode.TARGET_VERIFY, ARMS[0], pools=pools_for(config(Mode.TARGET_VERIFY), swa=True))
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match=r"batch size 5 is not within 1\.\.4"):
        own.backend.bind(dataclasses.replace(batch, batch_size=5))
    with pytest.raises(ConfigError, match="captured with 2 tokens per request, draft_tokens is 4"):
        own.backend.bind(dataclasses.replace(batch, positions=batch.positions[:8]))
    with pytest.raises(ConfigError, match="holds 16 tokens, a batch of 4 writes 20"):
        own.backend.bind(dataclasses.replace(batch, out_cache_loc=torch.zeros(20, dtype=torch.int64)))
    long = torch.full((BUCKET,), 220)
    with pytest.raises(ConfigError, match="224 tokens need 14 columns of block_tables, which has 13"):
        own.backend.rebuild_aten(
            dataclasses.replace(batch, seq_lens_cpu=long), own.backend.metadata[Mode.TARGET_VERIFY, BUCKET]
        )


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("path", cases("ascend"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    compare(Golden(path), arm)


@pytest.mark.parametrize("path", cases("ascend"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced_with_the_long_lengths_of_later_releases(path):
    """Metadata has lengths of its own, whatever dtype the runner's buffer has, which upstream's metadata is."""
    golden = Golden(path)
    for name in [name for name in golden.data if name.startswith("r") and name.endswith("seq_lens")]:
        golden.data[name] = golden.data[name].astype(np.int64)
    golden.config["seq_lens_static_dtype"] = "torch.int64"
    compare(golden, ARMS[2])


def compare(golden: Golden, arm) -> None:
    """Every field of every replay and draft step, but for upstream's faults, which must be those."""
    masked = "capture/out/swa_mask" in golden.data
    draft = golden.mode is Mode.DRAFT_DECODE
    steps = golden.config["S"] - 1 if draft else 1
    for step in range(steps):
        prefix = f"step{step}." if draft else ""
        for i, replay in enumerate(golden.replays(AscendBackend, arm, step, swa_mask=masked)):
            for field in replay.expected.keys() & {n.removeprefix(prefix) for n in replay.golden}:
                if field == "seq_lens" and draft:
                    # Upstream's steps share one buffer: in a padded batch the offsets add up, else the last one wins.
                    padded = replay.host["raw_bs"] < replay.host["bs"]
                    added = sum(range(1, steps + 1)) if padded else steps
                    prefixes = replay.got["seq_lens"] - (step + 1)
                    np.testing.assert_array_equal(replay.golden[prefix + field], prefixes + added)
                elif field == "seq_lens":
                    # Upstream's is the runner's own buffer, of the runner's dtype.
                    np.testing.assert_array_equal(replay.golden[field], replay.got[field])
                elif field == "swa_mask" and golden.mode is Mode.TARGET_VERIFY:
                    # Upstream's ends where the prefix does, so that the draft tokens are hidden as well.
                    ends = golden.data[f"r{i}/static/seq_lens"][:, None, None]
                    tokens = np.arange(replay.golden[field].shape[2])
                    hidden = (tokens < ends - golden.config["window"]) | (tokens >= ends)
                    np.testing.assert_array_equal(replay.golden[field], hidden)
                else:
                    # Upstream's tables have room for draft tokens, ours for as many draft steps too.
                    narrow = golden.config["S"] > golden.config["N"]
                    assert replay.differences(field, prefix + field, within_recorded=narrow) == []
            if arm is ARMS[0] and not draft:
                classic = lookup("ascend").dispatches[str(golden.mode)][golden.config["swa"]]
                assert masked or replay.host["dispatches_out_graph"]["aten"] == classic
