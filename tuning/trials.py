"""Searches that are asked what to try next and told what came of it, and what they know of other cases.

A search is a generator of rounds: it yields candidates, and is sent their outcomes. So a round can be compiled at once,
and the first round of a case before its turn comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ..profilers.sample import Case
from .outcome import Outcome
from .space import Candidate, columns_of, kernel_of

KERNEL_APART, OCTAVE_APART, WINDOW_APART = 0.5, 1.0, 1.0
"""How far apart cases are on one axis: other kernel, twice the batch or table, with and without a window. In standard
deviations of a parameter."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A tuned case as it looks from another one.

    Attributes:
        offset: how far it is from there, one number an axis.
        times_us: what was timed in it.
    """

    offset: tuple[float, ...]
    times_us: Mapping[Candidate, float]


Rounds = Generator[list[Candidate], list[Outcome], None]
Search = Callable[[Sequence[Candidate], int, Sequence[Seen]], Rounds]
"""(candidates with the default first, seed, what is known of cases like this one) -> rounds. The default is in the
first round, at its head."""


class Trials:
    """One case's search.

    Attributes:
        next: what to try now; empty when the search has ended.
    """

    def __init__(
        self, search: Search, candidates: Sequence[Candidate], seed: int = 0, near: Sequence[Seen] = ()
    ) -> None:
        self._rounds = search(candidates, seed, near)
        self.next: list[Candidate] = next(self._rounds, [])

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """What came of `next`."""
        try:
            self.next = self._rounds.send(list(outcomes))
        except StopIteration:
            self.next = []


def in_turns(cases: Sequence[Case]) -> list[Case]:
    """A case of each backend after the other: when its turn comes, the backend's case before it has long ended."""
    by_backend: dict[str, list[Case]] = {}
    for case in cases:
        by_backend.setdefault(case.backend, []).append(case)
    return [case for turn in zip_longest(*by_backend.values()) for case in turn if case is not None]


def seen_from(case: Case, known: Mapping[Case, Mapping[Candidate, float]]) -> list[Seen]:
    """Times of other cases whose kernels have the same parameters."""
    own = _parameters(case)
    return [Seen(_offset(case, other), times) for other, times in known.items() if times and _parameters(other) == own]


def _parameters(case: Case) -> str:
    return kernel_of(case.backend).config


def _offset(case: Case, other: Case) -> tuple[float, ...]:
    return (
        KERNEL_APART * (kernel_of(case.backend) != kernel_of(other.backend)),
        OCTAVE_APART * math.log2(other.bucket / case.bucket),
        OCTAVE_APART * math.log2(columns_of(other) / columns_of(case)),
        WINDOW_APART * (int(other.swa) - int(case.swa)),
    )
