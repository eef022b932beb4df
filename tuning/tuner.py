"""One case from candidates to a choice: search, finals, decision. Knows neither devices nor files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import exhaustive, random_order, surrogate
from .decide import MARGIN, Choice, choose, undecided
from .outcome import NOT_TRIED, OK, SKIPPED, Finals, Measurer, Outcome
from .space import Candidate
from .store import LONG, SHORT
from .trials import Round, Search, Trials

SEARCHES: dict[str, Search] = {
    "exhaustive": exhaustive.search,
    "random": random_order.search,
    "surrogate": surrogate.search,
}

SURE = 3
"""Tries for which there is always time: the default, and what won in the nearest cases."""
MOST_FINALISTS, MOST_IN_A_HURRY = 4, 2
"""Beside the default; the second with a time budget."""
MOST_FIELDS = 2
"""Times that finalists are replaced by the next fastest, where all of them fell."""
MOST_REPEATS = 3
"""Times that finals are taken again, while it is open whether the default is beaten."""
FINALIST_WITHIN = 1.10
"""Rough times are taken minutes apart: what is this close to the fastest may be the fastest."""
LEAST_ROUGH_SHARE = 0.4
"""Of a time budget, however long the finals take."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of tuning one case.

    Attributes:
        outcomes: one for every candidate, in the space's order.
        finals: times of the finalists, side by side.
        choice: None if no candidate is usable, or none was timed.
        notes: what a reader must know.
    """

    outcomes: tuple[Outcome, ...]
    finals: Finals = field(default_factory=lambda: Finals({}))
    choice: Choice | None = None
    notes: tuple[str, ...] = ()

    @property
    def left_out(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == NOT_TRIED]


def tune(
    space: Sequence[Candidate],
    measurer: Measurer,
    *,
    search: Search = exhaustive.search,
    seed: int = 0,
    trials: Trials | None = None,
    budget_s: float = math.inf,
    finals_s: float = 0.0,
    repeats: int = MOST_REPEATS,
    expect: Callable[[Round], None] = lambda round_: None,
    clock: Callable[[], float] = time.monotonic,
    listen: Callable[[Outcome], None] = lambda outcome: None,
) -> Tuned:
    """Try the candidates of `space`, its first being the default, and choose.

    Args:
        budget_s: seconds; candidates that it leaves no time for are outcomes too. SURE tries are always made.
        finals_s: what finals are expected to take of it.
        repeats: how often finals are taken again while it is open whether the default is beaten; a log has them once.
        trials: a search that has begun; None begins `search` with `seed`.
        expect: called with each round, before the first candidate of it is tried.
        listen: called with each outcome as it comes.
    """
    default, known = space[0], {}
    trials = trials or Trials(search, space, seed)
    begun, late = clock(), False
    while trials.next.tries and not late:
        expect(trials.next)
        told = []
        for candidate in trials.next.tries:
            told.append(measurer.rough(candidate))
            known[candidate] = told[-1]
            listen(told[-1])
            if late := clock() - begun >= rough_time(budget_s, finals_s) and len(known) >= SURE:
                break
        else:
            trials.tell(told)
    left = ("time_budget", "no time was left for it") if late else ("search", "the search saw no promise in it")
    for candidate in space:
        if candidate not in known:
            known[candidate] = Outcome(candidate, NOT_TRIED, *left)
            listen(known[candidate])
    outcomes = tuple(known[candidate] for candidate in space)
    most = MOST_FINALISTS if budget_s == math.inf else MOST_IN_A_HURRY
    how = _Finals(measurer, default, most, repeats, lambda: clock() - begun >= budget_s)
    return how.decided(outcomes)


def rough_time(budget_s: float, finals_s: float) -> float:
    """Seconds of a budget for the rough pass."""
    return max(budget_s - finals_s, LEAST_ROUGH_SHARE * budget_s)


@dataclass(frozen=True, slots=True)
class _Finals:
    """How finals are held: `most` finalists beside the default, taken again up to `repeats` times, unless `late`."""

    measurer: Measurer
    default: Candidate
    most: int
    repeats: int
    late: Callable[[], bool]

    def decided(self, outcomes: tuple[Outcome, ...]) -> Tuned:
        """Among the fastest of the rough pass; among the next fastest where the guards let none of them pass."""
        left = sorted((o for o in outcomes if o.status == OK and o.samples_us), key=lambda o: o.median_us)
        usual = next((o.median_us for o in left if o.candidate == self.default), math.inf)
        tuned = Tuned(outcomes)
        for _ in range(MOST_FIELDS):
            near = {o.candidate for o in left[: self.most] if o.median_us <= FINALIST_WITHIN * left[0].median_us}
            timed = {o.candidate for o in tuned.outcomes if o.status == OK and o.samples_us}
            finalists = [o.candidate for o in outcomes if o.candidate in timed & {*near, self.default}]
            if not finalists:
                break
            tuned = self._among(finalists, tuned.outcomes)
            left = [o for o in left if o.candidate not in near and o.median_us * (1 + MARGIN) < usual]
            fell = {o.candidate for o in tuned.outcomes if o.status == SKIPPED}
            if not left or self.late() or not fell.issuperset(near - {self.default}):
                break
        return tuned

    def _among(self, finalists: list[Candidate], outcomes: tuple[Outcome, ...]) -> Tuned:
        """Side by side, and again while it is open whether the default is beaten."""
        finals = self.measurer.finals(finalists) if len(finalists) > 1 else Finals({})
        tuned = _chosen(outcomes, finalists, self.default, finals)
        for _ in range(self.repeats):
            rival = undecided(self.default, tuned.choice, finals.hot_us)
            if rival is None or self.late():
                break
            finals = finals.followed_by(self.measurer.finals([self.default, rival]))
            tuned = _chosen(outcomes, finalists, self.default, finals)
        return tuned


def _chosen(outcomes: tuple[Outcome, ...], finalists: list[Candidate], default: Candidate, finals: Finals) -> Tuned:
    rough = {o.candidate: o.samples_us for o in outcomes}
    times = finals.hot_us or rough  # one finalist alone, or finals that broke
    order = [c for c in finalists if c not in finals.rejected]
    guards = {"slower_cold": finals.cold_us, "slower_rank": finals.slowest_us}
    choice = choose(order, default, times, guards, {SHORT: finals.short_us, LONG: finals.long_us})
    fell = dict(finals.rejected) | (choice.rejected if choice else {})
    outcomes = tuple(fell.get(o.candidate, o) for o in outcomes)
    return Tuned(outcomes, finals, choice, (finals.note,) if finals.note else ())
