"""Searches against each other on logged cases: how fast each would have been with so many tries. Needs no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..profilers.sample import Case
from .log import Replay
from .outcome import OK
from .space import Candidate, key_of
from .store import Entry, Key, saved_entries
from .trials import Search, Trials, in_turns, seen_from
from .tuner import SEARCHES

TRIES = (8, 16, 24, 32)
SEEDS = range(5)
GOOD_ENOUGH = 0.97
"""Of the exhaustive winner's speed."""


@dataclass(frozen=True, slots=True)
class Searched:
    """One search after so many tries, over all logged cases and SEEDS.

    Attributes:
        mean_speed, least_speed: of the fastest found, as a share of the speed of the fastest logged.
        good_enough: share of cases and seeds with at least GOOD_ENOUGH of it.
        tried: mean tries; fewer than `tries` where a search ended by itself or the space is smaller.
    """

    search: str
    tries: int
    mean_speed: float
    least_speed: float
    good_enough: float
    tried: float


@dataclass(frozen=True, slots=True)
class Run:
    """One case, searched until the search ended by itself.

    Attributes:
        us: of each try, in order.
        fastest_us: of all logged.
        informed: whether cases before it told the search something.
    """

    case: Case
    us: tuple[float, ...]
    fastest_us: float
    informed: bool

    def speed(self, tries: int) -> float:
        """Of the fastest of the first `tries`, as a share of the fastest's there is."""
        return self.fastest_us / min(self.us[:tries])


def compare_searches(logged: Sequence[Replay]) -> list[Searched]:
    """A row for each search and number of tries; none where nothing was timed.

    A search knows the stored choices of other shapes, as in a session, and none of the shape that it searches.
    """
    found, stored = [], [entry for _, entry in saved_entries()[0]]
    gpus = [[one for one in logged if one.gpu == gpu] for gpu in dict.fromkeys(one.gpu for one in logged)]
    for name, search in SEARCHES.items():
        runs = [run for own in gpus for seed in SEEDS for run in search_all(own, search, seed, stored)]
        for tries in TRIES if runs else ():
            speeds = [run.speed(tries) for run in runs]
            good = sum(speed >= GOOD_ENOUGH for speed in speeds) / len(speeds)
            tried = sum(min(tries, len(run.us)) for run in runs) / len(runs)
            found.append(Searched(name, tries, fmean(speeds), min(speeds), good, tried))
    return found


def search_all(
    logged: Sequence[Replay], search: Search, seed: int, stored: Sequence[Entry] = (), most: int | None = None
) -> Iterator[Run]:
    """Every logged case in the order that a session takes, each with at most `most` tries.

    A search knows what it found in the cases before but for the last, which is measured when it begins, and the choices
    of `stored` that are of other shapes.
    """
    known: dict[Case, dict[Candidate, float]] = {}
    by_case = {one.case: one for one in logged}
    for one in map(by_case.__getitem__, in_turns(list(by_case))):
        times = {c: us for c in one.space if one.rough(c).status == OK and (us := one.rough(c).median_us)}
        if len(times) < 2:
            continue
        told, own = dict(list(known.items())[:-1]), key_of(one.case, one.gpu)
        near = seen_from(one.case, told, one.gpu, [entry for entry in stored if _shape(entry.key) != _shape(own)])
        trials, tried = Trials(search, list(times), seed, near), []
        while trials.next.tries and (most is None or len(tried) < most):
            tried += trials.next.tries
            trials.tell([one.rough(candidate) for candidate in trials.next.tries])
        known[one.case] = {candidate: times[candidate] for candidate in tried[:most]}
        yield Run(one.case, tuple(known[one.case].values()), min(times.values()), bool(near))


def _shape(key: Key) -> tuple:
    """What tells a shape's times to be the same, whichever GPU, backend and mix they are of."""
    return key.kernel, key.bucket, key.columns, key.swa
