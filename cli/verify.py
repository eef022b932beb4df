"""`attn-graph verify`: does every rebuild leave what it must, whatever the graph has captured before?"""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, plan, tp
from .errors import CliError, ExitCode

if TYPE_CHECKING:
    from ..profilers.conformance import Finding

MOST_JOBS_ON_A_GPU = 32
"""Each process holds a context of half a gigabyte and its own tables there; more only wait for one another."""


def verify(
    backend: Annotated[
        str,
        typer.Option(
            "--backend", help="Backends, wrappers and runners, comma list, or 'all'; see 'attn-graph backends'."
        ),
    ] = "all",
    mode: options.Mode = "all",
    device: options.DeviceName = "auto",
    arm: Annotated[
        str,
        typer.Option("--arm", help="Arms to compare, comma list of names or parts of names; compile only on request."),
    ] = "aten,fused",
    full: Annotated[
        bool,
        typer.Option("--full", help="Every page size and batch sizes up to 512, instead of a small choice."),
    ] = False,
    check: Annotated[
        str,
        typer.Option(
            "--check", help="Checks, comma list of ids (C3, L1, R1), C, L, R, V, faults, fault:NAME, or 'all'."
        ),
    ] = "all",
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes. Default: one a core, at most 32 on each GPU.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="CSV file, made anew, a row for each finding as soon as it is known."),
    ] = None,
    as_json: options.Json = False,
) -> ExitCode:
    """Prove that every rebuild is right under capture and replay, and that known faults would be noticed.

    Each arm is replayed over sequences of batches on poisoned buffers and compared with an oracle, cell by cell; then
    come the rules of capture and replay. Exit code 1 if anything is wrong. Ctrl-C
    keeps what is known; checks that had begun are told as interrupted. Processes share out all visible GPUs unless
    --device names one.

    Example: attn-graph verify --backend trtllm_mha --mode decode
    """
    from ..backends.modes import Arm, ForwardMode
    from ..profilers.devices import parse_request, resolve, use_interpreter

    where = resolve(device)
    any_gpu = where.is_cuda and parse_request(device)[1] is None
    use_interpreter(where)  # before names are looked up: that imports what third parties registered
    names = _names(backend)
    wanted = _modes(mode, names)
    arms = [Arm.parse(name) for name in plan.arms(arm)]
    from ..profilers.conformance import CHECKS
    from ..profilers.conformance import verify as findings_of

    gpus = tp.gpus() if any_gpu else int(where.is_cuda)
    checks = None if check == "all" else _checks(check, list(CHECKS))
    found = findings_of(
        names,
        None if wanted is None else [ForwardMode(name) for name in wanted],
        "cuda" if any_gpu else str(where),
        full=full,
        checks=checks,
        arms=arms,
        jobs=jobs or _usual_jobs(gpus),
    )
    with _stopped_like_ctrl_c():
        known, interrupted = _watched(found if out is None else _written(found, out))
    known.sort(key=_as_listed(names))
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in known], indent=2))
    elif known:
        others = f", and {gpus - 1} more" if gpus > 1 else ""
        _print(known, {c.id: c.title for c in CHECKS.values()}, where.title + others)
    if interrupted:
        raise KeyboardInterrupt
    if not known:
        raise CliError("nothing was checked: no such fault, or no backend has the modes asked for")
    return ExitCode.FOUND_WRONG if any(f.status == "fail" for f in known) else ExitCode.OK


def _usual_jobs(gpus: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_JOBS_ON_A_GPU * gpus) if gpus else cores


@contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """SIGTERM, as job schedulers send it, keeps what is known too."""

    def stop(signum: int, frame: object) -> None:
        signal.signal(signum, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _as_listed(names: Sequence[str]):
    """Order of a report: backends as asked for, their modes, the checks of each."""
    from ..backends.registry import registered

    modes = {name: registered()[name].modes for name in names}

    def key(f: Finding) -> tuple:
        numbered = f.check[1:].isdigit()  # sizes before the checks, faults behind them
        place = (1, f.check[0], int(f.check[1:])) if numbered else (2 * f.check.startswith("fault:"), f.check, 0)
        return names.index(f.backend), place[0] == 2, modes[f.backend].index(f.mode), place

    return key


def _written(found: Iterable[Finding], path: Path) -> Iterator[Finding]:
    """Hand findings on, each after it is on disk."""
    from ..profilers.conformance import Finding

    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, [f.name for f in fields(Finding)])
        rows.writeheader()
        for finding in found:
            rows.writerow(asdict(finding))
            file.flush()
            yield finding


