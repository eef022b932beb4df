"""A model of the times so far says what to try next, until it has been wrong often enough.

Times of neighbouring settings are alike, so a smooth surface through the logarithms of the measured ones (SciPy's
radial basis functions, over the logarithms of the parameters) points to where the fastest untried one should be. On
seven logged cases of an H200 with 40 to 47 candidates each, 24 tries reached at least 99% of the fastest's speed from
every one of five seeds; as many in random order, 95% (`attn-graph tune --replay results/h200/tune.csv`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .outcome import Measure, Outcome
from .random_order import shuffled
from .space import Candidate

FIRST = 12
"""Tries at random, the default among them, before there is a model."""
ASIDE = 4
"""Every so many tries after them one is at random too, lest a model that is wrong stays wrong."""
PATIENCE = 16
"""Tries after the first without anything better: then the search ends."""
BETTER = 0.995
"""Less of a gain than this is noise."""
UNUSABLE = 2.0
"""A candidate that cannot be used counts as this many times the slowest: its neighbours may be no better."""


def search(candidates: Sequence[Candidate], measure: Measure, seed: int) -> Iterator[Outcome]:
    untried = shuffled(candidates, seed)
    times: dict[Candidate, float | None] = {}
    best, since = math.inf, 0
    while untried and since < PATIENCE:
        modelled = len(times) - FIRST
        at_random = modelled < 0 or modelled % ASIDE == ASIDE - 1
        candidate = untried[0] if at_random else _most_promising(untried, times)
        untried.remove(candidate)
        outcome = measure(candidate)
        us = times[candidate] = None if outcome.cause else outcome.median_us
        since = 0 if us is not None and us < BETTER * best else since + (modelled >= 0)
        best = min(best, us or math.inf)
        yield outcome


def _most_promising(untried: Sequence[Candidate], times: dict[Candidate, float | None]) -> Candidate:
    import numpy as np
    from scipy.interpolate import RBFInterpolator

    known = [us for us in times.values() if us]
    if not known:
        return untried[0]
    heights = [math.log(us or UNUSABLE * max(known)) for us in times.values()]
    axes = np.array([[math.log2(1 + value) for _, value in c.values] for c in (*times, *untried)])
    axes /= np.maximum(axes.std(axis=0), 1e-9)  # a switch between 0 and 64 is one step, not six
    model = RBFInterpolator(axes[: len(times)], heights, kernel="linear", degree=0)
    return untried[int(np.argmin(model(axes[len(times) :])))]
