"""What a conformance check is, and what it says."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .subject import Subject

PROBLEMS_SHOWN = 3
"""Problems of one check on one subject; the rest follow from the same fault more often than not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of `attn-graph verify`.

    Attributes:
        backend, mode: what was checked, by name.
        check: id, e.g. ``C3``, ``L1`` or ``fault:truncated-page``.
        status: ``pass``, ``fail`` or ``skip``.
        detail: how much was checked, what is wrong and where, or why it was skipped.
    """

    backend: str
    mode: str
    check: str
    status: str
    detail: str = ""


class Skip(Exception):
    """A check that does not apply, or that this machine cannot make; says why."""


class Note(str):
    """Something a check found worth telling although nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Check:
    """One rule.

    Attributes:
        id, title: as in the table.
        run: yields one sentence for each problem; raises Skip where the rule does not apply.
        everywhere: made on every subject; the others stand for their mode on its first subjects only.
        of: what is checked: ``rebuild``, of a backend or wrapper, or ``runner``.
    """

    id: str
    title: str
    run: Callable[[Subject], Iterator[str]]
    everywhere: bool = False
    of: str = "rebuild"


CHECKS: dict[str, Check] = {}
"""By id, in the order of the specification."""


def check(id: str, title: str, *, everywhere: bool = False, of: str = "rebuild") -> Callable:
    """Register a generator of problems as check `id`."""

    def register(run: Callable[[Subject], Iterator[str]]) -> Callable:
        CHECKS[id] = Check(id, title, run, everywhere, of)
        return run

    return register


def judge(check: Check, subject: Subject) -> list[Finding]:
    """Make one check on one subject: its problems as failures, or one row that says it passed or was skipped."""
    notes: list[str] = []
    problems: list[str] = []
    try:
        for said in islice(check.run(subject), PROBLEMS_SHOWN):
            (notes if isinstance(said, Note) else problems).append(said)
    except Skip as reason:
        if not problems:
            return [_finding(subject, check, "skip", str(reason))]
    except Exception as error:  # a rebuild that breaks down has not passed; what broke is the finding
        problems.append(raised(error))
    if problems:
        return [_finding(subject, check, "fail", f"{problem} [{subject.title}]") for problem in problems]
    return [_finding(subject, check, "pass", "; ".join(notes))]


def _finding(subject: Subject, check: Check, status: str, detail: str) -> Finding:
    return Finding(subject.case.backend, subject.case.mode, check.id, status, detail)


def raised(error: Exception) -> str:
    """What broke down and where, in a line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (at {Path(frame.filename).name}:{frame.lineno})"
