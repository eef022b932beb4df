"""What runs beside a replay: the scheduler's next write, a forked in-graph hook, the metadata's own graph."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError
from attn_graph.backends.flashinfer import FlashInferBackend
from attn_graph.backends.kernels.launch import foreign_launch
from attn_graph.backends.modes import ForwardMode, Implementation, Placement, ReadEnd
from attn_graph.backends.runners.decode import DecodeRunner, StaticSlots
from attn_graph.backends.runners.fork import ForkedPrep, ForkError
from attn_graph.backends.runners.glue import GlueGraphs, backend_refusal
from attn_graph.backends.runners.read_done import CudaEvents, ReadDone
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.backends.wrappers.hybrid_linear import HybridLinear
from attn_graph.backends.wrappers.multi_step_draft import MultiStepDraft
from attn_graph.backends.wrappers.tbo import TwoBatchOverlap
from attn_graph.profilers.conformance.faults.decode import PublishesBeforeTheLaunch
from attn_graph.profilers.graphs import GraphFactory
from attn_graph.profilers.recorded import RecordedGraph
from runner_spies import DEVICE, SpyBackend, a_step, graphs_noting, placement, pools

Mode = ForwardMode
TABLES = pools(page_size=16)
CONFIG = AttentionConfig(page_size=16, max_context=100, draft_tokens=4, topk=1, draft_steps=3)


def decode_step(lengths=(5, 50, 7), **options):
    return a_step(Mode.DECODE, lengths, TABLES, **options)


# Read-done events.


class HostEvents:
    """Events in program order. `on_record` is the earliest moment at which somebody who waits may go on."""

    def __init__(self, log=None, has_external=True, on_record=lambda: None):
        self.log, self.has_external, self.on_record = log if log is not None else [], has_external, on_record

    def external(self):
        return HostEvent(self, "marker") if self.has_external else None

    def recorded(self):
        event = HostEvent(self, "fresh")
        event.record()
        return event


class HostEvent:
    def __init__(self, source, name):
        self.source, self.name = source, name

    def record(self):
        self.source.log.append(f"record {self.name}")
        self.source.on_record()


class Declares(SpyBackend):
    """Reads end where it is told to say so."""

    def shared_read_ends(self, mode):
        return self.end


@pytest.mark.parametrize(
    ("end", "external", "order", "published"),
    [
        (ReadEnd.PRE_REPLAY, True, ["out", "record fresh", "launch", "record marker"], "fresh"),
        (ReadEnd.IN_REPLAY, True, ["out", "launch", "record marker"], "marker"),
        (ReadEnd.IN_REPLAY, False, ["out", "launch", "record fresh"], "fresh"),
        (ReadEnd.POST_REPLAY, True, ["out", "launch", "record marker", "record fresh"], "fresh"),
        (ReadEnd.UNKNOWN, True, ["out", "launch", "record marker"], None),
    ],
)
def test_an_event_is_published_in_the_declared_place_and_nowhere_else(end, external, order, published):
    log = []
    backend = Declares(log, tables=TABLES)
    backend.end = end
    read_done = ReadDone(HostEvents(log, external))
    runner = DecodeRunner(
        backend, Mode.DECODE, [4], StaticSlots(4, 1, 1, DEVICE), Placement.GRAPH, graphs_noting(log),
        read_done=read_done,
    )  # fmt: skip
    runner.capture()
    runner.load_batch(decode_step())
    del log[:]
    runner.replay()
    assert log == order
    event = read_done.take()
    assert (event and event.name) == published
    assert read_done.take() is None  # consumed


def test_the_marker_stands_right_behind_the_hook_and_one_serves_every_size():
    log, backend = [], SpyBackend([], tables=TABLES)
    backend.log = log
    read_done = ReadDone(HostEvents(log))
    runner = DecodeRunner(
        backend, Mode.DECODE, [2, 4], StaticSlots(4, 1, 1, DEVICE), Placement.GRAPH, graphs_noting(log),
        lambda: log.append("body"), read_done=read_done,
    )  # fmt: skip
    runner.capture()
    assert log[-3:] == ["in", "record marker", "body"]
    published = []
    for lengths in ((5, 9), (5, 9, 7)):
        runner.load_batch(decode_step(lengths))
        runner.replay()
        published.append(read_done.take())
    assert published[0] is published[1]


def test_a_step_that_publishes_nothing_takes_back_what_an_earlier_one_published():
    read_done = ReadDone(HostEvents())
    read_done.after_launch(ReadEnd.POST_REPLAY, marked=True)
    read_done.before_launch(ReadEnd.UNKNOWN)
    read_done.after_launch(ReadEnd.UNKNOWN, marked=True)
    assert read_done.take() is None


def test_without_a_device_nothing_is_published():
    read_done = ReadDone.on(torch.device("cpu"))
    read_done.before_launch(ReadEnd.PRE_REPLAY)
    read_done.mark()
    read_done.after_launch(ReadEnd.IN_REPLAY, marked=True)
    assert read_done.take() is None


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_DECODE])
def test_reads_end_where_the_rebuild_runs(mode):
    for recorded, end in ((True, ReadEnd.IN_REPLAY), (False, ReadEnd.PRE_REPLAY)):
        assert TrtllmMhaBackend(CONFIG, TABLES, recorded=recorded).shared_read_ends(mode) is end
        wrapper = MultiStepDraft(replace(CONFIG, extra={"inner": "trtllm_mha"}), TABLES, recorded=recorded)
        assert wrapper.shared_read_ends(mode) is end
    assert TrtllmMhaBackend(CONFIG, TABLES).shared_read_ends(Mode.DRAFT_EXTEND_V2) is ReadEnd.UNKNOWN


def test_a_hook_of_its_own_in_the_graph_makes_an_eager_backend_a_reader_in_the_graph():
    assert SpyBackend([], recorded=False).shared_read_ends(Mode.DECODE) is ReadEnd.IN_REPLAY


def test_wrappers_read_as_long_as_their_last_child():
    class Late(TrtllmMhaBackend):
        def shared_read_ends(self, mode):
            return ReadEnd.POST_REPLAY

    wrapper = MultiStepDraft(replace(CONFIG, extra={"inner": "trtllm_mha"}), TABLES)
    wrapper._inners[1] = Late(CONFIG, TABLES)
    assert wrapper.shared_read_ends(Mode.DRAFT_DECODE) is ReadEnd.POST_REPLAY
    one_step = MultiStepDraft(replace(CONFIG, draft_steps=1), TABLES)
    assert one_step.shared_read_ends(Mode.DRAFT_DECODE) is ReadEnd.PRE_REPLAY  # nobody reads


class MarksBeforeTheHook(DecodeRunner):
    def _metadata(self, batch):
        self.read_done.mark()
        self.backend.init_forward_metadata_in_graph(batch)


def mixed_rows(cls, arm=Implementation.FUSED, placement=Placement.GRAPH) -> int:
    """Replays while a scheduler rewrites the rows at the first moment it may; pages that are not wholly old."""
    tables = pools(page_size=16)
    backend = TrtllmMhaBackend(CONFIG, tables, arm, recorded=placement is not Placement.EAGER)
    events = HostEvents()
    runner = cls(
        backend, Mode.DECODE, [2], StaticSlots(2, 1, 1, DEVICE), placement, RecordedGraph, read_done=ReadDone(events)
    )
    runner.capture()
    mixed = 0
    events.on_record = lambda: tables.req_to_token.add_(16 * 1000)
    for lengths in ((90, 30), (20, 77)):
        runner.load_batch(a_step(Mode.DECODE, lengths, tables))
        old = tables.req_to_token[1:3, ::16] // 16
        runner.replay()
        for r, n in enumerate(lengths):
            live = -(-n // 16)
            mixed += int((backend.forward_metadata.page_table[r, :live] != old[r, :live]).sum())
    return mixed


@pytest.mark.parametrize("placement", [Placement.GRAPH, Placement.GLUE, Placement.EAGER])
def test_the_scheduler_may_rewrite_rows_the_moment_they_are_said_to_be_read(placement):
    assert mixed_rows(DecodeRunner, placement=placement) == 0


@pytest.mark.parametrize("fault", [PublishesBeforeTheLaunch, MarksBeforeTheHook])
def test_an_event_before_the_gather_mixes_two_steps_and_is_seen_here(fault):
    assert mixed_rows(fault) > 0


def test_write_slots_are_a_snapshot_once_the_rebuild_is_done():
    """A05: layers that map their slots again, behind the fence, read the next step's map."""
    tables = pools(page_size=1)
    mapping = torch.zeros(2000, dtype=torch.int64, device=DEVICE)
    mapping[11], mapping[4], mapping[-1] = 40, 9, -1
    tables = replace(tables, full_to_swa=mapping)
    backend = TrtllmMhaBackend(replace(CONFIG, page_size=1), tables)
    runner = DecodeRunner(
        backend, Mode.DECODE, [2], StaticSlots(2, 1, 1, DEVICE), Placement.GRAPH, RecordedGraph,
        read_done=ReadDone(HostEvents()),
    )  # fmt: skip
    runner.capture()
    runner.load_batch(a_step(Mode.DECODE, [5, 6], tables, out_cache_loc=torch.tensor([11, 4])))
    runner.replay()
    mapping[:-1] = 0
    assert backend.forward_metadata.swa_out_cache_loc.tolist() == [40, 9]
    assert mapping[torch.tensor([11, 4])].tolist() == [0, 0]  # what such a layer would write to


