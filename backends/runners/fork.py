"""In-graph metadata on a stream of its own, beside the layers that need none of it yet.

The embedding and the first layer up to its attention do not read metadata. The first consumer, a KV store or an
attention kernel, joins. Where there is no second stream the work waits for the join: a consumer that reads too early
reads stale metadata there, as it may on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..base import AttentionBackend, ConfigError
from ..modes import Implementation, Placement
from .tree import halves_batches


class ForkError(RuntimeError):
    """A fork that was not joined, or one begun while another is pending."""


class ForkedPrep:
    """One fork at a time; the same code runs in warm-ups and under capture.

    Args:
        side: the stream to run on; None on a CPU.
    """

    def __init__(self, side: torch.cuda.Stream | None = None) -> None:
        self._side = side
        self._work: Callable[[], None] | None = None
        self._done = None if side is None else torch.cuda.Event()

    @property
    def pending(self) -> bool:
        return self._work is not None

    def begin(self, work: Callable[[], None]) -> None:
        """Start `work` beside what follows.

        Raises:
            ForkError: the last fork is still pending.
        """
        if self.pending:
            raise ForkError("in-graph metadata was forked twice without a join between")
        self._work = work
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))
            with torch.cuda.stream(self._side):
                work()
                self._done.record()

    def join(self) -> None:
        """Make what follows wait for the work. Free where nothing is pending, so that every consumer may call it."""
        work, self._work = self._work, None
        if work is None:
            return
        if self._side is None:
            work()
        else:
            torch.cuda.current_stream(self._side.device).wait_event(self._done)

    def check_joined(self) -> None:
        """At the end of the body.

        Raises:
            ForkError: nobody joined; no graph can hold that. The stream is joined all the same, and usable.
        """
        if self.pending:
            self.join()
            raise ForkError("the forward pass never joined the stream of its metadata: call join() before reading it")


def check_forkable(backend: AttentionBackend, placement: Placement) -> None:
    """Refuse what cannot be forked.

    Raises:
        ConfigError: the rebuild is not in the main graph, is compiled, or halves the batch.
    """
    if placement is not Placement.GRAPH:
        raise ConfigError(f"only a rebuild inside the main graph can be forked, not placement {placement}")
    if backend.implementation is Implementation.COMPILE:
        raise ConfigError("a compiled rebuild cannot be forked: it may wait for streams of its own")
    if halves_batches(backend):
        raise ConfigError("two-batch overlap has streams of its own: its metadata cannot be forked as well")
