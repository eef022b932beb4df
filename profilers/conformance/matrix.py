"""Which configurations `attn-graph verify` looks at, and the run over them."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...backends.base import ConfigError, tensors_of
from ...backends.batch import with_unassigned_slots
from ...backends.modes import Arm, ForwardMode, Implementation, Placement
from ...backends.registry import lookup
from ..measure import case_pools
from ..sample import Case
from .faults import Fault, known_faults
from .findings import CHECKS, Check, Finding, judge
from .subject import COMPARED, Subject

CHEAPEST = Arm(Implementation.ATEN, Placement.EAGER)


@dataclass(frozen=True, slots=True)
class Sizes:
    """One configuration before a backend and a mode are chosen. Lengths in tokens.

    Attributes:
        buckets: captured batch sizes.
        draft_tokens, draft_steps, step_id, topk: used in speculative modes only.
        holes: some token slots are unassigned (-1).
        probe: also looked at by the checks that are not made everywhere.
        steps, thin, live: see `Subject`; `live` are its sizes.
    """

    page_size: int
    max_context: int
    buckets: tuple[int, ...]
    draft_tokens: int = 4
    draft_steps: int = 3
    step_id: int = 0
    topk: int = 1
    swa: bool = False
    holes: bool = False
    lens: torch.dtype = torch.int64
    rows: torch.dtype = torch.int64
    probe: bool = False
    steps: int | None = None
    thin: int = 1
    live: tuple[int, ...] = ()

    def subject(self, backend: str, mode: ForwardMode, device: torch.device, arms: Sequence[Arm], seed: int) -> Subject:
        """A subject of these sizes.

        Raises:
            ConfigError: the backend does not do this.
        """
        speculative = mode.is_speculative
        case = Case(
            backend=backend,
            mode=str(mode),
            bs=max(self.buckets),
            bucket=max(self.buckets),
            context="",
            page_size=self.page_size,
            max_context=self.max_context,
            swa=self.swa,
            topk=self.topk if speculative else 0,
            draft_tokens=self.draft_tokens if speculative else 0,
            draft_steps=self.draft_steps if speculative else 0,
            step_id=self.step_id if mode is ForwardMode.DRAFT_DECODE else 0,
            device=str(device),
            seed=seed,
        )
        pools = case_pools(case, device)
        if self.holes:
            pools = with_unassigned_slots(pools, seed)
        subject = Subject(
            case, lookup(backend).load(), pools, self.buckets, device, tuple(arms),
            lens=self.lens, rows=self.rows, steps=self.steps, thin=self.thin, sizes=self.live,
        )  # fmt: skip
        subject.rig(CHEAPEST, buckets=[min(self.buckets)])
        return subject


def quick_sizes(mode: ForwardMode) -> Iterator[Sizes]:
    """Small tables; every page size and bucket, each dtype and the window switched between modes. Ten seconds a mode
    where kernels are interpreted, of which most goes to the interpreter."""
    turn = list(ForwardMode).index(mode) % 2 == 1
    small = Sizes(16, 116, (2, 3), probe=True, thin=5, steps=4 if mode is ForwardMode.IDLE else None)
    yield small
    yield replace(small, swa=True, step_id=1, steps=4)
    if mode is ForwardMode.IDLE:
        yield Sizes(256, 1500, (2,), swa=True, steps=4, thin=5)
        return
    int32 = torch.int32
    yield Sizes(1, 61, (1, 8), 2, 2, swa=turn, holes=True, lens=int32, rows=int32, steps=5, thin=5)
    yield Sizes(64, 500, (7,), 8, 3, step_id=1, swa=not turn, holes=True, rows=int32, steps=5, thin=5)
    yield Sizes(128, 1000, (33,), 1, 2, swa=turn, lens=int32, steps=2, thin=2)
    yield Sizes(256, 1500, (2,), 2, 2, swa=True, thin=5)
    if mode.is_speculative:
        yield Sizes(1, 61, (3,), 4, 3, topk=4, thin=5)
        yield Sizes(16, 116, (2,), 4, 3, topk=2, swa=turn, steps=5, thin=5)


def full_sizes(mode: ForwardMode, device: torch.device) -> Iterator[Sizes]:
    """Everything: on a GPU captured sizes up to 512 and every live size from 1 to 512 on real tables."""
    if device.type == "cpu":
        for sizes in quick_sizes(mode):
            for swa in (False, True):
                yield replace(sizes, swa=swa, thin=1, steps=None)
        return
    for swa in (False, True):
        yield Sizes(16, 500, (1, 2, 8), swa=swa, step_id=int(swa), probe=True)
        if mode is ForwardMode.IDLE:
            continue
        for i, (page, context) in enumerate(((1, 600), (16, 4000), (32, 8000), (64, 8192), (128, 16000), (256, 32000))):
            yield Sizes(
                page_size=page,
                max_context=context,
                buckets=(1, 2, 3, 7, 8, 33, 64, 128, 256, 512) if page == 64 else (1, 33, 512),
                swa=swa,
                step_id=i % 2,
                holes=page in (1, 32),
                lens=torch.int32 if page == 32 else torch.int64,
                rows=torch.int32 if page == 128 else torch.int64,
                live=tuple(range(1 + i, 513, 5)),
            )
        if mode.is_speculative:
            yield Sizes(16, 500, (1, 8, 64), 8, 3, topk=4, swa=swa)


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does at a time: a mode of a backend, or (mode None) its known faults."""

    backend: str
    mode: ForwardMode | None
    device: str
    full: bool
    checks: tuple[str, ...]
    arms: tuple[Arm, ...]


