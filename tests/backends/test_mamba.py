"""State slots of live rows, -1 for padding rows, whoever chose the fill and however long the requests are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from attn_graph.backends.base import ConfigError, tensors_of
from attn_graph.backends.batch import idle_batch
from attn_graph.backends.mamba import VARIANTS, MambaBackend
from attn_graph.backends.modes import ForwardMode
from attn_graph.backends.registry import lookup
from golden_replays import Golden, cases
from linear_states import (
    BUCKET,
    N,
    backend_of,
    batches,
    capture,
    counted,
    counts_by_value,
    pools_for,
    recorded,
    requests,
)
from rebuilds import ARMS, replayed

Mode = ForwardMode
MODES = sorted(MambaBackend.modes)


class CountsByValue(MambaBackend):
    """Rows of the fill length are padding, whatever the engine says."""

    def _padding(self, fb):
        return super()._padding(dataclasses.replace(fb, num_padding=None))


class ClampedSlot(MambaBackend):
    """A19: padding's -1 clamped to slot 0, which somebody owns."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        md.mamba_cache_indices.clamp_(min=0)


class CountsCaptureLengths(MambaBackend):
    """A capture that counts: its lengths are all the fill, so every row is padding and every start 0."""

    def bind(self, fb):
        md = super().bind(fb)
        self.rebuild_aten(dataclasses.replace(fb, num_padding=None), md)
        return md


class LinksPastTheLive(MambaBackend):
    """All link rows copied, from a buffer whose rows behind the live ones are an older batch's."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        md.retrieve_next_token.copy_(fb.spec_info.retrieve_next_token)


class TranslatedPadding(MambaBackend):
    """Slots translated after padding got its -1, which as an index means the last slot."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        slots = self.pools.state_slots[fb.req_pool_indices].long()
        slots[fb.batch_size - fb.num_padding :] = -1
        md.mamba_cache_indices.copy_(self.pools.physical_slots[slots])


