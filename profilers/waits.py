"""What a run says about waiting, as three small tables beside its samples: wait.csv, predict.csv, inject.csv.

They are made from the samples alone, so they can be made again from a saved run. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .collective import INDEPENDENT, MODELS, Extrapolation, analyse_collectives, extrapolate, skew
from .inject import EACH, INJECTED
from .results import cases_in, read_samples
from .sample import MEASURED, PREDICTED, Case

if TYPE_CHECKING:
    import pandas as pd

WAIT, PREDICT, INJECT = "wait.csv", "predict.csv", "inject.csv"
LONGEST = "longest"
"""Instead of a rank: of each step the wait of the rank that waited longest, which came first."""

CALIBRATED = "calibrated"
"""Model of a prediction that knows how far behind its launch's end each rank's device comes."""

_UNWATCHED = "none"
_RESAMPLES = 500


def write_waits(folder: Path, rank_counts: Sequence[int] = ()) -> list[Path]:
    """Write those of the three tables that the run has numbers for; returns their paths.

    Args:
        rank_counts: how many ranks to predict waits for, beside those that were measured.
    """
    import pandas as pd

    samples = read_samples(folder)
    samples = samples[(samples["status"] == "ok") & (samples["step"] >= 0)]
    bare, delayed = samples[samples["observer"] == _UNWATCHED], samples[samples["observer"] == INJECTED]
    made = {WAIT: wait_rows(bare), PREDICT: predict_rows(bare, rank_counts), INJECT: inject_rows(delayed)}
    written = []
    for name, rows in made.items():
        frame = pd.DataFrame(rows)
        if len(frame):
            path = Path(folder) / name
            frame.to_csv(path.with_suffix(".part"), index=False, float_format="%.4f")
            os.replace(path.with_suffix(".part"), path)
            written.append(path)
    return written


def wait_rows(samples: pd.DataFrame) -> Iterator[dict]:
    """Of each case, arm and source: a row for every rank, and one for the longest wait of each step.

    `excess_*`: beyond what the exchange itself takes; predicted waits have no exchange in them. `last_share`: in how
    many of the steps the rank came last. `culprit`: whether that recurs, or rotates as by chance.
    """
    for case, arm, rows in _arms(samples):
        skews = _values(rows, "launch_skew_us")
        for source in (MEASURED, PREDICTED):
            waits = _by_step(rows, "first_wait_us", source)
            if waits.shape[1] < 2:
                continue
            exchange = exchange_us(waits) if source == MEASURED else 0.0
            found = analyse_collectives(waits)
            # Equal waits are nobody's: a step without skew has no last rank.
            habit = f"rank {found.late_rank} recurs" if found.recurring else "rotates"
            for rank, values in [(LONGEST, waits.max(axis=1)), *((str(r), waits[:, r]) for r in range(waits.shape[1]))]:
                p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
                yield {
                    **asdict(case), "arm": arm, "rank": rank, "source": source, "n": len(values), "p50_us": p50,
                    "p90_us": p90, "p99_us": p99, "max_us": values.max(), "sum_us": values.sum(),
                    "exchange_us": exchange, "excess_p50_us": p50 - exchange, "excess_p99_us": p99 - exchange,
                    "launch_skew_p50_us": _quantile(skews, 0.5), "launch_skew_p99_us": _quantile(skews, 0.99),
                    "last_share": found.last[int(rank)] / len(values) if rank != LONGEST else None, "culprit": habit,
                }  # fmt: skip


def predict_rows(samples: pd.DataFrame, rank_counts: Sequence[int] = ()) -> Iterator[dict]:
    """Of each arm: the longest first wait of a step by number of ranks, measured, predicted and extrapolated.

    All are less the exchange. ``measured``: on the device. ``predicted``: from the launch ends of the same ranks and
    steps, as they are, and (model ``calibrated``) with each rank's `device_delays_us` as the other arms show it.
    ``extrapolated``: launch ends of `basis_ranks` ranks resampled to `n_ranks`, by both models of `extrapolate`; from
    one rank only independent jitter can be drawn. Where `n_ranks` was measured too, `error_*_us` says how far a row is
    from that, and `error_*` the same as a share of the measured wait, its exchange included.
    """
    groups: dict[tuple[str, str], list[tuple[Case, pd.DataFrame]]] = {}
    arms = list(_arms(samples))
    for case, arm, rows in arms:
        groups.setdefault((replace(case, tp=1).key, arm), []).append((case, rows))
    delays = _delays(arms)
    for (_, arm), runs in groups.items():
        counts = sorted({*rank_counts, *(case.tp for case, _ in runs if case.tp > 1)})
        found = {row["n_ranks"]: row for case, rows in runs for row in _measured_row(case, arm, rows)}
        yield from found.values()
        for case, rows in runs:
            ends = _by_step(rows, "launch_end_us", MEASURED)
            if len(ends) < 2:
                continue
            if case.tp > 1:
                others = [late for other, late in delays.get(case, {}).items() if other != arm]
                arrivals = {"": ends} | ({CALIBRATED: ends + np.mean(others, axis=0)} if others else {})
                for model, arrived in arrivals.items():
                    row = _row(case, arm, case.tp, case.tp, model, PREDICTED, skew(arrived))
                    yield _against(row, found.get(case.tp))
            models = MODELS if case.tp > 1 else (INDEPENDENT,)
            unlike = [n for n in counts if n in rank_counts or n != case.tp]
            for e in _extrapolations(ends, [(n, model) for n in unlike for model in models]):
                row = _row_of(case, arm, e.n_ranks, case.tp, e.model, e.source, len(ends), e)
                yield _against(row, found.get(e.n_ranks))


def exchange_us(waits: np.ndarray) -> float:
    """What the exchange itself takes: the last rank to come waits for nobody. waits: [steps, ranks]."""
    return float(np.median(waits.min(axis=1)))


def device_delays_us(ends: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """[ranks], how much later than its launch's end each rank's device arrives, beyond the mean of the ranks.

    A launch call returns some time after the device was told, and on a slow core later; GPUs differ too. Who waits
    longer came earlier by that much, so waits give the differences of arrivals, to compare with those of the ends.

    Args:
        ends, waits: [steps, ranks], of the same steps.
    """
    arrivals, ends = -waits, np.asarray(ends)
    apart = arrivals - arrivals.mean(axis=1, keepdims=True) - (ends - ends.mean(axis=1, keepdims=True))
    return np.median(apart, axis=0)


def _delays(arms: Iterable[tuple[Case, str, pd.DataFrame]]) -> dict[Case, dict[str, np.ndarray]]:
    """`device_delays_us` of every arm that was measured on devices, by case."""
    found: dict[Case, dict[str, np.ndarray]] = {}
    for case, arm, rows in arms:
        ends, waits = _by_step(rows, "launch_end_us", MEASURED), _by_step(rows, "first_wait_us", MEASURED)
        if ends.shape == waits.shape and len(ends) > 1:
            found.setdefault(case, {})[arm] = device_delays_us(ends, waits)
    return found


def _extrapolations(ends: np.ndarray, wanted: list[tuple[int, str]]) -> list[Extrapolation]:
    """In threads: resampling is NumPy's work, outside the interpreter's lock."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda job: extrapolate(ends, job[0], model=job[1]), wanted))


