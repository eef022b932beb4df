"""What lightning attention adds to recurrent layers: query lengths, none for padding, and flags that stay in place."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attn_graph.backends.base import ConfigError
from attn_graph.backends.batch import idle_batch
from attn_graph.backends.lightning import LightningBackend, decay_slopes
from attn_graph.backends.modes import ForwardMode
from attn_graph.backends.registry import lookup
from golden_replays import Golden, cases
from linear_states import BUCKET, N, backend_of, batches, capture, counted, counts_by_value, recorded, requests
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
MODES = sorted(LightningBackend.modes)


class CountsByValue(LightningBackend):
    """Rows of length 1 are padding, whatever the engine says."""

    def _padding(self, fb):
        return super()._padding(dataclasses.replace(fb, num_padding=None))


class NewTensorsEveryCall(LightningBackend):
    """Upstream: the capture-time tensor is freed while the graph holds its address."""

    def rebuild_aten(self, fb, md):
        md.q_lengths = md.q_lengths.clone()
        super().rebuild_aten(fb, md)


class BoolFlags(LightningBackend):
    """The eager path's dtype."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.ones = {dtype: ones.bool() for dtype, ones in self.ones.items()}


class PaddingHasQueries(LightningBackend):
    """All rows taken as N queries long, as the verify kernel's own step does."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        md.q_lengths.fill_(self.tokens)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, arm):
    own = capture(LightningBackend, mode, arm)
    assert [d for d in replayed(own, batches(mode, own.backend.pools)) if d] == []


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode):
    classic, eager, graph = (capture(LightningBackend, mode, ARMS[i]) for i in (0, 2, 3))
    full, padded = requests(classic, [33, 64, 5, 7]), requests(classic, [33, 64])
    assert classic.counts(full).dispatches == lookup("lightning").dispatches[str(mode)][0] == 15
    assert classic.counts(padded).dispatches == 18
    assert classic.counts(idle_batch()).dispatches == lookup("lightning").dispatches["idle"][0]
    assert (eager.counts(padded).dispatches, eager.counts(padded).launches) == (0, 1)
    assert (graph.counts(padded).dispatches, graph.counts(padded).launches) == (0, 0)


@pytest.mark.parametrize(("mode", "padded"), [(Mode.DECODE, 33), (Mode.TARGET_VERIFY, 34)], ids=str)
def test_counting_by_value_costs_what_older_releases_paid(mode, padded):
    own = capture(LightningBackend, mode, ARMS[0])
    full, some = (counts_by_value(own, requests(own, lens)) for lens in ([33, 64, 5, 7], [33, 64]))
    assert (full.dispatches, full.syncs) == (23, 3)
    assert (some.dispatches, some.syncs) == (padded, 6)


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_an_idle_step_has_no_queries_and_a_live_row_of_length_one_has_its_own(arm):
    own = capture(LightningBackend, Mode.TARGET_VERIFY, arm)
    md = own.backend.forward_metadata
    assert own.differences(idle_batch()) == []
    assert md.q_lengths.tolist() == [0, 0, 0, 0] and md.mamba_cache_indices.tolist() == [-1] * 4
    assert own.differences(requests(own, [1, 9, 1])) == []
    assert md.q_lengths.tolist() == [N, N, N, 0]


@pytest.mark.parametrize("lens", [torch.int32, torch.int64], ids=str)
def test_flags_have_the_dtype_of_the_lengths_and_are_written_once(lens):
    backend = backend_of(LightningBackend, Mode.DECODE, ARMS[3])
    own = Replayer.capture(backend, Mode.DECODE, BUCKET, ARMS[3].placement, lens=lens)
    assert backend.forward_metadata.has_initial_states.dtype == lens
    assert [d for d in replayed(own, batches(Mode.DECODE, backend.pools)) if d] == []


def test_host_constants_are_those_of_the_captured_size():
    verify, decode = (capture(LightningBackend, m, ARMS[3]).backend for m in (Mode.TARGET_VERIFY, Mode.DECODE))
    md = verify.forward_metadata
    assert (md.batch_size, md.num_decodes, md.num_prefills, md.num_prefill_tokens) == (BUCKET, BUCKET, 0, 0)
    assert (md.value_tile, decode.forward_metadata.value_tile) == (64, 32)
    two = capture(LightningBackend, Mode.TARGET_VERIFY, ARMS[3]).runner.capture_batch(2)
    assert verify.bind(two).value_tile == 32


def test_slopes_halve_from_head_to_head_and_fade_with_depth():
    np.testing.assert_allclose(decay_slopes(8, 0, 1), [2.0**-i * (1 + 1e-5) for i in range(1, 9)])
    # Six heads: four geometric ones, then the first and third of eight.
    expected = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    np.testing.assert_allclose(decay_slopes(6, 0, 5), np.multiply(expected, 1 + 1e-5))
    np.testing.assert_allclose(decay_slopes(6, 2, 5), np.multiply(expected, 0.5 + 1e-5))
    np.testing.assert_allclose(decay_slopes(6, 4, 5), np.multiply(expected, 1e-5))


def test_a_rank_holds_the_slopes_of_its_own_heads():
    tables = []
    for rank in (0, 1):
        backend = backend_of(LightningBackend, Mode.DECODE, ARMS[0], layers=3, tp_rank=rank, tp_size=2)
        backend.init_cuda_graph_state(BUCKET, BUCKET)
        assert [(t.shape, t.dtype) for t in backend.tp_slope] == [((32, 1, 1), torch.float32)] * 3
        tables.append(torch.stack(backend.tp_slope))
    whole = [decay_slopes(64, layer, 3) for layer in range(3)]
    np.testing.assert_allclose(torch.cat(tables, dim=1).squeeze(), whole, rtol=1e-6)


@pytest.mark.parametrize(
    ("fault", "arm", "fields"),
    [
        (CountsByValue, ARMS[0], {"query_start_loc", "mamba_cache_indices", "q_lengths"}),
        (NewTensorsEveryCall, ARMS[0], {"q_lengths"}),
        (BoolFlags, ARMS[3], {"has_initial_states: dtype bool, expected int64"}),
        (PaddingHasQueries, ARMS[2], {"q_lengths"}),
    ],
)
def test_the_comparison_catches(fault, arm, fields):
    own = capture(fault, Mode.TARGET_VERIFY, arm)
    found = {d.split("[")[0] for ds in replayed(own, batches(Mode.TARGET_VERIFY, own.backend.pools)) for d in ds}
    assert found == fields


def test_trees_are_refused():
    with pytest.raises(ConfigError, match="topk must be at most 1, got 4"):
        backend_of(LightningBackend, Mode.TARGET_VERIFY, ARMS[0], topk=4).init_cuda_graph_state(4, 16)


RECORDED = {name: name for name in ("mamba_cache_indices", "query_start_loc")} | {
    # Made anew by every call: what the graph would read is the capture's.
    name: f"live/{name}"
    for name in ("q_lengths", "has_initial_states")
}


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("path", cases("lightning"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    for i, replay in enumerate(golden.replays(LightningBackend, arm)):
        ones = golden.data[f"r{i}/static/seq_lens"].tolist().count(1)
        if counted(golden, "lightning") and ones != golden.config["B"] - replay.host["raw_bs"]:
            continue  # a live row taken for padding: see the test of the recorded release's own chain
        assert [d for field, name in RECORDED.items() for d in replay.differences(field, name)] == []


@pytest.mark.parametrize("path", cases("lightning"), ids=lambda p: p.stem)
def test_the_classic_chain_of_the_recorded_release_leaves_and_costs_what_was_recorded(path):
    golden = Golden(path)
    for i, own, cost in recorded(golden, CountsByValue if counted(golden, "lightning") else LightningBackend):
        then, md = golden.host(i), own.backend.forward_metadata
        for field, name in RECORDED.items():
            folder = f"r{i}/" if name.startswith("live") else f"r{i}/out/"
            np.testing.assert_array_equal(getattr(md, field), golden.data[folder + name])
        for name in ("batch_size", "num_decodes", "num_prefills", "num_prefill_tokens"):
            assert getattr(md, name) == then[name]
        assert cost.dispatches == then["dispatches_out_graph"]["aten"]
        assert cost.syncs == then["dispatches_out_graph"]["sync"]
