"""Three tables of one row each: whole, own chunk, chunk before; and host constants that a capture must not shrink."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import BatchShape, batch_sequence, live_batch, make_pools, with_unassigned_slots
from attn_graph.backends.dual_chunk import DualChunkBackend
from attn_graph.backends.modes import ForwardMode, Placement, TailPolicy
from attn_graph.backends.registry import lookup
from attn_graph.profilers.counters import count
from golden_replays import DEVICE, Golden, cases
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
BUCKET, CHUNK = 4, 96
CHUNKED = {"chunk_size": 128, "local_size": 32}
MAXIMA = ("max_seq_len", "max_seq_len_intra", "max_seq_len_succ", "max_seq_len_inter")


def config(page_size=16, max_context=320, **extra) -> AttentionConfig:
    return AttentionConfig(page_size, max_context, extra=CHUNKED | extra)


def pools_for(c: AttentionConfig, seed=0):
    return make_pools(rows=9, width=c.max_context + 4, page_size=c.page_size, swa=False, seed=seed, device=DEVICE)


def replayer(arm, c=None, pools=None, cls=DualChunkBackend, bucket=BUCKET, **kwargs) -> Replayer:
    c = c or config()
    backend = cls(c, pools or pools_for(c), arm.implementation, recorded=arm.placement is not Placement.EAGER)
    return Replayer.capture(backend, Mode.DECODE, bucket, arm.placement, **kwargs)


def live(lengths, pools):
    return live_batch(Mode.DECODE, lengths, range(1, len(lengths) + 1), pools, 1, np.random.default_rng(0))


def batches(c, pools):
    """The usual sequence, then lengths around the edges of chunks, then some within the first only."""
    yield from batch_sequence(BatchShape(Mode.DECODE, BUCKET, c.page_size, c.max_context), pools, seed=1)
    for lengths in ([95, 96, 97, 98], [191, 192, 193, 194], [288, 289, 1, 320], [96, 50, 1], [1]):
        yield live(lengths, pools)


@pytest.mark.parametrize("scaled", [0, 64], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(arm, scaled):
    c = config(original_context=scaled)
    own = replayer(arm, c, with_unassigned_slots(pools_for(c), seed=2))
    assert [d for d in replayed(own, batches(c, own.backend.pools)) if d] == []


@pytest.mark.parametrize("page_size", [1, 24, 96])
@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
def test_every_page_size_that_divides_a_chunk(arm, page_size):
    c = config(page_size, max_context=200)
    own = replayer(arm, c)
    for lengths in ([95, 96, 97, 98], [191, 192, 193, 200], [1, 2, 50, 96]):
        assert own.differences(live(lengths, own.backend.pools)) == []


def test_scaling_follows_its_formula_at_every_length():
    own = replayer(ARMS[3], config(original_context=64))
    for length, found in enumerate(own.backend.scale.tolist()):
        wanted = max(1.0, 0.1 * math.log(max(length, 1) / 64) + 1)
        assert found == pytest.approx(wanted, rel=1e-6)


def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch():
    assert lookup("dual_chunk").dispatches == {"decode": (55, None), "idle": (55, None)}
    scaling = {"original_context": 64}
    for page_size, extra, lengths, wanted in (
        (16, {}, [50], 55),
        (16, {}, [50, 60], 75),
        (16, {}, [50] * 8, 195),
        (1, {}, [50, 60], 72),
        (16, scaling, [300], 84),
        (16, scaling, [300, 50], 126),
        (16, scaling, [300] * 8, 378),
    ):
        c = config(page_size, **extra)
        size = {"bucket": len(lengths), "max_bs": len(lengths) + 1}
        for lens in (torch.int32, torch.int64):
            own = replayer(ARMS[0], c, lens=lens, **size)
            counts = own.counts(live(lengths, own.backend.pools))
            lists = 2 if DEVICE == "cuda" else 0  # a copy each; on a CPU they are read in place
            assert counts.dispatches == wanted + (lens is torch.int64) + lists
            assert counts.syncs == 4 + (8 if max(lengths) > CHUNK else 4) * len(lengths)
        eager, graph = (replayer(arm, c, **size) for arm in (ARMS[2], ARMS[3]))
        for own, launches in ((eager, 1), (graph, 0)):
            counts = own.counts(live(lengths, own.backend.pools))
            assert (counts.dispatches, counts.launches) == (0, launches)
        assert graph.runner.graphs[len(lengths)].nodes in (1, None)  # a CUDA graph does not tell


def test_the_example_of_the_specification():
    c = AttentionConfig(16, 20480, extra={"original_context": 4096})
    pools = make_pools(rows=2, width=20490, page_size=16, swa=False, seed=0, device=DEVICE)
    for arm in (ARMS[0], ARMS[3]):
        own = replayer(arm, c, pools, bucket=1)
        assert own.differences(live([20000], pools)) == []
        md, row = own.backend.forward_metadata, pools.req_to_token[1] // 16
        assert [md.seq_lens_intra.item(), md.seq_lens_succ.item(), md.seq_lens_inter.item()] == [5664, 7168, 7168]
        assert torch.equal(md.block_tables_intra[0, :354], row[896 * 16 : (896 + 354) * 16 : 16])
        assert torch.equal(md.block_tables_succ[0, :448], row[448 * 16 : 896 * 16 : 16])
        assert md.scaling_factor.item() == pytest.approx(1.15857, abs=1e-5)


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_capture_leaves_the_bounds_that_recorded_layers_decide_by(arm):
    own = replayer(arm)
    captured = own.backend.metadata[Mode.DECODE, BUCKET]
    assert [getattr(captured, name) for name in MAXIMA] == [320] * 4
    own.differences(live([300, 5], own.backend.pools))
    followed = [300, 12, 96, 192]
    assert [getattr(captured, name) for name in MAXIMA] == ([320] * 4 if arm != ARMS[0] else followed)
    with own.stream():
        own.backend.init_forward_metadata_out_graph(own.runner.capture_batch(BUCKET), in_capture=True)
    again = own.backend.forward_metadata
    assert [getattr(again, name) for name in MAXIMA] == [320] * 4
    assert again.block_tables.data_ptr() == captured.block_tables.data_ptr()


def test_host_lists_are_the_classic_chains():
    own = replayer(ARMS[0])
    own.differences(live([300, 5], own.backend.pools))
    md = own.backend.forward_metadata
    assert md.seq_lens == md.orig_seq_lens == [300, 5, 1, 1]


def test_a_table_that_nobody_reads_is_left_alone():
    for arm in ARMS:
        own = replayer(arm)
        own.differences(live([200, 5], own.backend.pools))
        table = own.backend.forward_metadata.block_tables_succ
        kept = table.clone()
        own.load(live([96, 5], own.backend.pools))
        with own.stream():
            own.runner.replay()
        assert torch.equal(table, kept) and not own.backend.forward_metadata.seq_lens_succ.any()


class FrozenMaxima(DualChunkBackend):
    """Captured maxima left at what lengths of 1 gave: two of three calls are never recorded."""

    def init_forward_metadata_out_graph(self, fb, in_capture=False):
        super(DualChunkBackend, self).init_forward_metadata_out_graph(fb, in_capture)


class ChunkOfTheWholeSize(DualChunkBackend):
    """Chunks counted with their local part."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.chunk = self.config.extra["chunk_size"]

    def expected(self, batch, pools):
        right = DualChunkBackend(self.config, self.pools)
        right.init_cuda_graph_state(self.max_bs, self.max_bs)
        return right.expected(batch, pools)


