"""Checks of the hooks themselves: what they may do under capture, what they cost, and who calls whom."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...backends.base import Allowances, AttentionBackend, tensors_of
from ...backends.batch import ForwardBatch, idle_batch
from ...backends.modes import Arm, ForwardMode, Implementation, Placement
from ...backends.registry import BackendInfo, registered
from ...backends.runners.glue import backend_refusal
from ...backends.runners.tree import halves_batches
from ..counters import SYNC_OPS, Counts, count
from ..graphs import CaptureError
from .findings import Note, Skip, check
from .pointers import recorded_arms, selected
from .subject import Rig, Subject, addresses, changed, children_of, scalars_of
from .trace import Trace, trace


@check("C8", "no host synchronisation where none is allowed: in the graph, and before it for who is recorded or fused")
def no_host_sync(subject: Subject) -> Iterator[str]:
    free = [arm for arm in subject.plain_arms if arm != Arm(Implementation.ATEN, Placement.EAGER)]
    if not free:
        raise Skip("the classic chain may read the host mirror")
    for arm in free:
        rig = subject.rig(arm, buckets=[max(subject.buckets)])
        if arm.placement is Placement.EAGER and halves_batches(rig.backend):
            continue  # it sums the host mirror of each half
        with rig.on_stream():
            rig.load(subject.some_batch(max(subject.buckets)))
            for where, body in (("before the launch", rig.runner.rebuild), ("in the graph", in_graph(rig))):
                with _syncs_raise(subject.device):
                    seen = trace(body)
                reads = [n for n in seen.names if n in SYNC_OPS] or seen.host_reads
                if reads:
                    yield f"{', '.join(sorted(set(reads)))} {where}: the host waits for the device ({arm})"


def in_graph(rig: Rig):
    """The in-graph hook on the batch that a capture of the loaded bucket sees."""
    batch = selected(rig, rig.runner.bucket or max(rig.runner.buckets))
    return lambda: rig.backend.init_forward_metadata_in_graph(batch)


@contextmanager
def _syncs_raise(device: torch.device) -> Iterator[None]:
    """Make CUDA calls that wait for the device raise."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@check("C9", "the in-graph hook can be captured by itself, does something, and replays to the oracle's values")
def capture_legality(subject: Subject) -> Iterator[str]:
    largest = max(subject.buckets)
    for arm in recorded_arms(subject):
        rig = subject.rig(arm, buckets=[largest])
        with rig.on_stream():
            batch = selected(rig, largest)
            graph = rig.factory()
            graph.capture(lambda rig=rig, batch=batch: rig.backend.init_forward_metadata_in_graph(batch))
            if graph.nodes == 0:
                yield f"nothing was recorded ({arm}, B={largest})"
            poisoned = rig.poison(rig.expect(subject.some_batch(largest)), salt=1)
            graph.launch()
            for m in poisoned.mismatches():
                yield f"{m}, from a graph of the hook alone ({arm}, B={largest})"


@check("C10", "the in-graph hook does the same operations on the same shapes whatever the batch holds")
def trace_equality(subject: Subject) -> Iterator[str]:
    largest = max(subject.buckets)
    for arm in recorded_arms(subject):
        one, other = two_traces(subject, arm)
        if one.ops != other.ops:
            i = next((i for i, (a, b) in enumerate(zip(one.ops, other.ops, strict=False)) if a != b), len(one.ops))
            a, b = (t.ops[i] if i < len(t.ops) else "nothing" for t in (one, other))
            yield f"operation {i} is {a} for one batch and {b} for another ({arm}, B={largest})"


