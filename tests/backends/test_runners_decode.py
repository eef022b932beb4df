"""The decode runner: order of hooks, padding of slots, what the out-graph hook sees, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError, NotCapturedError
from attn_graph.backends.batch import idle_batch
from attn_graph.backends.modes import ForwardMode, Implementation, Placement
from attn_graph.backends.runners.decode import DecodeRunner, StaticSlots, upload
from attn_graph.backends.runners.slots import BufferPool
from attn_graph.backends.runners.staging import EarlyStage
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.profilers.counters import count
from attn_graph.profilers.recorded import CaptureError, RecordedGraph
from runner_spies import DEVICE, SpyBackend, a_step, graphs_noting, placement, pools

Mode = ForwardMode
TABLES = pools()


def decode_runner(log, buckets=(2, 4), body=lambda: None, cls=DecodeRunner, recorded=True, slots=None, **options):
    backend = SpyBackend(log, recorded=recorded, tables=TABLES)
    slots = slots or StaticSlots(max(buckets), 1, 1, DEVICE)
    return cls(backend, Mode.DECODE, buckets, slots, placement(backend), graphs_noting(log), body, **options)


def decode_step(lengths=(5, 9, 7), **options):
    return a_step(Mode.DECODE, lengths, TABLES, **options)


# Order.


def test_each_size_is_bound_once_warmed_up_twice_and_recorded_largest_first():
    log = []
    runner = decode_runner(log, body=lambda: log.append("body"))
    runner.capture()
    one_size = ["out_capture", "capture", "in", "body", "warm", "in", "body", "warm", "in", "body"]
    assert log == [("state", 4, 4), *one_size, *one_size]
    assert list(runner.graphs) == [4, 2]


def test_a_replay_calls_the_out_graph_hook_once_and_before_the_launch_and_no_other():
    log = []
    runner = decode_runner(log)
    runner.capture()
    del log[:]
    runner.load_batch(decode_step())
    assert log == []
    runner.replay()
    assert log == ["out", "launch"]


class InGraphLast(DecodeRunner):
    """The hook behind the forward pass that reads it."""

    def _run(self, bucket, batch):
        self._run_forward(bucket, batch)
        self._metadata(batch)


@pytest.mark.parametrize(("cls", "read"), [(DecodeRunner, [5, 9, 7, 1]), (InGraphLast, [1, 1, 1, 1])])
def test_the_forward_pass_reads_the_metadata_of_its_own_step(cls, read):
    seen = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    runner = decode_runner([], (4,), lambda: seen.copy_(runner.backend.lens), cls)
    runner.capture()
    runner.load_batch(decode_step())
    runner.replay()
    assert seen.tolist() == read


def test_autotuning_runs_the_body_and_its_hook_once_more_for_the_largest_size_only():
    log = []
    decode_runner(log, autotune=lambda body: (log.append("tune"), body())).capture()
    first, second = "".join(x[0] for x in log[1:] if x != "capture").split("o")[1:]
    assert (first, second) == ("tiwiwiwi", "iwiwi")  # tune, in-graph and warm-up hooks


def test_capturing_again_keeps_state_and_addresses_and_replaces_the_graphs():
    log = []
    runner = decode_runner(log)
    runner.capture()
    bound = runner.backend.metadata[Mode.DECODE, 4]["lens"].data_ptr()
    first = dict(runner.graphs)
    runner.capture()
    assert [x for x in log if x[0] == "state"] == [("state", 4, 4)]
    assert runner.backend.metadata[Mode.DECODE, 4]["lens"].data_ptr() == bound
    assert all(runner.graphs[b] is not first[b] for b in (2, 4))
    runner.load_batch(decode_step())
    runner.replay()
    assert runner.backend.lens.tolist() == [5, 9, 7, 1]


def test_outputs_are_cut_to_the_live_rows():
    out = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)

    def body():
        out.copy_(torch.stack([runner.backend.lens, runner.backend.first], 1))
        return {"out": out}

    runner = decode_runner([], (4,), body)
    runner.capture()
    runner.load_batch(decode_step())
    assert runner.replay()["out"].tolist() == [[n, TABLES.req_to_token[1 + i, 0]] for i, n in enumerate((5, 9, 7))]


def test_a_recorded_rebuild_is_one_call_of_the_hook():
    """Measured: whatever else stands here is paid before every graph launch."""
    runner = decode_runner([])
    runner.capture()
    runner.load_batch(decode_step())
    assert type(runner.rebuild) is partial and runner.rebuild.args == (runner.view,) and not runner.rebuild.keywords
    assert runner.rebuild.func == runner.backend.init_forward_metadata_out_graph
    assert runner.launch == runner.graphs[4].launch


# Slots.


def test_a_fill_resets_the_tails_and_copies_the_live_rows():
    slots = StaticSlots(4, 2, 7, DEVICE, encoder_fill=33)
    for name, x in slots.slices(4).items():
        x.fill_(99 if name != "encoder_lens" else 33)
    step = a_step(Mode.TARGET_VERIFY, [5, 9], TABLES, 2, input_ids=torch.arange(4))
    slots.fill(step, 3)
    assert slots.seq_lens.tolist() == slots.seq_lens_cpu.tolist() == [5, 9, 7, 99]
    assert slots.req_pool_indices.tolist() == [1, 2, 0, 99]
    assert slots.positions.tolist() == [*step.positions.tolist(), 0, 0, 99, 99]
    assert slots.out_cache_loc.tolist() == [*step.out_cache_loc.tolist(), 0, 0, 99, 99]
    assert slots.input_ids.tolist() == [0, 1, 2, 3, 99, 99, 99, 99]  # nobody reads padding's ids
    assert slots.encoder_lens.tolist() == [33] * 4
    assert slots.num_token_non_padded.tolist() == [4]


class R13Positions(StaticSlots):
    """Padded positions keep the last step's: stale tails crashed verify plans."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._rules["positions"] = replace(self._rules["positions"], pad=None)


