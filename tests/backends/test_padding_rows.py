"""Rows of the field's regressions about padding: A16, no filler suits every backend; A20, -1 is no last slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig
from attn_graph.backends.batch import make_pools
from attn_graph.backends.modes import ForwardMode, Placement
from attn_graph.backends.registry import registered
from attn_graph.backends.runners.decode import DecodeRunner, StaticSlots
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.profilers.recorded import RecordedGraph
from rebuilds import ARMS
from runner_spies import DEVICE, a_step

Mode = ForwardMode
LENGTHS = (130, 64, 1)
DECODING = [info for info in registered().values() if info.kind == "backend" and "decode" in info.modes]


@pytest.mark.parametrize(
    "info", [i for i in DECODING if i.family in ("page_table", "block_table")], ids=lambda i: i.name
)
def test_padded_rows_have_the_backend_s_own_filler_and_count_into_the_sum(info):
    """A16: bs 3 in bucket 4."""
    page = 256 if info.name.startswith("deepseek") else 128 if info.name == "cutlass_mla" else 64
    tables = make_pools(rows=9, width=300, page_size=page, swa=False, seed=0, device=DEVICE)
    backend = info.load()(AttentionConfig(page, 256, extra={"num_sms": 4}), tables)
    slots = StaticSlots(4, 1, backend.seq_len_fill_value, DEVICE)
    runner = DecodeRunner(backend, Mode.DECODE, [4], slots, Placement.GRAPH, RecordedGraph)
    runner.capture()
    runner.load_batch(a_step(Mode.DECODE, LENGTHS, tables))
    fill = backend.seq_len_fill_value
    assert fill in (0, 1) and slots.seq_lens.tolist() == [*LENGTHS, fill]
    assert runner.view.seq_lens_sum == sum(LENGTHS) + fill and runner.view.num_padding == 1
    assert slots.req_pool_indices.tolist()[3] == 0 and not tables.req_to_token[0].any()  # the row of zeros


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_slot_of_minus_one_is_not_the_last_slot(arm):
    """A20: 6 blocks of 8; -1 // 8 = -1 and -1 % 8 = 7 would be slot 47 of the full pool, or the map's last entry."""
    tables = make_pools(rows=3, width=24, page_size=8, swa=True, seed=0, device=DEVICE)
    mapping = tables.full_to_swa
    backend = TrtllmMhaBackend(
        AttentionConfig(8, 24), tables, arm.implementation, recorded=arm.placement.value != "eager"
    )
    slots = StaticSlots(4, 1, 1, DEVICE)
    runner = DecodeRunner(backend, Mode.DECODE, [4], slots, arm.placement, RecordedGraph)
    runner.capture()
    step = a_step(Mode.DECODE, (20, 9), tables)
    runner.load_batch(replace(step, out_cache_loc=torch.tensor([9, -1], device=DEVICE)))
    runner.replay()
    written = backend.forward_metadata.swa_out_cache_loc.tolist()
    assert written == [int(mapping[9]), -1, int(mapping[0]), int(mapping[0])]
    assert np.isin(slots.out_cache_loc.tolist()[2:], [0]).all()  # padding writes to the reserved slot