def two_traces(subject: Subject, arm: Arm) -> tuple[Trace, Trace]:
    """Traces of the in-graph hook for two batches of one bucket.

    The hook sees static tensors, as a capture does, beside the host numbers of the live batch: whatever it does with
    those shows as a difference.
    """
    rig = subject.rig(arm, buckets=[max(subject.buckets)])
    traces = []
    for seed, size in enumerate((max(subject.buckets), max(max(subject.buckets) - 1, 1))):
        with rig.on_stream():
            rig.load(subject.some_batch(size, seed=30 + seed))
            rig.runner.rebuild()
            traces.append(trace(rig.backend.init_forward_metadata_in_graph, _static(rig)))
    return traces[0], traces[1]


def _static(rig: Rig) -> ForwardBatch:
    """The captured batch with the live one's host numbers."""
    captured, live = rig.runner.capture_batch(rig.runner.bucket), rig.runner.view
    spec = captured.spec_info
    if spec is not None and live.spec_info is not None:
        spec = replace(spec, num_accept_tokens_cpu=live.spec_info.num_accept_tokens_cpu)
    return replace(
        captured, spec_info=spec, actual_forward_mode=live.actual_forward_mode,
        seq_lens_sum=live.seq_lens_sum, num_padding=live.num_padding,
    )  # fmt: skip


@check("C12", "after warm-ups and their hook backend and tables are as before them, and it records the same")
def warmup_hook(subject: Subject) -> Iterator[str]:
    largest = max(subject.buckets)
    for arm in recorded_arms(subject):
        rig = subject.rig(arm, buckets=[largest])
        tables = {name: t.clone() for name, t in tensors_of(subject.pools).items()}
        with rig.on_stream():
            rig.load(subject.some_batch(largest))
            rig.slots.reset(largest)  # as at a capture, for which engines count every row as live
            batch = selected(rig, largest)
            before = _python_state(rig.backend)
            first = trace(rig.backend.init_forward_metadata_in_graph, batch)
            rig.backend.on_after_cuda_graph_warmup()
            after = _python_state(rig.backend)
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    yield f"{name} was {before.get(name)} before a warm-up and is {after.get(name)} after it ({arm})"
            for name in changed(tables, tensors_of(subject.pools)):
                yield f"a warm-up changed pools.{name} ({arm})"
            second = trace(rig.backend.init_forward_metadata_in_graph, batch)
            if first.names != second.names:
                yield f"a first run does {len(first.ops)} operations, one after a warm-up {len(second.ops)} ({arm})"
            nodes = []
            for warmups in (0, 2):
                graph = rig.factory()
                hook = rig.backend.on_after_cuda_graph_warmup
                graph.capture(in_graph(rig), warmups=warmups, after_warmup=hook)
                nodes.append(graph.nodes)
            if nodes[0] != nodes[1]:
                yield f"{nodes[0]} nodes without warm-ups, {nodes[1]} with two ({arm})"


def _python_state(backend: AttentionBackend) -> dict[str, Any]:
    """Attributes, where the tensors among them lie, and the host numbers of the metadata in use."""
    plain = {
        name: value if isinstance(value, int | float | str | bool | None) else id(value)
        for name, value in vars(backend).items()
    }
    return plain | addresses(backend.forward_metadata) | scalars_of(backend.forward_metadata)


@check("C13", "a wrapper forwards every hook, and each to the same children")
def wrapper_forwarding(subject: Subject) -> Iterator[str]:
    arm = subject.arms[-1]
    rig = subject.rig(arm, buckets=[max(subject.buckets)])
    children = children_of(rig.backend)
    if not children:
        raise Skip("not a wrapper")
    batch = rig.runner.capture_batch(max(subject.buckets))
    calls = {
        "init_forward_metadata_out_graph": lambda: rig.backend.init_forward_metadata_out_graph(batch, in_capture=True),
        "init_forward_metadata_in_graph": lambda: rig.backend.init_forward_metadata_in_graph(batch),
    }
    for name in hook_names() - calls.keys():
        if not inspect.signature(getattr(rig.backend, name)).parameters:
            calls[name] = getattr(rig.backend, name)
    wanted = getattr(rig.backend, "forwarding", None)
    reached: dict[str, Counter] = {}
    for name, call in calls.items():
        with _spied(children, name) as seen:
            call()
        reached[name] = seen
        if wanted is not None and seen != Counter(wanted(batch, name)):
            yield f"{name} reached {dict(seen)}, wanted {wanted(batch, name)} ({arm})"
    first = reached["init_forward_metadata_out_graph"]
    for name, seen in reached.items() if wanted is None else ():
        if set(seen) != set(first):
            yield f"{name} reached {sorted(seen) or 'no child'}, the out-of-graph hook {sorted(first)} ({arm})"
    yield Note(f"{len(calls)} hooks, {len(children)} children")


