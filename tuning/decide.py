"""Which finalist is taken. Plain arithmetic on times, so the same times always give the same answer.

A candidate ties with the fastest unless it is slower by more than MARGIN for certain, by the paired 95% interval of
their ratio. A tie is broken by a fixed rule: the default if it is among them, else the first in the space's order, of
those with a median within MARGIN. So the default is left only for what certainly beats it by more than MARGIN: noise
moves a choice to the default, which is then said to be tied with what another run may have chosen. Before the order of
the space comes for how many other lengths a candidate is no slower than the default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..profilers.stats import SLOWER, Verdict, paired_verdict
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
        near = [c for c in tied if medians[c] <= (1 + MARGIN) * medians[best]]
        better = [c for c in near if default not in medians or not _ties(default, c, times, medians)]
        winner = max(better, key=lambda c: len(serves[c]))  # of equals the first
    return Choice(winner, tied, medians, _reason(winner, best, default, medians), rejected, serves[winner])


def undecided(default: Candidate, choice: Choice | None, times: Times) -> Candidate | None:
    """The fastest beside the default, where more times could show that it beats it by MARGIN, or that it does not."""
    rivals = [c for c in choice.medians_us if c != default] if choice and default in choice.medians_us else []
    if not rivals:
        return None
    rival = min(rivals, key=choice.medians_us.__getitem__)
    verdict = _verdict(times.get(rival, ()), times.get(default, ()))
    known = verdict.ratio_low is not None and verdict.ratio_high is not None
    return rival if known and verdict.ratio_low <= 1 + MARGIN < verdict.ratio_high else None


def _served(candidate: Candidate, default: Candidate, lengths: Mapping[str, Times]) -> tuple[str, ...]:
    return tuple(
        name
        for name, times in lengths.items()
        if candidate in times and default in times and _not_slower(times[default], times[candidate])
    )


def _not_slower(default_us: Sequence[float], us: Sequence[float]) -> bool:
    """Whether a candidate takes no more than the default, within the noise and MARGIN."""
    verdict = _verdict(default_us, us)
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
        verdict = _verdict(guard[default], guard[candidate])
        if verdict.word == SLOWER and verdict.ratio > 1 + MARGIN:
            reason = f"{verdict.ratio - 1:.1%} slower than the default {GUARDS[cause]}"
            return Outcome(candidate, SKIPPED, cause, reason)
    return None


def _ties(candidate: Candidate, best: Candidate, times: Times, medians: Mapping[Candidate, float]) -> bool:
    low = _verdict(times[best], times[candidate]).ratio_low
    # Too few pairs for an interval show nothing either way; then the medians have the word.
    return (medians[candidate] / medians[best] if low is None else low) <= 1 + MARGIN


def _verdict(baseline: Sequence[float], us: Sequence[float]) -> Verdict:
    """Of the values that were taken in the same moments: one side may have been timed again."""
    n = min(len(baseline), len(us))
    return paired_verdict(_or_nan(baseline[:n]), _or_nan(us[:n]), tolerance=MARGIN)


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