def verify(
    backends: Iterable[str],
    modes: Iterable[ForwardMode] | None = None,
    device: torch.device | str = "cpu",
    *,
    full: bool = False,
    checks: Iterable[str] | None = None,
    arms: Iterable[Arm] = COMPARED,
    jobs: int = 1,
) -> Iterator[Finding]:
    """Make every check that applies, and show that every known fault is caught.

    Args:
        backends: registry names.
        modes: modes to look at; a backend's own if None.
        device: where; kernels are interpreted on a CPU.
        full: every size instead of a small choice.
        checks: ids, ``faults`` for all known faults or ``fault:NAME``; everything if None.
        arms: what is compared.
        jobs: processes. One does the work in this process.

    Yields:
        One finding for each check that passed or was skipped in a mode, one for each failure.
    """
    wanted = tuple(checks) if checks is not None else (*sorted(CHECKS, key=_in_order), "faults")
    asked = None if modes is None else set(modes)
    tasks = []
    for name in backends:
        own = [ForwardMode(mode) for mode in lookup(name).modes]
        tasks += [
            Task(name, mode, str(device), full, wanted, tuple(arms))
            for mode in own
            if (asked is None or mode in asked) and not CHECKS.keys().isdisjoint(wanted)
        ]
        if any(c.startswith("fault") for c in wanted):
            tasks.append(Task(name, None, str(device), full, wanted, tuple(arms)))
    if jobs <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield from _do(task)
        return
    # spawn: a forked child could not use CUDA.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, initializer=_as_worker) as pool:
        results = [pool.submit(_do_all, task) for task in tasks]
        try:
            for task, result in zip(tasks, results, strict=True):
                yield from _outcome(task, result)
        except BaseException:  # Ctrl-C above all: nobody will ask for what is still being worked on
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _outcome(task: Task, result: Future[list[Finding]]) -> list[Finding]:
    """What a worker found. One that died takes the others' work with it; each is told."""
    try:
        return result.result()
    except BrokenProcessPool:
        detail = "a process that was checking died: its own messages are above; look at one mode and check at a time"
        return [Finding(task.backend, str(task.mode or ""), "process", "fail", detail)]


def _in_order(check: str) -> tuple[str, int]:
    return check[0], int(check[1:])


def _as_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers; their own tracebacks help nobody
    torch.set_num_threads(1)


def _do_all(task: Task) -> list[Finding]:
    return list(_do(task))


def _do(task: Task) -> Iterator[Finding]:
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if task.mode is None:
        for fault in known_faults(task.backend):
            if {"faults", f"fault:{fault.name}"} & set(task.checks):
                yield caught(fault, task.backend, device)
        return
    subjects, probes, refused = _subjects(task, device)
    yield _sizes_row(task, len(subjects), refused)
    for name in task.checks:
        if name in CHECKS and subjects:
            yield from _merged(CHECKS[name], subjects if CHECKS[name].everywhere else probes or subjects[:1])