def hook_names() -> set[str]:
    """Hooks of the contract, found by inspection, so that one added later is checked too."""
    return {
        name
        for name, value in vars(AttentionBackend).items()
        if inspect.isfunction(value) and name.startswith(("init_forward_metadata_", "on_"))
    }


@contextmanager
def _spied(children: dict[str, AttentionBackend], hook: str) -> Iterator[Counter]:
    """Count calls of `hook` by child; the hook still runs."""
    seen: Counter = Counter()
    for name, child in children.items():
        original = getattr(child, hook)

        def spy(*args, name=name, original=original, **kwargs):
            seen[name] += 1
            return original(*args, **kwargs)

        setattr(child, hook, spy)
    try:
        yield seen
    finally:
        for child in children.values():
            delattr(child, hook)


@check("C20", "an out-of-graph rebuild that can be captured as a glue graph stays right; others depend on the host")
def glue_eligibility(subject: Subject) -> Iterator[str]:
    eager = [arm for arm in subject.plain_arms if arm.placement is Placement.EAGER]
    if not eager:
        raise Skip("no eager arm in this run")
    verdicts = []
    for arm in eager:
        problem, refusal = _as_glue(subject, arm), backend_refusal(subject.backend(arm))
        if problem and arm.implementation is Implementation.FUSED and not refusal:
            yield f"{problem} ({arm})"
        verdicts.append(f"{arm}: {f'host-dependent, {problem}' if problem else 'can be captured'}")
    yield Note("; ".join(verdicts))


def _as_glue(subject: Subject, arm: Arm) -> str:
    """What goes wrong when the out-of-graph hook is captured and replayed; empty if nothing does.

    The capture sees the shortest lengths, replays longer ones: whatever was sized from the host at capture is too
    small, and nothing refuses to read a host mirror while a CUDA graph is recorded.
    """
    largest, shape = max(subject.buckets), subject.shape
    rig = subject.rig(arm, buckets=[largest])
    with rig.on_stream():
        rig.load(subject.some_batch(largest, seed=40, length=shape.minimum))
        batch = rig.runner.capture_batch(largest)
        graph = rig.factory()
        try:
            graph.capture(lambda: rig.backend.init_forward_metadata_out_graph(batch))
        except CaptureError as error:
            return str(error).splitlines()[0]
        for salt, length in enumerate((None, shape.limit, None)):
            live = subject.some_batch(largest, seed=41 + salt, length=length)
            poisoned = rig.poison(rig.expect(live), salt)
            graph.launch()
            for m in poisoned.mismatches():
                return str(m)
    return ""


