"""Checks of values: what a replay leaves, whatever was there before and in whatever order batches come."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import torch

from ...backends.base import ConfigError
from ...backends.batch import LiveBatch, idle_batch
from ...backends.modes import Arm, ForwardMode, Implementation, Placement, TailPolicy
from ...backends.runners.decode import StaticSlots
from .findings import Note, Skip, check
from .poison import Mismatch, bits
from .subject import Replay, Rig, Subject, changed


def _told(subject: Subject, kinds: set[str], *, padding: bool = False) -> Iterator[str]:
    """Mismatches of some kinds, once for each arm and field; only those of padded rows if `padding`."""
    told = set()
    for replay in subject.history:
        for m in replay.mismatches:
            if (
                m.kind in kinds
                and (not padding or _in_padding(subject, replay, m))
                and (replay.arm, m.path) not in told
            ):
                told.add((replay.arm, m.path))
                yield f"{m} ({replay})"
    yield Note(f"{len(subject.history)} replays")


def _in_padding(subject: Subject, replay: Replay, m: Mismatch) -> bool:
    """Whether the cell belongs to a row behind the live ones."""
    if not m.index or replay.live == replay.bucket:
        return False
    tokens = subject.shape.tokens_per_req
    return m.index[0] >= replay.live * (tokens if "loc" in m.path or "pos" in m.path else 1) + ("cu_" in m.path)


@check("C3", "values at replay equal the oracle's, cell by cell, in every arm", everywhere=True)
def values_at_replay(subject: Subject) -> Iterator[str]:
    yield from _told(subject, {"value", "stale", "constant", "extra", "shape", "overflow"})


@check("C4", "no cell that a kernel reads keeps what an earlier batch left", everywhere=True)
def nothing_stale(subject: Subject) -> Iterator[str]:
    yield from _told(subject, {"stale"})


@check("C5", "a replay does not depend on the batches before it")
def order_independence(subject: Subject) -> Iterator[str]:
    for arm in subject.distinct_arms:
        used = subject.rig(arm)
        for live in _ups_and_downs(subject):
            after_others = _live_cells(used, live)
            fresh = _live_cells(subject.rig(arm, buckets=[used.runner.bucket]), live)
            for path in changed(after_others, fresh):
                i, found, alone = _first_difference(after_others[path], fresh[path])
                yield (
                    f"{path}: live cell {i[0]} is {found} after other batches, {alone} in a fresh process "
                    f"({arm}, B={used.runner.bucket}, {live.batch_size} live)"
                )


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> tuple[list[int], int, int]:
    """Where two fields differ first, and both cells."""
    i = tuple((one != other).nonzero()[0].tolist())
    return list(i), int(one[i]), int(other[i])


def _ups_and_downs(subject: Subject) -> Iterator[LiveBatch]:
    """Full, small, full again with other lengths, idle, padded."""
    largest, smallest = max(subject.buckets), min(subject.buckets)
    sizes = [largest, smallest, largest, 0, max(largest - 1, 1)]
    for i, size in enumerate(sizes):
        if size:
            yield subject.some_batch(size, seed=i)
        elif subject.mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
            yield idle_batch()


def _live_cells(rig: Rig, live: LiveBatch) -> dict[str, torch.Tensor]:
    """Replay without poison: the cells that a kernel would read, in one row for each field."""
    with rig.on_stream():
        expected, _ = rig.expect(live)
        rig.runner.rebuild()
        rig.runner.launch()
        # By number, counted on the host: a boolean index would wait for the device.
        cells = {path: torch.from_numpy(np.flatnonzero(word.live)) for path, word in expected.items()}
        return {path: bits(t).reshape(-1)[cells[path].to(t.device, non_blocking=True)] for path, t in rig.bound.items()}


@check("C6", "padding rows hold what padding must hold, and live rows do not read behind themselves", everywhere=True)
def padded_tail(subject: Subject) -> Iterator[str]:
    yield from _told(subject, {"value", "stale", "constant", "extra"}, padding=True)
    largest = max(subject.buckets)
    if largest > MOST_ROWS:
        return
    live = max(largest - 1, 1)
    batch = subject.some_batch(live)
    for arm in {subject.arms[0], subject.arms[-1]}:
        rig = subject.rig(arm, buckets=[largest, largest + 2])  # so that there are slots behind the batch
        clean = _live_cells(rig, batch)
        with rig.on_stream():
            _leave_behind(subject, rig.slots)
        dirty = _live_cells(rig, batch)
        for path in changed(clean, dirty):
            yield f"{path} depends on what older batches left in the slots ({arm}, B={largest}, {live} live)"
        fill, slots = rig.slots.fill_value, rig.slots.slots_per_req
        for name, pad, width in (
            ("req_pool_indices", 0, 1), ("seq_lens", fill, 1), ("seq_lens_cpu", fill, 1), ("out_cache_loc", 0, slots),
        ):  # fmt: skip
            found, given = (
                getattr(rig.slots, name)[: largest * width].tolist(),
                getattr(batch, name.removesuffix("_cpu")),
            )
            wanted = [*given.tolist(), *[pad] * (largest * width - len(given))]
            if found != wanted:
                yield f"slots.{name} is {found}, wanted {wanted} (B={largest}, {live} live)"


MOST_ROWS = 8
"""Up to here the second half is made; a larger batch shows nothing more and takes far longer."""


def _leave_behind(subject: Subject, slots: StaticSlots) -> None:
    """Fill every slot with what is legal and wrong."""
    slots.seq_lens.fill_(subject.shape.limit)
    slots.seq_lens_cpu.fill_(subject.shape.limit)
    slots.req_pool_indices.fill_(subject.pools.req_to_token.shape[0] - 1)
    slots.out_cache_loc.fill_(1)
    slots.num_accept_tokens.fill_(1)


@check("C16", "a small batch writes no row of a larger one", everywhere=True)
def size_to_size(subject: Subject) -> Iterator[str]:
    yield from _told(subject, {"outside"})


@check("C21", "nothing recorded reads a tensor that lives for one step only")
def live_tensor_binding(subject: Subject) -> Iterator[str]:
    for arm in subject.distinct_arms:
        rig = subject.rig(arm)
        for salt, size in enumerate((max(subject.buckets), max(max(subject.buckets) - 1, 1), min(subject.buckets))):
            with rig.on_stream():
                step = rig.load(subject.some_batch(size, seed=10 + salt))
                poisoned = rig.poison(rig.expected(), salt)
                rig.runner.rebuild()
                for t in (step.out_cache_loc, step.seq_lens, step.req_pool_indices, step.positions):
                    t.fill_(1)  # what the next owner of this memory would do
                rig.runner.view = None
                del step
                gc.collect(1)
                rig.runner.launch()
                for m in poisoned.mismatches():
                    yield f"{m}, after the step's own tensors were freed ({arm}, {size} live)"


@check("C23", "fields whose order is free hold the right cells in some order", everywhere=True)
def unordered_fields(subject: Subject) -> Iterator[str]:
    free = subject.backend(subject.arms[-1]).allowances.unordered
    if not free:
        raise Skip("no field of this backend is written in a free order")
    for problem in _told(subject, {"value", "stale", "extra"}):
        if isinstance(problem, Note) or any(problem.startswith(path) for path in free):
            yield problem


PARITY = (
    (TailPolicy.BATCH_MAX, Placement.EAGER),
    (TailPolicy.STATIC_FULL, Placement.GRAPH),
)
"""The two tails that the classic chain can leave: as wide as the batch, or as wide as what a graph could record."""


@check("C25", "fused equals the classic chain bit for bit, tails and first entries included")
def fused_parity(subject: Subject) -> Iterator[str]:
    compared = 0
    for tail, placement in PARITY:
        arms = [Arm(implementation, placement) for implementation in (Implementation.ATEN, Implementation.FUSED)]
        if not set(arms) <= set(subject.arms):
            continue
        largest = max(subject.buckets)
        rigs = [_with_tail(subject, arm, tail, [min(subject.buckets), largest]) for arm in arms]
        for salt, size in enumerate((largest, 1, max(largest - 1, 1))):
            compared += 1
            classic, fused = (_cells(rig, subject.some_batch(size, seed=20 + salt), salt) for rig in rigs)
            for path in changed(classic, fused):
                i, left, right = _first_difference(classic[path], fused[path])
                yield (
                    f"{path}{i}: aten leaves {left}, fused {right} "
                    f"({tail} tails, {placement}, B={rigs[0].runner.bucket}, {size} live)"
                )
    if not compared:
        raise Skip("needs an aten and a fused arm of one placement")
    yield Note(f"{compared} pairs")


def _with_tail(subject: Subject, arm: Arm, tail: TailPolicy, buckets: list[int]) -> Rig:
    try:
        return subject.rig(arm, tail=tail, buckets=buckets)
    except ConfigError:  # a backend without tail policies: both implementations have the same one
        return subject.rig(arm, buckets=buckets)


def _cells(rig: Rig, live: LiveBatch, salt: int) -> dict[str, torch.Tensor]:
    """Every bound cell after a replay on poison."""
    with rig.on_stream():
        rig.poison(rig.expect(live), salt)
        rig.runner.rebuild()
        rig.runner.launch()
        return {path: bits(t).clone() for path, t in rig.bound.items()}
