"""One case from candidates to a choice: search, finals, decision. Knows neither devices nor files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import exhaustive, random_order, surrogate
from .decide import Choice, choose
from .outcome import NOT_TRIED, OK, Finals, Measurer, Outcome
from .space import Candidate
from .store import LONG, SHORT
from .trials import Search, Trials

SEARCHES: dict[str, Search] = {
    "exhaustive": exhaustive.search,
    "random": random_order.search,
    "surrogate": surrogate.search,
}

MOST_FINALISTS, MOST_IN_A_HURRY = 4, 2
"""Beside the default; the second with a time budget."""
FINALIST_WITHIN = 1.10
"""Rough times are taken minutes apart: what is this close to the fastest may be the fastest."""
ROUGH_SHARE = 0.6
"""Of a time budget; the finals take the rest."""


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
    expect: Callable[[Sequence[Candidate]], None] = lambda candidates: None,
    clock: Callable[[], float] = time.monotonic,
    listen: Callable[[Outcome], None] = lambda outcome: None,
) -> Tuned:
    """Try the candidates of `space`, its first being the default, and choose.

    Args:
        budget_s: seconds; candidates that it leaves no time for are outcomes too. The default is always tried.
        trials: a search that has begun; None begins `search` with `seed`.
        expect: called with the candidates of each round, before the first of them is tried.
        listen: called with each outcome as it comes.
    """
    default, known = space[0], {}
    trials = trials or Trials(search, space, seed)
    deadline, late = clock() + ROUGH_SHARE * budget_s, False
    while trials.next and not late:
        expect(trials.next)
        told = []
        for candidate in trials.next:
            told.append(measurer.rough(candidate))
            known[candidate] = told[-1]
            listen(told[-1])
            if late := clock() >= deadline:
                break
        else:
            trials.tell(told)
    left = ("time_budget", "no time was left for it") if late else ("search", "the search saw no promise in it")
    for candidate in space:
        if candidate not in known:
            known[candidate] = Outcome(candidate, NOT_TRIED, *left)
            listen(known[candidate])
    outcomes = tuple(known[candidate] for candidate in space)
    finalists = _finalists(outcomes, default, MOST_FINALISTS if budget_s == math.inf else MOST_IN_A_HURRY)
    if not finalists:
        return Tuned(outcomes)
    finals = measurer.finals(finalists) if len(finalists) > 1 else Finals({})
    return _decided(outcomes, finalists, default, finals)


def _finalists(outcomes: Sequence[Outcome], default: Candidate, most: int) -> list[Candidate]:
    """The fastest in the rough pass, and the default, in the space's order."""
    usable = [o for o in outcomes if o.status == OK and o.samples_us]
    ranked = sorted(usable, key=lambda o: o.median_us)[:most]
    near = {o.candidate for o in ranked if o.median_us <= FINALIST_WITHIN * ranked[0].median_us}
    return [o.candidate for o in usable if o.candidate in near or o.candidate == default]


def _decided(outcomes: tuple[Outcome, ...], finalists: list[Candidate], default: Candidate, finals: Finals) -> Tuned:
    rough = {o.candidate: o.samples_us for o in outcomes}
    times = finals.hot_us or rough  # one finalist alone, or finals that broke
    order = [c for c in finalists if c not in finals.rejected]
    guards = {"slower_cold": finals.cold_us, "slower_rank": finals.slowest_us}
    choice = choose(order, default, times, guards, {SHORT: finals.short_us, LONG: finals.long_us})
    late = dict(finals.rejected) | (choice.rejected if choice else {})
    outcomes = tuple(late.get(o.candidate, o) for o in outcomes)
    return Tuned(outcomes, finals, choice, (finals.note,) if finals.note else ())
