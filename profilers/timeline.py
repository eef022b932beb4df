"""The steps of a run as rows of a timeline: who did what, from when, for how long. Imports no torch.

A run records each step from the ranks' common start and not when that was: what lies between two steps (filling inputs,
draining the device) is nobody's concern. So steps follow one another here at a fixed gap, and only distances within a
step mean something.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .sample import MEASURED

if TYPE_CHECKING:
    import pandas as pd

HOST, WAIT = "host", "first all-reduce"
GAP_US = 100.0
MOST_STEPS = 5_000
"""Steps times ranks that are drawn: some 25,000 slices, which any viewer takes; half a megabyte packed."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time, on a track of a rank.

    Slices of one track nest or follow one another; they never overlap otherwise.
    """

    rank: int
    track: str
    name: str
    start_us: float
    duration_us: float
    args: dict[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mark:
    """An instant that concerns all ranks."""

    name: str
    at_us: float
    args: dict[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Level:
    """A value of all ranks that holds until the next one of its name."""

    name: str
    at_us: float
    value: float


Row = Slice | Mark | Level


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rows in order of time, and how many steps there were and are not drawn (of all cases and arms)."""

    rows: tuple[Row, ...]
    steps: int
    left_out: int

    @property
    def note(self) -> str:
        """What a reader must know."""
        gaps = f"Steps are laid one after another, {GAP_US:g} us apart; only times within a step were measured."
        if not self.left_out:
            return gaps
        return (
            f"{self.left_out} of {self.steps} steps are left out: the slowest are here, and of the others an even "
            f"choice; all are in samples.csv.gz. {gaps}"
        )


