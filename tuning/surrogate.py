"""A model of the times so far says what to try next, until it has been wrong often enough.

Times of neighbouring settings are alike, so a smooth surface through the logarithms of the measured ones (SciPy's
radial basis functions, over the logarithms of the parameters) points to where the fastest untried one should be. Cases
are alike too: times of other batch sizes, of the other kind of window and of kernels with the same parameters are
further points of the same surface, each case's relative to its fastest, and so are stored choices. With these a case
begins where others ended: with their winners themselves, of which one is often the fastest or beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .outcome import Outcome
from .random_order import shuffled
from .space import Candidate
from .trials import Round, Rounds, Seen

FIRST = 12
"""Tries at random, the default among them, where there is nothing to make a model of."""
ROUND = 8
"""Tries between two models: what a dozen compilers have ready at once."""
CARRIED = 4
"""Winners of the nearest other cases that are tried first of all, after the default."""
PATIENCE = 16
"""Tries in a row without anything better, after which the search ends."""
BETTER = 0.995
"""Less of a gain than this is noise."""
UNUSABLE = 2.0
"""A candidate that cannot be used counts as this many times the slowest: its neighbours may be no better."""
SMOOTHING = 1e-3
"""Noise of a rough time, so that points in one place do not contradict each other."""

Times = Mapping[Candidate, float | None]


def search(candidates: Sequence[Candidate], seed: int, near: Sequence[Seen] = ()) -> Rounds:
    untried = shuffled(candidates, seed)
    times: dict[Candidate, float | None] = {}
    first = [untried[0], *_carried(untried[1:], near)] if near else untried[:FIRST]
    others = _ranked([candidate for candidate in untried if candidate not in first], times, near)
    n = max(ROUND, len(first)) - len(first)
    tries, likely = first + others[:n], others[n : n + ROUND]
    since = 0
    while tries and since < PATIENCE:
        before = _fastest(times)
        times |= {outcome.candidate: _time(outcome) for outcome in (yield Round(tries, likely))}
        since = 0 if _fastest(times) < BETTER * before else since + len(tries)
        others = _ranked([candidate for candidate in untried if candidate not in times], times, near)
        tries, likely = others[:ROUND], others[ROUND : 2 * ROUND]


def _carried(untried: Sequence[Candidate], near: Sequence[Seen]) -> list[Candidate]:
    """What won elsewhere, the nearest case's first."""
    winners = dict.fromkeys(min(seen.times_us, key=seen.times_us.__getitem__) for seen in near)
    return [candidate for candidate in winners if candidate in set(untried)][:CARRIED]


def _time(outcome: Outcome) -> float | None:
    return None if outcome.cause else outcome.median_us


def _fastest(times: Times) -> float:
    return min((us for us in times.values() if us), default=math.inf)


def _ranked(untried: Sequence[Candidate], times: Times, near: Sequence[Seen]) -> list[Candidate]:
    """That whose time the model sees lowest first; as they came where there is no model."""
    import numpy as np
    from scipy.interpolate import RBFInterpolator

    known = [(c, seen.offset, height) for seen in near for c, height in _heights(seen.times_us)]
    here = (0.0,) * len(near[0].offset) if near else ()
    known += [(c, here, height) for c, height in _heights(times)]
    if not known or not untried:
        return list(untried)
    settings = np.array([[math.log2(1 + value) for _, value in c.values] for c in (*(c for c, *_ in known), *untried)])
    settings /= np.maximum(settings.std(axis=0), 1e-9)  # a switch between 0 and 64 is one step, not six
    places = np.array([*(place for _, place, _ in known), *(here for _ in untried)]).reshape(len(settings), -1)
    axes = np.hstack([settings, places])
    heights = [height for *_, height in known]
    model = RBFInterpolator(axes[: len(known)], heights, kernel="linear", degree=0, smoothing=SMOOTHING)
    order = np.argsort(model(axes[len(known) :]), kind="stable")
    return [untried[i] for i in order]


def _heights(times: Times) -> list[tuple[Candidate, float]]:
    """Logarithms of the times over the fastest."""
    known = [us for us in times.values() if us]
    if not known:
        return []
    return [(c, math.log((us or UNUSABLE * max(known)) / min(known))) for c, us in times.items()]
