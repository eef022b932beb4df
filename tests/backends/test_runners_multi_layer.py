"""The multi-layer draft-extend runner: layers chained by hidden states and rotated ids, in one graph or in several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError, tensors_of
from attn_graph.backends.batch import idle_batch
from attn_graph.backends.modes import ForwardMode, Placement, ReadEnd
from attn_graph.backends.runners.decode import upload
from attn_graph.backends.runners.multi_layer_eagle_draft_extend import (
    LayerOutput,
    MultiLayerEagleDraftExtendRunner,
    rotate,
)
from attn_graph.backends.runners.read_done import ReadDone
from attn_graph.backends.triton import TritonBackend
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.profilers.conformance.faults.multi_layer_eagle_draft_extend import DefaultsHook
from runner_cases import built, captured
from runner_spies import DEVICE, GRAPHS, H, SpyBackend, a_step, on_device, pools

pytestmark = pytest.mark.usefixtures("on_stream")
Mode = ForwardMode
N, LAYERS, CONTEXT = 4, 3, 100
CONFIG = AttentionConfig(page_size=16, max_context=CONTEXT, draft_tokens=N, topk=1, draft_steps=3)
TABLES = pools(CONTEXT + N, 16)
ONE_OR_MORE = pytest.mark.parametrize("single_graph", [False, True], ids=["per layer", "single graph"])


def step_of(lengths, accepted=None, **also):
    b = len(lengths)
    step = a_step(
        Mode.DRAFT_EXTEND_V2, lengths, TABLES, N, extend_seq_lens=torch.full((b,), N, dtype=torch.int32),
        hidden_states=torch.ones(b * N, H), input_ids=torch.arange(b * N),
    )  # fmt: skip
    if accepted is not None:
        step = replace(step, num_accept_tokens=torch.tensor(accepted, dtype=torch.int32))
    return on_device(replace(step, **also))


def layer(step) -> LayerOutput:
    """Samples 1000 (layer + 1) plus the id at each select_index; doubles hidden states."""
    ids = step.slots["input_ids"][step.slots["select_index"]]
    return LayerOutput(ids + 1000 * (step.index + 1), step.slots["hidden_states"] * 2)


def spied(log, buckets=(2, 4), recorded=True, forward=layer, cls=MultiLayerEagleDraftExtendRunner, **options):
    backends = [
        SpyBackend(log, f"layer{i}", recorded=recorded, tables=TABLES, draft_tokens=N, topk=1, draft_steps=3)
        for i in range(LAYERS)
    ]
    return built(cls, backends, buckets, forward, log=log, **options)


def real(cls, single_graph=False, runner=MultiLayerEagleDraftExtendRunner, recorded=True, buckets=(2, 4)):
    backends = [cls(CONFIG, TABLES, recorded=recorded) for _ in range(LAYERS)]
    return captured(runner, backends, buckets, layer, single_graph=single_graph)


def names(log):
    return [" ".join(map(str, x)) if isinstance(x, tuple) else x for x in log]


# Order.


def test_each_layer_is_captured_with_its_own_backend_and_that_backends_warm_up_hook():
    """Before R23 the hook was the default backend's, whichever was captured."""
    log = []
    runner = spied(log, (2,), forward=lambda step: (log.append(f"forward{step.index}"), layer(step))[1])
    del log[:]
    runner.capture()
    assert names(log[:3]) == ["layer0 out_capture", "layer1 out_capture", "layer2 out_capture"]
    for i, part in enumerate((log[3:12], log[12:21], log[21:30])):
        body = [f"layer{i} in", f"forward{i}"]
        assert names(part) == ["capture", *body, f"layer{i} warm", *body, f"layer{i} warm", *body]
    assert len(log) == 30


@pytest.mark.parametrize(("cls", "each"), [(MultiLayerEagleDraftExtendRunner, [2, 2, 2]), (DefaultsHook, [6, 0, 0])])
def test_every_backend_gets_its_warm_up_hook_twice(cls, each):
    log = []
    spied(log, (2,), cls=cls).capture()
    assert [names(log).count(f"layer{i} warm") for i in range(LAYERS)] == each


def test_in_a_single_graph_every_in_graph_hook_runs_right_before_its_own_layer():
    log = []
    runner = spied(log, (2,), single_graph=True, forward=lambda s: (log.append(f"forward{s.index}"), layer(s))[1])
    del log[:]
    runner.capture()
    body = [x for i in range(LAYERS) for x in (f"layer{i} in", f"forward{i}")]
    hooks = [f"layer{i} warm" for i in range(LAYERS)]
    assert names(log[3:]) == ["capture", *body, *hooks, *body, *hooks, *body]
    del log[:]
    runner.load_batch(step_of((20, 30)))
    runner.replay()
    assert names(log) == ["layer0 out", "layer1 out", "layer2 out", "launch"]


