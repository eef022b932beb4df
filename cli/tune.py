"""`attn-graph tune`: choose block sizes for this GPU, or say that the default is as good."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .errors import CliError, ExitCode

if TYPE_CHECKING:
    from ..profilers.devices import Device
    from ..profilers.sample import Case
    from ..tuning.outcome import Outcome
    from ..tuning.session import Report
    from ..tuning.static import Compiled
    from ..tuning.tuner import Search

MIX = "loguniform"
MOST_COMPILERS = 8
UNTIMED = "candidates can be checked for values but not timed, so nothing is stored."


def tune(
    backend: Annotated[
        str, typer.Option("--backend", help="Backends whose kernels to tune, comma list.")
    ] = "trtllm_mha",
    bs: Annotated[
        str, typer.Option("--bs", help="Captured batch sizes, comma list; each is tuned by itself.")
    ] = "1,8,64,256",
    context: Annotated[
        str,
        typer.Option(
            "--context",
            help="Mix of context lengths that a choice must serve: a number, uniform:LO:HI, loguniform:LO:HI, or "
            "'loguniform' for all lengths up to --max-context.",
        ),
    ] = MIX,
    page_size: options.PageSize = "64",
    max_context: Annotated[
        str, typer.Option("--max-context", help="Context limit of the tables in tokens, comma list.")
    ] = "131072",
    swa: options.Swa = None,
    device: options.DeviceName = "auto",
    search: Annotated[
        str | None,
        typer.Option("--search", help="exhaustive or random. Default: exhaustive; random with a --time-budget."),
    ] = None,
    time_budget: Annotated[
        float | None, typer.Option("--time-budget", min=1, help="Seconds for everything; what it left out is said.")
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Only compile the candidates and say why some are out. Needs no GPU.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option("--target", help="With --static: sm_90, gfx942 and the like. Default: the GPU's own."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", help="Choose again from a file that --out wrote. Needs no GPU, stores nothing."),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="List what is stored, for every GPU.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget what is stored; the file is renamed, not deleted.")
    ] = False,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="CSV to append every candidate to, as it comes; times in us.")
    ] = None,
) -> ExitCode:
    """Choose block sizes for this GPU, or say that the default is as good.

    Every candidate is first checked against the oracle on poisoned outputs, then timed
    inside a graph; the fastest few are timed again side by side. The default stays unless
    it is beaten by more than 2% and more than the noise. The choice is stored, and later
    runs name it.

    Exit codes: 1 where no candidate is usable, 2 where there is no GPU to time on.

    Example: attn-graph tune --bs 64 --time-budget 60 --out candidates.csv
    """
    with _errors_explained():
        if show:
            return _show(as_json)
        if clear:
            return _clear()
        how = _search(search, time_budget)
        if replay is not None:
            return _replay(replay, how, seed, as_json)
        if target is not None and not static:
            raise CliError("--target goes with --static: times are only true for the GPU that is there")
        where = _device(device, needed=target is None)
        cases = _cases(backend, bs, context, page_size, max_context, swa, where.kind, seed)
        if static:
            return _static(cases, where, target, out, as_json)
        return _tune(cases, where, how, seed, time_budget, out, as_json)


@contextmanager
def _errors_explained() -> Iterator[None]:
    from ..tuning.child import ChildDied, ChildTimeout
    from ..tuning.log import LogError
    from ..tuning.space import NotTunable
    from ..tuning.static import TargetError
    from ..tuning.store import StoreError

    try:
        yield
    except (LogError, NotTunable, StoreError, TargetError) as error:
        raise CliError(str(error)) from error
    except (ChildDied, ChildTimeout) as error:
        raise CliError(
            f"the measuring process did not get a case ready: {error}. Try a smaller --max-context"
        ) from error


# What to tune, where and how.


def _search(name: str | None, budget_s: float | None) -> Search:
    from ..backends.registry import unknown_message
    from ..tuning.tuner import SEARCHES

    name = name or ("random" if budget_s else "exhaustive")
    if name not in SEARCHES:
        raise CliError(unknown_message("search", name, list(SEARCHES)))
    return SEARCHES[name]


def _device(request: str, needed: bool) -> Device:
    from ..profilers.devices import Device, resolve, use_interpreter

    where = resolve(request) if needed else Device("cpu")
    use_interpreter(where)
    return where


def _cases(
    backend: str, bs: str, context: str, page_size: str, max_context: str, swa: bool | None, device: str, seed: int
) -> list[Case]:
    """A case for each combination, with full batches of the captured size."""
    from ..tuning.space import kernel_of
    from . import plan

    cases = []
    for limit in plan.numbers(max_context, "--max-context", 1):
        mix = f"{MIX}:1:{limit}" if context == MIX else context
        _check_mix(mix, limit)
        cases += plan.sweep(
            backend=backend,
            mode="decode",
            bs=bs,
            context=mix,
            page_size=page_size,
            max_context=str(limit),
            swa=swa,
            topk="1",
            draft_tokens="0",
            tp="1",
            graph_nodes="typical",
            graph_branches="1",
            allreduce_at=10,
            device=device,
            seed=seed,
        ).cases
    for case in cases:
        kernel_of(case.backend)
    return list(dict.fromkeys(replace(case, bs=case.bucket) for case in cases))


def _check_mix(mix: str, limit: int) -> None:
    import numpy as np

    from ..backends.batch import context_lengths, parse_context

    try:
        context_lengths(parse_context(mix), 1, limit, np.random.default_rng(0))
    except ValueError as error:
        raise CliError(f"--context: {error}") from None


def _jobs() -> int:
    from ..profilers.environment import allowed_cores

    return min(MOST_COMPILERS, len(allowed_cores()))


# What it does.


def _tune(
    cases: list[Case],
    where: Device,
    search: Search,
    seed: int,
    budget_s: float | None,
    out: Path | None,
    as_json: bool,
) -> ExitCode:
    from ..tuning.log import Log
    from ..tuning.session import Session
    from ..tuning.static import device_target
    from ..tuning.store import check_writable
    from .tune_tables import print_report

    if not where.is_cuda and where.reason:
        raise CliError(
            f"no GPU: {where.reason}. Here {UNTIMED} Try --device cpu to check values, or --static --target sm_90"
        )
    file = check_writable() if where.is_cuda else None
    target = device_target(where.index) if where.is_cuda else None
    ends = time.monotonic() + (budget_s or math.inf)
    reports: list[Report] = []
    try:
        with (
            Log(out, where.name) as log,
            _progress(as_json) as (begin, listen),
            Session(where, log, target=target, jobs=_jobs(), search=search, seed=seed, listen=listen) as session,
        ):
            for i, case in enumerate(cases):
                begin(f"{i + 1}/{len(cases)} {case.title}")
                reports.append(session.tune(case, (ends - time.monotonic()) / (len(cases) - i)))
    finally:  # Ctrl-C leaves the finished cases stored: they are shown too
        if not as_json:
            for report in reports:
                print_report(report)
            if any(report.key for report in reports):
                typer.echo(f"Stored in {file}")
    if where.is_cuda:
        return _finish({"device": where.title, "file": str(file)}, reports, as_json)
    problem = f"on a CPU {UNTIMED}"
    _finish({"device": where.title, "file": None}, reports, as_json, problem)
    return ExitCode.USAGE


def _replay(path: Path, search: Search, seed: int, as_json: bool) -> ExitCode:
    from ..tuning.log import read_log
    from ..tuning.session import replay
    from .tune_tables import print_report

    reports = [replay(logged, search, seed) for logged in read_log(path)]
    if not as_json:
        for report in reports:
            print_report(report)
    return _finish({"replayed": str(path)}, reports, as_json)


def _finish(head: dict, reports: list[Report], as_json: bool, problem: str = "") -> ExitCode:
    """Say the problem, if any, last; print the document."""
    from .tune_tables import report_object

    without = [report.case.title for report in reports if report.tuned.choice is None]
    if without and not problem:
        problem = f"no valid config for {'; '.join(without)}. The table says why"
    if as_json:
        typer.echo(json.dumps({**head, "problem": problem, "cases": list(map(report_object, reports))}, indent=1))
    if problem:
        typer.echo(f"Error: {problem}", err=True)
    return ExitCode.FOUND_WRONG if problem else ExitCode.OK


def _static(cases: list[Case], where: Device, text: str | None, out: Path | None, as_json: bool) -> ExitCode:
    from ..tuning.log import Log
    from ..tuning.outcome import OK
    from ..tuning.space import candidates
    from ..tuning.static import Compilers, device_target, parse_target
    from .tune_tables import compiled_object, print_compiled

    if text is None and not where.is_cuda:
        raise CliError("--static: there is no GPU to take the target from. Name one: --target sm_90")
    target = parse_target(text) if text else device_target(where.index)
    found: dict[Case, list[Compiled]] = {}
    with Log(out) as log, _progress(as_json) as (begin, listen), Compilers(target, _jobs()) as compilers:
        for i, case in enumerate(cases):
            begin(f"{i + 1}/{len(cases)} {case.title}")
            for compiled in compilers.survey(case, candidates(case, target.warp_size)):
                log.compiled(case, compiled)
                listen("compiled", compiled.outcome)
                found.setdefault(case, []).append(compiled)
    unusable = [case.title for case, all_ in found.items() if all(c.outcome.status != OK for c in all_)]
    if as_json:
        documents = [compiled_object(case, compiled) for case, compiled in found.items()]
        typer.echo(json.dumps({"target": str(target), "cases": documents}, indent=1))
    else:
        for case, compiled in found.items():
            print_compiled(case, str(target), compiled)
    if unusable:
        typer.echo(f"Error: no valid config for {target}: {'; '.join(unusable)}", err=True)
    return ExitCode.FOUND_WRONG if unusable else ExitCode.OK


def _show(as_json: bool) -> ExitCode:
    from ..tuning.store import saved_entries, user_file
    from .tune_tables import entry_object, print_entries

    entries, problems = saved_entries()
    if as_json:
        listed = [entry_object(path, entry) for path, entry in entries]
        typer.echo(json.dumps({"file": str(user_file()), "entries": listed, "notes": problems}, indent=1))
    elif entries:
        print_entries(entries)
    else:
        typer.echo(f"Nothing is tuned: {user_file()} holds no block sizes. Run 'attn-graph tune' on a GPU")
    for problem in problems:
        typer.echo(f"Note: {problem}", err=True)
    return ExitCode.OK


def _clear() -> ExitCode:
    from ..tuning.store import clear

    typer.echo(clear())
    return ExitCode.OK


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[str, Outcome], None]]]:
    """Yields ``begin(title)`` and ``listen(phase, outcome)``; silent when piped or asked to be."""
    if quiet or not sys.stderr.isatty():
        yield (lambda title: None), (lambda phase, outcome: None)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, shown = bar.add_task("starting"), {"title": "", "best": math.inf}

        def begin(title: str) -> None:
            shown.update(title=title, best=math.inf)
            bar.update(task, description=title)

        def listen(phase: str, outcome: Outcome) -> None:
            if outcome.median_us and not outcome.cause:
                shown["best"] = min(shown["best"], outcome.median_us)
            best = "" if shown["best"] == math.inf else f", best so far {shown['best']:.2f} us"
            bar.update(task, description=f"{shown['title']}: {phase} {outcome.candidate}{best}")

        yield begin, listen