@check("C24", "dispatches, launches and synchronisations of one rebuild are those specified, at every size")
def dispatch_budget(subject: Subject) -> Iterator[str]:
    info = registered().get(subject.case.backend)
    budget = _specified(subject, info)
    subject = subject.but(lens=getattr(torch, info.lens) if info else torch.int32)  # other lengths cost a cast more
    for arm in subject.plain_arms:
        rig = subject.rig(arm)
        counted = {}
        for size in _of_one_kind(rig):
            with rig.on_stream():
                rig.load(idle_batch() if subject.case.mode == ForwardMode.IDLE else subject.some_batch(size))
                counted[size] = count(rig.runner.rebuild, [rig.slots.seq_lens_cpu])
        smallest, least = counted[min(counted)], min(counted)
        classic = arm == Arm(Implementation.ATEN, Placement.EAGER)
        allowed = rig.backend.allowances if classic else Allowances()
        growth = allowed.dispatches_per_request.get(subject.case.mode, 0)
        for size, counts in counted.items():
            more = size - least
            if _without(counts, growth * more, allowed.syncs_per_request * more) != _without(smallest, 0, 0):
                yield f"B={least} takes {smallest}, B={size} {counts} ({arm})"
        own = Counts()
        if arm.placement is Placement.EAGER and children_of(rig.backend):
            with rig.on_stream(), _muted(children_of(rig.backend)):
                rig.load(idle_batch() if subject.case.mode == ForwardMode.IDLE else subject.some_batch(least))
                own = count(rig.runner.rebuild, [rig.slots.seq_lens_cpu])
            if budget is not None and (own.dispatches > budget or (classic and own.dispatches != budget)):
                yield f"{own.dispatches} dispatches of its own, specified are {budget} ({arm})"
            whole = None
        else:
            copies = allowed.lists_read if subject.device.type != "cpu" else 0
            whole = budget if budget is None else budget + copies + growth * (least - 1)
        yield from _over_budget(arm, smallest, own, whole, rig.backend.allowances.fused_launches)
    yield Note(f"classic chain: {budget if budget is not None else 'no'} dispatches specified")


def _specified(subject: Subject, info: BackendInfo | None) -> int | None:
    """Dispatches of the classic chain; of a wrapper's own work, where its children are those of the specification."""
    specified = info.compositions[0] if info and info.compositions else None
    if info is None or subject.extra != specified:
        return None
    return info.dispatches.get(subject.case.mode, (None, None))[subject.case.swa]


def _of_one_kind(rig: Rig) -> list[int]:
    """Captured sizes whose rebuilds do alike. No requests take the smallest. A wrapper that halves them leaves a child
    out at 1, and slices of one row are contiguous where others are not."""
    sizes = rig.runner.buckets[: 1 if rig.subject.case.mode == ForwardMode.IDLE else None]
    return [size for size in sizes if size >= 4] or sizes[-1:] if halves_batches(rig.backend) else sizes


@contextmanager
def _muted(children: dict[str, AttentionBackend]) -> Iterator[None]:
    """Leave out what children do before the launch."""
    for child in children.values():
        child.init_forward_metadata_out_graph = lambda fb, in_capture=False: None
    try:
        yield
    finally:
        for child in children.values():
            del child.init_forward_metadata_out_graph


def _without(counts: Counts, dispatches: int, syncs: int) -> tuple[int, ...]:
    """What must not depend on the batch size, less what the chain does for each further request."""
    return counts.dispatches - dispatches, counts.syncs - syncs, counts.triton, counts.graphs


def _over_budget(arm: Arm, counts: Counts, own: Counts, budget: int | None, fused_launches: int) -> Iterator[str]:
    """own: what a wrapper does before and after its children, which may include splitting a batch on the host."""
    if arm.placement is Placement.GRAPH:
        if counts.dispatches or counts.launches or counts.syncs:
            yield f"the host still works at replay: {counts} ({arm})"
    elif arm.placement is Placement.GLUE:
        if (counts.dispatches, counts.launches, counts.graphs, counts.syncs) != (0, 1, 1, 0):
            yield f"one graph launch and nothing else was due: {counts} ({arm})"
    elif arm.implementation is Implementation.FUSED:
        beside = counts.dispatches - own.dispatches, counts.views - own.views, counts.syncs - own.syncs
        if counts.launches > fused_launches or beside[0] > beside[1] or beside[2]:
            yield f"{fused_launches} launches and no other device work were due: {counts} ({arm})"
    elif budget is not None and counts.dispatches != budget:
        yield f"{counts.dispatches} dispatches, specified are {budget} ({arm})"
