"""A backend and whatever it wraps."""

from __future__ import annotations

from collections.abc import Iterator

from ..base import AttentionBackend
from ..wrappers.tbo import TwoBatchOverlap


def every(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    """The backend, its children, their children."""
    yield backend
    for child in getattr(backend, "children", ()):
        yield from every(child)


def plans_on_host(backend: AttentionBackend) -> str:
    """The class in `backend` that plans on the host before each replay; empty where none does."""
    planners = (type(b).__name__ for b in every(backend) if type(b).plan is not AttentionBackend.plan)
    return next(planners, "")


def is_idle_out_of_graph(backend: AttentionBackend) -> bool:
    """Whether the out-graph hook only selects what is bound, so that a replay is right without it."""
    hook = AttentionBackend.init_forward_metadata_out_graph
    inherits = all(type(b).init_forward_metadata_out_graph is hook for b in every(backend))
    return inherits and backend.recorded and not plans_on_host(backend)


def halves_batches(backend: AttentionBackend) -> bool:
    """Whether there is two-batch overlap in it."""
    return any(isinstance(b, TwoBatchOverlap) for b in every(backend))