def timeline_of(samples: pd.DataFrame, most_steps: int = MOST_STEPS) -> Timeline:
    """From the samples of a run, as `results.read_samples` gives them.

    Args:
        most_steps: steps times ranks to draw; each case and arm gets an equal share, at least one step.
    """
    from .results import cases_in

    found = [(case, _by_step(rows)) for case, rows in cases_in(samples[samples["status"] == "ok"])]
    arms = [(case, arm, table) for case, by_arm in found for arm, table in by_arm.items()]
    share = max(1, most_steps // max(1, sum(_ranks(table) for _, _, table in arms)))
    chosen = {(case, arm): _chosen(table, share) for case, arm, table in arms}
    rows: list[Row] = []
    at_us, drawn = 0.0, 0
    for case, by_arm in found:
        if by_arm:
            rows.append(Mark(case.title, at_us, {"case": case.key}))
        # Arms alternate step by step, as they ran.
        for step in sorted({step for arm in by_arm for step in chosen[case, arm]}):
            for arm, table in by_arm.items():
                if step in chosen[case, arm]:
                    rows += _step_rows(arm, step, table.loc[step], at_us)
                    at_us += _length_us(table.loc[step]) + GAP_US
                    drawn += 1
    steps = sum(table.index.get_level_values("step").nunique() for _, _, table in arms)
    return Timeline(tuple(rows), steps, steps - drawn)


PARTS = ("start_lag_us", "prep_host_us", "launch_host_us", "launch_end_us", "step_host_us", "injected_us")


def _by_step(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By arm: [step, rank] x parts of a step, only steps that some rank's launch end is known of.

    A wait has two columns: ``first_wait_us`` and whether it is ``measured``; a measured one goes before a predicted
    one. Causes of slow parts are in columns of their own.
    """
    import pandas as pd

    rows = rows[(rows["rank"] >= 0) & (rows["step"] >= 0)]
    names = (
        rows["arm"]
        .astype(str)
        .where(rows["observer"] == "none", rows["arm"].astype(str) + " under " + rows["observer"].astype(str))
    )
    tables = {}
    for name in names.unique():
        of_arm = rows[names == name]
        index = ["step", "rank"]
        parts = of_arm[of_arm["metric"].isin(PARTS)].drop_duplicates([*index, "metric"])
        table = parts.pivot(index=index, columns="metric", values="value")
        if "launch_end_us" not in table and "prep_host_us" not in table:
            continue
        waits = of_arm[of_arm["metric"] == "first_wait_us"]
        waits = waits.assign(measured=waits["source"] == MEASURED).sort_values("measured", ascending=False)
        waits = waits.drop_duplicates(index).set_index(index)
        causes = parts.assign(cause=parts["cause"].astype(str), metric=parts["metric"].astype(str) + " cause")
        causes = causes[causes["cause"] != ""].pivot(index=index, columns="metric", values="cause")
        found = pd.concat(
            [table, waits[["value", "measured"]].rename(columns={"value": "first_wait_us"}), causes], axis=1
        )
        tables[name] = found.reindex(table.index).sort_index()
    return tables


def _ranks(table: pd.DataFrame) -> int:
    return table.index.get_level_values("rank").nunique()


def _chosen(table: pd.DataFrame, most: int) -> set[int]:
    """Steps to draw: the slowest of all, and of the rest as many more, evenly spread."""
    import numpy as np

    lengths = _lengths_us(table).groupby(level="step").max()
    if len(lengths) <= most:
        return set(lengths.index)
    slowest = lengths.nlargest(-(-most // 2)).index
    rest = [step for step in lengths.index if step not in slowest]
    even = np.linspace(0, len(rest) - 1, most - len(slowest)).round().astype(int)
    return {*slowest, *(rest[i] for i in even)}


def _lengths_us(table: pd.DataFrame) -> pd.Series:
    """When each rank was through with its step: the end of its launch, or of its prep where nothing was launched."""
    prepared = table.get("start_lag_us", 0.0) + table.get("prep_host_us", 0.0)
    return table["launch_end_us"].fillna(prepared) if "launch_end_us" in table else prepared


def _length_us(step: pd.DataFrame) -> float:
    waits = step["first_wait_us"].fillna(0.0) if "first_wait_us" in step else 0.0
    return float((_lengths_us(step) + waits).max())


def _step_rows(arm: str, step: int, ranks: pd.DataFrame, at_us: float) -> Iterator[Row]:
    """One step of all ranks; `ranks` is rank x parts."""
    ends = ranks["launch_end_us"].dropna() if "launch_end_us" in ranks else []
    if len(ends) > 1:
        yield Level(f"launch skew {arm}, us", at_us, float(ends.max() - ends.min()))
    for rank, parts in ranks.iterrows():
        known = {name: value for name, value in parts.items() if value == value and value is not None}
        yield from _rank_rows(arm, int(step), int(rank), known, at_us)


def _rank_rows(arm: str, step: int, rank: int, known: dict, at_us: float) -> Iterator[Row]:
    lag, prep = known.get("start_lag_us", 0.0), known.get("prep_host_us", 0.0)
    end = known.get("launch_end_us", lag + prep)
    started, prepared = at_us + lag, at_us + min(lag + prep, end)
    launching = max(prepared, at_us + end - known.get("launch_host_us", 0.0))

    def part(name: str, start: float, until: float, metric: str) -> Iterator[Slice]:
        if metric in known:
            cause = known.get(f"{metric} cause")
            yield Slice(rank, HOST, f"{name} {arm}", start, until - start, {"slow because": cause} if cause else {})

    if lag > 0:
        yield Slice(rank, HOST, "lag", at_us, lag)
    yield Slice(rank, HOST, f"step {arm}", started, at_us + end - started, {"step": step})
    yield from part("prep", started, prepared, "prep_host_us")
    if known.get("injected_us"):
        late = min(prepared + known["injected_us"], launching)
        yield Slice(rank, HOST, "injected delay", prepared, late - prepared)
    yield from part("launch", launching, at_us + end, "launch_host_us")
    if "first_wait_us" in known:
        source = "measured" if known.get("measured") else "predicted"
        # The device's clock has no common zero with the host's: the wait is drawn from where it can begin at the
        # earliest, and its length is what is known.
        args = {"source": source, "begins": "drawn at the end of the launch"}
        yield Slice(rank, WAIT, f"wait {arm}", at_us + end, max(0.0, known["first_wait_us"]), args)
