"""Medians, their intervals, and verdicts in words. Imports no torch.

Host times have a long right tail, so they are compared by medians and reported with p90, p99, max and the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

FASTER, SAME, SLOWER, UNDECIDED = "faster", "same", "slower", "undecided"
NOT_COMPARABLE, NOT_EQUAL = "not comparable", "not equal"

VERDICTS: dict[str, tuple[int, str]] = {
    NOT_EQUAL: (1, "the results differ bit for bit, so no speed is claimed"),
    SLOWER: (1, "slower"),
    NOT_COMPARABLE: (4, "not comparable"),
    UNDECIDED: (3, "undecided: too noisy to tell"),
    SAME: (0, "no difference shown"),
    FASTER: (0, "faster"),
}
"""Verdict word -> (exit code, how it is said), worst first."""

TOLERANCE = 0.02
CONFIDENCE = 0.95
RESAMPLES = 2000
FEWEST_VALUES = 6  # below this not even the whole range covers a median with 95%: 2 * 0.5**5 > 0.05
FEWEST_RUNS = 3  # with two runs a side, one pair of orders in three is clear of overlap by luck alone


def exit_code(words: Iterable[str]) -> int:
    """The exit code of the worst verdict; 4 where there is none, for then nothing was compared."""
    given = set(words)
    return next((code for word, (code, _) in VERDICTS.items() if word in given), VERDICTS[NOT_COMPARABLE][0])


@dataclass(frozen=True, slots=True)
class Summary:
    """Of `n` numbers, in their own unit; `p50_low`..`p50_high` is the 95% bootstrap interval of the median.

    `missing` counts the blanks and NaNs that were left out. With n = 0 every number is None.
    """

    n: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    sum: float | None = None
    p50_low: float | None = None
    p50_high: float | None = None
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found.

    `ratio` is the candidate's median over the baseline's, so below 1 is less time; None where the baseline is zero
    and the candidate is not. `n` pairs (or values of the smaller side) were used, `missing` were left out.
    """

    word: str
    baseline: float | None = None
    candidate: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    n: int = 0
    missing: int = 0

    @property
    def sentence(self) -> str:
        return VERDICTS[self.word][1]

    @property
    def exit_code(self) -> int:
        return VERDICTS[self.word][0]


def summarise(values: Iterable[float | None]) -> Summary:
    """Order statistics, mean and sum of `values`; blanks and NaN are dropped and counted."""
    numbers, missing = _finite(values)
    if not numbers.size:
        return Summary(n=0, missing=missing)
    p50, p90, p99 = np.percentile(numbers, (50, 90, 99))
    low, high = np.percentile(bootstrap_medians(numbers), _TAILS)
    figures = (p50, p90, p99, numbers.mean(), numbers.min(), numbers.max(), numbers.sum(), low, high)
    return Summary(numbers.size, *map(float, figures), missing=missing)