def inject_rows(samples: pd.DataFrame) -> Iterator[dict]:
    """Of each case and arm: a row a delayed rank (``each`` for all of them) and dose.

    `others_*`: what the other ranks waited, averaged over them in each step. `slope`: by how much their wait beyond the
    delayed rank's own rises per us of dose; the difference is straight also where the dose is smaller than the jitter,
    so that the delayed rank is not always last. `slope_others`: the same without taking the difference.
    """
    for case, arm, rows in _arms(samples):
        waits = _by_step(rows, "first_wait_us", MEASURED)
        source = MEASURED
        if not waits.size:
            waits, source = _by_step(rows, "first_wait_us", PREDICTED), PREDICTED
        doses = rows[rows["metric"] == "injected_us"].sort_values("step")
        if not waits.size or len(doses) != len(waits):
            continue
        dose, delayed = doses["value"].to_numpy(), doses["rank"].to_numpy()
        own = waits[np.arange(len(waits)), delayed]
        others = (waits.sum(axis=1) - own) / (waits.shape[1] - 1)
        chosen = [(str(rank), delayed == rank) for rank in np.unique(delayed)]
        if len(chosen) > 1:
            chosen.append((EACH, np.ones(len(dose), dtype=bool)))
        for rank, steps in chosen:
            yield from _dose_rows(case, arm, rank, source, dose[steps], others[steps], own[steps])