@pytest.mark.parametrize(("cls", "tail"), [(StaticSlots, 0), (R13Positions, 8)])
def test_positions_of_padding_are_zero_and_not_the_last_steps(cls, tail):
    slots = cls(4, 1, 1, DEVICE)
    slots.fill(decode_step([9, 9, 9, 9]), 4)
    slots.fill(decode_step([5]), 4)
    assert slots.positions.tolist() == [4, tail, tail, tail]


@pytest.mark.parametrize(("size", "dispatches"), [(4, 9), (3, 21)])
def test_what_a_fill_dispatches(size, dispatches):
    """Slices of six slots, one grouped copy, one of the mirror, the number of live tokens; a tail is a slice and a
    fill, but for input_ids, which keep theirs."""
    slots, step = StaticSlots(4, 1, 1, DEVICE), decode_step([5] * size, input_ids=torch.arange(size))
    seen = count(lambda: slots.fill(step, 4))
    padding = 2 * 5 if size < 4 else 0
    assert seen.dispatches == 6 + 2 + 1 + padding
    assert seen.dispatches <= dispatches


def test_length_dtypes_are_copied_each_in_a_group_of_its_own():
    slots = StaticSlots(4, 1, 1, DEVICE, lens=torch.int32)
    slots.fill(decode_step(), 4)  # an int64 step
    assert slots.seq_lens.dtype == torch.int32 and slots.seq_lens.tolist() == [5, 9, 7, 1]


def test_pooled_slots_alias_but_those_of_one_width_and_a_capture_undoes_what_the_other_left():
    pool = BufferPool()
    target, draft = StaticSlots(4, 2, 1, DEVICE, pool=pool), StaticSlots(8, 1, 5, DEVICE, pool=pool)
    assert target.positions.data_ptr() == draft.positions.data_ptr()
    assert target.seq_lens.data_ptr() != draft.seq_lens.data_ptr()
    assert target.retrieve_next_token.data_ptr() != draft.retrieve_next_token.data_ptr()
    same = StaticSlots(4, 2, 5, DEVICE, pool=pool)
    assert target.seq_lens.tolist() == [5] * 4  # the other runner's init
    target.reset(4)
    assert same.seq_lens.tolist() == [1] * 4


