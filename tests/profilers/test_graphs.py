"""What a graph does, and what it refuses. The stand-in and, on a GPU, the real one are held to the same rules."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from attn_graph.backends.kernels.launch import launch, observed
from attn_graph.profilers.graphs import CaptureError, CudaGraph, GraphFactory, RecordedGraph
from conftest import HAS_GPU

DEVICE = "cuda" if HAS_GPU else "cpu"


@triton.jit
def _add_one(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n, other=0) + 1, mask=i < n)


def add_one(x: torch.Tensor) -> None:
    launch(_add_one, (1,), (x, x.shape[0]), {"BLOCK": 16})


@pytest.fixture(params=["recorded", pytest.param("cuda", marks=pytest.mark.gpu)])
def factory(request):
    return GraphFactory(torch.device("cpu" if request.param == "recorded" else "cuda"))


def on(factory: GraphFactory) -> str:
    return "cpu" if factory.stream is None else "cuda"


def sync(factory: GraphFactory) -> None:
    if factory.stream is not None:
        torch.cuda.synchronize()


def captured(factory, body, **options):
    sync(factory)
    graph = factory()
    graph.capture(body, **options)
    sync(factory)
    return graph


def launched(factory, graph) -> None:
    sync(factory)
    graph.launch()
    sync(factory)


def test_a_factory_makes_the_graph_of_its_device(factory):
    assert isinstance(factory(), RecordedGraph if on(factory) == "cpu" else CudaGraph)


def test_replay_reads_what_the_captured_memory_holds_then(factory):
    x, y = torch.tensor([1, 2, 3], device=on(factory)), torch.zeros(3, dtype=torch.int64, device=on(factory))
    graph = captured(factory, lambda: y.copy_(x * 2 + 1))
    x.copy_(torch.tensor([10, 20, 30]))
    launched(factory, graph)
    assert y.tolist() == [21, 41, 61]


def test_a_tensor_that_is_rebound_after_capture_is_not_read(factory):
    class Holder:
        x = torch.ones(2, device=on(factory))

    y = torch.zeros(2, device=on(factory))
    graph = captured(factory, lambda: y.copy_(Holder.x))
    Holder.x = torch.full((2,), 5.0, device=on(factory))
    launched(factory, graph)
    assert y.tolist() == [1, 1]


def test_temporaries_of_the_capture_are_recomputed_at_replay(factory):
    """A chain through memory that only exists inside: every link must follow the new input."""
    x, y = torch.arange(4, device=on(factory)), torch.zeros(4, dtype=torch.int64, device=on(factory))
    graph = captured(factory, lambda: y[1:].copy_(torch.cumsum(x + 1, 0)[:3]))
    x.fill_(10)
    launched(factory, graph)
    assert y.tolist() == [0, 11, 22, 33]


@pytest.mark.skipif(HAS_GPU, reason="the interpreter runs kernels on a CPU only where there is no GPU")
def test_kernel_launches_are_recorded_and_replayed():
    x = torch.zeros(5, dtype=torch.int32)
    graph = RecordedGraph()
    graph.capture(lambda: add_one(x), warmups=0)
    assert x.tolist() == [1] * 5, "recording runs the body once"
    graph.launch()
    graph.launch()
    assert x.tolist() == [3] * 5
    assert graph.nodes == 1


def test_the_body_runs_twice_to_warm_up_and_the_hook_after_each(factory):
    calls = []
    x = torch.zeros(1, device=on(factory))

    def body() -> None:
        calls.append("body")
        x.add_(1)

    captured(factory, body, after_warmup=lambda: calls.append("hook"))
    assert calls == ["body", "hook", "body", "hook", "body"]


def test_an_in_place_resize_of_the_caller_s_tensor_does_not_change_what_was_recorded():
    x, y = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    graph = RecordedGraph()
    graph.capture(lambda: y.copy_(x))
    y.zero_()
    x.resize_(2)
    graph.launch()
    assert y.tolist() == [0, 1, 2, 3, 4, 5]


def test_launch_before_capture_is_refused(factory):
    with pytest.raises(CaptureError, match="launch before capture"):
        factory().launch()


MASK = torch.tensor([True, False])
REFUSED = {
    "item": (lambda x: x[0].item(), "host read"),
    "int()": (lambda x: int(x[0]), "host read"),
    "bool()": (lambda x: bool(x[0] > 0), "host read"),
    "tolist": (lambda x: x.tolist(), "host read"),
    "cpu": (lambda x: x.cpu(), "host read"),
    "numpy": (lambda x: x.numpy(), "host read"),
    "a branch": (lambda x: 1 if x[0] else 0, "host read"),
    "a slice bound": (lambda x: x[: x[0]], "host read"),
    "max().item()": (lambda x: x.max().item(), "host read"),
    "nonzero": (lambda x: x.nonzero(), "data-dependent shape"),
    "unique": (lambda x: torch.unique(x), "data-dependent shape"),
    "masked_select": (lambda x: torch.masked_select(x, x > 0), "data-dependent shape"),
    "a boolean index": (lambda x: x[x > 0], "data-dependent shape"),
    "equal": (lambda x: torch.equal(x, x), "data-dependent shape"),
    "zeros": (lambda x: torch.zeros(3), "allocates"),
    "arange": (lambda x: torch.arange(3), "allocates"),
    "empty_like": (lambda x: torch.empty_like(x), "allocates"),
    "full": (lambda x: torch.full((3,), 1), "allocates"),
    "a tensor from a list": (lambda x: torch.tensor([1, 2]), "allocates"),
    "new_zeros": (lambda x: x.new_zeros(2), "allocates"),
}


@pytest.mark.parametrize(("body", "why"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_cannot_hold_is_refused_by_name(body, why):
    x, graph = torch.tensor([1, 2]), RecordedGraph()
    with pytest.raises(CaptureError, match=why):
        graph.capture(lambda: body(x))
    assert not graph.captured
    with pytest.raises(CaptureError, match="launch before capture"):
        graph.launch()


ALLOWED = {
    "views": lambda x: x[1:].view(-1)[None, :].expand(2, -1),
    "casts": lambda x: x.to(torch.int32),
    "gather": lambda x: x[x],
    "arithmetic": lambda x: (x + 1) // 2,
    "cumsum": lambda x: torch.cumsum(x, 0),
    "in place": lambda x: x.clamp_(min=0),
    "where": lambda x: torch.where(x > 0, x, x + 1),
}


@pytest.mark.parametrize("body", ALLOWED.values(), ids=ALLOWED)
def test_what_a_graph_can_hold_is_not_refused(body):
    x = torch.tensor([0, 1])
    graph = RecordedGraph()
    graph.capture(lambda: body(x))
    graph.launch()


def test_a_graph_cannot_be_launched_inside_another_s_capture():
    x, inner = torch.zeros(1), RecordedGraph()
    inner.capture(lambda: x.add_(1))
    with pytest.raises(CaptureError, match="not permitted while another graph is being captured"):
        RecordedGraph().capture(inner.launch)


def test_a_refused_capture_leaves_nothing_behind():
    """Neither a recorder that still records, nor a guard that still refuses."""
    x, graph = torch.tensor([1, 2]), RecordedGraph()
    with pytest.raises(CaptureError):
        graph.capture(lambda: x.sum().item(), warmups=0)
    assert x.sum().item() == 3
    graph.capture(lambda: x.add_(1), warmups=0)
    graph.launch()
    assert x.tolist() == [3, 4]


def test_the_report_of_pointers_names_outside_memory_once_and_no_temporaries():
    x, y = torch.arange(4), torch.zeros(2, dtype=torch.int64)
    graph = RecordedGraph()
    graph.capture(lambda: y.copy_((x + x)[:2]))
    assert {(p.data_ptr, p.shape) for p in graph.pointers()} == {(x.data_ptr(), (4,)), (y.data_ptr(), (2,))}
    (seen,) = [p for p in graph.pointers() if p.data_ptr == x.data_ptr()]
    assert (seen.storage_ptr, seen.stride, seen.dtype) == (x.untyped_storage().data_ptr(), (1,), torch.int64)


def test_nodes_are_device_work_and_views_are_not():
    x, y = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    graph = RecordedGraph()
    graph.capture(lambda: y[1:].copy_(x[1:] + 1))
    assert graph.nodes == 2


def test_an_observer_sees_a_graph_launch_as_one_launch():
    x, seen = torch.zeros(1), []
    graph = RecordedGraph()
    graph.capture(lambda: x.add_(1).add_(1), warmups=0)

    def observer(run, args) -> None:
        seen.append(args)
        run()

    with observed(observer):
        graph.launch()
    assert seen == [None]
    assert x.tolist() == [4]


@pytest.mark.gpu
def test_a_refused_cuda_capture_leaves_the_stream_usable():
    factory = GraphFactory(torch.device("cuda"))
    x = torch.ones(4, device="cuda")
    with pytest.raises(CaptureError, match="capture failed"):
        factory().capture(lambda: x.sum().item())
    graph = factory()
    for body in (lambda: x.sum().item(), lambda: x.sum().item()):
        with pytest.raises(CaptureError, match="capture failed"):
            graph.capture(body)
    graph.capture(lambda: x.add_(1))  # the object itself can be used again
    graph = captured(factory, lambda: x.add_(1))
    before = x.sum().item()
    launched(factory, graph)
    assert x.sum().item() == before + 4


@pytest.mark.gpu
def test_a_new_thread_launches_a_graph_as_well():
    factory = GraphFactory(torch.device("cuda"))
    x = torch.zeros(1, device="cuda")
    graph = captured(factory, lambda: x.add_(1), warmups=0)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(graph.launch).result()
    torch.cuda.synchronize()
    assert x.item() == 1


@pytest.mark.gpu
def test_the_raw_launch_and_the_wrapper_s_replay_do_the_same():
    factory = GraphFactory(torch.device("cuda"))
    x = torch.zeros(1, device="cuda")
    graph = captured(factory, lambda: x.add_(1), warmups=0)
    start = x.item()
    launched(factory, graph)
    with torch.cuda.stream(factory.stream):
        graph.replay()
    sync(factory)
    assert x.item() == start + 2
