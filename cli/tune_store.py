"""What `tune` does with stored choices alone: show, clear, compare two files, and answer whether all are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .errors import ExitCode

if TYPE_CHECKING:
    from ..profilers.sample import Case


def show(as_json: bool) -> ExitCode:
    from ..tuning.store import saved_entries, user_file
    from .tune_tables import entry_object, print_entries

    entries, problems = saved_entries()
    own = any(path == user_file() for path, _ in entries)
    if as_json:
        listed = [entry_object(path, entry) for path, entry in entries]
        typer.echo(json.dumps({"file": str(user_file()), "entries": listed, "notes": problems}, indent=1))
    else:
        if entries:
            print_entries(entries)
        if not own:
            listed = "; what is listed came with the package" if entries else ""
            typer.echo(f"Nothing is tuned: {user_file()} holds no block sizes{listed}. Run 'attn-graph tune' on a GPU")
    for problem in problems:
        typer.echo(f"Note: {problem}", err=True)
    return ExitCode.OK


def clear() -> ExitCode:
    from ..tuning import store

    typer.echo(store.clear())
    return ExitCode.OK


def diff(a: Path, b: Path, as_json: bool) -> ExitCode:
    """1 where the files differ, as `diff` has it."""
    from ..tuning import store
    from .tune_tables import print_diff

    found = store.diff(a, b)
    if as_json:
        rows = [{**asdict(key), "a": x and x.config, "b": y and y.config} for key, x, y in found]
        typer.echo(json.dumps({"a": str(a), "b": str(b), "differ": rows}, indent=1))
    elif found:
        print_diff(a, b, found)
    else:
        typer.echo(f"{a} and {b} hold the same choices")
    return ExitCode.FOUND_WRONG if found else ExitCode.OK


def assert_hit(cases: Sequence[Case], gpu: str, as_json: bool) -> ExitCode:
    """Every case has an entry of its own: neighbours would do in a bench, and are missing here."""
    from ..tuning.store import EXACT, describe, lookup_case

    found = {case: lookup_case(case, gpu) for case in cases}
    missing = [answer for answer in found.values() if answer.rule != EXACT]
    if as_json:
        rows = [{**asdict(a.key), "rule": a.rule, "config": a.config, "detail": a.detail} for a in found.values()]
        typer.echo(json.dumps({"gpu": gpu, "missing": len(missing), "cases": rows}, indent=1))
    else:
        for answer in found.values():
            typer.echo(describe(answer))
    for answer in missing:
        typer.echo(f"Error: no entry for {answer.key}. Run 'attn-graph tune' on this GPU", err=True)
    return ExitCode.FOUND_WRONG if missing else ExitCode.OK
