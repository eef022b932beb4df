"""A summary as tables: one a case, arms as rows. Shared by the terminal and the HTML report.

Works on the frames of `profilers.results` and loads nothing heavy itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..backends.modes import ARMS
from ..profilers.results import POOLED, cases_in
from ..profilers.sample import PREDICTED, Case

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from ..profilers.slow import SlowRow
    from .compare import PairedComparison
    from .saved import SavedComparisons

STATUS_WORDS = {
    "ok": "ok",
    "no_device": "no device",
    "not_applicable": "n/a",
    "unsupported": "unsupported",
    "compile_failed": "compile failed",
    "capture_failed": "capture failed",
    "failed": "failed",
    "interrupted": "interrupted",
}
GPU_ONLY = ("launch_host_us", "prep_device_us")
NO_FAILURE = ("ok", "no_device", "not_applicable")
UNTRACED = "none"
PREDICTED_MARK = "*"
PREDICTED_NOTE = f"{PREDICTED_MARK} predicted from the ranks' launch ends, not measured"
WIDTH_OF_A_PIPE = 120


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and the figures of the summary that stand under it."""

    heading: str
    metrics: tuple[str, ...]
    figures: tuple[str, ...]


COLUMNS = (
    Column("prep host\nus p50/p99", ("prep_host_us",), ("p50", "p99")),
    Column("launch\nus p50", ("launch_host_us",), ("p50",)),
    Column("prep on\ndevice\nus p50", ("prep_device_us",), ("p50",)),
    Column("rank skew\nus p50/p99", ("launch_skew_us",), ("p50", "p99")),
    Column("first wait\nus p50/p99", ("longest_wait_us",), ("p50", "p99")),
    Column("dispatches/\nlaunches/\nsyncs", ("dispatches", "launches", "syncs"), ("p50",)),
)


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm of a case: a cell for each of COLUMNS, and what went wrong, if anything."""

    arm: str
    cells: tuple[str, ...]
    status: str
    failed: bool


def arm_rows(rows: pd.DataFrame) -> list[ArmRow]:
    """The arms of one case, from its rows of a summary. Numbers taken under a tracer are rows of their own."""
    pooled = rows[rows["rank"] == POOLED]
    made = []
    for observer in sorted(pooled["observer"].unique(), key=lambda name: (name != UNTRACED, name)):
        seen = pooled[pooled["observer"] == observer]
        for arm in arm_order(seen["arm"]):
            of_arm = seen[seen["arm"] == arm]
            status = _status(of_arm)
            made.append(
                ArmRow(
                    arm=arm if observer == UNTRACED else f"{arm}\n under {observer}",
                    cells=tuple(_cell(of_arm, column) for column in COLUMNS),
                    status=status,
                    failed=status != STATUS_WORDS["ok"],
                )
            )
    return made


def print_summary(summary: pd.DataFrame, console: Console | None = None) -> None:
    """Print one table a case. Without a terminal: no colour, and lines of WIDTH_OF_A_PIPE."""
    console = console or new_console()
    shared, labels = case_labels([case for case, _ in cases_in(summary)])
    console.print(shared, style="bold", highlight=False, markup=False)
    for case, rows in cases_in(summary):
        console.print(case_table(arm_rows(rows), labels[case.key]), "")
    if (summary["source"] == PREDICTED).any():
        console.print(PREDICTED_NOTE, style="dim", highlight=False)


MOST_SLOW_LINES = 8


def print_slow(rows: Sequence[SlowRow]) -> None:
    """Print what slowed steps, the costliest first; nothing where no step was slow."""
    from ..profilers.slow import ALL

    slow = sorted((row for row in rows if row.cause != ALL), key=lambda row: -row.excess_us)
    if not slow:
        return
    table = plain_table("")
    for heading, side in (
        ("slow because of", "left"), ("steps", "right"), ("us p50", "right"), ("us sum", "right"),
        ("beyond the\nmedian, us", "right"), ("arm", "left"), ("metric", "left"), ("case", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=side, overflow="fold")
    for row in slow[:MOST_SLOW_LINES]:
        table.add_row(
            row.cause, number(row.steps), number(row.p50_us), number(row.sum_us), number(row.excess_us), row.arm,
            row.metric.removesuffix("_us"), row.case,
        )  # fmt: skip
    left_out = len(slow) - MOST_SLOW_LINES
    console = new_console()
    console.print(table)
    if left_out > 0:
        console.print(f"{left_out} more in slow.csv", style="dim", highlight=False)


def new_console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_PIPE)


def case_table(rows: Sequence[ArmRow], title: str = "") -> Table:
    """A rich table of `arm_rows`; its numbers fit into 80 columns."""
    table = plain_table(title)
    table.add_column("arm", no_wrap=True)
    for column in COLUMNS:
        # On a narrow terminal words may break, numbers must not.
        table.add_column(column.heading, justify="right", no_wrap=column.metrics[0] not in GPU_ONLY)
    table.add_column("status", overflow="fold")
    for row in rows:
        table.add_row(row.arm, *row.cells, row.status, style="red" if row.failed else None)
    return table


def saved_table(comparisons: SavedComparisons) -> Table:
    """A rich table of a comparison of saved runs. The ratio recomputes from the two medians beside it."""
    table = plain_table("")
    shared, labels = case_labels([row.case for row in comparisons.rows])
    table.title = shared
    for heading, side in (
        ("case", "left"), ("arm", "left"), ("metric", "left"), ("A p50", "right"), ("B p50", "right"),
        ("B / A", "right"), ("95%", "right"), ("verdict", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=side, overflow="fold")
    for row in comparisons.rows:
        v = row.verdict
        table.add_row(
            labels[row.case.key],
            row.arm,
            row.metric + (PREDICTED_MARK if row.source == PREDICTED else ""),
            number(v.baseline),
            number(v.candidate),
            shown_ratio(v.candidate, v.baseline),
            f"{v.ratio_low:.3g}-{v.ratio_high:.3g}" if None not in (v.ratio_low, v.ratio_high) else "",
            v.sentence,
            style=None if row.decides else "dim",
        )
    return table


def paired_table(comparisons: Sequence[PairedComparison]) -> Table:
    """A rich table of one implementation against the other; the ratio recomputes from the two medians beside it."""
    table = plain_table("")
    shared, labels = case_labels(dict.fromkeys(row.case for row in comparisons))
    arms = f"{comparisons[0].candidate} against {comparisons[0].baseline}: " if comparisons else ""
    table.title = arms + shared
    for heading, side in (
        ("case", "left"), ("metric", "left"), ("baseline p50", "right"), ("candidate p50", "right"),
        ("ratio", "right"), ("95%", "right"), ("pairs", "right"), ("verdict", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=side, overflow="fold")
    for row in comparisons:
        v = row.verdict
        interval = f"{v.ratio_low:.3g}-{v.ratio_high:.3g}" if None not in (v.ratio_low, v.ratio_high) else ""
        table.add_row(
            labels[row.case.key], row.metric, number(v.baseline), number(v.candidate),
            shown_ratio(v.candidate, v.baseline), interval, number(v.n), v.sentence,
            style=None if row.decides else "dim",
        )  # fmt: skip
    return table


def case_labels(cases: Iterable[Case]) -> tuple[str, dict[str, str]]:
    """What all cases share, as a title, and by `Case.key` what tells each one from the others."""
    cases = list(cases)
    names = [f.name for f in fields(Case)]
    if all(case.bucket == case.bs for case in cases):
        names.remove("bucket")
    differs = [name for name in names if len({getattr(case, name) for case in cases}) > 1]
    same = [name for name in names if name not in differs and name not in _UNSAID_IF_SHARED]
    labels = {case.key: _words(case, differs) for case in cases}
    return (_words(cases[0], same) if cases else ""), labels


_LABELS = {
    "backend": "{}", "mode": "{}", "context": "ctx {}", "page_size": "page {}", "max_context": "max ctx {}",
    "device": "{}",
}  # fmt: skip
_SPECULATIVE = ("topk", "draft_tokens", "draft_steps", "step_id")
_UNSAID_IF_SHARED = ("device", "seed", "graph_branches", "allreduce_at")


def _words(case: Case, names: Sequence[str]) -> str:
    words = []
    for name in names:
        value = getattr(case, name)
        if name == "swa":
            words.append("SWA" if value else "no SWA")
        elif value or name not in _SPECULATIVE:
            words.append(_LABELS.get(name, f"{name.replace('_', ' ')} {{}}").format(value))
    return ", ".join(words)


def arm_order(arms: Iterable[str]) -> list[str]:
    """Distinct arms: ours in their usual order, then the others by name."""
    known = [str(arm) for arm in ARMS]
    return sorted(set(arms), key=lambda arm: (known.index(arm) if arm in known else len(known), arm))


def number(value: float | None) -> str:
    """Three significant digits, no exponent; blank for a missing one."""
    if value is None or math.isnan(value):
        return ""
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{int(value):,}"
    return f"{value:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.1 else 3}f}"


def shown_ratio(value: float | None, base: float | None) -> str:
    """value / base of the numbers as they are shown, so that a reader who divides them finds the same."""
    shown = [number(v).replace(",", "") for v in (value, base)]
    if "" in shown or float(shown[1]) == 0:
        return ""
    return f"{float(shown[0]) / float(shown[1]):.3g}"


def _cell(rows: pd.DataFrame, column: Column) -> str:
    found = [_metric(rows, metric) for metric in column.metrics]
    if any(row is None for row in found):
        return ""
    words = [STATUS_WORDS[row.status] for row in found if row.status != "ok"]
    if words:
        return words[0].split()[-1] if words[0].endswith("failed") else words[0]  # the status column says of what
    numbers = [number(getattr(row, figure)) for row in found for figure in column.figures]
    mark = PREDICTED_MARK if found[0].source == PREDICTED else ""
    return "/".join(numbers) + mark


def _metric(rows: pd.DataFrame, metric: str):
    """The row of a metric: the measured one before a predicted one, a number before a failure."""
    found = rows[rows["metric"] == metric]
    ranked = sorted(found.itertuples(), key=lambda row: (row.status != "ok", row.source == PREDICTED))
    return ranked[0] if ranked else None


def _status(rows: pd.DataFrame) -> str:
    equal = rows[(rows["metric"] == "bit_equal") & (rows["status"] == "ok")]
    words = [] if (equal["min"] == 1).all() else ["NOT BIT-EQUAL"]
    of_arm = rows[rows["metric"] != "sm_clock_mhz"]  # no NVML is no fault of an arm's
    failures = of_arm.loc[~of_arm["status"].isin(NO_FAILURE), "status"]
    words += [STATUS_WORDS[status] for status in dict.fromkeys(failures)]
    return ", ".join(words) or STATUS_WORDS["ok"]


def plain_table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
