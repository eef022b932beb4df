"""`attn-graph env`: what machine this is, and what on it may spoil a measurement."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from ..profilers.environment import Check
    from ..profilers.sample import Environment

STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


def env(
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|cuda[:N]", help="Device to describe and check.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks that are to run here; checks reckon with them.")] = 1,
    pid: Annotated[
        int | None,
        typer.Option("--pid", min=1, help="Look at this live process (a server) instead: what it was started with."),
    ] = None,
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

    On a GPU it also launches a few graphs: a cost per node says that something looks on.

    Example: attn-graph env --check --tp 8
    """
    from ..profilers.devices import resolve
    from ..profilers.environment import by_level, checks, collect, launch_check, process_checks
    from ..profilers.nvtx_ranges import range_cost_ns, range_state

    if pid is not None:
        return _answer(process_checks(pid), as_json, check)
    where = resolve(device)
    environment = collect(["attn-graph", *sys.argv[1:]], {}, where, tp=tp)
    found = checks(environment)
    here = {"nvtx_range_ns": round(range_cost_ns(), 1), "nvtx_state": range_state()} | _tuned()
    if where.is_cuda:
        from ..profilers.observers import launch_cost

        fixed_us, per_node_us = launch_cost(str(where))
        here |= {"launch_fixed_us": round(fixed_us, 2), "launch_per_node_ns": round(1000 * per_node_us, 2)}
        found = by_level([*found, *launch_check(fixed_us, per_node_us)])
    if as_json:
        typer.echo(json.dumps(asdict(environment) | here | {"checks": [asdict(c) for c in found]}, indent=2))
    else:
        _print_tables(environment, here, found)
    return _exit_code(found, check)


def _answer(found: list[Check], as_json: bool, check: bool) -> ExitCode:
    """Findings alone, without the tables of this machine."""
    from rich.console import Console

    if as_json:
        typer.echo(json.dumps({"checks": [asdict(c) for c in found]}, indent=2))
    else:
        _print_checks(Console(), found)
        if not found:
            typer.echo("nothing found")
    return _exit_code(found, check)


def _exit_code(found: list[Check], check: bool) -> ExitCode:
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

    console = Console()
    rows = {
        "NVTX range": f"{here['nvtx_range_ns']} ns ({here['nvtx_state']})",
        "tuned block sizes": f"{here['tuned_entries']} in {here['tuned_file']} and shipped tables",
    }
    if "launch_fixed_us" in here:
        rows["graph launch"] = f"{here['launch_fixed_us']:g} us + {here['launch_per_node_ns']:g} ns per node"
    console.print(_table(_machine(environment) | rows))
    for gpu in environment.gpus:
        console.print(_table(gpu))
    _print_checks(console, found)


def _print_checks(console: Console, found: list[Check]) -> None:
    from rich.text import Text

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
        "SMT, turbo": f"{_on(e.smt)}, {_on(e.turbo)}",
        "memory nodes": e.numa_nodes,
        "clock source": e.clock_source,
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


def _on(switch: bool | None) -> str:
    return {True: "on", False: "off", None: "unknown"}[switch]


def _or_blank(value: object, pattern: str = "{}") -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return pattern.format(value)
