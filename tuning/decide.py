"""Which finalist is taken. Plain arithmetic on times, so the same times always give the same answer.

A candidate ties with the fastest if its median is within MARGIN, or if the paired 95% interval of their ratio holds 1.
A tie is broken by a fixed rule: the default if it is among them, else the first in the space's order. So the default
is left only for something that beats it by more than MARGIN and by more than the noise. Before the order of the space
comes for how many other lengths a candidate is no slower than the default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..profilers.stats import SLOWER, paired_verdict
from .outcome import SKIPPED, Outcome
from .space import Candidate

MARGIN = 0.02

Times = Mapping[Candidate, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer.

    Attributes:
        winner: what is used from now on.
        tied: the winner and everything that is as good within the noise, in the space's order.
        medians_us: by candidate.
        reason: one sentence.
        rejected: finalists that could not be considered.
        serves: lengths unlike the mix's on which the winner was timed and is not slower than the default.
    """

    winner: Candidate
    tied: tuple[Candidate, ...]
    medians_us: dict[Candidate, float]
    reason: str
    rejected: dict[Candidate, Outcome] = field(default_factory=dict)
    serves: tuple[str, ...] = ()


GUARDS = {"slower_cold": "with cold caches", "slower_rank": "on the slowest rank"}
"""Other conditions under which a winner may not be slower than the default: cause -> in words."""


def choose(
    order: Sequence[Candidate],
    default: Candidate,
    times: Times,
    guards: Mapping[str, Times] | None = None,
    lengths: Mapping[str, Times] | None = None,
) -> Choice | None:
    """The winner among `times`, or None where nothing can win.

    Args:
        order: the finalists in the space's order.
        default: what runs untuned, finalist or not.
        times: us by candidate; value i of all was taken in the same moment.
        guards: times under other conditions, by cause: what is slower than the default there cannot win.
        lengths: times on lengths unlike the mix's, by their name: what is slower there can win, and is said to.
    """
    rejected = {c: found for c in order if (found := _disqualified(c, default, times, guards or {}))}
    running = [c for c in order if c not in rejected]
    if not running:
        return None
    medians = {c: median(_positive(times[c])) for c in running}
    best = min(running, key=medians.__getitem__)
    tied = tuple(c for c in running if _ties(c, best, times, medians))
    serves = {c: _served(c, default, lengths or {}) for c in tied}
    if default in tied:
        winner = default
    else:
        better = [c for c in tied if default not in medians or medians[c] * (1 + MARGIN) < medians[default]]
        winner = max(better, key=lambda c: len(serves[c]))  # of equals the first
    return Choice(winner, tied, medians, _reason(winner, best, default, medians), rejected, serves[winner])


def _served(candidate: Candidate, default: Candidate, lengths: Mapping[str, Times]) -> tuple[str, ...]:
    return tuple(
        name
        for name, times in lengths.items()
        if candidate in times and default in times and not_slower(times[default], times[candidate])
    )


def not_slower(default_us: Sequence[float], us: Sequence[float]) -> bool:
    """Whether a candidate was timed and takes no more than the default, within the noise and MARGIN."""
    verdict = paired_verdict(_or_nan(default_us), _or_nan(us), tolerance=MARGIN)
    return verdict.ratio is not None and verdict.ratio <= 1 + MARGIN and verdict.word != SLOWER


def _disqualified(
    candidate: Candidate, default: Candidate, times: Times, guards: Mapping[str, Times]
) -> Outcome | None:
    values = times[candidate]
    if 2 * len(_positive(values)) <= len(values):
        reason = f"the timer returned {median(values):.3g} us, which cannot be" if values else "no times"
        return Outcome(candidate, SKIPPED, "bad_timer", reason)
    for cause, guard in guards.items():
        if candidate == default or candidate not in guard or default not in guard:
            continue
        verdict = paired_verdict(_or_nan(guard[default]), _or_nan(guard[candidate]), tolerance=MARGIN)
        if verdict.word == SLOWER and verdict.ratio > 1 + MARGIN:
            reason = f"{verdict.ratio - 1:.1%} slower than the default {GUARDS[cause]}"
            return Outcome(candidate, SKIPPED, cause, reason)
    return None


def _ties(candidate: Candidate, best: Candidate, times: Times, medians: Mapping[Candidate, float]) -> bool:
    if medians[candidate] <= (1 + MARGIN) * medians[best]:
        return True
    verdict = paired_verdict(_or_nan(times[best]), _or_nan(times[candidate]), tolerance=MARGIN)
    # Too few pairs for an interval show nothing either way; then the medians have the word.
    return verdict.ratio_low is not None and verdict.word != SLOWER


def _reason(winner: Candidate, best: Candidate, default: Candidate, medians: Mapping[Candidate, float]) -> str:
    if default not in medians:
        return "the default is not usable here"
    gain = medians[default] / medians[best] - 1
    if winner != default:
        return f"{medians[default] / medians[winner] - 1:.1%} faster than the default"
    if best == default:
        return "the default is the fastest"
    return f"the default stays: the fastest gains {gain:.1%}, within the noise or the margin of {MARGIN:.0%}"


def _positive(values: Sequence[float]) -> list[float]:
    return [value for value in values if value > 0]


def _or_nan(values: Sequence[float]) -> list[float]:
    """Samples of zero and below as blanks, in their places, so that pairs stay pairs."""
    return [value if value > 0 else math.nan for value in values]
