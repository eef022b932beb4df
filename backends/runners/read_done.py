"""When the scheduler may rewrite the engine's tables for the next step: the event behind the last read of them.

| read end    | event                                             | published                   |
|-------------|---------------------------------------------------|-----------------------------|
| PRE_REPLAY  | a new one                                         | before the launch           |
| IN_REPLAY   | the marker that the graph records behind the hook | once the launch is enqueued |
| POST_REPLAY | a new one                                         | once the launch is enqueued |
| UNKNOWN     | none: the scheduler waits for the whole stream    |                             |

An event published before the launch completes before a gather inside the graph has begun. The scheduler then rewrites
rows under it, page tables mix two steps, and lengths still look right.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..kernels.launch import foreign_launch
from ..modes import ReadEnd


class Events(Protocol):
    """Where events come from."""

    def external(self) -> Any | None:
        """An event that a graph records anew at each replay, or None where there are none."""

    def recorded(self) -> Any:
        """A new event, recorded on the current stream."""


class CudaEvents:
    """Events of a CUDA or ROCm device."""

    def external(self) -> torch.cuda.Event | None:
        if torch.version.hip:
            return None
        try:
            return torch.cuda.Event(external=True)
        except TypeError:  # an older torch, which has no such events
            return None

    def recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event


class ReadDone:
    """Publishes one event per step and hands it to the scheduler once. All runners of a process share one.

    Args:
        events: where they come from; without a device stream there is nothing to wait for, and None publishes nothing.
    """

    def __init__(self, events: Events | None = None) -> None:
        self._events = events
        # One for all captured shapes: whichever graph runs records it.
        self._marker = None if events is None else events.external()
        self._event: Any = None

    @staticmethod
    def on(device: torch.device) -> ReadDone:
        """For a device: with events on a GPU, without on a CPU."""
        return ReadDone(CudaEvents() if device.type == "cuda" else None)

    def mark(self) -> None:
        """Record the marker; right behind the in-graph hook, on its stream."""
        if self._marker is not None:
            foreign_launch(self._marker.record, ())

    def before_launch(self, end: ReadEnd) -> None:
        """Forget an earlier reader's event: this step reads later. Publish where all reads are behind us."""
        self._event = self._events.recorded() if end is ReadEnd.PRE_REPLAY and self._events else None

    def after_launch(self, end: ReadEnd, *, marked: bool) -> None:
        """Publish what the launch records. marked: whether its graph holds the marker.

        A wait on the marker issued before the launch would bind to the record of the replay before.
        """
        if self._events is None or end in (ReadEnd.PRE_REPLAY, ReadEnd.UNKNOWN):
            return
        in_graph = end is ReadEnd.IN_REPLAY and marked and self._marker is not None
        self._event = self._marker if in_graph else self._events.recorded()

    def take(self) -> Any | None:
        """The event, once; None where the scheduler has to wait for the whole forward stream."""
        event, self._event = self._event, None
        return event

    def fence(self, scheduler: torch.cuda.Stream, forward: torch.cuda.Stream) -> None:
        """Let `scheduler` write the tables only when they are read."""
        event = self.take()
        if event is None:
            scheduler.wait_stream(forward)
        else:
            scheduler.wait_event(event)
