"""What `tune` found, as tables for people and objects for JSON. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ..profilers.sample import Case
    from ..tuning.against_autotune import Row
    from ..tuning.held_out import HeldOut
    from ..tuning.outcome import Outcome
    from ..tuning.regret import LeftOut
    from ..tuning.replays import Searched
    from ..tuning.session import Report
    from ..tuning.static import Compiled
    from ..tuning.store import Entry, Key


MOST_NAMED = 6


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
    if report.seconds:
        parts = ", ".join(f"{seconds:.1f} {what}" for what, seconds in report.seconds.items())
        typer.echo(f"Took {sum(report.seconds.values()):.1f} s: {parts}")
    typer.echo("")


def print_compiled(case: Case, target: str, found: Iterable[Compiled], ruled_out: Mapping[str, int]) -> None:
    """One case compiled for a target: what each candidate takes, and why some are out.

    ruled_out: constraint -> combinations that it kept from being candidates.
    """
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
    for what, n in ruled_out.items():
        typer.echo(f"No candidates: {n} combinations with {what}")
    typer.echo("")


def print_entries(entries: Iterable[tuple[Path, Entry]]) -> None:
    """Everything stored, with its file."""
    table = _table("", "GPU, kernel, shape", "block sizes", "us", "default us", "measured", "file")
    for path, entry in entries:
        facts = entry.facts
        table.add_row(
            str(entry.key),
            _setting(entry.config),
            *(_number(facts.get(name)) for name in ("p50_us", "default_p50_us")),
            str(facts.get("measured_at", ""))[:10],
            str(path),
        )
    _print(table)


def print_diff(a: Path, b: Path, found: Iterable[tuple[Key, Entry | None, Entry | None]]) -> None:
    table = _table("", "GPU, kernel, shape", str(a), "us", str(b), "us")
    for key, *sides in found:
        cells = []
        for entry in sides:
            cells += [_setting(entry.config), _number(entry.facts.get("p50_us"))] if entry else ["nothing", ""]
        table.add_row(str(key), *cells)
    _print(table)


def print_held_out(found: Sequence[HeldOut]) -> None:
    """Shapes that were not tuned: what the store gives, beside the default."""
    from ..tuning.held_out import geometric_mean

    if not found:
        return
    table = _table(
        "Held-out shapes", "shape", "rule", "block sizes", "us", "default us", "us cold", "default us cold", ""
    )
    for one in found:
        if one.chosen == one.default:
            continue
        hot, cold = one.finals.hot_us, one.finals.cold_us
        times = (_median(side.get(c)) for side in (hot, cold) for c in (one.chosen, one.default))
        table.add_row(one.case.title, one.found.rule, str(one.chosen), *map(_number, times), one.word)
    if table.row_count:
        _print(table)
    same = sum(one.chosen == one.default for one in found)
    mean = geometric_mean(one for one in found if one.chosen != one.default)
    faster = f", the others take {mean:.3f} of the default's time in geometric mean" if mean else ""
    typer.echo(f"Held out: {len(found)} shapes, {same} of them run the default{faster}")


def print_left_out(found: Iterable[LeftOut]) -> None:
    """A line for each rule: what it would have cost on the tuned shapes."""
    by_rule: dict[str, list[LeftOut]] = {}
    for one in found:
        by_rule.setdefault(one.rule, []).append(one)
    for rule, ones in by_rule.items():
        lost = [one.regret for one in ones if one.regret is not None]
        told = f"lose at most {max(lost):.1%}, {median(lost):.1%} in median" if lost else "were not timed with it"
        timed = f", {len(lost)} of them timed" if len(lost) < len(ones) and lost else ""
        typer.echo(f"Left out: {len(ones)} shapes would go by the rule '{rule}'{timed}: they {told}")


def print_searches(found: Sequence[Searched]) -> None:
    """Searches after so many tries."""
    if not found:
        return
    table = _table(
        "Searches on these cases: speed of the best found, as a share of the fastest's",
        "search", "after tries", "mean", "least", "share of runs at 97%", "tries made",
    )  # fmt: skip
    for one in found:
        shares = (f"{value:.3f}" for value in (one.mean_speed, one.least_speed, one.good_enough))
        table.add_row(one.search, str(one.tries), *shares, f"{one.tried:.0f}")
    _print(table)


def print_autotune(rows: Sequence[Row]) -> None:
    """Both tuners: seconds, agreement of their processes, and regret on held-out lengths."""
    from ..tuning.against_autotune import agreeing

    table = _table(
        "triton.autotune and attn-graph tune, same candidates", "case", "tuner", "processes", "different choices",
        "agree or tie", "seconds", "mean regret", "most regret",
    )  # fmt: skip
    for case, tuner in dict.fromkeys((row.case.title, row.tuner) for row in rows):
        own = [row for row in rows if (row.case.title, row.tuner) == (case, tuner)]
        runs = {row.process: row for row in own}
        lost = [row.regret for row in own if row.regret is not None]
        table.add_row(
            case, tuner, str(len(runs)), str(len({row.candidate for row in own})), str(agreeing(own)),
            f"{median(row.seconds for row in runs.values()):.1f}",
            *([f"{sum(lost) / len(lost):.1%}", f"{max(lost):.1%}"] if lost else ["", ""]),
        )  # fmt: skip
    _print(table)


def _setting(config: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _finalists_table(report: Report) -> Table:
    tuned, choice = report.tuned, report.tuned.choice
    slowest = tuned.finals.slowest_us
    on_ranks = ["us slowest rank"] if slowest else []
    table = _table(report.case.title, "candidate", "us hot", *on_ranks, "us cold", "us rough", "")
    rough = {outcome.candidate: outcome.median_us for outcome in tuned.outcomes}
    for candidate in sorted(choice.medians_us, key=choice.medians_us.__getitem__):
        place = "chosen" if candidate == choice.winner else "tie" if candidate in choice.tied else ""
        table.add_row(
            str(candidate),
            _number(choice.medians_us[candidate]),
            *([_number(_median(slowest.get(candidate)))] if slowest else []),
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
        if cause == "search":  # most of the space: names would say nothing
            left = sum(outcome.cause == cause for outcome in outcomes)
            lines.append(f"Out of {len(outcomes)}, {left} were not tried: the search saw no promise in them")
            continue
        out = [outcome for outcome in outcomes if outcome.cause == cause]
        names = "; ".join(str(outcome.candidate) for outcome in out[:MOST_NAMED])
        names += f"; and {len(out) - MOST_NAMED} more, see --out or --json" if len(out) > MOST_NAMED else ""
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
        "seconds": {what: round(seconds, 2) for what, seconds in report.seconds.items()},
        "candidates": candidates,
    }


def compiled_object(case: Case, found: Iterable[Compiled]) -> dict:
    """One case compiled for a target."""
    return {"case": asdict(case), "candidates": [_outcome_object(c.outcome, c) for c in found]}


def entry_object(path: Path, entry: Entry) -> dict:
    """A stored choice; the key's fields and the facts side by side."""
    return {**entry.facts, **asdict(entry.key), "config": entry.config, "file": str(path)}


def held_out_object(one: HeldOut) -> dict:
    """A held-out shape as JSON holds it."""
    times = one.finals.hot_us
    return {
        "case": asdict(one.case),
        "rule": one.found.rule,
        "config": one.chosen.as_dict(),
        "default": one.default.as_dict(),
        "p50_us": _median(times.get(one.chosen)),
        "default_p50_us": _median(times.get(one.default)),
        "ratio": one.ratio,
        "verdict": one.word,
    }


def _outcome_object(outcome: Outcome, compiled: Compiled | None) -> dict:
    return {
        "config": outcome.candidate.as_dict(),
        "status": outcome.status,
        "cause": outcome.cause,
        "reason": outcome.reason,
        "resources": asdict(compiled.resources) if compiled and compiled.resources else None,
    }
