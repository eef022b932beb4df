"""State slots of live rows, -1 for padding rows, whoever chose the fill and however long the requests are."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from attn_graph.backends.base import ConfigError, tensors_of
from attn_graph.backends.batch import RING_LENGTH, idle_batch, live_batch
from attn_graph.backends.kernels.linear_state import PreparedLinearState, Ring
from attn_graph.backends.lightning import LightningBackend
from attn_graph.backends.mamba import VARIANTS, MambaBackend
from attn_graph.backends.modes import ForwardMode, Implementation
from attn_graph.backends.registry import lookup
from attn_graph.backends.runners.glue import GlueGraphs
from attn_graph.profilers.conformance.faults.mamba import ClampedSlot, CountsByValue
from attn_graph.profilers.conformance.findings import CHECKS, judge
from attn_graph.profilers.conformance.matrix import Sizes
from golden_replays import Golden, cases
from linear_states import (
    BUCKET,
    CONTEXT,
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


# Replay rings.

RING = {"variant": "gdn", "ring_interval": 3}
RINGS = [
    (Mode.DECODE, RING),
    (Mode.DECODE, RING | {"variant": "kda"}),
    (Mode.TARGET_VERIFY, RING),
    (Mode.TARGET_VERIFY, RING | {"variant": "mamba2", "ring_in_verify": True}),
]


def cursors_of(own) -> list[int]:
    return own.backend.pools.ring_cursors.tolist()


def test_the_capture_of_the_classic_chain_flushes_nothing_whatever_the_fill():
    own = capture(MambaBackend, Mode.DECODE, ARMS[0], **RING | {"ring_interval": 1})
    assert own.backend.forward_metadata.force_flush.tolist() == [0] * BUCKET
    assert own.differences(requests(own, [4, 5])) == []
    assert own.backend.forward_metadata.force_flush.tolist() == [1] * BUCKET


def on_rows(own, rows: list[int], lengths: list[int]):
    return live_batch(own.runner.mode, lengths, rows, own.backend.pools, 1, np.random.default_rng(0))


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize(("mode", "options"), RINGS, ids=str)
def test_every_arm_writes_ring_fields_and_moves_cursors_as_the_oracle_says(mode, options, arm):
    own = capture(MambaBackend, mode, arm, **options)
    first = cursors_of(own)
    assert [d for d in replayed(own, batches(mode, own.backend.pools)) if d] == []
    assert (cursors_of(own) != first) is (mode is Mode.DECODE or options.get("ring_in_verify", False))


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_rings_are_those_of_the_places_where_a_pool_moved_the_states(arm):
    own = capture(MambaBackend, Mode.DECODE, arm, moves=True, **RING)
    assert [d for d in replayed(own, batches(Mode.DECODE, own.backend.pools)) if d] == []
    assert cursors_of(own)[:40] == [slot % RING_LENGTH for slot in range(40)]  # states lie behind these


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_captures_and_their_warm_ups_leave_rings_as_they_are(arm):
    own = capture(MambaBackend, Mode.DECODE, arm, **RING)
    assert cursors_of(own) == pools_for().ring_cursors.tolist()
    own.differences(requests(own, [4, 5]))  # from now on the slots say that rows are live
    moved = cursors_of(own)
    own.runner.capture()
    assert cursors_of(own) == moved


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_slot_that_stands_twice_moves_once_and_is_flushed_if_either_row_says_so(arm):
    own = capture(MambaBackend, Mode.DECODE, arm, **RING)
    slot = int(own.backend.pools.state_slots[5])
    own.backend.pools.ring_cursors[slot] = 1
    assert own.differences(on_rows(own, [5, 5, 5], [4, 5, 7])) == []
    assert cursors_of(own)[slot] == 2
    for lengths in ([4, 6, 7], [6, 5, 7], [4, 5, 6]):
        own.backend.pools.ring_cursors[slot] = 1
        assert own.differences(on_rows(own, [5, 5, 5], lengths)) == []
        assert cursors_of(own)[slot] == 0
    assert own.backend.forward_metadata.force_flush[:3].tolist() == [0, 0, 1]


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_ring_starts_anew_behind_its_last_entry_and_rows_without_a_slot_move_none(arm):
    own = capture(MambaBackend, Mode.DECODE, arm, **RING)
    pools = own.backend.pools
    pools.ring_cursors.copy_(torch.arange(9) % 2)
    a, b = int(pools.state_slots[2]), int(pools.state_slots[3])
    pools.ring_cursors[a], pools.state_slots[4] = RING_LENGTH - 1, -1
    before = cursors_of(own)
    assert own.differences(on_rows(own, [2, 3, 4], [7, 7, 7])) == []
    before[a], before[b] = 0, before[b] + 1
    assert cursors_of(own) == before
    assert own.backend.forward_metadata.mamba_cache_indices.tolist() == [a, b, -1, -1]


@pytest.mark.parametrize("rows", [300, 512])
def test_rows_of_one_slot_wait_for_each_other_however_far_apart_they_stand(rows):
    rng = np.random.default_rng(rows)
    pool, lengths = 1 + rng.integers(0, 40, rows), rng.integers(1, 99, rows)
    states, before = torch.arange(41, dtype=torch.int32), torch.from_numpy(rng.integers(0, 7, 41)).int()
    cursors, out = before.clone(), [torch.zeros(rows + 1, dtype=torch.int32) for _ in range(4)]
    ring = Ring(cursors, 7, torch.from_numpy(lengths), 10, True, out[0][:rows], out[1][:rows])
    live, pools = torch.tensor([rows - 2], dtype=torch.int32), torch.from_numpy(pool)
    fused = PreparedLinearState(
        req_pool_indices=pools, state_slots=states, live_tokens=live, state_indices=out[2][:rows],
        query_start_loc=out[3], ring=ring, bs=rows, width=1, padding_slot=-1,
    )  # fmt: skip
    fused(pools, live, seq_lens=ring.seq_lens)
    wanted = before.tolist()
    for slot in set(pool[: rows - 2].tolist()):
        flushed = any(lengths[: rows - 2][pool[: rows - 2] == slot] % 10 == 0)
        wanted[slot] = 0 if flushed else (wanted[slot] + 1) % 7
    assert cursors.tolist() == wanted
    assert ring.write_pos[: rows - 2].tolist() == before[pool[: rows - 2]].tolist()
    assert ring.write_pos[rows - 2 :].tolist() == [before[0]] * 2


def test_a_ring_costs_the_classic_chain_25_dispatches_and_the_fused_one_nothing():
    classic, eager, graph = (capture(MambaBackend, Mode.DECODE, ARMS[i], **RING) for i in (0, 2, 3))
    full, padded = requests(classic, [33, 64, 5, 7]), requests(classic, [33, 64])
    cost = classic.counts(padded)
    assert (cost.dispatches, cost.views) == (14 + 25, 11)
    assert classic.counts(full).dispatches == 11 + 25
    assert (eager.counts(padded).dispatches, eager.counts(padded).launches) == (0, 1)
    assert (graph.counts(padded).dispatches, graph.counts(padded).launches) == (0, 0)


def test_what_a_ring_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"ring_interval 3 of MambaBackend needs pools\.ring_cursors; got None"):
        config = backend_of(MambaBackend, Mode.DECODE, ARMS[0], **RING).config
        MambaBackend(config, dataclasses.replace(pools_for(), ring_cursors=None))
    with pytest.raises(ConfigError, match="got rings of 0 entries"):
        MambaBackend(config, dataclasses.replace(pools_for(), ring_length=0))
    with pytest.raises(ConfigError, match="ring_interval of MambaBackend must be at least 1 token, or 0, got -1"):
        backend_of(MambaBackend, Mode.DECODE, ARMS[0], ring_interval=-1)
    with pytest.raises(ConfigError, match="LightningBackend has no replay rings"):
        backend_of(LightningBackend, Mode.DECODE, ARMS[0], ring_interval=3)


def test_no_glue_graph_is_made_of_a_rebuild_that_its_warm_ups_would_move_on():
    eager = backend_of(MambaBackend, Mode.DECODE, ARMS[2], **RING)
    assert eager.implementation is Implementation.FUSED
    assert "it moves ring_cursors" in GlueGraphs(eager, lambda: None).refusal
    assert GlueGraphs(backend_of(MambaBackend, Mode.DECODE, ARMS[2]), lambda: None).refusal == ""


@pytest.mark.parametrize(
    "check", ["C2", "C5", "C9", "C10", "C11", "C12", "C15", "C17", "C20", "C21", "C22", "C25", "L3"]
)
def test_checks_that_rebuild_more_than_once_start_from_the_same_rings(check):
    sizes = Sizes(16, 116, (2, 3), steps=6, thin=5, options=tuple(RING.items()))
    subject = sizes.subject("mamba", Mode.DECODE, torch.device("cpu"), ARMS, seed=0)
    assert {f.status for f in judge(CHECKS[check], subject)} == {"pass"}


# Recorded cases have no rings. These are written here, by a reading of its own: a ring is a list of entries, emptied
# when it is full or flushed, and its cursor is how many there are.

BATCHES = (
    ([1, 2, 3, 4], [8, 9, 10, 11]),
    ([1, 2, 3, 4], [9, 10, 11, 12]),
    ([4, 6], [13, 30]),
    ([6, 6, 2], [31, 33, 1]),
    ([], []),
    ([5, 1, 6, 3], [100, 7, 34, 12]),
)


def ring_case(path, mode: Mode, options: dict) -> None:
    """Write a case as recorded ones are: four rows, rings of 4 entries, six replays."""
    rng, n, size = np.random.default_rng(3), N if mode is Mode.TARGET_VERIFY else 1, 4
    slots, table = np.array([3, 0, 5, 6, 1, 2, 4], dtype=np.int32), np.zeros((7, CONTEXT + 8), dtype=np.int32)
    rings = {slot: ["entry"] * int(rng.integers(0, 4)) for slot in range(7)}
    flushes = mode is Mode.DECODE and options["variant"] != "kda"
    moves = mode is Mode.DECODE or options.get("ring_in_verify", False)
    data = {"init/req_to_token": table, "init/mamba_index_mapping": slots, "init/ring_cursors": fill_of(rings)}
    for i, (rows, lengths) in enumerate(BATCHES):
        padding = size - len(rows)
        mine = [int(slots[row]) for row in rows]
        flush = [int(flushes and length % options["ring_interval"] == 0) for length in [*lengths, *[1] * padding]]
        data |= {
            f"r{i}/in/req_pool_indices": np.array(rows, dtype=np.int64),
            f"r{i}/in/seq_lens": np.array(lengths, dtype=np.int64),
            f"r{i}/in/out_cache_loc": np.zeros(len(rows) * n, dtype=np.int64),
            f"r{i}/in/positions": np.zeros(len(rows) * n, dtype=np.int64),
            f"r{i}/static/req_pool_indices": np.array([*rows, *[0] * padding]),
            f"r{i}/static/seq_lens": np.array([*lengths, *[1] * padding]),
            f"r{i}/out/mamba_cache_indices": np.array([*mine, *[-1] * padding], dtype=np.int32),
            f"r{i}/out/write_pos": np.array([len(rings[s]) for s in [*mine, *[0] * padding]], dtype=np.int32),
            f"r{i}/out/force_flush": np.array(flush, dtype=np.int32),
            f"r{i}/host": json.dumps({"raw_bs": len(rows)}),
        }
        for slot in set(mine) if moves else ():
            rings[slot].append("entry")
            flushed = any(f for s, f in zip(mine, flush, strict=False) if s == slot)
            if len(rings[slot]) == size or flushed:
                rings[slot].clear()
        data[f"r{i}/out/ring_cursors"] = fill_of(rings)
    config = {
        "mode": "verify" if n > 1 else "decode", "B": size, "P": 1, "C": CONTEXT, "N": n if n > 1 else 0, "K": 1,
        "S": 0, "window": None, "fill": 1, "heads": 4, "kv_heads": 1, "pool_size": 6, "mask": False, "encoder": False,
        "tokens_per_req": n, "seq_lens_static_dtype": "torch.int64", "replays": len(BATCHES),
        "extra": {"ring_length": size},
    }  # fmt: skip
    np.savez(path, config=json.dumps(config), **data)


def fill_of(rings: dict[int, list]) -> np.ndarray:
    return np.array([len(rings[slot]) for slot in range(len(rings))], dtype=np.int32)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize(("mode", "options"), RINGS, ids=str)
def test_rings_of_written_cases_are_reproduced_step_after_step(tmp_path, mode, options, arm):
    ring_case(tmp_path / "ring.npz", mode, options)
    seen = set()
    for replay in Golden(tmp_path / "ring.npz").replays(MambaBackend, arm, **options):
        assert {"mamba_cache_indices", "write_pos", "force_flush", "ring_cursors"} == replay.golden.keys()
        assert [d for field in sorted(replay.golden) for d in replay.differences(field)] == []
        seen.add(tuple(replay.golden["ring_cursors"]))
    assert (len(seen) > 4) is (mode is Mode.DECODE or options.get("ring_in_verify", False))
