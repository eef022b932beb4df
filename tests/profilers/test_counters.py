"""Counts are exact: what is dispatched, what reaches the device, what waits for it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from attn_graph.backends.kernels.launch import launch
from attn_graph.profilers.counters import Counts, count
from attn_graph.profilers.graphs import GraphFactory, RecordedGraph
from conftest import HAS_GPU

DEVICE = "cuda" if HAS_GPU else "cpu"


@triton.jit
def _fill(x, value, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.zeros([BLOCK], tl.int32) + value, mask=i < n)


def fill(x: torch.Tensor) -> None:
    launch(_fill, (1,), (x, 7, x.shape[0]), {"BLOCK": 16})


def test_views_work_and_reads_are_told_apart():
    x = torch.arange(8, device=DEVICE)
    seen = count(lambda: x[2:6].add_(1).sum().item())
    assert seen == Counts(dispatches=4, views=1, work=2, launches=2, syncs=1)


def test_an_operation_on_the_host_mirror_is_dispatched_and_launches_nothing():
    x, mirror = torch.arange(8, device=DEVICE), torch.arange(8)
    seen = count(lambda: (mirror[:4].max().item(), x.add_(1)), host=[mirror])
    assert seen == Counts(dispatches=4, views=1, work=2, launches=1, syncs=1)


def test_results_of_host_work_are_host_tensors_too():
    mirror = torch.arange(8)
    seen = count(lambda: (mirror + 1).cumsum(0).max().item(), host=[mirror])
    assert (seen.dispatches, seen.launches, seen.syncs) == (4, 0, 1)


def test_without_being_told_of_the_mirror_its_work_counts_as_device_work():
    mirror = torch.arange(8)
    assert count(lambda: mirror.max()).launches == 1
    assert count(lambda: mirror.max(), host=[mirror]).launches == 0


def test_a_copy_from_the_mirror_to_the_device_is_a_launch():
    x, mirror = torch.zeros(8, dtype=torch.int64, device=DEVICE), torch.arange(8)
    assert count(lambda: x.copy_(mirror), host=[mirror]).launches == 1


def test_allocating_launches_nothing_and_neither_does_work_on_no_elements():
    x = torch.arange(8, device=DEVICE)
    assert count(lambda: torch.empty(4, device=DEVICE)).launches == 0
    empty = count(lambda: x[8:].zero_())
    assert (empty.dispatches, empty.work, empty.launches) == (2, 1, 0)


def test_a_triton_launch_is_one_launch_and_no_dispatch():
    x = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    fill(x)  # compiles
    assert count(lambda: fill(x)) == Counts(launches=1, triton=1)
    assert x.tolist() == [7] * 5


@pytest.mark.skipif(HAS_GPU, reason="the recorded graph interprets kernels only where there is no GPU")
def test_a_graph_launch_is_one_launch_whatever_the_graph_holds():
    x = torch.zeros(5, dtype=torch.int32)
    graph = RecordedGraph()
    graph.capture(lambda: (fill(x), x.add_(1), x[1:].mul_(2)))
    assert count(graph.launch) == Counts(launches=1, graphs=1)


@pytest.mark.gpu
def test_a_raw_cuda_graph_launch_is_one_launch():
    factory, x = GraphFactory(torch.device("cuda")), torch.zeros(5, device="cuda")
    torch.cuda.synchronize()
    graph = factory()
    graph.capture(lambda: x.add_(1).mul_(2))
    assert count(graph.launch) == Counts(launches=1, graphs=1)


@pytest.mark.parametrize("op", [torch.nonzero, torch.unique], ids=lambda op: op.__name__)
def test_a_shape_that_depends_on_data_is_a_synchronisation(op):
    x = torch.arange(8, device=DEVICE)
    assert count(lambda: op(x)).syncs == 1


def test_counting_changes_nothing_and_ends():
    x = torch.arange(4, device=DEVICE)
    count(lambda: x.add_(1))
    assert x.tolist() == [1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        count(lambda: 1 / 0)
    assert count(lambda: None) == Counts()
