"""What `tune` found, as tables for people and objects for JSON. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ..profilers.sample import Case
    from ..tuning.outcome import Outcome
    from ..tuning.session import Report
    from ..tuning.static import Compiled
    from ..tuning.store import Entry


def print_report(report: Report) -> None:
    """One case: the finalists, or every candidate where none was chosen; then the choice and what is out."""
    tuned, choice = report.tuned, report.tuned.choice
    _print(_finalists_table(report) if choice else _outcomes_table(report))
    if choice:
        tie = f". A tie: {' | '.join(map(str, choice.tied))}" if len(choice.tied) > 1 else ""
        typer.echo(f"Chosen: {choice.winner}, {choice.reason}{tie}")
        for line in _causes(tuned.outcomes):
            typer.echo(line)
    for note in report.notes:
        typer.echo(f"Note: {note}")
    typer.echo("")


def print_compiled(case: Case, target: str, found: Iterable[Compiled]) -> None:
    """One case compiled for a target: what each candidate takes, and why some are out."""
    table = _table(
        f"{case.title}, compiled for {target}",
        "candidate",
        "registers",
        "spill bytes",
        "shared bytes",
        "code bytes",
        "",
    )
    for compiled in found:
        figures = asdict(compiled.resources).values() if compiled.resources else ("",) * 4
        table.add_row(
            str(compiled.outcome.candidate), *("?" if f is None else str(f) for f in figures), _out(compiled.outcome)
        )
    _print(table)


def print_entries(entries: Iterable[tuple[Path, Entry]]) -> None:
    """Everything stored, with its file."""
    table = _table("", "GPU, kernel, shape", "block sizes", "us", "default us", "measured", "file")
    for path, entry in entries:
        facts = entry.facts
        table.add_row(
            str(entry.key),
            " ".join(f"{name}={value}" for name, value in entry.config.items()),
            *(_number(facts.get(name)) for name in ("p50_us", "default_p50_us")),
            str(facts.get("measured_at", ""))[:10],
            str(path),
        )
    _print(table)


def _finalists_table(report: Report) -> Table:
    tuned, choice = report.tuned, report.tuned.choice
    table = _table(report.case.title, "candidate", "us hot", "us cold", "us rough", "")
    rough = {outcome.candidate: outcome.median_us for outcome in tuned.outcomes}
    for candidate in sorted(choice.medians_us, key=choice.medians_us.__getitem__):
        place = "chosen" if candidate == choice.winner else "tie" if candidate in choice.tied else ""
        table.add_row(
            str(candidate),
            _number(choice.medians_us[candidate]),
            _number(_median(tuned.finals.cold_us.get(candidate))),
            _number(rough[candidate]),
            ", ".join(filter(None, (place, "default" if candidate == report.default else ""))),
        )
    return table


def _outcomes_table(report: Report) -> Table:
    table = _table(report.case.title, "candidate", "us rough", "")
    for outcome in report.tuned.outcomes:
        told = _out(outcome) or ("values are right" if outcome.median_us is None else "")
        table.add_row(str(outcome.candidate), _number(outcome.median_us), told)
    return table


def _causes(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each cause: how many are out for it, and which; the reason of the first."""
    causes = dict.fromkeys(outcome.cause for outcome in outcomes if outcome.cause)
    lines = []
    for cause in causes:
        out = [outcome for outcome in outcomes if outcome.cause == cause]
        names = "; ".join(str(outcome.candidate) for outcome in out)
        lines.append(f"Out of {len(outcomes)}, {len(out)} {out[0].status} ({cause}: {out[0].reason}): {names}")
    return lines


def _out(outcome: Outcome) -> str:
    return f"{outcome.status}, {outcome.cause}: {outcome.reason}" if outcome.cause else ""


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        number = {"us", "bytes", "registers"} & set(column.split())
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=bool(number))
    return table


def _print(table: Table) -> None:
    from .tables import new_console

    new_console().print(table, markup=False, highlight=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _median(values: Sequence[float] | None) -> float | None:
    return median(values) if values else None


def report_object(report: Report) -> dict:
    """One case as JSON holds it. Times in us."""
    choice, finals = report.tuned.choice, report.tuned.finals
    candidates = []
    for outcome in report.tuned.outcomes:
        compiled = report.compiled.get(outcome.candidate)
        candidates.append(
            _outcome_object(outcome, compiled)
            | {
                "rough_p50_us": outcome.median_us,
                "hot_p50_us": _median(finals.hot_us.get(outcome.candidate)),
                "cold_p50_us": _median(finals.cold_us.get(outcome.candidate)),
            }
        )
    return {
        "case": asdict(report.case),
        "key": asdict(report.key) if report.key else None,
        "default": report.default.as_dict(),
        "winner": choice.winner.as_dict() if choice else None,
        "reason": choice.reason if choice else "",
        "tied": [candidate.as_dict() for candidate in choice.tied] if choice else [],
        "notes": list(report.notes),
        "candidates": candidates,
    }


def compiled_object(case: Case, found: Iterable[Compiled]) -> dict:
    """One case compiled for a target."""
    return {"case": asdict(case), "candidates": [_outcome_object(c.outcome, c) for c in found]}


def entry_object(path: Path, entry: Entry) -> dict:
    """A stored choice; the key's fields and the facts side by side."""
    return {**entry.facts, **asdict(entry.key), "config": entry.config, "file": str(path)}


def _outcome_object(outcome: Outcome, compiled: Compiled | None) -> dict:
    return {
        "config": outcome.candidate.as_dict(),
        "status": outcome.status,
        "cause": outcome.cause,
        "reason": outcome.reason,
        "resources": asdict(compiled.resources) if compiled and compiled.resources else None,
    }