@pytest.mark.gpu
@pytest.mark.parametrize(("cls", "clean"), [(DecodeRunner, True), (PublishesBeforeTheLaunch, False)])
def test_two_streams_never_mix_rows_unless_the_event_is_early(cls, clean):
    """A04, C18."""
    device = torch.device("cuda")
    table = torch.arange(2048 * 16, dtype=torch.int32, device=device)[None].repeat(3, 1)
    old, new = table + 16 * 1000, table + 16 * 5000
    tables = replace(pools(), req_to_token=old.clone())

    class Delayed(TrtllmMhaBackend):
        def init_forward_metadata_in_graph(self, fb):
            torch.cuda._sleep(200_000)
            super().init_forward_metadata_in_graph(fb)

    backend = Delayed(AttentionConfig(page_size=16, max_context=2047 * 16), tables)
    factory, scheduler = GraphFactory(device), torch.cuda.Stream()
    read_done, wrong = ReadDone.on(device), 0
    with torch.cuda.stream(factory.stream):
        slots = StaticSlots(2, 1, 1, device)
        runner = cls(backend, Mode.DECODE, [2], slots, Placement.GRAPH, factory, read_done=read_done)
        runner.capture()
        step = a_step(Mode.DECODE, [20000, 32000], tables, rows=[1, 2])
    for _ in range(200 if clean else 20):
        with torch.cuda.stream(factory.stream):
            runner.load_batch(step)
            runner.replay()
        read_done.fence(scheduler, factory.stream)
        with torch.cuda.stream(scheduler):
            tables.req_to_token.copy_(new)
        torch.cuda.synchronize()
        wrong += int((backend.forward_metadata.page_table[1, :2000] >= 5000).sum())
        tables.req_to_token.copy_(old)
        torch.cuda.synchronize()
    assert (wrong == 0) is clean


