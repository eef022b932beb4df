"""What `tune` does once it is decided what and where: measure, replay, compile, compare, with progress."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .errors import CliError, ExitCode

if TYPE_CHECKING:
    from ..profilers.devices import Device
    from ..profilers.sample import Case
    from ..tuning.held_out import HeldOut
    from ..tuning.log import Replay
    from ..tuning.outcome import Outcome
    from ..tuning.regret import LeftOut
    from ..tuning.session import Listen, Report
    from ..tuning.static import Compiled
    from ..tuning.trials import Search

MOST_COMPILERS = 12
UNTIMED = "candidates can be checked for values but not timed, so nothing is stored."


def search_of(name: str | None, timed: bool) -> Search:
    from ..backends.registry import unknown_message
    from ..tuning.tuner import SEARCHES

    name = name or ("surrogate" if timed else "exhaustive")  # without times there is nothing to learn from
    if name not in SEARCHES:
        raise CliError(unknown_message("search", name, list(SEARCHES)))
    return SEARCHES[name]


@dataclass(frozen=True, slots=True)
class Run:
    """A tuning run, decided."""

    where: Device
    search: Search
    seed: int
    budget_s: float | None
    ranks: int
    held_out: bool
    out: Path | None
    resume: bool
    as_json: bool

    def tune(self, cases: list[Case]) -> ExitCode:
        from ..tuning.log import Log
        from ..tuning.regret import left_out
        from ..tuning.session import Session
        from ..tuning.static import device_target
        from ..tuning.store import check_writable, save
        from .tune_tables import print_held_out, print_left_out, print_report

        where, started = self.where, time.monotonic()
        file = check_writable() if where.is_cuda else None
        resumed = self._resumed()
        ends = started + (self.budget_s or math.inf)
        reports: list[Report] = []
        held: list[HeldOut] = []
        lost: list[LeftOut] = []
        try:
            with (
                Log(self.out, where.name) as log,
                _progress(cases, self.as_json) as listen,
                Session(
                    where,
                    log,
                    target=device_target(where.index) if where.is_cuda else None,
                    jobs=_jobs(),
                    search=self.search,
                    seed=self.seed,
                    ranks=self._rank_devices(),
                    resumed=resumed,
                    listen=listen,
                ) as session,
            ):
                for report in session.tune(cases, self.budget_s or math.inf):
                    reports.append(report)
                lost = left_out(reports)
                if lost:
                    save([one.entry for one in lost])
                if self.held_out:
                    held.extend(session.held_out(reports, ends))
        finally:  # Ctrl-C leaves the finished cases stored: they are shown too
            reports.sort(key=lambda report: cases.index(report.case))
            if not self.as_json:
                for report in reports:
                    print_report(report)
                print_left_out(lost)
                print_held_out(held)
                if any(report.key for report in reports):
                    typer.echo(f"Stored in {file}, after {time.monotonic() - started:.0f} s")
        if where.is_cuda:
            return _finish({"device": where.title, "file": str(file)}, reports, self.as_json, held=held)
        _finish({"device": where.title, "file": None}, reports, self.as_json, f"on a CPU {UNTIMED}")
        return ExitCode.USAGE

    def _rank_devices(self) -> list[str]:
        """A GPU for each rank where there are as many, else the one of the run for all."""
        if self.ranks == 1 or not self.where.is_cuda:
            return []
        import torch

        if torch.cuda.device_count() >= self.ranks:
            return [f"cuda:{rank}" for rank in range(self.ranks)]
        return [str(self.where)] * self.ranks

    def _resumed(self) -> dict[Case, Replay]:
        from ..tuning.log import read_log

        if not self.resume or not self.out.exists():
            return {}
        return {logged.case: logged for logged in read_log(self.out) if logged.gpu == self.where.name}


def against_autotune(cases: list[Case], where: Device, seed: int, out: Path | None, as_json: bool) -> ExitCode:
    from ..tuning.against_autotune import Rows, compare
    from .tune_tables import print_autotune

    if not where.is_cuda:
        raise CliError(f"--against-autotune: on a CPU {UNTIMED}")
    if len(cases) > 1:
        raise CliError(
            f"--against-autotune compares on one case, and these are {len(cases)}. Name one by --backend and --bs, and "
            "--swa or --no-swa where it has both"
        )
    rows, started = [], time.monotonic()
    try:
        with Rows(out) as file:
            for row in compare(cases[0], where, seed):
                file.write(row)
                rows.append(row)
                if not row.on and not as_json:
                    others = f" (a tie: {row.tied})" if " | " in row.tied else ""
                    typer.echo(f"{row.tuner}, process {row.process}: {row.seconds:.1f} s, {row.candidate}{others}")
    finally:  # Ctrl-C leaves what is there
        if as_json:
            typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        else:
            print_autotune(rows)
            typer.echo(f"After {time.monotonic() - started:.0f} s")
    return ExitCode.OK


def replay(path: Path, search: str | None, seed: int, as_json: bool) -> ExitCode:
    from ..tuning import session
    from ..tuning.log import read_log
    from ..tuning.replays import compare_searches
    from .tune_tables import print_report, print_searches

    logged = list(read_log(path))
    how = search_of(search or "exhaustive", timed=True)
    reports = [session.replay(one, how, seed) for one in logged]
    searches = compare_searches(logged) if search is None else []
    if not as_json:
        for report in reports:
            print_report(report)
        print_searches(searches)
    head = {"replayed": str(path), "searches": [asdict(one) for one in searches]}
    return _finish(head, reports, as_json)


def _finish(
    head: dict, reports: list[Report], as_json: bool, problem: str = "", held: Sequence[HeldOut] = ()
) -> ExitCode:
    """Say the problem, if any, last; print the document."""
    from .tune_tables import held_out_object, report_object

    without = [report.case.title for report in reports if report.tuned.choice is None]
    if without and not problem:
        problem = f"no valid config for {'; '.join(without)}. The table says why"
    if as_json:
        body = {"cases": list(map(report_object, reports)), "held_out": list(map(held_out_object, held))}
        typer.echo(json.dumps({**head, "problem": problem, **body}, indent=1))
    if problem:
        typer.echo(f"Error: {problem}", err=True)
    return ExitCode.FOUND_WRONG if problem else ExitCode.OK


def static(cases: list[Case], where: Device, text: str | None, out: Path | None, as_json: bool) -> ExitCode:
    from ..tuning.log import Log
    from ..tuning.outcome import OK
    from ..tuning.space import candidates, ruled_out
    from ..tuning.static import Compilers, device_target, parse_target
    from .tune_tables import compiled_object, print_compiled

    if text is None and not where.is_cuda:
        raise CliError("--static: there is no GPU to take the target from. Name one: --target sm_90")
    target = parse_target(text) if text else device_target(where.index)
    found: dict[Case, list[Compiled]] = {}
    with Log(out) as log, _progress(cases, as_json) as listen, Compilers(target, _jobs()) as compilers:
        for case in cases:
            for compiled in compilers.survey(case, candidates(case, target.warp_size)):
                log.compiled(case, compiled)
                listen(case, "compiled", compiled.outcome)
                found.setdefault(case, []).append(compiled)
    unusable = [case.title for case, all_ in found.items() if all(c.outcome.status != OK for c in all_)]
    if as_json:
        documents = [compiled_object(case, compiled) for case, compiled in found.items()]
        typer.echo(json.dumps({"target": str(target), "cases": documents}, indent=1))
    else:
        for case, compiled in found.items():
            print_compiled(case, str(target), compiled, ruled_out(case, target.warp_size))
    if unusable:
        typer.echo(f"Error: no valid config for {target}: {'; '.join(unusable)}", err=True)
    return ExitCode.FOUND_WRONG if unusable else ExitCode.OK


@contextmanager
def _progress(cases: Sequence[Case], quiet: bool) -> Iterator[Listen]:
    """Yields ``listen(case, phase, outcome)``; silent when piped or asked to be."""
    if quiet or not sys.stderr.isatty():
        yield lambda case, phase, outcome: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, bests = bar.add_task("starting"), dict.fromkeys(cases, math.inf)

        def listen(case: Case, phase: str, outcome: Outcome) -> None:
            if outcome.median_us and not outcome.cause:
                bests[case] = min(bests[case], outcome.median_us)
            best = "" if bests[case] == math.inf else f", best so far {bests[case]:.2f} us"
            title = f"{list(bests).index(case) + 1}/{len(bests)} {case.title}"
            bar.update(task, description=f"{title}: {phase} {outcome.candidate}{best}")

        yield listen


def _jobs() -> int:
    from ..profilers.environment import allowed_cores

    return max(1, min(MOST_COMPILERS, len(allowed_cores()) - 1))  # one core goes on measuring meanwhile
