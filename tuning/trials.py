"""Searches that are asked what to try next and told what came of it, and what they know of other cases.

A search is a generator of rounds: it yields candidates, and is sent their outcomes. So a round can be compiled at once,
the first round of a case before its turn comes, and what may be asked for next while a round is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from ..profilers.sample import Case
from .outcome import Outcome
from .space import Candidate, NotTunable, kernel_of, key_of
from .store import Entry, Key

KERNEL_APART, OCTAVE_APART, WINDOW_APART, DEVICE_APART = 0.5, 1.0, 1.0, 1.0
"""How far apart cases are on one axis: other kernel, twice the batch or table, with and without a window, other GPU. In
standard deviations of a parameter."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A tuned case as it looks from another one.

    Attributes:
        offset: how far it is from there, one number an axis.
        times_us: what was timed in it; of a stored choice that and the default, if it was timed.
    """

    offset: tuple[float, ...]
    times_us: Mapping[Candidate, float]

    @property
    def distance(self) -> float:
        return sum(map(abs, self.offset))


class Round(NamedTuple):
    """What to try now, and what may be asked for next: worth compiling where compilers have nothing else to do."""

    tries: list[Candidate]
    likely: Sequence[Candidate] = ()


Rounds = Generator[Round, list[Outcome], None]
Search = Callable[[Sequence[Candidate], int, Sequence[Seen]], Rounds]
"""(candidates with the default first, seed, what is known of cases like this one) -> rounds. The default is in the
first round, at its head."""


class Trials:
    """One case's search.

    Attributes:
        next: what to try now; nothing when the search has ended.
    """

    def __init__(
        self, search: Search, candidates: Sequence[Candidate], seed: int = 0, near: Sequence[Seen] = ()
    ) -> None:
        self._rounds = search(candidates, seed, near)
        self.next = next(self._rounds, Round([]))

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """What came of the tries of `next`."""
        try:
            self.next = self._rounds.send(list(outcomes))
        except StopIteration:
            self.next = Round([])


def in_turns(cases: Sequence[Case]) -> list[Case]:
    """A case of each backend after the other: when its turn comes, the backend's case before it has long ended.

    Large shapes come first: what preparing and timing them takes beyond an equal share of a time budget, the others
    make up for together.
    """
    by_backend: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: (case.bucket * case.max_context, case.swa), reverse=True):
        by_backend.setdefault(case.backend, []).append(case)
    return [case for turn in zip_longest(*by_backend.values()) for case in turn if case is not None]


def seen_from(
    case: Case, known: Mapping[Case, Mapping[Candidate, float]], device: str = "", stored: Iterable[Entry] = ()
) -> list[Seen]:
    """What is known of kernels with the same parameters, the nearest first: times of other cases, and stored choices.

    Args:
        known: times of cases of this run.
        device: the GPU of this run.
        stored: choices of other runs, of any GPU.
    """
    own = key_of(case, device)
    alike = _parameters(own)
    measured = [(key_of(other, device), times) for other, times in known.items()]
    told = [(key, times) for key, times in measured if _parameters(key) == alike]
    told += [(entry.key, _times(entry)) for entry in stored if _parameters(entry.key) == alike]
    seen = [Seen(_offset(own, key), times) for key, times in told if times]
    return sorted(seen, key=lambda one: one.distance)


def _times(entry: Entry) -> dict[Candidate, float]:
    """Nothing for an entry without times, as one that was written by hand."""
    key = entry.key
    default = Candidate.of(**kernel_of(key.backend).default_of(key.bucket, key.columns))
    named = {default: entry.facts.get("default_p50_us"), Candidate.of(**entry.config): entry.facts.get("p50_us")}
    return {candidate: us for candidate, us in named.items() if isinstance(us, float) and us > 0}


def _parameters(key: Key) -> str:
    try:
        return kernel_of(key.backend).config
    except NotTunable:  # of another version
        return ""


def _offset(own: Key, other: Key) -> tuple[float, ...]:
    return (
        KERNEL_APART * (own.kernel != other.kernel),
        OCTAVE_APART * math.log2(other.bucket / own.bucket),
        OCTAVE_APART * math.log2(other.columns / own.columns),
        WINDOW_APART * (int(other.swa) - int(own.swa)),
        DEVICE_APART * (own.device != other.device),
    )
