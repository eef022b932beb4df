"""`attn-graph report`: a saved run as plots and one HTML file that opens offline. Imports no torch."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pandas as pd

    from ..profilers.sample import Environment
    from .plots import PlotResult

REPORT = "report.html"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a saved run, as 'attn-graph bench' wrote it.")],
) -> None:
    """Draw the plots of a saved run and write them, with its tables, into one HTML file.

    Needs no GPU and no PyTorch: the CSV files of the run are all it reads.

    Example: attn-graph report results/h200
    """
    from ..profilers.results import read_samples, read_summary
    from .observe import is_observer_run, print_tables, write_tables
    from .plots import save_plots
    from .tables import print_summary

    plots = save_plots(run)
    path = write_report(run, plots)
    samples = read_samples(run)
    if is_observer_run(samples):
        print_tables(*write_tables(run, samples))
    else:
        print_summary(read_summary(run))
    for plot in plots:
        if plot.path is None:
            typer.echo(f"No plot {plot.name}: {plot.note}", err=True)
    typer.echo(f"Plots: {run / 'plots'}\nReport: {path}")


def write_report(run: Path, plots: Sequence[PlotResult]) -> Path:
    """Write ``report.html`` into the run's folder; `plots` as `save_plots` returned them. Returns its path.

    Raises:
        ResultsError: `run` is not a run, or cannot be written.
    """
    import jinja2

    from ..profilers.results import ResultsError, read_environment, read_samples, read_summary
    from ..profilers.slow import slow_rows
    from . import tables
    from .observe import is_observer_run
    from .tables import UNTRACED, arm_rows, case_labels, cases_in

    summary, samples, environment = read_summary(run), read_samples(run), read_environment(run)
    if is_observer_run(samples):  # its other rows are in observer.csv and the plot
        summary = summary[summary["observer"] == UNTRACED]
    shared, labels = case_labels([case for case, _ in cases_in(summary)])
    environments = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environments.filters["data_uri"] = _data_uri
    page = environments.get_template("report.html.j2").render(
        name=Path(run).resolve().name,
        shared=shared,
        environment=environment,
        facts=list(_facts(environment)),
        command=shlex.join(environment.command),
        headings=[column.heading for column in tables.COLUMNS],
        cases=[(labels[case.key], arm_rows(rows)) for case, rows in cases_in(summary)],
        predicted_note=tables.PREDICTED_NOTE if (summary["source"] == "predicted").any() else "",
        plots=plots,
        waits=list(waiting(samples)),
        slow=list(slow_rows(samples)),
        gaps=list(missing(samples)),
        number=tables.number,
    )
    path = Path(run) / REPORT
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror}") from error
    return path


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """Who waits for whom in one case and arm: how often `rank` was the last, and what it waited itself, in us.

    `recurring`: this rank is last more often than chance explains; jitter that rotates over the ranks is nobody's.
    """

    case: str
    arm: str
    source: str
    rank: int
    last: int
    steps: int
    p50: float
    p99: float
    sum: float
    aligned: bool
    recurring: bool


def waiting(samples: pd.DataFrame) -> Iterator[WaitingRow]:
    """From the ranks' launch ends and first waits, steps that all ranks have. Nothing for a single rank."""
    from ..profilers.collective import analyse_collectives
    from .tables import UNTRACED, arm_order, cases_in

    rows = samples[(samples["status"] == "ok") & (samples["observer"] == UNTRACED)]
    rows = rows[rows["metric"].isin(("launch_end_us", "first_wait_us")) & (rows["rank"] >= 0)]
    for case, of_case in cases_in(rows):
        waits = of_case[of_case["metric"] == "first_wait_us"]
        for arm in arm_order(waits["arm"]):
            of_arm = of_case[of_case["arm"] == arm]
            for source in waits.loc[waits["arm"] == arm, "source"].unique():
                arrivals = _by_step(of_arm[of_arm["metric"] == "launch_end_us"])
                stays = _by_step(of_arm[(of_arm["metric"] == "first_wait_us") & (of_arm["source"] == source)])
                steps = arrivals.index.intersection(stays.index)
                if steps.empty or stays.shape[1] < 2 or list(arrivals.columns) != list(stays.columns):
                    continue
                found = analyse_collectives(stays.loc[steps].to_numpy(), arrivals.loc[steps].to_numpy())
                for i, rank in enumerate(stays.columns):
                    own = found.rank_waits[i]
                    yield WaitingRow(
                        case.title, arm, source, int(rank), found.last[i], found.cost.n,
                        own.p50, own.p99, own.sum, found.one_clock, found.recurring and i == found.late_rank,
                    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Missing:
    """A number that is not there, as often as it is not, with the cause that was recorded."""

    case: str
    arm: str
    metrics: str
    status: str
    cause: str


def missing(samples: pd.DataFrame) -> Iterator[Missing]:
    """One row for each case, arm, status and cause that left metrics without a number."""
    from .tables import STATUS_WORDS, cases_in

    for case, rows in cases_in(samples[~samples["status"].isin(("ok", "not_applicable"))]):
        for (arm, status, cause), found in rows.groupby(["arm", "status", "cause"], sort=False, observed=True):
            yield Missing(case.title, arm, ", ".join(found["metric"].unique()), STATUS_WORDS[status], cause)


def _by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """[steps, ranks] of values; steps that a rank lacks are left out."""
    return rows.pivot_table(index="step", columns="rank", values="value", observed=True).dropna()


def _facts(environment: Environment) -> Iterator[tuple[str, str]]:
    """Field and value for people; what could not be read says so."""
    for field in fields(environment):
        value = getattr(environment, field.name)
        if field.name in ("command", "warnings"):
            continue
        if field.name == "gpus":
            value = "; ".join(", ".join(f"{k} {v}" for k, v in gpu.items()) for gpu in value) or "none"
        elif isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
        yield field.name, "unknown" if value in ("", None) else str(value)


def _data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