def test_a_replay_goes_layer_by_layer():
    log = []
    runner = spied(log, (2,))
    runner.capture()
    del log[:]
    runner.load_batch(step_of((20, 30)))
    runner.replay()
    assert names(log) == ["layer0 out", "launch", "layer1 out", "launch", "layer2 out", "launch"]


@ONE_OR_MORE
@pytest.mark.parametrize(("recorded", "calls"), [(True, 0), (False, LAYERS)])
def test_the_out_graph_hook_is_left_out_where_everything_is_in_the_graph(recorded, calls, single_graph):
    runner = real(TrtllmMhaBackend, single_graph, recorded=recorded)
    seen = []
    hook = TrtllmMhaBackend.init_forward_metadata_out_graph
    for backend in runner.backends:
        backend.init_forward_metadata_out_graph = lambda fb, b=backend: (seen.append(fb), hook(b, fb))
    runner.load_batch(step_of((20, 99, 40)))
    runner.replay()
    assert len(seen) == calls
    for backend in runner.backends:
        md = backend.metadata[runner.mode, 4]
        assert md.cache_seqlens_int32.tolist() == [20, 99, 40, 1]
        for r, n in enumerate((20, 99, 40)):
            pages = -(-n // 16)
            assert md.page_table[r, :pages].tolist() == (TABLES.req_to_token[1 + r, : pages * 16 : 16] // 16).tolist()


# The chain.


@ONE_OR_MORE
def test_ids_rotate_and_hidden_states_chain_from_layer_to_layer(single_graph):
    runner = spied([], (2,), single_graph=single_graph)
    runner.capture()
    for _ in range(2):  # the second from the same start
        runner.load_batch(step_of((20, 30), accepted=(2, 4)))
        assert runner.slots.select_index.tolist() == [1, 7]  # b * N + accepted - 1
        made = runner.replay()
        # Layer 0 sees 1 at place 1 and 7 at place 7; each next layer what the one before sampled there.
        assert [made[f"tokens{i}"].tolist() for i in range(LAYERS)] == [[1001, 1007], [3001, 3007], [6001, 6007]]
        assert runner.slots.input_ids.tolist() == [1001, 3001, 3, 3, 6, 7, 1007, 3007]
        assert made["hidden_states"].eq(2**LAYERS).all()


def shifted_only(input_ids, tokens, select_index, width):
    ids = input_ids.view(-1, width)
    ids[:, :-1].copy_(ids[:, 1:].clone())


def rotated_over_requests(input_ids, tokens, select_index, width):
    input_ids[:-1].copy_(input_ids[1:].clone())
    input_ids.scatter_(0, select_index, tokens)


@pytest.mark.parametrize(
    ("turn", "ids"),
    [
        (rotate, [1, 50, 3, 3, 5, 6, 7, 60]),
        (shifted_only, [1, 2, 3, 3, 5, 6, 7, 7]),
        (rotated_over_requests, [1, 50, 3, 4, 5, 6, 7, 60]),
    ],
)
def test_a_rotation_stays_within_the_request_and_puts_the_token_last(turn, ids):
    got, tokens, at = (torch.tensor(x, device=DEVICE) for x in (range(8), [50, 60], [1, 7]))
    turn(got, tokens, at, 4)
    assert got.tolist() == ids


class NotRestored(MultiLayerEagleDraftExtendRunner):
    """Warm-ups change the chained slots, and nobody puts them back."""

    def _capture_layers(self, layers, bucket, batch):
        graph = self._new_graph()
        graph.capture(lambda: self._run_layers(layers, bucket, batch))
        return graph


@ONE_OR_MORE
@pytest.mark.parametrize(("cls", "restored"), [(MultiLayerEagleDraftExtendRunner, True), (NotRestored, False)])
def test_warm_ups_leave_the_chained_slots_as_they_were(cls, restored, single_graph):
    runner = spied([], (2,), cls=cls, single_graph=single_graph)
    runner.slots.input_ids.copy_(torch.arange(8))
    runner.slots.hidden_states.fill_(3)
    before = runner.slots.select_index.clone()
    runner._capture_size(2, runner.capture_batch(2))
    same = runner.slots.input_ids.tolist() == list(range(8)) and runner.slots.hidden_states.eq(3).all().item()
    assert same is restored and torch.equal(runner.slots.select_index, before)


def test_restoring_is_no_part_of_the_graph():
    """Recorded, it would undo every replay."""
    runner = spied([], (2,), single_graph=True)
    runner.capture()
    runner.load_batch(step_of((20, 30)))
    runner.replay()
    assert runner.slots.hidden_states.eq(2**LAYERS).all()


def test_rebuild_and_launch_apart_do_what_replay_does():
    runner = spied([], (2,), recorded=False)
    runner.capture()
    runner.load_batch(step_of((20, 30), accepted=(2, 4)))
    runner.rebuild()
    runner.launch()
    assert runner.outputs()["tokens2"].tolist() == [6001, 6007]
    assert all(b.lens.tolist() == [20, 30] for b in runner.backends)


# Slots.


class KeepsPaddedRows(MultiLayerEagleDraftExtendRunner):
    """Before R23: padded req_pool_indices were not zeroed, so padding gathered a dead request's row."""

    @staticmethod
    def new_slots(*args, **options):
        slots = MultiLayerEagleDraftExtendRunner.new_slots(*args, **options)
        slots._rules["req_pool_indices"] = replace(slots._rules["req_pool_indices"], pad=None)
        return slots


@pytest.mark.parametrize(("cls", "rows"), [(MultiLayerEagleDraftExtendRunner, [1, 0, 0, 0]), (KeepsPaddedRows, None)])
def test_prepare_resets_padding_every_time(cls, rows):
    runner = spied([], (4,), cls=cls)
    runner.capture()
    runner.load_batch(step_of((20, 99, 40, 17)))
    runner.load_batch(step_of((9,), accepted=(3,)))
    slots = runner.slots
    assert slots.req_pool_indices.tolist() == (rows or [1, 2, 3, 4])
    assert slots.seq_lens.tolist() == [9, 1, 1, 1] and slots.seq_lens.dtype == torch.int32
    assert slots.select_index.tolist() == [2, 7, 11, 15] and slots.extend_start_loc.tolist() == [0, 4, 8, 12]
    runner.replay()
    first = [int(b.first[1]) for b in runner.backends]
    assert (first == [0] * LAYERS) is (rows is not None)


class UnsetWidth(MultiLayerEagleDraftExtendRunner):
    """Before R23: the width was not on the captured batch, and backends asked accepted counts for it."""

    def _batch(self, bucket, step):
        batch = super()._batch(bucket, step)
        return replace(batch, spec_info=replace(batch.spec_info, num_tokens_per_req=-1))


@pytest.mark.parametrize(("cls", "width"), [(MultiLayerEagleDraftExtendRunner, N), (UnsetWidth, -1)])
def test_the_captured_batch_says_how_many_tokens_a_request_has(cls, width):
    runner = spied([], (2,), cls=cls)
    runner.capture()
    widths = {fb.spec_info.num_tokens_per_req for b in runner.backends for fb in b.captured_batches}
    assert widths == {width}


class BindsTheCast(TrtllmMhaBackend):
    """seq_lens is int32 here, so that .to(int32) is the runner's slot itself."""

    def bind(self, fb):
        return replace(super().bind(fb), cache_seqlens_int32=fb.seq_lens.to(torch.int32))


@pytest.mark.parametrize(("cls", "own"), [(TrtllmMhaBackend, True), (TritonBackend, True), (BindsTheCast, False)])
def test_metadata_is_no_alias_of_the_int32_lengths(cls, own):
    runner = real(cls)
    slots = {x.untyped_storage().data_ptr() for x in vars(runner.slots).values() if isinstance(x, torch.Tensor)}
    bound = {
        x.untyped_storage().data_ptr()
        for b in runner.backends
        for md in b.metadata.values()
        for x in tensors_of(md).values()
    }
    assert (not slots & bound) is own


def test_an_idle_rank_and_missing_fields_and_glue():
    runner = real(TritonBackend)
    runner.load_batch(upload(idle_batch(), DEVICE))
    assert runner.replay()["tokens0"].numel() == 0
    with pytest.raises(ConfigError, match="needs input_ids"):
        runner.load_batch(step_of((20,), input_ids=None))
    with pytest.raises(ConfigError, match="no glue graphs"):
        MultiLayerEagleDraftExtendRunner(runner.backends, [2], runner.slots, Placement.GLUE, GRAPHS, layer)


# The last reader.


class Events:
    def __init__(self, log):
        self.log = log

    def external(self):
        return None

    def recorded(self):
        self.log.append("record")
        return "event"


@pytest.mark.parametrize(
    ("ends", "order", "published"),
    [
        ((0, 0, 0), ["launch", "launch", "record", "launch"], "event"),
        ((0, 1, 0), ["launch", "launch", "launch", "record"], "event"),
        ((0, 1, 3), ["launch", "launch", "launch"], None),
    ],
)
def test_the_event_is_that_of_the_layer_that_reads_longest(ends, order, published):
    log = []
    read_done = ReadDone(Events(log))
    runner = spied(log, (2,), read_done=read_done)
    for backend, end in zip(runner.backends, ends, strict=True):
        backend.shared_read_ends = lambda mode, end=end: ReadEnd(end)
    runner.capture()
    runner.load_batch(step_of((20, 30)))
    del log[:]
    runner.replay()
    assert [x for x in log if x in ("launch", "record")] == order
    assert read_done.take() == published
