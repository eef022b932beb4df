"""Searches against each other on logged cases: how fast each would have been with so many tries. Needs no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from .log import Replay
from .outcome import OK
from .space import Candidate
from .tuner import SEARCHES, Search

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


def compare_searches(logged: Sequence[Replay]) -> list[Searched]:
    """A row for each search and number of tries; none where nothing was timed."""
    usable = [(one, space) for one in logged if len(space := _timed(one)) > 1]
    if not usable:
        return []
    found = []
    for name, search in SEARCHES.items():
        for tries in TRIES:
            runs = [_run(one, space, search, seed, tries) for one, space in usable for seed in SEEDS]
            speeds, tried = zip(*runs, strict=True)
            good = sum(speed >= GOOD_ENOUGH for speed in speeds) / len(speeds)
            mean = sum(speeds) / len(speeds)
            found.append(Searched(name, tries, mean, min(speeds), good, sum(tried) / len(tried)))
    return found


def _timed(logged: Replay) -> list[Candidate]:
    return [c for c in logged.space if logged.rough(c).status == OK and logged.rough(c).median_us]


def _run(logged: Replay, space: Sequence[Candidate], search: Search, seed: int, tries: int) -> tuple[float, int]:
    """Speed of the fastest found as a share of the fastest's there is, and how many were tried."""
    best = min(logged.rough(c).median_us for c in space)
    found = [outcome.median_us for outcome in islice(search(space, logged.rough, seed), tries)]
    return best / min(found), len(found)