def _names(text: str) -> list[str]:
    """Backends, wrappers and runners of a comma list, ``all`` for every one."""
    from ..backends.registry import lookup, registered

    if text == "all":
        return list(registered())
    return [lookup(name, "backend", "wrapper", "runner").name for name in plan.split(text, "--backend")]


def _modes(text: str, names: Sequence[str]) -> list[str] | None:
    """Modes asked for, each of which some backend has; None means each backend's own."""
    from ..backends.registry import registered, unknown_message

    if text == "all":
        return None
    asked = plan.split(text.replace("-", "_"), "--mode")
    known = list(dict.fromkeys(mode for name in names for mode in registered()[name].modes))
    for mode in asked:
        if mode not in known:
            raise CliError(unknown_message(f"mode for {', '.join(names)}", mode, known))
    return asked


def _checks(text: str, known: list[str]) -> list[str]:
    """Check ids of a comma list; a letter means its family.

    Raises:
        CliError: no such check.
    """
    from ..backends.registry import unknown_message

    chosen: list[str] = []
    for item in plan.split(text, "--check"):
        family = [id for id in known if item in (id, id[0])]
        if not family and item != "faults" and not item.startswith("fault:"):
            raise CliError(unknown_message("check", item, [*known, "faults", "fault:NAME"]))
        chosen += family or [item]
    return list(dict.fromkeys(chosen))


def _watched(found: Iterable[Finding]) -> tuple[list[Finding], bool]:
    """Collect findings, and whether they were interrupted; on a terminal, say how far they have come."""
    from rich.console import Console

    console, collected = Console(stderr=True), []
    with console.status("verify") if console.is_terminal else nullcontext() as status:
        try:
            for finding in found:
                collected.append(finding)
                if status is not None:
                    failed = sum(f.status == "fail" for f in collected)
                    status.update(f"{finding.backend} {finding.mode}: {len(collected)} checks, {failed} failed")
        except KeyboardInterrupt:
            return collected, True
    return collected, False


_USUAL = {"pass": "passed", "fail": "failed", "skip": "skipped"}


def _print(found: Sequence[Finding], titles: dict[str, str], where: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title=f"Conformance on {where}", title_justify="left")
    for heading in ("backend", "mode"):
        table.add_column(heading, no_wrap=True)
    states = {"pass": "green", "fail": "bold red", "skip": "dim", "interrupted": "yellow"}
    states = {
        state: style for state, style in states.items() if state in _USUAL or any(f.status == state for f in found)
    }
    for state in states:
        table.add_column(_USUAL.get(state, state), overflow="fold")
    rules = [f for f in found if not f.check.startswith("fault:")]
    for backend, mode in dict.fromkeys((f.backend, f.mode) for f in rules):
        row = [f for f in rules if (f.backend, f.mode) == (backend, mode)]
        table.add_row(backend, mode, *(Text(_ids(row, state), style) for state, style in states.items()))
    if rules:
        console.print(table)
    faults = [f for f in found if f.check.startswith("fault:")]
    for backend in dict.fromkeys(f.backend for f in faults):
        of = [f for f in faults if f.backend == backend]
        told = f"{backend}: {sum(f.status == 'pass' for f in of)} of {len(of)} known faults are noticed"
        console.print(told, highlight=False, soft_wrap=True)
    for reason in dict.fromkeys(f"{f.check} skipped: {f.detail}" for f in found if f.status == "skip"):
        console.print(Text(reason, "dim"), soft_wrap=True)
    for f in found:
        if f.status == "fail":
            title = f" ({titles[f.check]})" if f.check in titles else ""
            console.print(Text(f"\nFAIL {f.backend} {f.mode} {f.check}{title}", "bold red"), soft_wrap=True)
            console.print(Text(f.detail), soft_wrap=True)


def _ids(row: Sequence[Finding], status: str) -> str:
    """``C1-C6 C8``: ids in runs."""
    ids = [id for id in dict.fromkeys(f.check for f in row if f.status == status) if id[1:].isdigit()]
    others = [f.check for f in row if f.status == status and not f.check[1:].isdigit() and f.check != "sizes"]
    if status == "fail" and any(f.check == "sizes" for f in row if f.status == "fail"):
        others.append("sizes")
    runs: list[list[str]] = []
    for id in ids:
        if runs and runs[-1][-1][0] == id[0] and int(runs[-1][-1][1:]) + 1 == int(id[1:]):
            runs[-1].append(id)
        else:
            runs.append([id])
    return " ".join([run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs] + others)
