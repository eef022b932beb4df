"""`attn-graph backends`: what is registered, without importing any of it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..backends.registry import COMPARED, BackendInfo, registered


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """List the registered backends, wrappers and runners.

    'dispatches' counts the ATen dispatches of one classic rebuild, without and with sliding-window tables. 'fused-graph
    host' says where nothing is dispatched, launched or waited for before the main graph, and where not and why.

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
        "host_work": {mode: reason for mode in info.modes if (reason := info.host_work_in(mode))},
        "planners": info.planners,
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
    table.add_column("fused-graph\nhost", overflow="fold")
    for info in infos:
        kind = "\n".join((info.kind, info.family, info.pattern))
        modes = "\n".join(_mode_line(info, mode) for mode in info.modes)
        table.add_row(*map(escape, (info.name, kind, modes, _host(info))))
    console = Console()
    console.print(table)
    for info in infos:
        for reason in dict.fromkeys(filter(None, map(info.host_work_in, info.modes))):
            console.print(escape(f"{info.name}: host work in fused-graph: {reason}"), highlight=False, soft_wrap=True)
        for planner, how in info.planners.items():
            how = "compared by verify where it is installed" if how == COMPARED else how
            console.print(escape(f"{info.name}: {planner}: {how}"), highlight=False, soft_wrap=True)
        if info.note:
            console.print(escape(f"{info.name}: {info.note}"), highlight=False, soft_wrap=True)


def _host(info: BackendInfo) -> str:
    if info.kind == "runner":
        return ""
    reasons = [info.host_work_in(mode) for mode in info.modes]
    if not any(reasons):
        return "zero"
    return "not zero:\nsee below" if info.kind == "backend" else "zero, but\nsee below"


def _mode_line(info: BackendInfo, mode: str) -> str:
    counts = info.dispatches.get(mode)
    if counts is None:
        return mode
    return f"{mode} ({'/'.join('-' if count is None else str(count) for count in counts)})"