@pytest.mark.gpu
def test_this_device_has_an_event_that_graphs_record():
    assert CudaEvents().external() is not None


# Forked in-graph hook.


def forked_runner(body, fork=None, factory=RecordedGraph, **options):
    backend = TrtllmMhaBackend(CONFIG, TABLES)
    fork = fork or ForkedPrep()
    runner = DecodeRunner(
        backend, Mode.DECODE, [4], StaticSlots(4, 1, 1, DEVICE), Placement.GRAPH, factory,
        lambda: body(runner, fork), fork=fork, **options,
    )  # fmt: skip
    return runner


def consume(runner, seen, *, joins: str):
    """A forward pass whose first consumer of metadata joins before it reads, after, or never."""

    def body(_, fork):
        if joins == "before":
            fork.join()
        seen.copy_(runner.backend.forward_metadata.cache_seqlens_int32)
        fork.join() if joins == "after" else None
        fork.join() if joins != "never" else None  # each consumer joins; the second time costs nothing

    return body


@pytest.mark.parametrize(("joins", "read"), [("before", [5, 50, 7, 1]), ("after", None)])
def test_a_consumer_behind_the_join_reads_this_steps_metadata_and_one_before_it_stale_ones(joins, read):
    seen = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    runner = forked_runner(lambda r, fork: consume(r, seen, joins=joins)(r, fork))
    runner.capture()
    for lengths in ((90, 90, 90, 90), (5, 50, 7)):
        runner.load_batch(decode_step(lengths))
        runner.replay()
    assert seen.tolist() == (read or [90] * 4)
    assert not runner.fork.pending


def test_a_forward_pass_that_never_joins_is_refused_already_in_its_warm_up():
    runner = forked_runner(lambda r, fork: None)
    with pytest.raises(ForkError, match="never joined"):
        runner.capture()
    assert not runner.fork.pending


def test_one_fork_at_a_time():
    fork = ForkedPrep()
    fork.begin(lambda: None)
    with pytest.raises(ForkError, match="forked twice"):
        fork.begin(lambda: None)
    fork.join()
    fork.join()
    fork.begin(lambda: None)


