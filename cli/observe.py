"""`attn-graph bench --observer`: the same steps bare, under each observer and after it, as tables.

The samples go into the run's folder like any others, labelled with their observer; ``observer.csv`` and
``observer_fit.csv`` are made from them, here or again by `attn-graph report`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .errors import CliError, ExitCode

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from ..profilers.devices import Device
    from ..profilers.observers import LaunchFit, Observation, ObserverRow
    from ..profilers.results import RunWriter
    from ..profilers.sample import Case, Sample
    from .plan import Plan

OBSERVER_TABLE, OBSERVER_FIT = "observer.csv", "observer_fit.csv"
ARMS = ("aten-eager", "fused-eager", "fused-graph")
"""Arms when the user names none: the classic path, our kernel dispatched, and the goal."""

TIMEOUT_S = 300.0


def observer_names(text: str) -> list[str]:
    """Observers of a comma list; ``all`` is all of them. The control always runs, for factors rest on it.

    Raises:
        CliError: an unknown one.
    """
    from ..backends.registry import unknown_message
    from ..profilers.observers import OBSERVERS
    from .plan import split

    names = list(OBSERVERS) if text == "all" else split(text, "--observer")
    for name in names:
        if name not in OBSERVERS:
            raise CliError(unknown_message("observer", name, [*OBSERVERS, "all"]))
    return ["none", *(name for name in OBSERVERS if name in names and name != "none")]


@dataclass(frozen=True, slots=True)
class ObserverRun:
    """A run under observers, decided."""

    observers: Sequence[str]
    plan: Plan
    arms: tuple[str, ...]
    rounds: int | None
    device: Device
    folder: Path
    quiet: bool = False

    def measure(self) -> None:
        """One process an observation; all of them on disk at the end, or as many as there are when something ends it.

        Raises:
            CliError: cases of several ranks: what watching costs is a matter of one process.
        """
        from ..profilers.environment import collect
        from ..profilers.observers import ROUNDS, ObserverPlan, body_table, observations, observe_all
        from ..profilers.results import RunWriter

        if any(case.tp > 1 for case in self.plan.cases):
            raise CliError("--observer measures one process at a time; leave --tp out, or give --tp 1")
        if not self.plan.cases:
            raise CliError(f"no case to observe: {'; '.join(self.plan.refused.values())}")
        plan = ObserverPlan(
            cases=tuple(self.plan.cases),
            arms=self.arms,
            bodies=body_table(self.plan.cases[0]),
            device=str(self.device),
            rounds=self.rounds or ROUNDS,
        )
        options = {"observer": ",".join(self.observers), "arms": list(self.arms), "rounds": plan.rounds}
        environment = collect(["attn-graph", *sys.argv[1:]], options, self.device)
        found: dict[Case, list[Sample]] = {case: [] for case in plan.all_cases}
        with RunWriter(self.folder, environment) as writer:
            try:
                for observation, samples in observe_all(plan, observations(self.observers), TIMEOUT_S):
                    self._say(observation)
                    for case, of_case in samples.items():
                        found[case] += of_case
            finally:
                _write(writer, found)

    def _say(self, observation: Observation) -> None:
        if not self.quiet and sys.stderr.isatty():
            typer.echo(f"measured: {observation.title}", err=True)


def _write(writer: RunWriter, found: dict[Case, list[Sample]]) -> None:
    for case, samples in found.items():
        if samples:
            writer.write_case(case, samples)


def is_observer_run(rows: pd.DataFrame) -> bool:
    """Whether rows of a summary, or samples, were taken by phases of an observer."""
    return any(" " in label for label in rows["observer"].unique())


def write_tables(folder: Path, samples: pd.DataFrame) -> tuple[list[ObserverRow], list[LaunchFit]]:
    """Write observer.csv and observer_fit.csv into the folder of a run, and return their rows."""
    import pandas as pd

    from ..profilers.observers import LaunchFit, ObserverRow, launch_fits, observer_rows

    rows = observer_rows(samples)
    fits = launch_fits(rows)
    for name, kind, records in ((OBSERVER_TABLE, ObserverRow, rows), (OBSERVER_FIT, LaunchFit, fits)):
        frame = pd.DataFrame([asdict(record) for record in records], columns=[f.name for f in fields(kind)])
        frame.to_csv(folder / name, index=False, lineterminator="\n", float_format="%.6g")
    return rows, fits


def print_tables(rows: Sequence[ObserverRow], fits: Sequence[LaunchFit]) -> None:
    """Print what watching costs a step, and what it costs a launch by node."""
    from .tables import new_console

    console = new_console()
    for title, table in _step_tables(rows):
        console.print(title, style="bold", highlight=False, markup=False)
        console.print(table, "")
    by = METRIC_WORDS[_launcher(rows)]
    for title, table in (
        (f"{by} of the straight body alone, us p50: bare/during/after", _launch_table(rows)),
        (f"{by} of the body alone = fixed us + ns per node, ±standard error", _fit_table(fits)),
    ):
        if table.row_count:
            console.print(title, style="bold", highlight=False, markup=False)
            console.print(table, "")


METRIC_WORDS = {
    "prep_host_us": "prep",
    "launch_host_us": "launch (driver)",
    "replay_host_us": "launch (PyTorch)",
    "step_host_us": "step",
}


def _step_tables(rows: Sequence[ObserverRow]) -> Iterator[tuple[str, Table]]:
    """One table a case and arm."""
    from ..profilers.observers import BODY
    from .tables import STATUS_WORDS, number, plain_table

    groups = dict.fromkeys((row.case, row.arm, row.graph_nodes, row.graph_branches) for row in rows if row.arm != BODY)
    for case, arm, nodes, branches in groups:
        table = plain_table("")
        for heading, side in (
            ("observer", "left"), ("metric", "left"), ("bare\nus p50", "right"), ("during\nus p50", "right"),
            ("x", "right"), ("after\nus p50", "right"), ("x", "right"), ("status", "left"),
        ):  # fmt: skip
            table.add_column(heading, justify=side, overflow="fold")
        of_arm = [r for r in rows if (r.case, r.arm, r.graph_nodes, r.graph_branches) == (case, arm, nodes, branches)]
        said = ""
        for row in sorted(of_arm, key=_order):
            who = _who(row)
            table.add_row(
                who if who != said else "", METRIC_WORDS[row.metric], number(row.bare_us), number(row.during_us),
                number(row.during_factor), number(row.after_us), number(row.after_factor),
                STATUS_WORDS[row.status] + (f": {row.cause}" if row.cause else ""),
            )  # fmt: skip
            said = who
        topology = f"{nodes} nodes" + (f" in {branches} branches" if branches > 1 else "")
        yield f"{case}, {topology}, {arm}", table


def _launch_table(rows: Sequence[ObserverRow]) -> Table:
    """Launch of the straight body by number of nodes: bare/during/after."""
    from ..profilers.observers import BODY
    from .tables import number, plain_table

    straight = [r for r in rows if r.arm == BODY and r.graph_branches == 1 and r.metric == _launcher(rows)]
    table = plain_table("")
    table.add_column("observer", overflow="fold")
    counts = sorted({row.graph_nodes for row in straight})
    for nodes in counts:
        table.add_column(f"{nodes:,} node{'s' if nodes > 1 else ''}", justify="right", overflow="fold")
    cells: dict[str, dict[int, str]] = {}
    for row in sorted(straight, key=_order):
        figures = (row.bare_us, row.during_us, row.after_us)
        said = "/".join(map(number, figures)) if row.status == "ok" else row.status
        cells.setdefault(_who(row), {})[row.graph_nodes] = said
    for who, by_nodes in cells.items():
        table.add_row(who, *(by_nodes.get(nodes, "") for nodes in counts))
    return table


def _fit_table(fits: Sequence[LaunchFit]) -> Table:
    """Fixed cost in us + cost per node in ns with its standard error, by observer, topology and phase."""
    from ..profilers.observers import PHASES
    from .tables import plain_table

    table = plain_table("")
    table.add_column("observer", overflow="fold")
    table.add_column("branches", justify="right")
    for phase in PHASES:
        table.add_column(phase, justify="right", overflow="fold")
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for fit in sorted((fit for fit in fits if fit.metric == _launcher(fits)), key=_order):
        cells.setdefault((_who(fit), fit.graph_branches), {})[fit.phase] = _fit_words(fit)
    for (who, branches), by_phase in cells.items():
        table.add_row(who, str(branches), *(by_phase.get(phase, "") for phase in PHASES))
    return table


def _fit_words(fit: LaunchFit) -> str:
    from .tables import number

    error = "" if fit.per_node_stderr_us is None else f" ±{number(1000 * fit.per_node_stderr_us)}"
    return f"{number(fit.fixed_us)} + {number(1000 * fit.per_node_us)}{error}"


def _launcher(records: Sequence[ObserverRow] | Sequence[LaunchFit]) -> str:
    """The driver's own call where it was timed; a recorded graph has PyTorch's replay only."""
    from ..profilers.observers import BODY

    seen = {record.metric for record in records if getattr(record, "arm", BODY) == BODY}
    return "launch_host_us" if "launch_host_us" in seen else "replay_host_us"


def _order(record: ObserverRow | LaunchFit) -> tuple[int, bool, int]:
    from ..profilers.observers import OBSERVERS

    return list(OBSERVERS).index(record.observer), record.teardown, list(METRIC_WORDS).index(record.metric)


def _who(record: ObserverRow | LaunchFit) -> str:
    from ..profilers.observers import Observation

    return Observation(record.observer, record.teardown).title


def finish(folder: Path, *, plots: bool, as_json: bool) -> ExitCode:
    """Write the tables of a measured run, draw, and print."""
    import json

    from ..profilers.results import read_environment, read_samples

    rows, fits = write_tables(folder, read_samples(folder))
    if plots:
        from .plots import save_plots
        from .report import write_report

        write_report(folder, save_plots(folder))
    if as_json:
        document = {
            "folder": str(folder),
            "environment": asdict(read_environment(folder)),
            "observer": [asdict(row) for row in rows],
            "fits": [asdict(fit) for fit in fits],
        }
        typer.echo(json.dumps(document, indent=1))
    else:
        print_tables(rows, fits)
        typer.echo(f"Results: {folder / OBSERVER_TABLE}, {folder / OBSERVER_FIT}")
    failed = dict.fromkeys((_who(row), row.cause) for row in rows if row.status == "failed")
    for who, cause in failed:
        typer.echo(f"Error: under {who}: {cause}", err=True)
    return ExitCode.FOUND_WRONG if failed else ExitCode.OK
