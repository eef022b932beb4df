"""Comparison of saved runs: the same case, arm and metric before and after. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..profilers import stats
from ..profilers.results import (
    ResultsError,
    cases_in,
    machine_differences,
    read_environment,
    read_samples,
    runs_in,
)
from ..profilers.sample import CASE_COLUMNS, UNITS, Case, Environment
from ..profilers.stats import Verdict
from .tables import UNTRACED, arm_order

DECIDING = ("prep_host_us", "prep_device_us", "dispatches", "launches", "syncs")
"""What the rebuild itself costs; these verdicts make the exit code."""

SHOWN = ("launch_host_us", "prep_device_cold_us", "launch_skew_us", "longest_wait_us")
"""Consequences, which also depend on how the machine was used meanwhile; compared, but they decide nothing."""

FLOORS_US = {"prep_host_us": 0.5, "launch_host_us": 0.5, "prep_device_us": 0.05, "prep_device_cold_us": 0.05}
"""Below this, a difference is none: two reads of the host clock, and a step of the device's timer."""


@dataclass(frozen=True, slots=True)
class SavedComparison:
    """One metric of one case and arm. `decides`: whether the exit code heeds it."""

    case: Case
    arm: str
    metric: str
    source: str
    verdict: Verdict
    decides: bool

    @property
    def unit(self) -> str:
        return UNITS[self.metric]


@dataclass(frozen=True, slots=True)
class SavedComparisons:
    """What comparing two sides gave. With a `refusal` there are no rows: the sides are not comparable."""

    rows: list[SavedComparison]
    refusal: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return stats.exit_code(row.verdict.word for row in self.rows if row.decides)


def compare_saved(
    a: Path, b: Path, allow_different: bool = False, tolerance: float = stats.TOLERANCE
) -> SavedComparisons:
    """Compare candidate `b` with baseline `a`, pooled over ranks. Each is a run, or a folder of at least three.

    One run a side: bootstrap of the ratio of medians over raw samples, which cannot know how runs differ from one
    start to the next. Several a side: their medians, and only ranges that do not overlap differ.

    Args:
        allow_different: compare across machines or versions, with a warning in place of the refusal.

    Raises:
        ResultsError: not a run, or two runs on a side.
    """
    sides = [runs_in(a), runs_in(b)]
    several = max(map(len, sides)) > 1
    if several and min(map(len, sides)) < stats.FEWEST_RUNS:
        raise ResultsError(
            f"{a} has {len(sides[0])} runs and {b} has {len(sides[1])}. Give one run a side, or at least "
            f"{stats.FEWEST_RUNS}"
        )
    environments = {run: read_environment(run) for side in sides for run in side}
    different, conditions = _against_first(list(environments.values()))
    if different and not allow_different:
        return SavedComparisons([], refusal=f"different machines: {'; '.join(different)}")
    warnings = [f"compared across machines: {text}" for text in different]
    warnings += [f"measured under other conditions: {text}" for text in conditions]
    warnings += [f"{run} is {e.status}: it may lack cases" for run, e in environments.items() if e.status != "done"]
    if not several:
        warnings.append(
            "one run a side: what differs from one start to the next is not in the intervals; "
            f"{stats.FEWEST_RUNS} runs a side would show it"
        )
    groups = [_side(runs) for runs in sides]
    rows = list(_compared(*groups, several=several, tolerance=tolerance))
    if not rows:
        return SavedComparisons([], refusal=_nothing_shared(*groups), warnings=tuple(warnings))
    warnings += _unmatched(*groups)
    return SavedComparisons(rows, warnings=tuple(warnings))


@dataclass(frozen=True, slots=True)
class _Side:
    """Values by (case, arm, metric, source), one array a run, and the (case, arm) that were not bit-equal."""

    values: dict[tuple[Case, str, str, str], list]
    unequal: frozenset[tuple[Case, str]]


def _side(runs: list[Path]) -> _Side:
    values: dict[tuple[Case, str, str, str], list] = {}
    unequal = set()
    for run in runs:
        samples = read_samples(run)
        samples = samples[(samples["status"] == "ok") & (samples["observer"] == UNTRACED)]
        for case, rows in cases_in(samples):
            for (arm, metric, source), found in rows.groupby(["arm", "metric", "source"], observed=True)["value"]:
                if metric in DECIDING or metric in SHOWN:
                    values.setdefault((case, arm, metric, source), []).append(found.to_numpy())
                elif metric == "bit_equal" and (found != 1).any():
                    unequal.add((case, arm))
    return _Side(values, frozenset(unequal))


def _compared(a: _Side, b: _Side, several: bool, tolerance: float) -> Iterator[SavedComparison]:
    order = arm_order(arm for _, arm, _, _ in a.values)
    metrics = (*DECIDING, *SHOWN)
    cases = list(dict.fromkeys(case for case, _, _, _ in a.values))
    shared = a.values.keys() & b.values.keys()
    for key in sorted(shared, key=lambda k: (cases.index(k[0]), order.index(k[1]), metrics.index(k[2]), k[3])):
        case, arm, metric, source = key
        if (case, arm) in a.unequal | b.unequal:
            verdict = Verdict(stats.NOT_EQUAL)
        else:
            verdict = _verdict(metric, a.values[key], b.values[key], several, tolerance)
        yield SavedComparison(case, arm, metric, source, verdict, decides=metric in DECIDING)


def _verdict(metric: str, before: list, after: list, several: bool, tolerance: float) -> Verdict:
    if UNITS[metric] == "count":
        return stats.count_verdict(_joined(before), _joined(after))
    if several:
        medians = [[stats.summarise(values).p50 for values in side] for side in (before, after)]
        return stats.runs_verdict(*medians, tolerance=tolerance)
    return stats.unpaired_verdict(before[0], after[0], tolerance=tolerance, floor=FLOORS_US.get(metric, 0.0))


def _joined(arrays: list) -> list[float]:
    return [value for array in arrays for value in array.tolist()]


def _against_first(environments: list[Environment]) -> tuple[list[str], list[str]]:
    """`machine_differences` of all runs from the first one, each said once."""
    first, *others = environments
    found = [machine_differences(first, other) for other in others]
    machine, conditions = (list(dict.fromkeys(text for pair in found for text in pair[i])) for i in (0, 1))
    return machine, conditions


def _nothing_shared(a: _Side, b: _Side) -> str:
    """Why no row matched: the columns in which the two sides have no value in common."""
    cases = [{case for case, _, _, _ in side.values} for side in (a, b)]
    if not all(cases):
        return "a run without numbers"
    apart = []
    for column in CASE_COLUMNS:
        left, right = ({str(getattr(case, column)) for case in side} for side in cases)
        if not left & right:
            apart.append(f"{column} {', '.join(sorted(left))} against {', '.join(sorted(right))}")
    return f"the runs share no case and arm ({'; '.join(apart) or 'other combinations'})"


def _unmatched(a: _Side, b: _Side) -> list[str]:
    texts = []
    for name, mine, other in (("A", a, b), ("B", b, a)):
        alone = {(case.title, arm) for case, arm, *_ in mine.values} - {(c.title, arm) for c, arm, *_ in other.values}
        if alone:
            title, arm = min(alone)
            texts.append(f"only in {name}: {len(alone)} case-arms, such as {arm} of {title}")
    return texts