def test_the_marker_is_recorded_with_the_forked_hook():
    log = []
    runner = forked_runner(lambda r, fork: (log.append("embed"), fork.join()), read_done=ReadDone(HostEvents(log)))
    runner.capture()
    assert log == ["embed", "record marker"] * 3


def compiled():
    backend = TrtllmMhaBackend(CONFIG, TABLES)
    backend.implementation = Implementation.COMPILE
    return backend


@pytest.mark.parametrize(
    ("backend", "placement", "words"),
    [
        (lambda: TrtllmMhaBackend(CONFIG, TABLES, recorded=False), Placement.EAGER, "not placement eager"),
        (compiled, Placement.GRAPH, "compiled"),
        (lambda: TwoBatchOverlap(CONFIG, TABLES), Placement.GRAPH, "two-batch overlap"),
    ],
)
def test_what_cannot_be_forked_is_refused(backend, placement, words):
    with pytest.raises(ConfigError, match=words):
        DecodeRunner(
            backend(), Mode.DECODE, [4], StaticSlots(4, 1, 1, DEVICE), placement, RecordedGraph, fork=ForkedPrep()
        )


@pytest.mark.gpu
@pytest.mark.parametrize("joins", ["before", "never"])
def test_the_hook_runs_on_a_side_stream_and_must_be_joined(joins):
    """C19."""
    factory = GraphFactory(torch.device("cuda"))
    seen = torch.zeros(4, dtype=torch.int32, device="cuda")

    def body(runner, fork):
        if joins == "before":
            fork.join()
            seen.copy_(runner.backend.forward_metadata.cache_seqlens_int32)

    runner = forked_runner(body, ForkedPrep(torch.cuda.Stream()), factory)
    with torch.cuda.stream(factory.stream), nullcontext() if joins == "before" else pytest.raises(ForkError):
        runner.capture()
    if joins == "before":
        with torch.cuda.stream(factory.stream):
            runner.load_batch(decode_step())
            runner.replay()
        torch.cuda.synchronize()
        assert seen.tolist() == [5, 50, 7, 1]


# Glue graphs.


class HostWidth(TrtllmMhaBackend):
    """The fused launch is sized from the host mirror: a glue graph would freeze it."""

    def rebuild_fused(self, fb, md):
        md.max_seq_len_k = int(fb.seq_lens_cpu.max())
        super().rebuild_fused(fb, md)


def glued(cls=TrtllmMhaBackend, tables=TABLES, buckets=(2, 3)) -> DecodeRunner:
    backend = cls(CONFIG, tables, recorded=False)
    return DecodeRunner(
        backend, Mode.DECODE, buckets, StaticSlots(max(buckets), 1, 1, DEVICE), Placement.EAGER, RecordedGraph,
        glue_graphs=GlueGraphs(backend, RecordedGraph),
    )  # fmt: skip


def replayed(runner, lengths, **options):
    step = decode_step(lengths, **options)
    runner.load_batch(step)
    runner.replay()
    assert runner.backend.forward_metadata.cache_seqlens_int32.tolist()[: len(lengths)] == list(lengths)


def test_full_steps_go_through_a_graph_of_their_own_size_and_mode_and_padded_ones_do_not():
    """C20."""
    runner = glued()
    runner.capture()
    glue = runner.glue_graphs
    for lengths in ((5, 50, 7), (90, 3, 2), (9, 8), (4,), (7, 7, 7)):
        replayed(runner, lengths)
    assert glue.routed == 4 and list(glue._glue) == [(3, Mode.DECODE, Mode.DECODE), (2, Mode.DECODE, Mode.DECODE)]
    assert glue.eager == {"padded: rows are missing to the captured size": 1} and glue.refusal == ""


def test_a_glue_replay_is_one_launch_and_puts_the_backends_object_back():
    log, runner = [], glued()
    runner.capture()
    replayed(runner, (5, 50, 7))
    captured = runner.backend.forward_metadata
    replayed(runner, (5, 9))
    assert runner.backend.forward_metadata is not captured
    runner.backend.init_forward_metadata_out_graph = lambda *a, **k: log.append("out")
    replayed(runner, (6, 60, 8))
    assert runner.backend.forward_metadata is captured and log == []


