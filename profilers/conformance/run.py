"""The run of `attn-graph verify`: what there is to do in small pieces, done side by side, put together again."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import torch

from ...backends.modes import Arm, ForwardMode
from ...backends.registry import lookup
from .faults import Fault, RunnerFault, known_faults
from .findings import CHECKS, Finding, judge, raised
from .interpreter import lighten
from .matrix import HAVE_METADATA, Sizes, possible_sizes
from .runners import RunnerSubject
from .subject import COMPARED
from .workers import Died, done_by

LIVE_SIZES_AT_A_TIME = 26
"""So that no piece takes far longer than the others."""

MOST_KEPT_BYTES = 2**30
"""Device memory that a process keeps from one piece to the next: asking the driver again takes its time."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a piece of work leads to."""

    findings: tuple[Finding, ...] = ()
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Something to do for one backend and mode, in any process.

    Attributes:
        backend: or runner, by name.
        device: by name; ``cuda`` is the process's own of all GPUs.
    """

    backend: str
    mode: ForwardMode
    device: str
    arms: tuple[Arm, ...]

    @property
    def cost(self) -> float:
        """Larger takes longer, or others wait for it."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """What was being done, for the report of a process that died of it."""
        raise NotImplementedError

    @property
    def rows(self) -> tuple[str, ...]:
        """Ids of the rows that it answers for."""
        raise NotImplementedError

    def find(self, device: torch.device) -> Found:
        raise NotImplementedError

    def _found(self, device: torch.device) -> Found:
        try:
            return self.find(device)
        except Exception as error:  # what breaks down before its checks has not passed them; others go on
            return Found(tuple(Finding(self.backend, str(self.mode), row, "fail", raised(error)) for row in self.rows))

    def run(self) -> tuple[Found, bool]:
        """What it finds; and whether this process can find more."""
        device = torch.device(self.device)
        if device.type == "cpu":
            return self._found(device), True
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        torch.cuda.set_device(device)
        found = self._found(device)
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:  # a kernel ran into memory that is not its own; so would all that come after it
            return found, False
        if torch.cuda.memory_reserved(device) > MOST_KEPT_BYTES:
            gc.collect()
            torch.cuda.empty_cache()  # the other processes need room too
        return found, True


@dataclass(frozen=True, slots=True)
class Plan(_Piece):
    """Which sizes the backend takes in a mode: the parts."""

    full: bool
    checks: tuple[str, ...]

    cost = float("inf")
    title = "looking for sizes that it takes"
    rows = ("sizes",)

    def find(self, device: torch.device) -> Found:
        taken, refused = possible_sizes(self.backend, self.mode, device, self.arms, full=self.full)
        detail = f"{len(taken)} configurations"
        if refused:
            detail += f"; {len(refused)} refused: {'; '.join(dict.fromkeys(refused))}"
        row = Finding(self.backend, str(self.mode), "sizes", "pass" if taken else "fail", detail)
        return Found((row,), tuple(self._parts(taken)))

    def _parts(self, taken: Sequence[tuple[Sizes, int]]) -> Iterator[Part]:
        everywhere = tuple(c for c in self.checks if CHECKS[c].everywhere)
        elsewhere = [c for c in self.checks if not CHECKS[c].everywhere]
        probes = [(size, seed) for size, seed in taken if size.probe] or taken[:1]
        for size, seed in taken if everywhere else ():
            for piece in _pieces(size):
                yield self._part(everywhere, piece, seed)
        lint = tuple(c for c in elsewhere if c.startswith("L"))  # they look at one trace
        for group in [(c,) for c in elsewhere if c not in lint] + ([lint] if lint else []):
            for size, seed in probes:
                yield self._part(group, size, seed)

    def _part(self, checks: tuple[str, ...], size: Sizes, seed: int) -> Part:
        return Part(self.backend, self.mode, self.device, self.arms, checks, size, seed)


def _pieces(size: Sizes) -> Iterator[Sizes]:
    """The sequences, and the further live sizes a few at a time."""
    yield replace(size, live=size.live[:0])
    for start in range(0, len(size.live), LIVE_SIZES_AT_A_TIME):
        yield replace(size, steps=0, live=size.live[start : start + LIVE_SIZES_AT_A_TIME])


@dataclass(frozen=True, slots=True)
class Part(_Piece):
    """Checks on one configuration, or on a piece of one."""

    checks: tuple[str, ...]
    size: Sizes
    seed: int

    @property
    def rows(self) -> tuple[str, ...]:
        return self.checks

    @property
    def cost(self) -> float:
        sequences = sum(self.size.buckets) * (12 if self.size.steps is None else self.size.steps)
        return sequences + sum(self.size.live) if CHECKS[self.checks[0]].everywhere else max(self.size.buckets)

    @property
    def title(self) -> str:
        s = self.size
        sizes = f"P={s.page_size} C={s.max_context} B={'/'.join(map(str, s.buckets))}"
        return " ".join([", ".join(self.checks), "at", sizes, *(f"{name}={value}" for name, value in s.options)])

    def find(self, device: torch.device) -> Found:
        subject = self.size.subject(self.backend, self.mode, device, self.arms, self.seed)
        return Found(tuple(f for name in self.checks for f in judge(CHECKS[name], subject)))


@dataclass(frozen=True, slots=True)
class OfRunner(_Piece):
    """Checks of a runner in a mode."""

    checks: tuple[str, ...]

    cost = 1.0

    @property
    def rows(self) -> tuple[str, ...]:
        return self.checks

    @property
    def title(self) -> str:
        return ", ".join(self.checks)

    def find(self, device: torch.device) -> Found:
        subject = RunnerSubject.of(self.backend, self.mode, device)
        return Found(tuple(f for name in self.checks for f in judge(CHECKS[name], subject.but())))


@dataclass(frozen=True, slots=True)
class KnownFault(_Piece):
    """Whether a known fault is noticed."""

    fault: str

    cost = 0.0

    @property
    def rows(self) -> tuple[str, ...]:
        return (f"fault:{self.fault}",)

    @property
    def title(self) -> str:
        return self.rows[0]

    def find(self, device: torch.device) -> Found:
        fault = next(f for f in known_faults(self.backend) if f.name == self.fault)
        return Found((caught(fault, self.backend, device),))


def caught(fault: Fault | RunnerFault, backend: str, device: torch.device) -> Finding:
    """Whether each check that must catch a fault does, and passes without it."""
    row = partial(Finding, backend, str(fault.mode), f"fault:{fault.name}")
    try:
        sound = fault.sound(backend, device)
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
        backends: registry names of backends, wrappers and runners.
        modes: modes to look at; a backend's own if None.
        device: where; kernels are interpreted on a CPU. ``cuda`` without an index: processes share all GPUs out.
        full: every size instead of a small choice.
        checks: ids, ``faults`` for all known faults or ``fault:NAME``; everything if None.
        arms: what is compared.
        jobs: processes. One does the work in this process.

    Yields:
        A failure as soon as it is known; for each check that passed or was skipped in a mode one finding, when the
        last of its configurations has been looked at. After Ctrl-C what has begun, as interrupted.
    """
    wanted = tuple(checks) if checks is not None else (*in_order(CHECKS), "faults")
    asked = None if modes is None else set(modes)
    rules = tuple(c for c in wanted if c in CHECKS and CHECKS[c].of == "rebuild")
    of_runners = tuple(c for c in wanted if c in CHECKS and CHECKS[c].of == "runner")
    queue, rows = _Queue(), _Rows()
    for name in backends:
        of = {"backend": name, "device": str(device), "arms": tuple(arms)}
        info = lookup(name, *HAVE_METADATA, "runner")
        own = [ForwardMode(mode) for mode in info.modes]
        if info.kind == "runner":
            if of_runners:
                queue.add(OfRunner(mode=m, checks=of_runners, **of) for m in own if asked is None or m in asked)
        elif rules:
            queue.add(Plan(mode=m, full=full, checks=rules, **of) for m in own if asked is None or m in asked)
        for fault in known_faults(name) if any(c.startswith("fault") for c in wanted) else ():
            if {"faults", f"fault:{fault.name}"} & set(wanted):
                queue.add([KnownFault(mode=fault.mode, fault=fault.name, **of)])
    here = jobs <= 1 or len(queue) <= 1
    try:
        prepare = partial(_prepare, str(device))
        for piece, found in _done_here(queue) if here else done_by(jobs, queue.pop, prepare=prepare):
            if isinstance(found, Died):
                yield rows.died(piece)
                continue
            queue.add(found.parts)
            rows.expect(found.parts)
            yield from rows.add(piece, found.findings)
    except KeyboardInterrupt:
        yield from rows.unfinished()
        raise