class UntranslatedTrack(MambaBackend):
    """States cached where their slot number says, in a pool that moves them."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        md.mamba_track_indices.copy_(fb.mamba_track_indices)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_arm_writes_what_the_oracle_says_and_nothing_else(mode, arm):
    own = capture(MambaBackend, mode, arm)
    assert [d for d in replayed(own, batches(mode, own.backend.pools)) if d] == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_trees_bring_links_of_live_rows_and_leave_the_kernels_own(arm):
    own = capture(MambaBackend, Mode.TARGET_VERIFY, arm, topk=4)
    assert own.backend.forward_metadata.retrieve_parent_token.shape == (BUCKET, N)
    assert [d for d in replayed(own, batches(Mode.TARGET_VERIFY, own.backend.pools, topk=4)) if d] == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("moves", [False, True])
def test_slots_of_the_prefix_cache_come_along_and_all_slots_are_where_the_pool_moved_them(moves, arm):
    own = capture(MambaBackend, Mode.DECODE, arm, tracks=True, moves=moves, variant="mamba2")
    live = batches(Mode.DECODE, own.backend.pools, tracks=True)
    assert [d for d in replayed(own, live) if d] == []
    md = own.backend.forward_metadata
    # Mamba2 layers take the last num_decodes of them: a whole buffer would give them another size's.
    assert len(md.mamba_track_indices[-md.num_decodes :]) == len(md.mamba_track_indices) == BUCKET


@pytest.mark.parametrize(("moves", "more"), [(False, 2), (True, 4)])
def test_the_prefix_cache_costs_the_classic_chain_a_view_and_a_copy_and_moved_slots_a_look_up_each(moves, more):
    own = capture(MambaBackend, Mode.DECODE, ARMS[0], tracks=True, moves=moves)
    assert own.counts(requests(own, [33, 64])).dispatches == 14 + more
    fused = capture(MambaBackend, Mode.DECODE, ARMS[2], tracks=True, moves=moves)
    assert (fused.counts(requests(fused, [33, 64])).dispatches, fused.counts(idle_batch()).launches) == (0, 1)


@pytest.mark.parametrize(
    ("fault", "arm", "field"),
    [(TranslatedPadding, ARMS[0], "mamba_cache_indices"), (UntranslatedTrack, ARMS[2], "mamba_track_indices")],
)
def test_the_comparison_catches_slots_of_a_pool_that_moves_states(fault, arm, field):
    own = capture(fault, Mode.DECODE, arm, tracks=True, moves=True)
    live = batches(Mode.DECODE, own.backend.pools, tracks=True)
    assert {d.split("[")[0] for ds in replayed(own, live) for d in ds} == {field}


def test_variants_differ_in_constants_only():
    bound = {
        v: capture(MambaBackend, Mode.TARGET_VERIFY, ARMS[3], variant=v).backend.forward_metadata for v in VARIANTS
    }
    assert bound["gdn"].intermediate_state_indices.tolist() == [0, 1, 2, 3]
    mamba2 = bound["mamba2"]
    assert (mamba2.num_decodes, mamba2.draft_token_num, mamba2.is_target_verify) == (BUCKET, N, True)
    assert (mamba2.num_prefills, mamba2.num_prefill_tokens) == (0, 0)
    names = {v: set(tensors_of(md)) for v, md in bound.items()}
    assert names["mamba2"] == names["kda"] == names["gdn"] - {"intermediate_state_indices"}
    decode = capture(MambaBackend, Mode.DECODE, ARMS[3], variant="mamba2").backend.forward_metadata
    assert (decode.num_decodes, decode.draft_token_num, decode.is_target_verify) == (BUCKET, 1, False)


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
def test_indices_of_intermediate_states_stay_as_they_are(arm):
    own = capture(MambaBackend, Mode.TARGET_VERIFY, arm, variant="gdn")
    assert [d for d in replayed(own, batches(Mode.TARGET_VERIFY, own.backend.pools)) if d] == []
    assert own.backend.forward_metadata.intermediate_state_indices.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_counts_are_those_of_the_classic_chain_and_fused_is_one_launch(mode, variant):
    classic, eager, graph = (capture(MambaBackend, mode, ARMS[i], variant=variant) for i in (0, 2, 3))
    full, padded = requests(classic, [33, 64, 5, 7]), requests(classic, [33, 64])
    assert classic.counts(full).dispatches == lookup("mamba").dispatches[str(mode)][0] == 11
    assert classic.counts(padded).dispatches == 14
    assert classic.counts(idle_batch()).dispatches == 12
    assert (eager.counts(padded).dispatches, eager.counts(padded).launches) == (0, 1)
    assert (graph.counts(padded).dispatches, graph.counts(padded).launches) == (0, 0)


@pytest.mark.parametrize(("mode", "padded"), [(Mode.DECODE, 29), (Mode.TARGET_VERIFY, 30)], ids=str)
def test_counting_by_value_costs_what_older_releases_paid(mode, padded):
    own = capture(MambaBackend, mode, ARMS[0])
    full, some = (counts_by_value(own, requests(own, lens)) for lens in ([33, 64, 5, 7], [33, 64]))
    assert (full.dispatches, full.syncs) == (19, 3)
    assert (some.dispatches, some.syncs) == (padded, 6)


def test_links_cost_the_classic_chain_four_dispatches():
    own = capture(MambaBackend, Mode.TARGET_VERIFY, ARMS[0], topk=4)
    full, padded = requests(own, [33, 64, 5, 7]), requests(own, [33, 64])
    assert (own.counts(full).dispatches, own.counts(padded).dispatches) == (15, 18)
    assert (counts_by_value(own, full).dispatches, counts_by_value(own, padded).dispatches) == (23, 34)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("fill", [0, 1, 4])
def test_a_live_row_as_long_as_the_fill_keeps_its_state_whoever_chose_the_fill(fill, arm):
    own = capture(MambaBackend, Mode.TARGET_VERIFY, arm, fill=fill)
    assert own.differences(requests(own, [fill, 64, 1])) == []
    md = own.backend.forward_metadata
    assert md.query_start_loc.tolist() == [0, 4, 8, 12, 12] and md.mamba_cache_indices[3] == -1


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_slots_of_the_report_with_a_clamped_padding_slot(arm):
    pools = pools_for()
    pools.state_slots[2:5] = pools.state_slots.new_tensor([7, 0, 2])
    own = capture(MambaBackend, Mode.DECODE, arm)
    own.backend.pools.state_slots.copy_(pools.state_slots)
    assert own.differences(requests(own, [9, 10, 11])) == []
    assert own.backend.forward_metadata.mamba_cache_indices.tolist() == [7, 0, 2, -1]


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_pool_rows_of_padding_are_zeroed_before_they_are_looked_up(arm):
    own = capture(MambaBackend, Mode.DECODE, arm)
    own.load(requests(own, [5, 9]))
    own.runner.slots.req_pool_indices[2:] = 1_000_000
    own.runner.replay()
    assert own.runner.slots.req_pool_indices.tolist() == [2, 3, 0, 0]
    assert own.backend.forward_metadata.mamba_cache_indices[2:].tolist() == [-1, -1]


def test_a_capture_takes_no_row_for_padding_although_all_have_the_fill_length():
    own = capture(MambaBackend, Mode.DECODE, ARMS[0])
    assert own.backend.forward_metadata.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    faulty = backend_of(CountsCaptureLengths, Mode.DECODE, ARMS[0])
    faulty.init_cuda_graph_state(BUCKET, BUCKET)
    assert faulty.bind(own.runner.capture_batch(BUCKET)).query_start_loc.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("fault", "arm", "topk", "fields"),
    [
        (CountsByValue, ARMS[0], 1, {"query_start_loc", "mamba_cache_indices"}),
        (ClampedSlot, ARMS[2], 1, {"mamba_cache_indices"}),
        (LinksPastTheLive, ARMS[1], 4, {"retrieve_next_token"}),
    ],
)
def test_the_comparison_catches(fault, arm, topk, fields):
    own = capture(fault, Mode.TARGET_VERIFY, arm, topk=topk)
    found = {d.split("[")[0] for ds in replayed(own, batches(Mode.TARGET_VERIFY, own.backend.pools, topk)) for d in ds}
    assert found == fields


def test_counting_by_value_loses_the_last_live_row_and_finds_no_padding_of_another_fill():
    own = capture(CountsByValue, Mode.DECODE, ARMS[0])
    assert own.differences(requests(own, [1, 64, 9]))[0].startswith("mamba_cache_indices[2]: -1")
    other = capture(CountsByValue, Mode.DECODE, ARMS[0], fill=4)
    slot_of_row_0 = int(other.backend.pools.state_slots[0])
    assert other.differences(requests(other, [5, 64, 9]))[0].startswith(f"mamba_cache_indices[3]: {slot_of_row_0}, ")


def test_sizes_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="max_num_tokens 9 is no multiple of max_bs 4"):
        backend_of(MambaBackend, Mode.DECODE, ARMS[0]).init_cuda_graph_state(4, 9)
    with pytest.raises(ConfigError, match=r"unknown variant 'rwkv' of MambaBackend\. Known: gdn, kda, mamba2"):
        backend_of(MambaBackend, Mode.DECODE, ARMS[0], variant="rwkv").init_cuda_graph_state(4, 4)
    without = backend_of(MambaBackend, Mode.DECODE, ARMS[0])
    without.pools = dataclasses.replace(without.pools, state_slots=None)
    with pytest.raises(ConfigError, match=r"needs pools\.state_slots"):
        without.init_cuda_graph_state(4, 4)
    own = capture(MambaBackend, Mode.TARGET_VERIFY, ARMS[3])
    batch = own.runner.capture_batch(BUCKET)
    with pytest.raises(ConfigError, match="verify has 3 draft tokens, the buffers have 4 a request"):
        own.backend.bind(dataclasses.replace(batch, spec_info=dataclasses.replace(batch.spec_info, draft_token_num=3)))
    with pytest.raises(ConfigError, match=r"batch size 5 is not within 1\.\.4"):
        own.backend.bind(dataclasses.replace(batch, batch_size=5))
    with pytest.raises(ConfigError, match="num_token_non_padded is None"):
        own.backend.rebuild_fused(dataclasses.replace(batch, num_token_non_padded=None), own.backend.forward_metadata)
    with pytest.raises(ConfigError, match="has no mode draft_extend_v2"):
        extend = dataclasses.replace(batch, forward_mode=Mode.DRAFT_EXTEND_V2)
        own.backend.init_forward_metadata_out_graph(extend, in_capture=True)


def variant_of(path) -> str:
    return next((v for v in VARIANTS if v in path.stem.split("_")), "kda")


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("path", cases("mamba"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    golden = Golden(path)
    for i, replay in enumerate(golden.replays(MambaBackend, arm, variant=variant_of(path))):
        ones = golden.data[f"r{i}/static/seq_lens"].tolist().count(1)
        if counted(golden) and ones != golden.config["B"] - replay.host["raw_bs"]:
            continue  # a live row taken for padding: see the test of the recorded release's own chain
        fields = replay.expected.keys() & replay.golden.keys()
        assert {"mamba_cache_indices", "query_start_loc"} <= fields
        assert [d for field in sorted(fields) for d in replay.differences(field)] == []


@pytest.mark.parametrize("path", cases("mamba"), ids=lambda p: p.stem)
def test_the_classic_chain_of_the_recorded_release_leaves_and_costs_what_was_recorded(path):
    golden = Golden(path)
    cls = CountsByValue if counted(golden) else MambaBackend
    for i, own, cost in recorded(golden, cls, variant=variant_of(path)):
        then, md = golden.host(i), own.backend.forward_metadata
        for name, tensor in tensors_of(md).items():
            rows = then["raw_bs"] if name in ("retrieve_next_token", "retrieve_next_sibling") else None
            if name not in ("retrieve_parent_token", "intermediate_state_indices"):
                np.testing.assert_array_equal(tensor[:rows], golden.data[f"r{i}/out/{name}"][:rows])
        if variant_of(path) == "mamba2":
            for name in ("num_decodes", "num_prefills", "num_prefill_tokens"):
                assert getattr(md, name) == then[name]
        then = then["dispatches_out_graph"]
        assert (cost.dispatches, cost.views, cost.syncs) == (then["aten"], then["view"], then["sync"])