class OwnWidth(DualChunkBackend):
    """The whole table filled to each row's own length."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        own = (md.seq_lens_tensor + self.config.page_size - 1) // self.config.page_size
        md.block_tables.masked_fill_(self.page_numbers >= own[:, None], 0)


class AlwaysSucc(DualChunkBackend):
    """The previous chunk's table rewritten although no row has one."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        md.block_tables_succ.mul_((md.seq_lens_succ.max() > 0).to(torch.int32))


@pytest.mark.parametrize(
    ("fault", "arm", "field"),
    [
        (ChunkOfTheWholeSize, ARMS[2], "seq_lens_intra"),
        (OwnWidth, ARMS[1], "block_tables["),
        (AlwaysSucc, ARMS[1], "block_tables_succ"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_comparison_catches(fault, arm, field):
    c = config()
    own = replayer(arm, c, cls=fault)
    found = [d for ds in replayed(own, batches(c, own.backend.pools)) for d in ds]
    assert any(d.startswith(field) for d in found)


def test_frozen_maxima_are_what_the_restored_ones_are_not():
    captured = replayer(ARMS[0], cls=FrozenMaxima).backend.metadata[Mode.DECODE, BUCKET]
    assert [getattr(captured, name) for name in MAXIMA] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("c", "tail", "words"),
    [
        (config(page_size=64), None, "whole pages of 64 tokens, got 96"),
        (config(local_size=128), None, "whole pages of 16 tokens, got 0"),
        (config(max_context=900), None, "57 columns of 16 tokens, but req_to_token is only 324"),
        (config(), TailPolicy.LIVE_ONLY, "got tail live_only"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_both_numbers(c, tail, words):
    with pytest.raises(ConfigError, match=words):
        DualChunkBackend(c, pools_for(config()), tail=tail).init_cuda_graph_state(2, 2)


def test_batches_that_cannot_work_are_refused():
    own = replayer(ARMS[0])
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match=r"batch size 9 is not within 1\.\.4"):
        own.backend.bind(replace(batch, batch_size=9))
    with pytest.raises(ConfigError, match="has no mode target_verify"):
        verify = replace(batch, forward_mode=Mode.TARGET_VERIFY)
        own.backend.init_forward_metadata_out_graph(verify, in_capture=True)
    with pytest.raises(ConfigError, match="321 tokens needs more than the 20 columns"):
        too_long = replace(batch, seq_lens=torch.full((BUCKET,), 321, device=DEVICE))
        count(lambda: own.backend.init_forward_metadata_out_graph(too_long))


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("path", cases("dual_chunk"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    given = golden.config["extra"].get("dual_chunk", {})
    extra = {name: given[name] for name in ("chunk_size", "local_size") if name in given}
    extra["original_context"] = given.get("original_max_position_embeddings", 0)
    for i, replay in enumerate(golden.replays(DualChunkBackend, arm, **extra)):
        assert replay.expected.keys() == {name for name in replay.golden if name in replay.got}
        for name in replay.expected.keys() - {"scaling_factor"}:
            assert replay.differences(name) == []
        if not replay.expected["block_tables_succ"].written.any():
            assert (replay.golden["block_tables_succ"] == -7).all()
        if "scaling_factor" in replay.expected:
            np.testing.assert_allclose(replay.got["scaling_factor"], replay.golden["scaling_factor"], rtol=1e-6)
        if arm == ARMS[0]:
            host = golden.host(i)
            own = golden.captured(DualChunkBackend, arm, max_bs=golden.config["max_bs"], **extra)
            counts = own.counts(golden.live(i))
            recorded = host["dispatches_out_graph"]
            assert (counts.views, counts.syncs) == (recorded["view"], recorded["sync"])
            assert counts.dispatches == recorded["aten"] + (2 if DEVICE == "cuda" else 0)
            md = own.backend.forward_metadata
            assert {name: getattr(md, name) for name in (*MAXIMA, "seq_lens")} == {
                name: host[name] for name in (*MAXIMA, "seq_lens")
            }
