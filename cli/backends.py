"""`attn-graph backends`: what is registered, without importing any of it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..backends.registry import BackendInfo, registered


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """List the registered backends, wrappers and runners.

    'dispatches' counts the ATen dispatches of one classic rebuild, without and with sliding-window tables.

    Example: attn-graph backends --json
    """
    infos = list(registered().values())
    if as_json:
        typer.echo(json.dumps([_as_object(info) for info in infos], indent=2))
    else:
        _print_table(infos)


def _as_object(info: BackendInfo) -> dict:
    return {
        "name": info.name,
        "kind": info.kind,
        "family": info.family,
        "pattern": info.pattern,
        "modes": list(info.modes),
        "note": info.note,
        "dispatches": {mode: {"no_swa": plain, "swa": swa} for mode, (plain, swa) in info.dispatches.items()},
    }


def _print_table(infos: list[BackendInfo]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("kind, family,\npattern", overflow="fold")
    table.add_column("modes (dispatches\nwithout/with SWA)", no_wrap=True)
    for info in infos:
        kind = "\n".join((info.kind, info.family, info.pattern))
        modes = "\n".join(_mode_line(info, mode) for mode in info.modes)
        table.add_row(*map(escape, (info.name, kind, modes)))
    console = Console()
    console.print(table)
    for info in infos:
        if info.note:
            console.print(escape(f"{info.name}: {info.note}"), highlight=False, soft_wrap=True)


def _mode_line(info: BackendInfo, mode: str) -> str:
    counts = info.dispatches.get(mode)
    if counts is None:
        return mode
    return f"{mode} ({'/'.join('-' if count is None else str(count) for count in counts)})"