def test_capture_sees_its_own_fill_lengths_whatever_the_pool_holds():
    pool, seen = BufferPool(), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slots = StaticSlots(4, 1, 1, DEVICE, pool=pool)
    runner = decode_runner([], (4,), lambda: seen.copy_(runner.backend.lens), slots=slots)
    StaticSlots(4, 1, 77, DEVICE, pool=pool)
    runner.capture()
    assert seen.tolist() == [1] * 4


# The view.


def test_the_view_has_static_slices_live_write_slots_and_says_how_much_is_padding():
    runner = decode_runner([], recorded=False)
    runner.capture()
    step = decode_step()
    runner.load_batch(step)
    view, slots = runner.view, runner.slots
    assert (view.batch_size, view.num_padding, view.forward_mode) == (4, 1, Mode.DECODE)
    assert view.seq_lens.data_ptr() == slots.seq_lens.data_ptr() and view.seq_lens.tolist() == [5, 9, 7, 1]
    assert view.out_cache_loc is step.out_cache_loc
    assert view.seq_lens_sum == 5 + 9 + 7 + 1


def test_a_batch_without_host_lengths_is_not_given_an_earlier_ones():
    runner = decode_runner([])
    runner.capture()
    runner.load_batch(decode_step())
    runner.load_batch(replace(decode_step([3, 4, 5]), seq_lens_cpu=None))
    assert runner.view.seq_lens_cpu is None and runner.view.seq_lens_sum is None
    runner.replay()
    assert runner.backend.lens.tolist() == [3, 4, 5, 1]


def test_an_idle_rank_replays_padding_only_and_hooks_see_its_real_mode():
    """A23."""
    runner = decode_runner([], (1, 2))
    runner.capture()
    runner.load_batch(decode_step([5, 9]))
    runner.replay()
    runner.load_batch(upload(idle_batch(), DEVICE))
    runner.replay()
    view = runner.view
    assert (view.batch_size, view.num_padding, view.forward_mode) == (1, 1, Mode.DECODE)
    assert view.actual_forward_mode is Mode.IDLE and view.out_cache_loc.numel() == 0
    assert runner.backend.lens.tolist()[0] == 1 and runner.backend.first[0] == 0  # one filler row, of the padding row
    assert runner.slots.out_cache_loc[0] == 0 and runner.outputs() == {}


def test_an_idle_step_of_tree_verify_sees_the_runners_own_mask():
    config = AttentionConfig(page_size=1, max_context=100, draft_tokens=2, topk=2, draft_steps=1)
    backend = SpyBackend([], tables=TABLES)
    backend.config = config
    slots = StaticSlots(2, 2, 1, DEVICE, mask_context=100)
    runner = DecodeRunner(backend, Mode.TARGET_VERIFY, [2], slots, Placement.GRAPH, RecordedGraph)
    runner.capture()
    runner.load_batch(a_step(Mode.TARGET_VERIFY, [5, 9], TABLES, 2, topk=2))
    runner.load_batch(upload(idle_batch(), DEVICE))
    mask = runner.view.spec_info.custom_mask
    assert mask.data_ptr() == slots.idle_mask.data_ptr() and mask.all() and mask.numel() == 2 * 2 * (1 + 2)


# Planned batches.


def test_a_planned_batch_takes_only_new_tokens_and_positions():
    log = []
    runner = decode_runner(log)
    runner.capture()
    runner.load_batch(decode_step())
    runner.rebuild()
    del log[:]
    runner.refresh_planned(decode_step([50, 50, 50], input_ids=torch.tensor([3, 1, 2])))
    runner.replay()
    assert log == ["launch"]  # rebuilt on the plan stream
    assert runner.slots.positions.tolist()[:3] == [49, 49, 49] and runner.slots.input_ids.tolist()[:3] == [3, 1, 2]
    assert runner.slots.seq_lens.tolist() == [5, 9, 7, 1]
    with pytest.raises(NotCapturedError, match="batch size 2 was not planned, 3 was"):
        runner.refresh_planned(decode_step([5, 9]))