def test_every_child_of_a_wrapper_gets_its_object_back():
    config = replace(CONFIG, extra={"full": "trtllm_mha"})
    tables = replace(TABLES, state_slots=torch.arange(9, dtype=torch.int32, device=DEVICE))
    backend = HybridLinear(config, tables, recorded=False)
    runner = DecodeRunner(
        backend, Mode.DECODE, [2, 3], StaticSlots(3, 1, 1, DEVICE), Placement.EAGER, RecordedGraph,
        glue_graphs=GlueGraphs(backend, RecordedGraph),
    )  # fmt: skip
    runner.capture()
    objects = []
    for lengths in ((5, 9, 7), (5, 9), (6, 9, 7)):
        runner.load_batch(decode_step(lengths))
        runner.replay()
        objects.append([b.forward_metadata for b in (backend, *backend.children)])
    assert runner.glue_graphs.routed == 3
    assert all(a is c for a, c in zip(objects[0], objects[2], strict=True))
    assert not any(a is b for a, b in zip(objects[0], objects[1], strict=True))


def test_live_tensors_are_not_bound_by_the_glue_graph():
    """C21: the step's own write slots are freed after it; the graph reads the static slots."""
    mapping = torch.arange(3000, device=DEVICE)
    runner = glued(tables=replace(TABLES, full_to_swa=mapping))
    runner.capture()
    for slots in (torch.tensor([3, 4, 5]), torch.tensor([13, 14, 15])):
        replayed(runner, (5, 50, 7), out_cache_loc=slots)
        assert runner.backend.forward_metadata.swa_out_cache_loc.tolist() == slots.tolist()


def test_a_capture_that_fails_ends_glue_for_good_and_every_step_still_runs():
    runner = glued(HostWidth)
    runner.capture()
    for lengths in ((5, 50, 7), (90, 3, 2), (4,)):
        replayed(runner, lengths)
    glue = runner.glue_graphs
    assert glue.routed == 0 and glue.refusal.startswith("capture failed: 'NoneType'")
    assert glue.eager == {glue.refusal: 3}


def test_a_fault_of_the_rebuild_itself_is_not_swallowed_with_the_failed_capture():
    class Broken(TrtllmMhaBackend):
        def rebuild_fused(self, fb, md):
            raise RuntimeError("ours")

    runner = glued(Broken)
    work, runner.backend._out_graph_work = runner.backend._out_graph_work, []
    runner.capture()
    runner.backend._out_graph_work = work
    runner.load_batch(decode_step())
    with pytest.raises(RuntimeError, match="ours"):
        runner.rebuild()


def test_capturing_the_runner_anew_drops_the_glue_graphs():
    runner = glued()
    runner.capture()
    replayed(runner, (5, 50, 7))
    runner.capture()
    assert not runner.glue_graphs._glue
    replayed(runner, (6, 60, 8))
    assert runner.glue_graphs.routed == 2


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (lambda: TrtllmMhaBackend(CONFIG, TABLES, recorded=False), ""),
        (lambda: TrtllmMhaBackend(CONFIG, TABLES), "recorded already"),
        (lambda: TrtllmMhaBackend(CONFIG, TABLES, Implementation.ATEN, recorded=False), "may read lengths"),
        (lambda: FlashInferBackend(CONFIG, TABLES, recorded=False), "FlashInferBackend plans on the host"),
        (lambda: HybridLinear(replace(CONFIG, extra={"full": "flashinfer"}), TABLES, recorded=False), "plans on the"),
        (lambda: TwoBatchOverlap(CONFIG, TABLES, recorded=False), "splits on the host"),
    ],
)
def test_a_backend_whose_hook_cannot_be_captured_is_not_and_says_why(backend, words):
    reason = backend_refusal(backend())
    assert words in reason and bool(words) is bool(reason)


def test_a_refused_backend_runs_eagerly_and_is_counted():
    backend = SpyBackend([], recorded=False, tables=TABLES)
    backend.implementation = Implementation.ATEN
    runner = DecodeRunner(
        backend, Mode.DECODE, [3], StaticSlots(3, 1, 1, DEVICE), placement(backend), RecordedGraph,
        glue_graphs=GlueGraphs(backend, RecordedGraph),
    )  # fmt: skip
    runner.capture()
    runner.load_batch(decode_step())
    runner.replay()
    assert backend.lens.tolist() == [5, 50, 7] and sum(runner.glue_graphs.eager.values()) == 1


def test_launches_noted_here_are_what_graphs_record():
    """The stand-in for an event must be an operation of the graph, or the tests above show nothing."""
    graph, log = RecordedGraph(), []
    graph.capture(lambda: foreign_launch(lambda: log.append("x"), ()), warmups=0)
    graph.launch()
    assert log == ["x", "x"] and graph.nodes == 1
