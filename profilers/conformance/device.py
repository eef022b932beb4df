"""Checks that only a GPU can make: allocations, races with the scheduler's stream, forked preparation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...backends.base import AttentionBackend, tensors_of
from ...backends.batch import ForwardBatch, Pools
from ...backends.modes import Arm, Placement
from ..causes import frozen_gc
from ..graphs import CaptureError
from .findings import Note, Skip, check
from .hooks import in_graph
from .pointers import recorded_arms, selected
from .poison import Mismatch
from .subject import Rig, Subject, changed

DELAY_CYCLES = 4_000_000
"""About 2 ms on current GPUs: far longer than a host takes to enqueue the scheduler's next write."""

RACES = 4


def _needs_gpu(subject: Subject, what: str) -> None:
    if subject.device.type != "cuda":
        raise Skip(f"{what} need a GPU")


@check("C7", "the in-graph hook keeps no memory once warm, and a replay allocates nothing")
def no_allocation(subject: Subject) -> Iterator[str]:
    _needs_gpu(subject, "allocator statistics")
    for arm in recorded_arms(subject):
        rig = subject.rig(arm, buckets=[max(subject.buckets)])
        with rig.on_stream():
            rig.load(subject.some_batch(max(subject.buckets)))
            rig.runner.rebuild()
            hook = in_graph(rig)
            hook()
            hook()
            grown = _growth(hook, subject.device)
            if grown["segment.all.allocated"] > 0 or grown["allocated_bytes.all.current"] > 0:
                yield f"a third in-graph hook keeps {grown['allocated_bytes.all.current']} bytes ({arm})"
            grown = _growth(rig.runner.launch, subject.device)
            if grown["allocation.all.allocated"]:
                yield f"a replay makes {grown['allocation.all.allocated']} allocations ({arm})"


def _growth(body, device: torch.device) -> dict[str, int]:
    """How the allocator's numbers change while `body` runs."""
    torch.cuda.synchronize(device)
    with frozen_gc():  # a collection in between would hand back what earlier rigs held, and hide or fake a change
        before = torch.cuda.memory_stats(device)
        body()
        torch.cuda.synchronize(device)
        after = torch.cuda.memory_stats(device)
    names = ("segment.all.allocated", "allocated_bytes.all.current", "allocation.all.allocated")
    return {name: after.get(name, 0) - before.get(name, 0) for name in names}


@check("C18", "once the declared reads have ended, the scheduler may rewrite the shared tables")
def write_after_read(subject: Subject) -> Iterator[str]:
    _needs_gpu(subject, "two streams")
    arms = [arm for arm in recorded_arms(subject) if arm.placement is Placement.GRAPH]
    if not arms:
        raise Skip("no arm of this run reads the tables in the main graph")
    for arm in arms:
        marker = _external_event()
        rig = subject.but(backend_class=_delayed(subject.backend_class, marker)).rig(
            arm, buckets=[max(subject.buckets)]
        )
        ends = ["in", "post"] if marker is not None else ["post"]
        for end in ends:
            for m in _raced(rig, end, marker):
                yield f"{m}: the table was rewritten {end}-replay, after its readers had said they were done ({arm})"
                break
        if not _raced(rig, "pre", marker):
            yield f"a rewrite before the captured readers ran went unnoticed: this check shows nothing ({arm})"
    yield Note(f"{RACES} rounds each, read ends {', '.join(ends)}; an event before the launch is caught")


def _external_event() -> torch.cuda.Event | None:
    """An event that a graph records at every replay; None where this torch has none, which leaves the end of replay."""
    try:
        return torch.cuda.Event(external=True)
    except TypeError:
        return None


def _delayed(backend_class: type[AttentionBackend], marker: torch.cuda.Event | None) -> type[AttentionBackend]:
    """The backend with a late start of its in-graph reads, and the marker right behind them."""

    class Delayed(backend_class):
        def init_forward_metadata_in_graph(self, fb: ForwardBatch) -> None:
            torch.cuda._sleep(DELAY_CYCLES)
            super().init_forward_metadata_in_graph(fb)
            if marker is not None:
                marker.record()

    return Delayed


def _raced(rig: Rig, end: str, marker: torch.cuda.Event | None) -> list[Mismatch]:
    """Replay while another stream rewrites every shared table as soon as it is told to.

    The host waits for nothing between launch and rewrite. Told before the launch, the scheduler may be through with its
    rewrite when the graph starts: that is what happens here, so that no race has to be won for it to show.
    """
    ours, scheduler, largest = rig.factory.stream, torch.cuda.Stream(rig.subject.device), max(rig.runner.buckets)
    theirs = next_tables(rig.subject.pools, rig.backend.allowances.advances)
    tables = [(table, table.clone(), following) for table, following in theirs]
    for round_ in range(1 if end == "pre" else RACES):
        with rig.on_stream():
            poisoned = rig.poison(rig.expect(rig.subject.some_batch(largest, seed=round_)), round_)
            rig.runner.rebuild()
            if end != "pre":
                rig.runner.launch()
            # In the graph: waited for only now, because a wait before the launch would see the last replay's record.
            scheduler.wait_event(marker if end == "in" else ours.record_event())
            with torch.cuda.stream(scheduler):
                for table, _, following in tables:
                    table.copy_(following)
            ours.wait_stream(scheduler)
            if end == "pre":
                rig.runner.launch()
            found = poisoned.mismatches()
            for table, before, _ in tables:
                table.copy_(before)
        if found:
            return found
    return []


def next_tables(pools: Pools, advanced: frozenset[str] = frozenset()) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each of the engine's tables, and what its scheduler might turn it into: every request and slot has another's
    entry, and each can still be looked up. advanced: names of those that are the backend's to write."""
    return [(table, table.roll(1, dims=0)) for name, table in tensors_of(pools).items() if name not in advanced]


@check("C19", "the rebuild may run on a forked stream, and a fork that is not joined cannot be captured")
def fork_and_join(subject: Subject) -> Iterator[str]:
    _needs_gpu(subject, "streams")
    for arm in recorded_arms(subject):
        rig = subject.rig(arm, buckets=[max(subject.buckets)])
        with rig.on_stream():
            poisoned, copies = _forked(rig, arm)
            early = changed(rig.bound, copies)
            for m in poisoned.mismatches():
                yield f"{m}, rebuilt on a forked stream ({arm})"
            for path in early:
                yield f"{path} was read before the fork had joined ({arm})"
            try:
                rig.factory().capture(_fork(rig, {}, joined=False))
            except CaptureError:
                pass
            else:
                yield f"a fork without a join was captured ({arm})"


def _forked(rig: Rig, arm: Arm):
    """Replay the hook from a forked stream, with a consumer behind the join; its copies of the metadata."""
    largest = max(rig.runner.buckets)
    rig.load(rig.subject.some_batch(largest))
    copies = {path: torch.empty_like(t) for path, t in rig.bound.items()}
    graph = rig.factory()
    graph.capture(_fork(rig, copies, joined=True))
    poisoned = rig.poison(rig.expect(rig.subject.some_batch(largest, seed=1)), 1)
    graph.launch()
    return poisoned, copies


def _fork(rig: Rig, copies: dict[str, torch.Tensor], *, joined: bool):
    side, batch = torch.cuda.Stream(rig.subject.device), selected(rig, max(rig.runner.buckets))
    bound = rig.bound

    def body() -> None:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            torch.cuda._sleep(DELAY_CYCLES // 10)
            rig.backend.init_forward_metadata_in_graph(batch)
        if joined:
            current.wait_stream(side)
        for path, copy in copies.items():
            copy.copy_(bound[path])

    return body