def bootstrap_medians(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """RESAMPLES medians of resamples of `values` ([n] float64, n >= 1), without drawing the resamples.

    The k-th smallest of n draws with replacement is the value of rank floor(n * U), where U, the k-th smallest of n
    uniform numbers, is Beta(k, n - k + 1). One sort and two draws a median instead of n draws: a summary has hundreds
    of rows of thousands of values, and resampling them would take longer than measuring them.
    """
    rng, n = np.random.default_rng(seed), values.size
    ranked, middle = np.sort(values), (n + 1) // 2
    lower = rng.beta(middle, n - middle + 1, RESAMPLES)
    if n % 2:
        return ranked[_rank(lower, n)]
    # The next order statistic is the least of the n - middle uniform numbers that lie above.
    upper = lower + (1 - lower) * rng.beta(1, n - middle, RESAMPLES)
    return (ranked[_rank(lower, n)] + ranked[_rank(upper, n)]) / 2


def paired_verdict(
    baseline: Sequence[float | None],
    candidate: Sequence[float | None],
    tolerance: float = TOLERANCE,
    floor: float = 0.0,
    seed: int = 0,
) -> Verdict:
    """Compare two arms step by step: `baseline[i]` and `candidate[i]` are of the same step.

    Steps are resampled as pairs, so what disturbed both arms of a step does not count as a difference. ``same`` means
    that the whole interval of the ratio lies within 1 +- `tolerance`; a difference of up to `floor` (in the values'
    unit) is none either. ``undecided`` means that the interval holds 1 and also more than that.

    Raises:
        ValueError: the sides differ in length.
    """
    from scipy import stats

    if len(baseline) != len(candidate):
        raise ValueError(f"pairs need equal lengths, got {len(baseline)} and {len(candidate)}")
    pairs = np.array([_floats(baseline), _floats(candidate)])
    kept = pairs[:, np.isfinite(pairs).all(axis=0)]
    n, missing = kept.shape[1], pairs.shape[1] - kept.shape[1]
    if n < FEWEST_VALUES:
        return _too_few(kept[0], kept[1], missing)
    ratios = stats.bootstrap(
        (kept[0], kept[1]),
        lambda b, c, axis: _ratio(np.median(b, axis=axis), np.median(c, axis=axis)),
        n_resamples=RESAMPLES,
        batch=max(1, 2_000_000 // n),
        paired=True,
        vectorized=True,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).bootstrap_distribution
    return _judge(kept[0], kept[1], ratios, tolerance, floor, missing)


def unpaired_verdict(
    baseline: Iterable[float | None],
    candidate: Iterable[float | None],
    tolerance: float = TOLERANCE,
    floor: float = 0.0,
) -> Verdict:
    """Compare two independent sets of samples, as of two saved runs. Words as in `paired_verdict`.

    The interval knows nothing of how runs differ from one start to the next; `runs_verdict` does.
    """
    (before, lost), (after, gone) = _finite(baseline), _finite(candidate)
    if min(before.size, after.size) < FEWEST_VALUES:
        return _too_few(before, after, lost + gone)
    ratios = _ratio(bootstrap_medians(before, seed=0), bootstrap_medians(after, seed=1))
    return _judge(before, after, ratios, tolerance, floor, lost + gone)


def runs_verdict(
    baseline: Iterable[float | None], candidate: Iterable[float | None], tolerance: float = TOLERANCE
) -> Verdict:
    """Compare whole runs, one figure a run, at least FEWEST_RUNS a side: only ranges that do not overlap differ.

    `ratio_low` and `ratio_high` are the extremes over all pairs of runs. Overlapping ranges are ``same`` where the
    medians agree within `tolerance`, else ``undecided``.
    """
    (before, lost), (after, gone) = _finite(baseline), _finite(candidate)
    if min(before.size, after.size) < FEWEST_RUNS:
        return _too_few(before, after, lost + gone)
    ratio = _ratio(np.median(before), np.median(after))
    low, high = _ratio(before.max(), after.min()), _ratio(before.min(), after.max())
    if after.max() < before.min():
        word = FASTER
    elif after.min() > before.max():
        word = SLOWER
    else:
        word = SAME if abs(ratio - 1) <= tolerance else UNDECIDED
    return _verdict(word, before, after, ratio, low, high, lost + gone)


def count_verdict(baseline: Iterable[float | None], candidate: Iterable[float | None]) -> Verdict:
    """Compare counts, which carry no noise: fewer is ``faster``, one more is ``slower``."""
    (before, lost), (after, gone) = _finite(baseline), _finite(candidate)
    if not before.size or not after.size:
        return _too_few(before, after, lost + gone)
    least, most = np.median(before), np.median(after)
    word = SAME if least == most else FASTER if most < least else SLOWER
    ratio = _ratio(least, most)
    return _verdict(word, before, after, ratio, ratio, ratio, lost + gone)


def median_paired_ratio(baseline: Sequence[float | None], candidate: Sequence[float | None]) -> float | None:
    """Median over steps of candidate / baseline; None where no step has both and a baseline other than zero."""
    before, after = _floats(baseline), _floats(candidate)
    kept = np.isfinite(before) & np.isfinite(after) & (before != 0)
    return float(np.median(after[kept] / before[kept])) if kept.any() else None


_TAILS = (50 * (1 - CONFIDENCE), 100 - 50 * (1 - CONFIDENCE))


def _rank(uniform: np.ndarray, n: int) -> np.ndarray:
    return np.minimum((uniform * n).astype(np.int64), n - 1)


def _floats(values: Iterable[float | None]) -> np.ndarray:
    return np.asarray([math.nan if v is None else v for v in values], dtype=np.float64)


def _finite(values: Iterable[float | None]) -> tuple[np.ndarray, int]:
    """The numbers among `values`, and how many are none."""
    numbers = values if isinstance(values, np.ndarray) else _floats(values)
    kept = numbers[np.isfinite(numbers)]
    return kept, numbers.size - kept.size


def _ratio(baseline, candidate):
    """candidate / baseline; two zeros are equal, and anything over zero is infinite."""
    baseline, candidate = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    over_zero = np.where(candidate == 0, 1.0, math.inf)
    return np.divide(candidate, baseline, out=over_zero, where=baseline != 0)


def _judge(before, after, ratios, tolerance: float, floor: float, missing: int) -> Verdict:
    median = np.median(before)
    low, high = np.percentile(ratios, _TAILS, method="nearest")
    nothing = max(tolerance, floor / median) if median > 0 else tolerance
    if 1 - nothing <= low and high <= 1 + nothing:
        word = SAME
    elif high < 1:
        word = FASTER
    elif low > 1:
        word = SLOWER
    else:
        word = UNDECIDED
    return _verdict(word, before, after, _ratio(median, np.median(after)), low, high, missing)


def _too_few(before: np.ndarray, after: np.ndarray, missing: int) -> Verdict:
    """No numbers on a side: not comparable. Too few for an interval: undecided, without one."""
    if not before.size or not after.size:
        return Verdict(NOT_COMPARABLE, missing=missing)
    ratio = _ratio(np.median(before), np.median(after))
    return _verdict(UNDECIDED, before, after, ratio, math.inf, math.inf, missing)


def _verdict(word: str, before, after, ratio, low, high, missing: int) -> Verdict:
    ratio, low, high = (float(r) if np.isfinite(r) else None for r in (ratio, low, high))
    n = min(before.size, after.size)
    return Verdict(word, float(np.median(before)), float(np.median(after)), ratio, low, high, n, missing)
