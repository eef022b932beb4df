"""Checks of memory: who owns what a graph reads, that it stays where it was, and who else writes there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...backends.base import AttentionBackend, AttentionConfig, ConfigError, NotCapturedError, tensors_of
from ...backends.modes import Arm, ForwardMode, Implementation, Placement
from ..measure import case_pools
from .findings import Note, Skip, check
from .subject import Rig, Subject, addresses, changed, scalars_of
from .trace import trace


@check("C1", "metadata tensors stay where the graph captured them, and baked host constants stay as they were",
       everywhere=True)  # fmt: skip
def pointer_stability(subject: Subject) -> Iterator[str]:
    told = set()
    for replay in subject.history:
        for moved in replay.moved:
            key = replay.arm, moved.split()[0]
            if key not in told:
                told.add(key)
                yield f"{moved} ({replay})"


@check("C2", "everything recorded work reads belongs to the runner, the engine or the backend")
def ownership(subject: Subject) -> Iterator[str]:
    for arm in recorded_arms(subject):
        rig = subject.rig(arm)
        owned = rig.inputs | tensors_of(owned_by(rig.backend))
        storages = {t.untyped_storage().data_ptr() for t in owned.values()}
        for bucket in rig.runner.buckets:
            with rig.on_stream():
                seen = trace(rig.backend.init_forward_metadata_in_graph, selected(rig, bucket))
            for t in seen.outside:
                if (
                    t.numel()
                    and t.device.type == subject.device.type
                    and t.untyped_storage().data_ptr() not in storages
                ):
                    yield f"a {t.dtype} tensor {list(t.shape)} is nobody's and may be freed ({arm}, B={bucket})"
                    break


def recorded_arms(subject: Subject) -> list[Arm]:
    """One recorded arm for each implementation: where the recording goes makes no difference to the hook."""
    arms = {arm.implementation: arm for arm in subject.plain_arms if arm.placement is not Placement.EAGER}
    if not arms:
        raise Skip("no arm of this run records the rebuild")
    return list(arms.values())


def selected(rig: Rig, bucket: int) -> Any:
    """The batch a capture of `bucket` sees, with the backend's metadata chosen for it."""
    batch = rig.runner.capture_batch(bucket)
    rig.backend.init_forward_metadata_out_graph(batch)
    return batch


def owned_by(backend: AttentionBackend, seen: set[int] | None = None) -> dict[str, Any]:
    """A backend's own state, its children's included."""
    seen = seen if seen is not None else set()
    seen.add(id(backend))
    state: dict[str, Any] = {}
    for name, value in vars(backend).items():
        if not isinstance(value, AttentionConfig):
            state[name] = _with_children(value, seen)
    return state


def _with_children(value: Any, seen: set[int]) -> Any:
    if isinstance(value, AttentionBackend):
        return {} if id(value) in seen else owned_by(value, seen)
    if isinstance(value, dict):
        return {k: _with_children(v, seen) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_with_children(v, seen) for v in value]
    if type(value).__module__.startswith("attn_graph.") and hasattr(value, "__dict__") and id(value) not in seen:
        seen.add(id(value))  # what a wrapper keeps for several children
        return {k: _with_children(v, seen) for k, v in vars(value).items()}
    return value


@check("C11", "hooks may run twice, and a size may be captured twice: same values, same addresses")
def idempotence(subject: Subject) -> Iterator[str]:
    largest = max(subject.buckets)
    for arm in subject.distinct_arms:
        rig = subject.rig(arm, buckets=[largest])
        with rig.on_stream():
            rig.load(subject.some_batch(largest))
            rig.runner.rebuild()
            rig.runner.launch()
            once = _state(rig)
            rig.put_back()
            rig.runner.rebuild()
            rig.runner.launch()
            yield from _differences(once, _state(rig), f"a second rebuild ({arm}, B={largest})")
            if rig.backend.recorded:
                rig.put_back()
                rig.backend.init_forward_metadata_in_graph(rig.runner.capture_batch(largest))
                yield from _differences(once, _state(rig), f"one more in-graph hook ({arm}, B={largest})")
            bound = addresses(rig.metadata(largest))
            rig.runner.capture()
        for path, place in addresses(rig.metadata(largest)).items():
            if bound.get(path) != place:
                yield f"{path} lies elsewhere after capturing B={largest} again: older graphs still read there ({arm})"


def _state(rig: Rig) -> dict[str, Any]:
    values = {path: t.clone() for path, t in rig.bound.items()}
    return values | {f"host {p}": v for p, v in scalars_of(rig.backend.forward_metadata).items()}


def _differences(before: dict[str, Any], after: dict[str, Any], what: str) -> Iterator[str]:
    tensors = {path: value for path, value in before.items() if isinstance(value, torch.Tensor)}
    numbers = [path for path, value in before.items() if path not in tensors and value != after[path]]
    for path in [*changed(tensors, after), *numbers]:
        yield f"{path} changed with {what}"


@check("C14", "every captured size owns its metadata; other sizes are refused, not built on the way")
def key_coverage(subject: Subject) -> Iterator[str]:
    for arm in subject.distinct_arms:
        rig = subject.rig(arm)
        captured = set(rig.backend.metadata)
        missing = {(subject.mode, b) for b in rig.runner.buckets} - captured
        if missing:
            yield f"no metadata for {sorted(str(b) for _, b in missing)} after capture ({arm})"
        with rig.on_stream():
            for size in rig.runner.buckets:
                rig.load(subject.some_batch(size))
                rig.runner.rebuild()
            added = set(rig.backend.metadata) - captured
            if added:
                yield f"replay made new entries: {sorted(map(str, added))} ({arm})"
            yield from _refuses(rig, max(rig.runner.buckets) + 1)


