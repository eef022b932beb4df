"""CUDA graphs and their stand-in behind one interface: capture a body, launch it, say what it reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch

from .driver import raw_graph_launcher
from .recorded import CapturedTensor, CaptureError, RecordedGraph, recording

__all__ = ["CaptureError", "CapturedTensor", "CudaGraph", "Graph", "GraphFactory", "RecordedGraph", "capturing"]


def capturing() -> bool:
    """Whether what is done now goes into a graph instead of happening."""
    return recording() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class Graph(Protocol):
    """What runners and benches need of a graph."""

    kind: str
    captured: bool
    launch: Callable[[], None]

    def capture(
        self, body: Callable[[], None], *, warmups: int = 2, after_warmup: Callable[[], None] | None = None
    ) -> None: ...

    def replay(self) -> None: ...

    @property
    def nodes(self) -> int | None: ...


class MemoryPool:
    """Memory for graphs that never run at the same time."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    def replace(self) -> None:
        """A capture that failed leaves its pool recording, and PyTorch refuses it to every later one."""
        self.handle = torch.cuda.graph_pool_handle()


class CudaGraph:
    """One captured graph. `launch` goes to the driver directly, `replay` through PyTorch's wrapper.

    Args:
        stream: stream to capture on and to launch on; graphs of one process share it.
        pool: shared with other graphs; one of its own if None.
    """

    kind = "cuda"

    def __init__(self, stream: torch.cuda.Stream, pool: MemoryPool | None = None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = stream
        self._pool = pool or MemoryPool()
        self.captured = False
        self.raw = False
        self.launch: Callable[[], None] = self._not_captured

    def capture(
        self, body: Callable[[], None], *, warmups: int = 2, after_warmup: Callable[[], None] | None = None
    ) -> None:
        """Run `body` `warmups` times, synchronised, then once more under capture.

        Raises:
            CaptureError: the body does what a graph cannot hold; the stream is usable afterwards.
        """
        with torch.cuda.stream(self._stream):
            for _ in range(warmups):
                torch.cuda.synchronize()
                body()
                if after_warmup:
                    after_warmup()
            torch.cuda.synchronize()
            try:
                with (
                    warnings.catch_warnings(),
                    torch.cuda.graph(
                        self._graph, pool=self._pool.handle, stream=self._stream, capture_error_mode="thread_local"
                    ),
                ):
                    # An eager arm without a body has nothing to record, and that is what it measures.
                    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                    body()
            except RuntimeError as error:
                torch.cuda.synchronize()
                self._graph = torch.cuda.CUDAGraph()
                self._pool.replace()
                raise CaptureError(f"capture failed: {error}") from error
        self.captured = True
        self._bind_launch()

    def _bind_launch(self) -> None:
        """Take the driver's handle where this torch hands it out; the wrapper's replay otherwise."""
        handle = getattr(self._graph, "raw_cuda_graph_exec", None)
        if handle is None:
            self.launch = self._replay_on_stream
            return
        self.launch = raw_graph_launcher(handle(), self._stream.cuda_stream)
        self.raw = True

    def _replay_on_stream(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    def replay(self) -> None:
        """PyTorch's own replay, on the current stream."""
        self._graph.replay()

    @property
    def nodes(self) -> int | None:
        """Unknown: counting needs the un-instantiated graph, which PyTorch drops."""
        return None

    def _not_captured(self) -> None:
        raise CaptureError("launch before capture")


class GraphFactory:
    """Makes graphs for one device. CUDA graphs of one factory share a stream and a memory pool.

    Attributes:
        stream: the stream to capture, rebuild and launch on; None without a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                self.stream = torch.cuda.Stream()
                self._pool = MemoryPool()

    def __call__(self) -> Graph:
        return RecordedGraph() if self.stream is None else CudaGraph(self.stream, self._pool)