def _dose_rows(
    case: Case, arm: str, rank: str, source: str, dose: np.ndarray, others: np.ndarray, own: np.ndarray
) -> Iterator[dict]:
    from scipy.stats import linregress

    if len(np.unique(dose)) < 2:
        return
    beyond, plain = linregress(dose, others - own), linregress(dose, others)
    for amount in np.unique(dose):
        at = dose == amount
        yield {
            **asdict(case), "arm": arm, "injected_rank": rank, "dose_us": amount, "n": int(at.sum()),
            "others_p50_us": np.median(others[at]), "others_p99_us": np.quantile(others[at], 0.99),
            "own_p50_us": np.median(own[at]), "slope": beyond.slope, "slope_stderr": beyond.stderr,
            "intercept_us": beyond.intercept, "slope_others": plain.slope, "slope_others_stderr": plain.stderr,
            "source": source,
        }  # fmt: skip


def _measured_row(case: Case, arm: str, rows: pd.DataFrame) -> Iterator[dict]:
    waits = _by_step(rows, "first_wait_us", MEASURED)
    if case.tp > 1 and len(waits) >= 2:
        exchange = exchange_us(waits)
        row = _row(case, arm, case.tp, case.tp, "", MEASURED, waits.max(axis=1) - exchange)
        yield _against(row | {"exchange_us": exchange}, None)


def _row(case: Case, arm: str, n: int, basis: int, model: str, source: str, longest: np.ndarray) -> dict:
    return _row_of(case, arm, n, basis, model, source, len(longest), _Quantiles(longest))


def _row_of(case: Case, arm: str, n: int, basis: int, model: str, source: str, steps: int, figures) -> dict:
    names = ("p50_us", "p50_low_us", "p50_high_us", "p99_us", "p99_low_us", "p99_high_us")
    return {
        **asdict(replace(case, tp=n)), "arm": arm, "n_ranks": n, "basis_ranks": basis, "model": model,
        "source": source, "steps": steps, "exchange_us": None, **{name: getattr(figures, name) for name in names},
    }  # fmt: skip


class _Quantiles:
    """p50 and p99 of longest waits, each with a 95% bootstrap interval over the steps."""

    def __init__(self, longest: np.ndarray) -> None:
        from scipy.stats import bootstrap

        for name, q in (("p50", 0.5), ("p99", 0.99)):

            def quantile(values: np.ndarray, axis: int = -1, q: float = q) -> np.ndarray:
                return np.quantile(values, q, axis=axis)

            ends = (quantile(longest),) * 2
            if np.ptp(longest) > 0:
                found = bootstrap(
                    (longest,), quantile, n_resamples=_RESAMPLES, method="percentile", vectorized=True,
                    random_state=np.random.default_rng(0),
                ).confidence_interval  # fmt: skip
                ends = (found.low, found.high)
            setattr(self, f"{name}_us", float(quantile(longest)))
            setattr(self, f"{name}_low_us", float(ends[0]))
            setattr(self, f"{name}_high_us", float(ends[1]))


def _against(row: dict, measured: dict | None) -> dict:
    for name in ("p50", "p99"):
        truth = None if measured is None else measured[f"{name}_us"]
        error = None if truth is None else row[f"{name}_us"] - truth
        share = None if truth is None else error / (truth + measured["exchange_us"])
        row |= {f"error_{name}_us": error, f"error_{name}": share}
    return row


def _arms(samples: pd.DataFrame) -> Iterator[tuple[Case, str, pd.DataFrame]]:
    for case, of_case in cases_in(samples):
        for arm, rows in of_case.groupby("arm", sort=False, observed=True):
            yield case, str(arm), rows


def _values(rows: pd.DataFrame, metric: str) -> np.ndarray:
    return rows.loc[rows["metric"] == metric, "value"].to_numpy()


def _by_step(rows: pd.DataFrame, metric: str, source: str) -> np.ndarray:
    """[steps, ranks] of a metric; steps that a rank lacks are left out."""
    rows = rows[(rows["metric"] == metric) & (rows["source"] == source) & (rows["rank"] >= 0)]
    if rows.empty:
        return np.zeros((0, 0))
    table = rows.pivot_table(index="step", columns="rank", values="value", observed=True)
    return table.dropna().to_numpy()


def _quantile(values: np.ndarray, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None