def _refuses(rig: Rig, size: int) -> Iterator[str]:
    """A size that was never captured must be refused by name, by the runner and by the backend."""
    slots = rig.new_slots([size])
    runner = object.__new__(type(rig.runner))
    runner.__dict__ |= vars(rig.runner) | {"slots": slots}
    try:
        rig.backend.init_forward_metadata_out_graph(runner.capture_batch(size))
    except NotCapturedError as error:
        if str(size) not in str(error):
            yield f"the refusal of B={size} does not name it: {error}"
    else:
        yield f"B={size} was never captured and is accepted ({rig.arm})"


@check("C15", "captured modes of one instance keep out of each other's metadata")
def mode_to_mode(subject: Subject) -> Iterator[str]:
    subjects = _each_mode(subject)
    if len(subjects) < 2:
        raise Skip("the backend has one mode only")
    largest, replays = max(subject.buckets), 0
    for arm in recorded_arms(subject):
        backend = subjects[0].backend(arm)
        backend.init_cuda_graph_state(largest, largest * max(s.shape.tokens_per_req for s in subjects))
        rigs = [Rig(s, arm, backend=backend) for s in subjects]
        yield from _undocumented_sharing(rigs)
        for number, rig in enumerate([*rigs, *reversed(rigs)]):
            replays += 1
            for m in rig.replay(rig.subject.some_batch(largest, seed=number), number):
                yield f"{m}, after replays of other modes ({arm}, {rig.subject.mode})"
    yield Note(f"{replays} replays of {len(subjects)} modes in turn")


def _each_mode(subject: Subject) -> list[Subject]:
    """The subject in every mode that an engine captures on one instance. The two draft-extend modes never meet: an
    engine has one or the other."""
    modes = [m for m in ForwardMode if m in subject.backend_class.modes]
    if {ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2} <= set(modes):
        first = subject.mode is ForwardMode.DRAFT_EXTEND
        modes.remove(ForwardMode.DRAFT_EXTEND_V2 if first else ForwardMode.DRAFT_EXTEND)
    case, pools = subject.case, subject.pools
    if case.draft_tokens == 0 and any(m.is_speculative for m in modes):
        case = replace(case, draft_tokens=2, draft_steps=2)
        pools = case_pools(case, subject.device)
    each = [
        subject.but(case=replace(case, mode=str(mode)), pools=pools, buckets=(max(subject.buckets),)) for mode in modes
    ]
    return [s for s in each if _has_it(s)] if subject.extra else each


def _has_it(subject: Subject) -> bool:
    """Whether the children that a wrapper is made of serve the mode."""
    try:
        subject.rig(Arm(Implementation.ATEN, Placement.EAGER), buckets=[1])
    except ConfigError:
        return False
    return True


def _undocumented_sharing(rigs: list[Rig]) -> Iterator[str]:
    allowed = rigs[0].backend.allowances.shared_between_modes
    for i, one in enumerate(rigs):
        for other in rigs[i + 1 :]:
            ours, theirs = (tensors_of(r.metadata(max(r.subject.buckets))) for r in (one, other))
            for path, t in ours.items():
                for their_path, u in theirs.items():
                    if overlap(t, u) and not (path == their_path and path in allowed):
                        yield (
                            f"{path} of {one.subject.mode} and {their_path} of {other.subject.mode} share memory and "
                            f"nothing says so ({one.arm})"
                        )


def overlap(t: torch.Tensor, u: torch.Tensor) -> bool:
    """Whether two tensors have bytes in common, judged by their first and last."""
    if not (t.numel() and u.numel()) or t.untyped_storage().data_ptr() != u.untyped_storage().data_ptr():
        return False
    (a, b), (c, d) = _extent(t), _extent(u)
    return a < d and c < b


def _extent(t: torch.Tensor) -> tuple[int, int]:
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    return t.data_ptr(), t.data_ptr() + span * t.element_size()


@check("C17", "a rebuild changes none of its inputs", everywhere=True)
def input_mutation(subject: Subject) -> Iterator[str]:
    told = set()
    for replay in subject.history:
        for name in set(replay.mutated) - told:
            told.add(name)
            yield f"{name} was changed ({replay})"


@check("C22", "no two fields, and no field and input, share memory without saying so", everywhere=True)
def alias_map(subject: Subject) -> Iterator[str]:
    for arm in _one_of_each(subject):
        rig = subject.rig(arm, buckets=[max(subject.buckets)])
        documented = rig.backend.allowances.aliases
        fields = tensors_of(rig.metadata(max(subject.buckets)))
        others = fields | rig.inputs
        pairs = {frozenset((a, b)) for a in fields for b in others if a != b and overlap(fields[a], others[b])}
        for pair in pairs:
            if not any(pair <= group for group in documented):
                yield f"{' and '.join(sorted(pair))} share memory ({arm})"
    if documented:
        yield Note(f"documented: {'; '.join(' = '.join(sorted(group)) for group in documented)}")


def _one_of_each(subject: Subject) -> list[Arm]:
    """An eager and a recorded arm, the cheapest to build: what they bind is the same whoever rebuilds."""
    by_kind = {arm.placement is Placement.EAGER: arm for arm in reversed(subject.arms)}
    return sorted(by_kind.values(), key=lambda arm: arm.implementation is Implementation.FUSED)
