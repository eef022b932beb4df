"""What ranks that drift apart cost at the first collective: predictions from launch ends, and reading of records.

The rank whose graph starts first waits in the first all-reduce for the last one. With one GPU per rank, and launches
that return when the graph is queued, that wait is the difference of the launch ends; nothing here is measured on a
device. Times are microseconds from each step's common start; arrays are [steps, ranks] float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .stats import Summary, summarise

EXTRAPOLATED = "extrapolated"

INDEPENDENT = "independent"
CORRELATED = "correlated"
MODELS = (INDEPENDENT, CORRELATED)

_SIMULATED_STEPS = (2_000, 10_000)  # 20 to 100 of them lie above the p99
_SIMULATED_WAITS = 200_000  # how many steps within those bounds: this many ranks x steps
_RESAMPLES = 200

RECURRING_P = 0.01
CLOCK_GRAIN_US = 1.0


def predict_first_wait(launch_end_us: np.ndarray) -> np.ndarray:
    """How long each rank would wait in its first all-reduce, beyond an exchange without skew; [steps, ranks].

    Predicted for one GPU per rank: ranks that share a GPU also wait for each other's kernels.

    Args:
        launch_end_us: [steps, ranks], when each rank's graph launch returned.

    Raises:
        ValueError: not [steps, ranks], or not finite.
    """
    ends = _per_step(launch_end_us, "launch_end_us")
    return ends.max(axis=1, keepdims=True) - ends


def skew(launch_end_us: np.ndarray) -> np.ndarray:
    """Last launch end less first, per step; [steps]. Needs one clock for all ranks."""
    return np.ptp(_per_step(launch_end_us, "launch_end_us"), axis=1)


def duration_spread(durations_us: np.ndarray) -> np.ndarray:
    """Longest less shortest of the ranks' own step durations, per step; [steps].

    Free of start lags, and of any common clock: each rank times itself.
    """
    return np.ptp(_per_step(durations_us, "durations_us"), axis=1)


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """First waits expected with more (or fewer) ranks than were measured.

    Attributes:
        n_ranks: how many ranks this is about.
        model: ``independent`` or ``correlated``, see `extrapolate`.
        p50_us, p99_us: of each step's longest wait, which is that of the first rank to arrive. (Over all ranks the
            median of two ranks would be 0: one of them never waits.)
        *_low_us, *_high_us: 95% bootstrap interval over the measured steps.
        measured_ranks, measured_steps: what it rests on.
        source: ``extrapolated``, always.
    """

    n_ranks: int
    model: str
    p50_us: float
    p50_low_us: float
    p50_high_us: float
    p99_us: float
    p99_low_us: float
    p99_high_us: float
    measured_ranks: int
    measured_steps: int
    source: str = EXTRAPOLATED


def extrapolate(launch_end_us: np.ndarray, n_ranks: int, *, model: str, seed: int = 0) -> Extrapolation:
    """Resample measured launch ends to `n_ranks` ranks and give their longest first waits.

    ``independent`` draws every rank's end on its own, from any measured rank and step: nothing that happened to ranks
    together survives. ``correlated`` lays whole measured steps side by side, each centred on its mean: what moved all
    ranks of a step is taken to move any number of ranks, and cancels. With as many ranks as were measured it
    reproduces the measurement, and the distance of ``independent`` from it shows how much of the jitter is common.
    They bracket the truth as far as it was sampled: neither knows a delay that was never measured, so a p99 that
    stops growing with the ranks has met the largest one, and more ranks on one host may disturb each other more.

    Args:
        launch_end_us: [steps, ranks], at least 2 steps.
        n_ranks: at least 2.
        model: one of `MODELS`.
        seed: same seed, same result.

    Raises:
        ValueError: arguments outside the above.
    """
    from scipy.stats import bootstrap

    ends = _per_step(launch_end_us, "launch_end_us")
    steps, ranks = ends.shape
    if steps < 2:
        raise ValueError(f"extrapolation needs at least 2 measured steps, got {steps}")
    if n_ranks < 2:
        raise ValueError(f"n_ranks must be at least 2, got {n_ranks}")
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}. Known: {', '.join(MODELS)}")
    simulated = int(np.clip(_SIMULATED_WAITS // n_ranks, *_SIMULATED_STEPS))
    # Drawn once and used for every resample, so that the interval shows how few steps were measured and not how
    # few were simulated.
    draws = np.random.default_rng(seed)
    if model == INDEPENDENT:
        step_of = draws.integers(steps, size=(simulated, n_ranks))
        rank_of = draws.integers(ranks, size=(simulated, n_ranks))
    else:
        ends = ends - ends.mean(axis=1, keepdims=True)
        blocks = -(-n_ranks // ranks)
        step_of = np.repeat(draws.integers(steps, size=(simulated, blocks)), ranks, axis=1)[:, :n_ranks]
        # Shuffled, so that a last block that is not full is not always the same ranks.
        order = draws.permuted(np.tile(np.arange(ranks), (simulated, blocks, 1)), axis=2)
        rank_of = order.reshape(simulated, -1)[:, :n_ranks]

    flat = ends.ravel()

    def waits_p50_p99(measured: np.ndarray) -> np.ndarray:
        drawn = np.take(flat, np.take(measured * ranks, step_of) + rank_of)
        return np.quantile(drawn.max(axis=1) - drawn.min(axis=1), (0.5, 0.99))

    def statistic(measured: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.moveaxis(np.apply_along_axis(waits_p50_p99, axis, measured), axis, 0)

    every_step = np.arange(steps)
    interval = bootstrap(
        (every_step,),
        statistic,
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=1,
        method="percentile",
        random_state=draws,
    ).confidence_interval
    p50, p99 = waits_p50_p99(every_step)
    (p50_low, p99_low), (p50_high, p99_high) = interval.low, interval.high
    return Extrapolation(
        n_ranks,
        model,
        *map(float, (p50, p50_low, p50_high, p99, p99_low, p99_high)),
        measured_ranks=ranks,
        measured_steps=steps,
    )


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """Who waited for whom in a series of collectives. Medians do not show what a series costs, so sums stand beside.

    Attributes:
        one_clock: whether arrivals of different ranks could be compared.
        spread: last arrival less first, by collective; None without one clock.
        cost: what the exchange itself takes: the shortest stay in each collective.
        rank_waits: by rank, what it stayed longer than that.
        waiting_share: of all time spent in collectives, 0..1.
        first, last: by rank, in how many collectives it came first, and last.
        recurring: whether one rank was last more often than chance explains (binomial test at `RECURRING_P`,
            corrected for having picked the worst rank); otherwise the lateness rotates.
        waiting_ranks: ranks whose median wait is at least half of the median gap between first and last.
    """

    one_clock: bool
    spread: Summary | None
    cost: Summary
    rank_waits: tuple[Summary, ...]
    waiting_share: float
    first: tuple[int, ...]
    last: tuple[int, ...]
    recurring: bool
    waiting_ranks: tuple[int, ...]

    @property
    def earliest_rank(self) -> int:
        return self.first.index(max(self.first))

    @property
    def late_rank(self) -> int:
        return self.last.index(max(self.last))

    @property
    def waiting_us(self) -> float:
        """All waiting of all ranks."""
        return sum(waits.sum for waits in self.rank_waits)

    def describe(self) -> str:
        """The finding in words."""
        habit = "recurring" if self.recurring else "not more often than chance explains"
        waiting = ", ".join(map(str, self.waiting_ranks)) or "none"
        gap = (
            f"arrivals spread {_figures(self.spread)}"
            if self.spread
            else "arrivals not compared: the ranks' clocks are not aligned; order taken from the time inside"
        )
        return (
            f"rank {self.late_rank} is last in {max(self.last)} of {self.cost.n} collectives ({habit}); "
            f"waiting ranks: {waiting}; {gap}; waiting {self.waiting_us:.1f} us in sum, "
            f"{self.waiting_share:.0%} of the time in collectives; the exchange itself {_figures(self.cost)}"
        )


def analyse_collectives(durations_us: np.ndarray, arrivals_us: np.ndarray | None = None) -> CollectiveReport:
    """Split the time that ranks spend in collectives into waiting and the exchange itself.

    All ranks leave a collective together, so the last one in pays only for the exchange, and whatever another rank
    pays beyond that is waiting.

    Args:
        durations_us: [collectives, ranks], time each rank spent inside, on its own clock.
        arrivals_us: [collectives, ranks], when each rank entered; None if there is no common clock. Where ranks
            seem to leave further apart than the exchange takes, the clocks do not agree, and arrivals count as None:
            order then comes from the durations, and there is no spread.

    Raises:
        ValueError: shapes differ, are not [collectives, ranks] with at least 2 ranks, or values are not finite.
    """
    from scipy.stats import binomtest

    durations = _per_step(durations_us, "durations_us")
    n, ranks = durations.shape
    if ranks < 2:
        raise ValueError("a collective needs at least 2 ranks, got 1")
    cost = durations.min(axis=1)
    waits = durations - cost[:, None]
    order = -durations  # the longer a rank was inside, the earlier it came
    one_clock = False
    if arrivals_us is not None:
        arrivals = _per_step(arrivals_us, "arrivals_us")
        if arrivals.shape != durations.shape:
            raise ValueError(
                f"arrivals_us is {list(arrivals.shape)}, durations_us is {list(durations.shape)}; they must agree"
            )
        one_clock = bool(np.median(skew(arrivals + durations)) <= max(np.median(cost), CLOCK_GRAIN_US))
        order = arrivals if one_clock else order
    gap = np.ptp(order, axis=1)
    last = np.bincount(order.argmax(axis=1), minlength=ranks)
    by_chance = binomtest(int(last.max()), n, 1 / ranks, alternative="greater").pvalue * ranks
    typical_wait = np.median(waits, axis=0)
    return CollectiveReport(
        one_clock=one_clock,
        spread=summarise(gap) if one_clock else None,
        cost=summarise(cost),
        rank_waits=tuple(summarise(waits[:, rank]) for rank in range(ranks)),
        waiting_share=float(waits.sum() / durations.sum()) if durations.any() else 0.0,
        first=tuple(np.bincount(order.argmin(axis=1), minlength=ranks).tolist()),
        last=tuple(last.tolist()),
        recurring=bool(by_chance < RECURRING_P),
        waiting_ranks=tuple(np.flatnonzero((typical_wait > 0) & (typical_wait >= np.median(gap) / 2)).tolist()),
    )


def _figures(of: Summary) -> str:
    return f"{of.p50:.1f} us at p50, {of.p99:.1f} us at p99, {of.sum:.1f} us in sum"


def _per_step(values: np.ndarray, name: str) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"{name} must be [steps, ranks] with at least one of each, got {list(values.shape)}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has {np.count_nonzero(~np.isfinite(values))} values that are not finite")
    return values
