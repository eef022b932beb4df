"""`attn-graph env`: what machine this is, and what on it may spoil a measurement."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import ExitCode

if TYPE_CHECKING:
    from ..profilers.environment import Check
    from ..profilers.sample import Environment

STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


def env(
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|cuda[:N]", help="Device to describe and check.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit 1 if a check is at level 'error': numbers taken here would mean something else. Findings at "
            "level 'info' and 'warning' are listed and leave the exit code 0.",
        ),
    ] = False,
) -> ExitCode:
    """Show this machine: processor, container, GPUs, versions, and what may spoil a measurement.

    Example: attn-graph env --check
    """
    from ..profilers.devices import resolve
    from ..profilers.environment import checks, collect
    from ..profilers.nvtx_ranges import range_cost_ns, range_state

    environment = collect(["attn-graph", *sys.argv[1:]], {}, resolve(device))
    found = checks(environment)
    here = {"nvtx_range_ns": round(range_cost_ns(), 1), "nvtx_state": range_state()} | _tuned()
    if as_json:
        typer.echo(json.dumps(asdict(environment) | here | {"checks": [asdict(c) for c in found]}, indent=2))
    else:
        _print_tables(environment, here, found)
    return ExitCode.FOUND_WRONG if check and any(c.level == "error" for c in found) else ExitCode.OK


def _tuned() -> dict:
    """Where tuned block sizes are looked up first, and how many are found in all tables."""
    from ..tuning.store import StoreError, saved_entries, user_file

    try:
        return {"tuned_file": str(user_file()), "tuned_entries": len(saved_entries()[0])}
    except StoreError as error:
        return {"tuned_file": str(error), "tuned_entries": 0}


def _print_tables(environment: Environment, here: dict, found: list[Check]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    rows = {
        "NVTX range": f"{here['nvtx_range_ns']} ns ({here['nvtx_state']})",
        "tuned block sizes": f"{here['tuned_entries']} in {here['tuned_file']} and shipped tables",
    }
    console.print(_table(_machine(environment) | rows))
    for gpu in environment.gpus:
        console.print(_table(gpu))
    for item in found:
        console.print(Text(f"{item.level}: {item}", style=STYLES[item.level]), soft_wrap=True)


def _table(rows: dict):
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(_or_blank(value)))
    return table


def _machine(e: Environment) -> dict:
    quota = _or_blank(e.container_cpu_quota, ", container limited to {:g}")
    dirty = " with changes" if e.git_dirty else ""
    return {
        "device": e.device,
        "host": e.hostname,
        "system": e.os,
        "processor": e.cpu,
        "cores": f"{e.affinity_cores} usable of {e.cores}{quota}",
        "load, 1 min": e.load_1m,
        "governor": e.governor,
        "memory": _or_blank(e.memory_gib, "{:g} GiB"),
        "python": e.python,
        "torch": e.torch,
        "CUDA, HIP": " ".join(filter(None, (e.cuda, e.hip))),
        "triton": e.triton,
        "numpy": e.numpy,
        "driver": e.driver,
        "CUDA_VISIBLE_DEVICES": "unset" if e.visible_devices is None else repr(e.visible_devices),
        "attn-graph": f"{e.attn_graph} {e.git_commit[:12]}{dirty}".strip(),
    }


def _or_blank(value: object, pattern: str = "{}") -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return pattern.format(value)