@pytest.mark.parametrize("same", [True, False])
def test_a_staged_step_is_taken_as_it_is_only_if_nothing_was_replaced(same):
    log = []
    runner = decode_runner(log)
    runner.capture()
    stage, step = EarlyStage(runner), decode_step()
    stage.stage(step)
    assert log[-1] == "out"
    del log[:]
    later = step if same else replace(step, seq_lens=step.seq_lens + 1)
    stage.take(later)
    assert log == ([] if same else ["out"])
    assert (stage.taken, stage.refilled) == ((1, 0) if same else (0, 1))
    runner.launch()
    assert runner.backend.lens.tolist()[:3] == later.seq_lens.tolist()
    stage.take(step)  # nothing is staged any more
    assert stage.refilled == (1 if same else 2)


def test_staging_over_pooled_slots_is_refused():
    runner = decode_runner([], (2,), slots=StaticSlots(2, 1, 1, DEVICE, pool=BufferPool()))
    with pytest.raises(ConfigError, match="slots of its own"):
        EarlyStage(runner)


# Refusals.


def test_sizes_that_were_not_captured_are_refused_by_name():
    """A21."""
    runner = decode_runner([], (1, 2, 4))
    with pytest.raises(NotCapturedError, match="no batch is loaded"):
        runner.replay()
    with pytest.raises(NotCapturedError, match="call capture first"):
        runner.load_batch(decode_step())
    runner.capture()
    with pytest.raises(NotCapturedError, match="batch size 5 exceeds the captured sizes 1, 2, 4"):
        runner.load_batch(decode_step([5] * 5))
    with pytest.raises(NotCapturedError, match=r"batch size 3 was not captured .* captured sizes: 1, 2, 4"):
        runner.backend.init_forward_metadata_out_graph(runner.capture_batch(3))


def test_lengths_beyond_the_tables_and_placements_that_contradict_the_backend_are_refused():
    runner = decode_runner([])
    runner.capture()
    step = decode_step()
    with pytest.raises(ConfigError, match="seq_lens has 101 tokens, more than max_context 100"):
        runner.load_batch(replace(step, seq_lens_cpu=torch.tensor([5, 101, 7])))
    backend = SpyBackend([], recorded=False)
    with pytest.raises(ConfigError, match="placement graph with recorded=False"):
        DecodeRunner(backend, Mode.DECODE, [1], runner.slots, Placement.GRAPH, RecordedGraph)


class Fragile(TrtllmMhaBackend):
    """B03: reads the longest length on the host, inside the graph."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        md.max_seq_len_k = int(fb.seq_lens.max())


@pytest.mark.parametrize(("cls", "fits"), [(TrtllmMhaBackend, True), (Fragile, False)])
def test_a_width_read_on_the_host_cannot_be_captured_and_the_static_one_reads_nothing(cls, fits):
    backend = cls(AttentionConfig(page_size=16, max_context=100), TABLES, Implementation.ATEN)
    runner = DecodeRunner(backend, Mode.DECODE, [2], StaticSlots(2, 1, 1, DEVICE), Placement.GRAPH, RecordedGraph)
    if not fits:
        with pytest.raises(CaptureError, match="host read"):
            runner.capture()
        return
    runner.capture()
    runner.load_batch(decode_step([5, 90]))
    assert count(runner.rebuild, [runner.slots.seq_lens_cpu]).syncs == 0
    runner.replay()
    pages = backend.forward_metadata.page_table
    for r, n in enumerate((5, 90)):
        live = -(-n // 16)
        np.testing.assert_array_equal(pages[r, :live], TABLES.req_to_token[1 + r, : live * 16 : 16] // 16)


@pytest.mark.gpu
def test_the_width_of_each_request_is_filled_on_the_device_without_waiting_for_it():
    """B02: from a Python list, it would wait for all queued work."""
    slots = StaticSlots(40, 4, 1, DEVICE)
    step = a_step(Mode.DRAFT_EXTEND_V2, [20] * 32, TABLES, 4, rows=np.resize(1 + np.arange(8), 32))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots.fill(replace(step, seq_lens_cpu=None), 40)
        with pytest.raises(RuntimeError, match="synchroniz"):
            slots.num_accept_tokens[:32].copy_(torch.tensor([4] * 32))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert slots.num_accept_tokens.tolist() == [*step.num_accept_tokens.tolist(), *[4] * 8]