def in_order(checks: Iterable[str]) -> list[str]:
    """C1, C2, ... C10, ... L1, ... R1, ... V1."""
    return sorted(checks, key=lambda id: (id[0], int(id[1:])))


def _prepare(device: str, number: int) -> None:
    torch.set_num_threads(1)
    lighten()
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    gc.freeze()  # what has been imported stays: collections need not look at it


def _done_here(queue: _Queue) -> Iterator[tuple[_Piece, Found]]:
    lighten()
    while (piece := queue.pop()) is not None:
        yield piece, piece.run()[0]


@dataclass(slots=True)
class _Queue:
    """What is to do, longest first, else in the order that it came."""

    _heap: list[tuple[float, int, _Piece]] = field(default_factory=list)
    _number: Callable[[], int] = field(default_factory=lambda: count().__next__)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, pieces: Iterable[_Piece]) -> None:
        for piece in pieces:
            heapq.heappush(self._heap, (-piece.cost, self._number(), piece))

    def pop(self) -> _Piece | None:
        return heapq.heappop(self._heap)[2] if self._heap else None


@dataclass(slots=True)
class _Row:
    """One check in one mode."""

    due: int = 0
    failed: bool = False
    passed: list[tuple[int, Finding]] = field(default_factory=list)
    skipped: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class _Rows:
    """Findings of parts, put together: a failure at once, a pass or a skip with the last part of its check."""

    _rows: dict[tuple[str, str, str], _Row] = field(default_factory=dict)

    def expect(self, parts: Iterable[Part]) -> None:
        for part in parts:
            for row in self._of(part):
                row.due += 1

    def _of(self, part: Part) -> list[_Row]:
        return [self._rows.setdefault((part.backend, str(part.mode), check), _Row()) for check in part.checks]

    def add(self, piece: _Piece, findings: Sequence[Finding]) -> Iterator[Finding]:
        if not isinstance(piece, Part):
            yield from findings
            return
        for f in findings:
            row = self._rows[f.backend, f.mode, f.check]
            if f.status == "fail":
                row.failed = True
                yield f
            elif f.status == "pass":
                row.passed.append((piece.seed, f))
            else:
                row.skipped.append(f)
        for row in self._of(piece):
            row.due -= 1
            if not row.due and not row.failed:
                yield _whole(row)

    def died(self, piece: _Piece) -> Finding:
        """A process ended while it did `piece`: nothing that it was checking has passed."""
        if isinstance(piece, Part):
            for row in self._of(piece):
                row.due -= 1
                row.failed = True
        detail = f"a process died while it did {piece.title}: its own messages are above"
        return Finding(piece.backend, str(piece.mode), "process", "fail", detail)

    def unfinished(self) -> Iterator[Finding]:
        for (backend, mode, check), row in self._rows.items():
            if row.due and not row.failed:
                detail = f"{len(row.passed)} parts passed, {row.due} were still to do"
                yield Finding(backend, mode, check, "interrupted", detail)


def _whole(row: _Row) -> Finding:
    """One finding for a check that failed nowhere."""
    if not row.passed:
        return row.skipped[0]
    notes = dict.fromkeys(f.detail for _, f in row.passed if f.detail)
    configurations = len({seed for seed, _ in row.passed})
    return replace(row.passed[0][1], detail="; ".join([f"{configurations} configurations", *notes]))
