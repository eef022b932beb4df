"""One block table, one launch: what is left to go wrong is which columns it writes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.batch import (
    BatchShape,
    SpecInfo,
    batch_sequence,
    live_batch,
    make_pools,
    with_unassigned_slots,
)
from attn_graph.backends.cutlass_mla import CutlassMlaBackend
from attn_graph.backends.modes import ForwardMode, Placement
from attn_graph.backends.registry import lookup
from attn_graph.profilers.conformance.faults.cutlass_mla import TruncatingDivision, WholePagesOnly
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, replayed

CONFIG = AttentionConfig(page_size=128, max_context=600)
BUCKET = 4


def pools_for(width=604, seed=0):
    return make_pools(rows=9, width=width, page_size=128, swa=False, seed=seed, device="cpu")


def replayer(arm, pools=None, lens=torch.int64, cls=CutlassMlaBackend) -> Replayer:
    backend = cls(CONFIG, pools or pools_for(), arm.implementation, recorded=arm.placement is not Placement.EAGER)
    return Replayer.capture(backend, ForwardMode.DECODE, BUCKET, arm.placement, lens=lens)


def batches(pools):
    return batch_sequence(BatchShape(ForwardMode.DECODE, BUCKET, 128, 600), pools, seed=1)


@pytest.mark.parametrize("lens", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(arm, lens):
    own = replayer(arm, with_unassigned_slots(pools_for(), seed=2), lens)
    assert [d for d in replayed(own, batches(own.backend.pools)) if d] == []


def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch():
    live = live_batch(ForwardMode.DECODE, [33, 64], [2, 3], pools_for(), 1, np.random.default_rng(0))
    classic, eager, graph = (replayer(ARMS[i]).counts(live) for i in (0, 2, 3))
    assert (classic.dispatches, classic.views, classic.triton) == (lookup("cutlass_mla").dispatches["decode"][0], 2, 1)
    assert (eager.dispatches, eager.launches) == (0, 1)
    assert (graph.dispatches, graph.launches) == (0, 0)


def test_unset_cells_hold_one_until_a_row_grows_over_them():
    own = replayer(ARMS[2])
    assert own.backend.table.shape == (BUCKET, 5)
    own.load(live_batch(ForwardMode.DECODE, [300], [2], own.backend.pools, 1, np.random.default_rng(0)))
    own.runner.replay()
    assert (own.backend.table[0, 3:] == 1).all() and own.backend.table[1:, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("fault", [WholePagesOnly, TruncatingDivision])
def test_the_comparison_catches(fault):
    own = replayer(ARMS[0], with_unassigned_slots(pools_for(), seed=2, share=0.3), cls=fault)
    assert any(replayed(own, batches(own.backend.pools)))


def test_what_it_cannot_serve_is_refused():
    with pytest.raises(ConfigError, match="page_size must be 128, the only one cutlass_mla has; got 64"):
        CutlassMlaBackend(AttentionConfig(page_size=64, max_context=600), pools_for()).init_cuda_graph_state(4, 4)
    with pytest.raises(ConfigError, match=r"5 columns of 128 tokens .* only 500 tokens wide"):
        CutlassMlaBackend(CONFIG, pools_for(500)).init_cuda_graph_state(4, 4)
    own = replayer(ARMS[3])
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match="spec_info must be None"):
        own.backend.bind(dataclasses.replace(batch, spec_info=SpecInfo(draft_token_num=4)))
    with pytest.raises(ConfigError, match="has no mode target_verify"):
        verify = dataclasses.replace(batch, forward_mode=ForwardMode.TARGET_VERIFY)
        own.backend.init_forward_metadata_out_graph(verify, in_capture=True)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("path", cases("cutlass_mla"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    for replay in Golden(path).replays(CutlassMlaBackend, arm):
        assert replay.differences("block_kv_indices") == []
        assert replay.host["dispatches_out_graph"]["aten"] == 2
