"""One measuring run: cases over ranks into a folder of results. Shared by `bench` and `compare`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ExitCode

if TYPE_CHECKING:
    from ..profilers.devices import Device
    from ..profilers.inject import Injection
    from ..profilers.results import RunWriter
    from ..profilers.sample import Case
    from ..profilers.team import Place
    from .plan import Plan

RANK_TIMEOUT_S = 300.0
"""Silence after which a rank counts as hung: above the longest compilation of one arm."""


@dataclass(frozen=True, slots=True)
class Tour:
    """What runs when an option is not given: about two minutes on this kind of device."""

    bs: str
    context: str
    max_context: str
    most_ranks: int
    steps: int
    warmup: int

    @property
    def ranks(self) -> int:
        from ..profilers.environment import allowed_cores

        return max(1, min(self.most_ranks, len(allowed_cores()) or 1))


TOURS = {
    "cuda": Tour("1,64", "8192", "131072", most_ranks=4, steps=200, warmup=20),
    "cpu": Tour("1,8", "512", "2048", most_ranks=2, steps=20, warmup=2),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: exit code, the problem that ended it early, and lines a reader should see."""

    exit_code: ExitCode
    problem: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A run, decided: what to measure, how, and where it goes.

    `place` is this process's among ranks with a device each; None where this process starts ranks that share one.
    """

    plan: Plan
    arms: tuple[str, ...]
    steps: int
    warmup: int
    device: Device
    folder: Path
    resume: bool = False
    tuned: bool = True
    nvtx: bool = True
    quiet: bool = False
    place: Place | None = None
    allreduce: str = "auto"
    injection: Injection | None = None
    timeout_s: float = RANK_TIMEOUT_S

    def measure(self) -> Outcome:
        """Run all cases, each on disk as it ends; the fewest ranks first. Ranks other than 0 only take part.

        Raises:
            RankFailure: only from ranks with a device each.
        """
        from ..profilers.ranks import run_ranks

        if self.place is None:
            return self._write(run_ranks, "")
        from ..profilers.team import Team

        with Team(self.place, self.device.kind, self.allreduce, self._agreed(), self.timeout_s) as team:
            if self.place.rank == 0:
                return self._write(team.run, team.note)
            team.serve()
            return Outcome(ExitCode.OK)

    def _write(self, run_ranks: Callable, note: str) -> Outcome:
        """Measure by `run_ranks` into the folder."""
        from ..profilers.environment import collect
        from ..profilers.ranks import RankFailure
        from ..profilers.results import RunWriter

        cases = self.plan.cases
        environment = collect(
            ["attn-graph", *sys.argv[1:]], self._options(), self.device, tp=max(case.tp for case in cases)
        )
        notes: tuple[str, ...] = ()
        try:
            with RunWriter(self.folder, environment, self.resume) as writer:
                if note:
                    writer.warn(note)
                self._write_refused(writer)
                todo = [(i, case) for i, case in enumerate(cases) if case.key not in writer.done_cases()]
                tuned, notes = self._tuned([case for _, case in todo])
                self._measure_all(run_ranks, todo, writer, tuned)
        except RankFailure as failure:  # outside, so that leaving the writer by it marks the run failed
            trace = f"\n{failure.traceback}" if failure.traceback else ""
            return Outcome(ExitCode.FOUND_WRONG, f"{failure}{trace}", notes)
        return Outcome(ExitCode.OK, notes=notes)

    def _measure_all(self, run_ranks: Callable, todo: list[tuple[int, Case]], writer: RunWriter, tuned: dict) -> None:
        from ..profilers.ranks import RankFailure

        with self._progress(len(todo)) as advance:
            for ranks in sorted({case.tp for _, case in todo}):
                try:
                    cases = [(i, c) for i, c in todo if c.tp == ranks]
                    self._measure_with(run_ranks, ranks, cases, writer, tuned, advance)
                except RankFailure as failure:
                    writer.warn(str(failure))
                    raise

    def _write_refused(self, writer: RunWriter) -> None:
        """A case that its backend refuses is a row with the reason, so that a sweep shows what it left out."""
        from ..profilers.results import ACROSS_RANKS
        from ..profilers.sample import Sample

        for case, reason in self.plan.refused.items():
            if case.key not in writer.done_cases():
                blank = [
                    Sample(arm, ACROSS_RANKS, -1, "prep_host_us", None, "unsupported", cause=reason)
                    for arm in self.arms
                ]
                writer.write_case(case, blank)

    def _measure_with(
        self,
        run_ranks: Callable,
        ranks: int,
        cases: list[tuple[int, Case]],
        writer: RunWriter,
        tuned: dict,
        advance: Callable[[str], None],
    ) -> None:
        from ..profilers.assemble import samples_of
        from ..profilers.measure import MeasureSettings, measure_cases
        from ..profilers.ranks import plan_affinity

        if self.place is None:
            for note in (plan_affinity(ranks).note, self._shared_gpu(ranks)):
                if note:
                    writer.warn(note)
        configs = {key: found.config for key, found in tuned.items() if found.config}
        settings = MeasureSettings(self.arms, self.steps, self.warmup, self.nvtx, configs, self.injection)
        by_index, arrived = dict(cases), {}

        def on_report(rank: int, part) -> None:
            parts = arrived.setdefault(part.case_index, {})
            parts[rank] = part
            if len(parts) == ranks:
                case = by_index[part.case_index]
                rule = tuned[case.key].rule if case.key in tuned else "default"
                writer.write_case(case, samples_of(case, arrived.pop(part.case_index)), tuned=rule)
                advance(case.title)

        target_args = (cases, settings, str(self.device))
        run_ranks(ranks, measure_cases, target_args, timeout_s=self.timeout_s, on_report=on_report)

    def _shared_gpu(self, ranks: int) -> str:
        if not self.device.is_cuda or ranks < 2:
            return ""
        return (
            f"{ranks} simulated ranks share {self.device}: their contexts take turns, so waits are predicted and "
            "pessimistic. step_alone_us is a step of rank 0 with the others at rest, step_host_us one beside them."
        )

    def _agreed(self) -> dict[str, str]:
        """What every rank must have alike, by the name that an error says it by."""
        from importlib.metadata import version

        return {
            "set of cases": "; ".join(case.key for case in self.plan.cases),
            "set of arms": ",".join(self.arms),
            "number of steps": f"{self.steps} after {self.warmup}",
            "all-reduce": self.allreduce,
            "delay to inject": str(self.injection),
            "device": self.device.name or self.device.kind,
            **{name: version(name) for name in ("torch", "attn-graph")},
            **self._chosen(),
        }

    def _chosen(self) -> dict[str, str]:
        """Block sizes as this rank would take them: hosts may hold unlike files of tuned ones."""
        found, _ = self._tuned(self.plan.cases)
        cases = {case.key: case.title for case in self.plan.cases}
        return {f"choice of block sizes for {cases[key]}": answer.setting for key, answer in found.items()}

    def _tuned(self, cases: list[Case]) -> tuple[dict, tuple[str, ...]]:
        """Where each case's block sizes come from, and a line for each distinct answer."""
        if not self.tuned or not self.device.is_cuda:
            return {}, ()
        from ..tuning.store import describe, lookup_case

        found = {case.key: lookup_case(case, self.device.name) for case in cases}
        return found, tuple(dict.fromkeys(map(describe, found.values())))

    def _options(self) -> dict:
        """As environment.json keeps them."""
        return {
            "arms": list(self.arms),
            "steps": self.steps,
            "warmup": self.warmup,
            "tuned": self.tuned,
            "nvtx": self.nvtx,
            "cases": len(self.plan.cases),
            "allreduce": self.allreduce if self.place else "none",
            "inject": str(self.injection or ""),
            "hosts": self.place.hosts if self.place else 1,
        }

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[str], None]]:
        """Yields ``advance(title)``; silent when piped or asked to be."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda title: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting ranks", total=total)
            yield lambda title: bar.update(task, advance=1, description=title)


def default_folder(device: Device) -> Path:
    """results/<time>-<device>."""
    from datetime import datetime

    name = "".join(c if c.isalnum() else "-" for c in (device.name or device.kind).lower())
    return Path("results") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