def _subjects(task: Task, device: torch.device) -> tuple[list[Subject], list[Subject], list[str]]:
    """What a mode of a backend is looked at on, the probes among it, and why other sizes were refused.

    Some backends take one page size only, or need a window. The first sizes that they refuse are tried with other
    pages and the window switched, until there are two subjects.
    """
    subjects, probes, refused = [], [], []
    taken: set[Sizes] = set()
    for seed, wanted in enumerate(full_sizes(task.mode, device) if task.full else quick_sizes(task.mode)):
        others = _variants(wanted) if len(subjects) < 2 else ()
        made, why = _first_possible(task, (wanted, *others), device, seed)
        if made is None:
            refused.append(why)
            continue
        size, subject = made
        if size in taken:
            continue  # the same as another that was switched, or as one without a window
        taken.add(size)
        subjects.append(subject)
        if size.probe:
            probes.append(subject)
    return subjects, probes, refused


def _first_possible(
    task: Task, sizes: Iterable[Sizes], device: torch.device, seed: int
) -> tuple[tuple[Sizes, Subject] | None, str]:
    """The first of `sizes` that the backend takes, with its subject; and why it refused the one before all others."""
    why = ""
    for size in sizes:
        try:
            subject = size.subject(task.backend, task.mode, device, task.arms, seed)
            if size.swa and not has_window_fields(subject):
                size = replace(size, swa=False)
                subject = size.subject(task.backend, task.mode, device, task.arms, seed)
            return (size, subject), why
        except ConfigError as error:
            why = why or str(error)
    return None, why


def _variants(size: Sizes) -> Iterator[Sizes]:
    for page in (64, 128, 256):
        for swa in (size.swa, not size.swa):
            yield replace(size, page_size=page, swa=swa, max_context=max(size.max_context, 5 * page + 20))


def has_window_fields(subject: Subject) -> bool:
    """Whether a sliding-window pool changes what this backend's metadata is made of."""
    plain = subject.but(case=replace(subject.case, swa=False), pools=replace(subject.pools, full_to_swa=None))
    try:
        with_window, without = (s.rig(CHEAPEST, buckets=[1]).metadata(1) for s in (subject, plain))
    except ConfigError:
        return True  # it cannot do without one
    return tensors_of(with_window).keys() != tensors_of(without).keys()


def _sizes_row(task: Task, taken: int, refused: list[str]) -> Finding:
    detail = f"{taken} configurations"
    if refused:
        detail += f"; {len(refused)} refused: {'; '.join(dict.fromkeys(refused))}"
    return Finding(task.backend, str(task.mode), "sizes", "pass" if taken else "fail", detail)


def _merged(check: Check, subjects: Sequence[Subject]) -> Iterator[Finding]:
    """One row where a check passed or was skipped everywhere it was made; every failure otherwise."""
    found = [f for subject in subjects for f in judge(check, subject)]
    failed = [f for f in found if f.status == "fail"]
    passed = [f for f in found if f.status == "pass"]
    if failed:
        yield from failed
    elif passed:
        notes = dict.fromkeys(f.detail for f in passed if f.detail)
        yield replace(passed[0], detail="; ".join([f"{len(passed)} configurations", *notes]))
    else:
        yield found[0]


def caught(fault: Fault, backend: str, device: torch.device) -> Finding:
    """Whether each check that must catch a fault does, and passes without it."""
    row = partial(Finding, backend, str(fault.mode), f"fault:{fault.name}")
    try:
        sound = fault.on(fault.sizes.subject(backend, fault.mode, device, fault.arms, seed=0))
    except OSError as error:
        return row("skip", f"{fault.title}: this machine cannot show it: {error}")
    broken = fault.broken(sound)
    for name in fault.caught_by:
        here = judge(CHECKS[name], sound.but())
        if any(f.status == "fail" for f in here):
            return row("fail", f"{name} fails without the fault too: {here[0].detail}")
        there = judge(CHECKS[name], broken)
        if there[0].status != "fail":
            return row("fail", f"{fault.title}: {name} did not notice ({there[0].status} {there[0].detail})")
    return row("pass", f"{fault.title}: caught by {', '.join(fault.caught_by)}: {there[0].detail}")
