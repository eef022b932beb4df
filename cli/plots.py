"""Plots of a saved run, from its two tables alone. Imports no torch.

A plot never invents or hides: a number that is missing is a gap and a line under the plot says why; a plot with nothing
to show is not drawn and says why. Every arm has one colour, the same in all plots and all runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..profilers.results import (
    POOLED,
    ResultsError,
    cases_in,
    read_environment,
    read_samples,
    read_summary,
)
from ..profilers.sample import MEASURED, PREDICTED, Case
from ..profilers.waits import INJECT, PREDICT
from .observe import is_observer_run
from .tables import STATUS_WORDS, UNTRACED, arm_order, case_labels, number

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = "plots"
DPI = 150
MOST_PANELS = 24

# Okabe and Ito's palette, told apart with any common colour vision: warm for aten, cold for fused. Peers, which are
# rarely there, take one left over and two of Tol's muted scheme.
ARM_COLOURS = {
    "aten-eager": "#D55E00",
    "aten-glue": "#E69F00",
    "aten-graph": "#CC79A7",
    "compile-eager": "#000000",
    "fused-eager": "#56B4E9",
    "fused-glue": "#0072B2",
    "fused-graph": "#009E73",
    "sglang-eager": "#F0E442",
    "sglang-glue": "#999933",
    "sglang-graph": "#882255",
}
OTHER_COLOUR = "#7F7F7F"
LAG_COLOUR, WAIT_COLOUR = "#BBBBBB", "#EEEEEE"

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    # The same numbers give the same bytes, so that committed plots change only when results do.
    "svg.hashsalt": "attn-graph",
}


class NothingToPlot(Exception):
    """Why a plot is not drawn."""


@dataclass(frozen=True, slots=True)
class PlotResult:
    """A plot that was saved (`path`, a PNG with an SVG beside it), or why not (`path` None and the reason in `note`).

    Where there is a plot, `note` is what stands under it: the numbers that are missing, and why.
    """

    name: str
    title: str
    how_to_read: str
    path: Path | None
    note: str


class RunTables:
    """The tables of a run, without the numbers that were taken under a tracer. Samples are read when first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Rows of rank ``all``."""
        rows = read_summary(self.folder)
        return rows[(rows["rank"] == POOLED) & (rows["observer"] == UNTRACED)]

    @cached_property
    def samples(self) -> pd.DataFrame:
        """Rows that hold a number."""
        rows = read_samples(self.folder)
        return rows[(rows["status"] == "ok") & (rows["observer"] == UNTRACED)]

    def measured(self, *metrics: str) -> pd.DataFrame:
        """Summary rows with numbers for any of `metrics`.

        Raises:
            NothingToPlot: there are none.
        """
        rows = self.summary[self.summary["metric"].isin(metrics)]
        found = rows[rows["status"] == "ok"]
        if found.empty:
            words = sorted({STATUS_WORDS[status] for status in rows["status"]})
            raise NothingToPlot(f"{' and '.join(metrics)}: {', '.join(words) or 'not recorded in this run'}")
        return found

    def sampled(self, *metrics: str) -> pd.DataFrame:
        """Samples of `metrics` of which there must be some, as for `measured`."""
        self.measured(metrics[0])
        return self.samples[self.samples["metric"].isin(metrics)]

    def gaps(self, *metrics: str, arms: Sequence[str] | None = None) -> str:
        """Which of `arms` (default: all) have no number of `metrics`, and why; blank if none."""
        rows = self.summary[
            self.summary["metric"].isin(metrics) & ~self.summary["status"].isin(("ok", "not_applicable"))
        ]
        texts = []
        if arms is not None:
            rows = rows[rows["arm"].isin(arms)]
        for status, found in rows.groupby("status", sort=False):
            arms = ", ".join(arm_order(found["arm"]))
            texts.append(f"{arms} ({STATUS_WORDS[status]}, {_count(len(list(cases_in(found))), 'case')})")
        return f"No number: {'; '.join(texts)}." if texts else ""


def save_plots(folder: Path) -> list[PlotResult]:
    """Draw every plot that the run has numbers for, as PNG and SVG under ``plots/``.

    A run under observers has plots of its own: its bare numbers are those of one process, in a case or two.

    Raises:
        ResultsError: `folder` is not a run, or cannot be written.
    """
    import matplotlib

    tables = RunTables(Path(folder))
    # Also refuses a folder that is no run before anything is made.
    observed = is_observer_run(read_summary(folder))
    try:
        (tables.folder / FOLDER).mkdir(exist_ok=True)
        with matplotlib.rc_context(STYLE):
            plots = OBSERVER_PLOTS if observed else PLOTS
            return [_save(plot, tables) for plot in plots if not plot.table or (tables.folder / plot.table).is_file()]
    except OSError as error:
        raise ResultsError(f"cannot write plots to {tables.folder / FOLDER}: {error.strerror}") from error


def _save(plot: Plot, tables: RunTables) -> PlotResult:
    path = tables.folder / FOLDER / f"{plot.name}.png"
    try:
        figure, note = plot.draw(tables)
    except NothingToPlot as reason:
        # One that an earlier report left would be of other numbers.
        for old in (path, path.with_suffix(".svg")):
            old.unlink(missing_ok=True)
        return PlotResult(plot.name, plot.title, plot.how_to_read, None, str(reason))
    figure.suptitle(f"{plot.title}\n{figure.get_suptitle()}".strip(), x=0.01, ha="left", fontsize=11)
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color="#555555")
    figure.savefig(path, dpi=DPI)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return PlotResult(plot.name, plot.title, plot.how_to_read, path, note)


# The plots. Each takes the tables and gives the figure and the note under it.


def host_prep(tables: RunTables) -> tuple[Figure, str]:
    """Host time of the rebuild by arm: dot at p50, bar to p99."""
    tables.measured("prep_host_us")
    figure = _range_panels(tables, ("prep_host_us",), "host time of the rebuild, us (log)")
    return figure, tables.gaps("prep_host_us")


def device_time(tables: RunTables) -> tuple[Figure, str]:
    """Device time of the rebuild by arm: filled dot hot, open dot cold."""
    tables.measured("prep_device_us", "prep_device_cold_us")
    figure = _range_panels(tables, ("prep_device_us", "prep_device_cold_us"), "device time of the rebuild, us (log)")
    return figure, tables.gaps("prep_device_us", "prep_device_cold_us")


def rank_skew(tables: RunTables) -> tuple[Figure, str]:
    """Share of steps whose skew is at most x, by arm."""
    samples = tables.sampled("launch_skew_us")
    figure, panels = _panels(samples, height=2.6)
    for axes, rows in panels:
        for arm in arm_order(rows["arm"]):
            skews = rows.loc[rows["arm"] == arm, "value"].sort_values()
            shares = [(i + 1) / skews.size for i in range(skews.size)]
            axes.step(skews, shares, where="post", color=_colour(arm), label=f"{arm} (n={skews.size})")
        axes.set_ylim(0, 1.02)
        axes.grid(True)
        axes.set(xlabel="launch skew between ranks, us (log)", ylabel="share of steps")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    _log_x(figure)
    return figure, f"{_shared_gpu(tables)} {tables.gaps('launch_skew_us')}".strip()


def first_wait(tables: RunTables) -> tuple[Figure, str]:
    """Share of steps whose longest first wait is at most x, by arm: measured solid, predicted dashed."""
    samples = tables.sampled("first_wait_us")
    exchange = tables.samples.loc[tables.samples["metric"] == "exchange_us", "value"]
    figure, panels = _panels(samples, height=2.6)
    for axes, rows in panels:
        for arm in arm_order(rows["arm"]):
            for source, line in ((MEASURED, "-"), (PREDICTED, "--")):
                found = rows[(rows["arm"] == arm) & (rows["source"] == source)]
                waits = found.groupby("step")["value"].max().sort_values()
                if waits.empty:
                    continue
                shares = [(i + 1) / waits.size for i in range(waits.size)]
                label = f"{arm}, {source} (n={waits.size})"
                axes.step(waits.clip(lower=0.1), shares, line, where="post", color=_colour(arm), label=label)
        if len(exchange):
            axes.axvline(exchange.median(), color=LAG_COLOUR, label="exchange without skew")
        axes.set_ylim(0, 1.02)
        axes.grid(True)
        axes.set(xlabel="longest first wait of a step, us (log)", ylabel="share of steps")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    _log_x(figure)
    return figure, f"{_shared_gpu(tables)} {tables.gaps('first_wait_us')}".strip()


def first_wait_ranks(tables: RunTables) -> tuple[Figure, str]:
    """How the longest first wait grows with the ranks: p50 and p99 by arm, extrapolated and measured."""
    from matplotlib.ticker import FuncFormatter

    rows = _side_table(tables, PREDICT)
    drawn = rows[rows["source"].isin(("extrapolated", "measured"))]
    if drawn.loc[drawn["source"] == "extrapolated", "n_ranks"].nunique() < 2:
        raise NothingToPlot("waits were predicted for fewer than two rank counts; see bench --predict-ranks")
    arms = arm_order(drawn["arm"])
    basis = drawn["basis_ranks"].max()
    nodes = sorted(drawn["graph_nodes"].unique())
    figure = _figure(11, 0.9 + 3.2 * len(nodes))
    grid = figure.subplots(len(nodes), 2, squeeze=False, sharex=True)
    for (y, count), (x, name) in itertools.product(enumerate(nodes), enumerate(("p50", "p99"))):
        axes = grid[y, x]
        for arm in arms:
            here = drawn[(drawn["arm"] == arm) & (drawn["graph_nodes"] == count)]
            for model, line in (("independent", "-"), ("correlated", ":")):
                some = here[(here["model"] == model) & (here["basis_ranks"] == basis)].sort_values("n_ranks")
                some = some.drop_duplicates("n_ranks")
                axes.plot(some["n_ranks"], some[f"{name}_us"], line, color=_colour(arm), label=f"{arm}, {model}")
                low, high = some[f"{name}_low_us"], some[f"{name}_high_us"]
                axes.fill_between(some["n_ranks"], low, high, color=_colour(arm), alpha=0.12, linewidth=0)
            dots = here[here["source"] == "measured"].drop_duplicates("n_ranks")
            axes.plot(dots["n_ranks"], dots[f"{name}_us"], "o", color=_colour(arm), markersize=5)
        axes.axvspan(basis, drawn["n_ranks"].max(), color="#F4F4F4", zorder=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.grid(True)
        axes.set_title(f"{name}, {count} graph nodes", loc="left")
        axes.set(xlabel="ranks", ylabel="longest first wait, us (log above 1)")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper")
    return figure, (
        f"Resampled from the launch ends of {basis} measured rank{'s' if basis > 1 else ''}; shaded: more ranks than "
        "that, so extrapolated. Bands: 95% bootstrap over steps. Dots: measured on the device, less the exchange."
    )


def dose_response(tables: RunTables) -> tuple[Figure, str]:
    """What the other ranks wait when one rank's launch is delayed on purpose, by dose."""
    rows = _side_table(tables, INJECT)
    several = rows[rows["injected_rank"] == "each"]
    rows = several if len(several) else rows
    figure = _figure(9, 4)
    axes = figure.subplots()
    for arm in arm_order(rows["arm"]):
        found = rows[rows["arm"] == arm].sort_values("dose_us").drop_duplicates("dose_us")
        slope = f"slope {found['slope'].iloc[0]:.3f} ± {found['slope_stderr'].iloc[0]:.3f}"
        axes.plot(found["dose_us"], found["others_p50_us"], "o-", color=_colour(arm), label=f"{arm}: {slope}")
    highest = rows["dose_us"].max()
    axes.plot([0, highest], [0, highest], color=LAG_COLOUR, linestyle="--", label="one for one")
    axes.grid(True)
    axes.set(xlabel="delay added to one rank, us", ylabel="wait of the others, p50, us")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure, f"n={rows['n'].min()} or more steps a dot; first waits are {', '.join(sorted(set(rows['source'])))}."


def timeline(tables: RunTables) -> tuple[Figure, str]:
    """One median and one p99 step of two arms, rank by rank, in the case with the largest skew."""
    ends = tables.sampled("launch_end_us")
    case, arms = _most_skewed(ends)
    ranks = int(ends["rank"].max()) + 1
    if ranks < 2:
        raise NothingToPlot("the run has one rank, so none drifts from another")
    rows = next(rows for found, rows in cases_in(tables.samples) if found == case)
    figure = _figure(10, 1.2 + len(arms) * (1.1 + 0.22 * ranks))
    grid = figure.subplots(len(arms), 2, squeeze=False, sharex="row", sharey=True)
    for arm, pair in zip(arms, grid, strict=True):
        steps = _steps(rows[rows["arm"] == arm])
        drawn = (("median", 0.5), ("p99", 0.99))
        latest = [_draw_step(axes, steps, arm, *which) for axes, which in zip(pair, drawn, strict=True)]
        pair[0].set_xlim(0, 1.03 * max(latest))
    grid[0, 0].invert_yaxis()
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper")
    figure.suptitle(case.title)
    note = f"Each row has its own time axis. Prep is drawn in the colour of its arm. {_shared_gpu(tables)}"
    return figure, note.strip()


def backends_overview(tables: RunTables) -> tuple[Figure, str]:
    """Host time of the rebuild over all backends: one dot a case, a line between the arms' medians."""
    rows = tables.measured("prep_host_us")
    groups = list(rows.groupby(["backend", "mode"], sort=False))
    if rows["backend"].nunique() < 2:
        raise NothingToPlot("the run has one backend")
    arms = [arm for arm in ("aten-eager", "fused-eager", "fused-glue", "fused-graph") if arm in set(rows["arm"])]
    figure = _figure(9, 1.6 + 0.34 * len(groups))
    axes = figure.subplots()
    for y, (_, found) in enumerate(groups):
        medians = [found.loc[found["arm"] == arm, "p50"].median() for arm in arms]
        axes.plot(medians, [y] * len(arms), color="#AAAAAA", linewidth=1, zorder=1)
        for arm, median in zip(arms, medians, strict=True):
            dots = found.loc[found["arm"] == arm, "p50"]
            axes.scatter(dots, [y] * len(dots), color=_colour(arm), s=14, alpha=0.4, linewidths=0)
            axes.scatter([median], [y], color=_colour(arm), s=42, label=arm if y == 0 else None)
    labels = [f"{backend} {mode} ({_count(len(list(cases_in(f))), 'case')})" for (backend, mode), f in groups]
    axes.set_yticks(range(len(groups)), labels)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(True, axis="x")
    axes.set_xlabel("host time of the rebuild, p50, us (log)")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    _log_x(figure)
    fewest, most = rows["n"].min(), rows["n"].max()
    note = f"Every small dot is the median of n={fewest if fewest == most else f'{fewest} to {most}'} samples."
    return figure, f"{note} {tables.gaps('prep_host_us', arms=arms)}".strip()


PHASE_COLOURS = {"bare": "#009E73", "during": "#D55E00", "after": "#0072B2", "recaptured": "#56B4E9"}
BRANCH_MARKERS = {1: "o", 2: "s", 4: "^"}


def observer_effect(tables: RunTables) -> tuple[Figure, str]:
    """Launch of the body by its number of nodes: a panel an observer, a colour a phase, a marker a topology."""
    from ..profilers.observers import BODY, PHASES, Observation, observer_rows

    rows = [r for r in observer_rows(read_samples(tables.folder)) if r.arm == BODY]
    if not any(r.bare_us is not None for r in rows):
        raise NothingToPlot("no process came to its measurement")
    metric = "launch_host_us" if any(r.metric == "launch_host_us" for r in rows) else "replay_host_us"
    measured = [r for r in rows if r.metric == metric and r.bare_us is not None]
    whos = list(dict.fromkeys((r.observer, r.teardown) for r in measured))
    columns = min(4, len(whos))
    figure = _figure(1.5 + 3 * columns, 1.4 + 2.7 * math.ceil(len(whos) / columns))
    grid = list(figure.subplots(math.ceil(len(whos) / columns), columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes, who in zip(grid, whos, strict=False):
        for phase in PHASES:
            for branches, marker in BRANCH_MARKERS.items():
                line = sorted(
                    (r.graph_nodes, us)
                    for r in measured
                    if (r.observer, r.teardown) == who
                    and r.graph_branches == branches
                    and (us := getattr(r, f"{phase}_us")) is not None
                )
                nodes, medians = [n for n, _ in line], [us for _, us in line]
                label = phase if branches == 1 else None
                axes.plot(
                    nodes, medians, marker=marker, markersize=4, linewidth=1, color=PHASE_COLOURS[phase], label=label
                )
        axes.set_title(Observation(*who).title, loc="left")
        axes.set(yscale="log", xlabel="graph nodes (log)", ylabel="launch, us p50 (log)")
        axes.grid(True)
    for axes in grid[len(whos) :]:
        axes.set_axis_off()
    _log_x(figure)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    blank = sorted({f"{r.observer} ({STATUS_WORDS[r.status]})" for r in rows if r.bare_us is None})
    graphs = "" if metric == "launch_host_us" else " No GPU: these are recorded graphs, replayed in Python."
    note = f"Circles: straight, squares: 2 branches, triangles: 4.{graphs}"
    return figure, note + (f" No number: {', '.join(blank)}." if blank else "")


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot, and what a reader needs to be told about it.

    Attributes:
        table: file that only runs which asked for it have; the others do without the plot, and without a word.
    """

    name: str
    title: str
    draw: Callable[[RunTables], tuple[Figure, str]]
    how_to_read: str
    table: str = ""


PLOTS = (
    Plot(
        "host_prep",
        "Host time of the metadata rebuild, by arm",
        host_prep,
        "The dot is the median step, the bar ends at the 99th percentile; both are written beside it with the number "
        "of samples. The axis is logarithmic: equal distances are equal factors. Further left is better; a long bar "
        "is a host that jitters, and jitter is what drives ranks apart.",
    ),
    Plot(
        "rank_skew",
        "How far the ranks' graph launches drift apart, by arm",
        rank_skew,
        "For each arm, the share of steps (up) whose launch skew, last rank minus first, is at most the time on the "
        "axis (right). A curve further left is better at every percentile; read the median at 0.5 and the tail near "
        "1. Every microsecond of skew is waited for by the other ranks in the first all-reduce of the step.",
    ),
    Plot(
        "first_wait",
        "How long the first all-reduce waits for the last rank, by arm",
        first_wait,
        "For each arm, the share of steps (up) whose longest first wait is at most the time on the axis (right). Solid "
        "lines were measured by the device's clock inside the graph and include the exchange itself, whose time "
        "without skew is the grey line; dashed lines are predicted from when the launches returned.",
    ),
    Plot(
        "first_wait_ranks",
        "How the first wait grows with the number of ranks",
        first_wait_ranks,
        "Lines: the slowest of N ranks, from resampled launch ends; solid as if every rank jittered by itself, dotted "
        "with what moves all ranks of a step together taken out. The truth lies between them as far as delays were "
        "sampled; a p99 that goes flat has met the largest delay that was measured.",
        table=PREDICT,
    ),
    Plot(
        "dose_response",
        "What the others wait when one rank is delayed on purpose",
        dose_response,
        "A known delay is added to one rank's launch. If the ruler is right, the other ranks wait longer by just that: "
        "the dots lie on the dashed line, and the slope is 1.",
        table=INJECT,
    ),
    Plot(
        "timeline",
        "A median and a bad step over the ranks",
        timeline,
        "One bar a rank from the common start: lag is the ruler's own error, prep the rebuild, launch the graph "
        "launch, and the mark is where the launch returned. The pale part is how long that rank waits for the last "
        "one. The bad step is the one at the 99th percentile of skew.",
    ),
    Plot(
        "device_time",
        "Device time of the metadata rebuild, by arm",
        device_time,
        "Filled dots: inputs are in the cache, as when step follows step. Open dots: they are not. The bar ends at "
        "the 99th percentile. Device time is what a rebuild inside the graph still costs.",
    ),
    Plot(
        "backends",
        "Host time of the rebuild over all backends",
        backends_overview,
        "One line a backend and mode. Small dots are cases, large dots their median; the length of the line is the "
        "factor between the classic rebuild and the fused one.",
    ),
)

OBSERVER_PLOTS = (
    Plot(
        "observer",
        "What watching costs a graph launch",
        observer_effect,
        "One panel an observer, each in a process of its own: bare is before it came, during while it watched, after "
        "when it had left, and recaptured the same on graphs captured after that. Lines that lie on each other are "
        "the good news; a line that climbs with the nodes is a cost per node, at every launch.",
    ),
)


# Shared pieces.


def _side_table(tables: RunTables, name: str) -> pd.DataFrame:
    """One of the small tables that `profilers.waits` writes beside a run."""
    import pandas as pd

    return pd.read_csv(tables.folder / name)


def _figure(width: float, height: float) -> Figure:
    """Inches. Without pyplot, so that no window system and no global state is involved."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _panels(rows: pd.DataFrame, height: float) -> tuple[Figure, Iterator[tuple[Axes, pd.DataFrame]]]:
    """A figure with one panel a case on a shared x axis. Beyond MOST_PANELS cases the rest is named, not drawn."""
    found = list(cases_in(rows))
    shared, labels = case_labels([case for case, _ in found])
    left_out = len(found) - MOST_PANELS
    found = found[:MOST_PANELS]
    columns = min(2, len(found))
    lines = math.ceil(len(found) / columns)
    figure = _figure(6.2 * columns if columns > 1 else 8, 1.1 + height * lines)
    grid = list(figure.subplots(lines, columns, squeeze=False, sharex=True).flat)
    for axes, (case, _) in zip(grid, found, strict=False):
        axes.set_title(labels[case.key], loc="left")
        axes.xaxis.set_tick_params(labelbottom=True)
    for axes in grid[len(found) :]:
        axes.set_axis_off()
    rest = f"\n{_count(left_out, 'more case')} in summary.csv" if left_out > 0 else ""
    figure.suptitle(shared + rest)
    return figure, zip(grid, (rows for _, rows in found), strict=False)


def _range_panels(tables: RunTables, metrics: Sequence[str], xlabel: str) -> Figure:
    """One panel a case, one line an arm; the first metric filled, the second open. Failed arms are gaps with a word."""
    rows = tables.summary[tables.summary["metric"].isin(metrics)]
    rows = rows[rows["status"] != "not_applicable"]
    figure, panels = _panels(rows, height=0.55 + 0.27 * rows["arm"].nunique() * len(metrics))
    for axes, found in panels:
        lines = [(arm, metric) for arm in arm_order(found["arm"]) for metric in metrics]
        for y, (arm, metric) in enumerate(lines):
            _draw_range(axes, y, found[(found["arm"] == arm) & (found["metric"] == metric)], metric == metrics[0])
        axes.set_yticks(range(len(lines)), [_line_label(arm, metric, len(metrics)) for arm, metric in lines])
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.grid(True, axis="x")
        axes.set_xlabel(xlabel)
    _log_x(figure)
    return figure


def _line_label(arm: str, metric: str, metrics: int) -> str:
    if metrics == 1:
        return arm
    return f"{arm}, {'cold' if 'cold' in metric else 'hot'}"


def _draw_range(axes: Axes, y: int, rows: pd.DataFrame, filled: bool) -> None:
    """p50 to p99, with the figures at the right edge; the status there where there is no number."""
    measured = rows[rows["status"] == "ok"]
    if measured.empty:
        text = ", ".join(STATUS_WORDS[status] for status in dict.fromkeys(rows["status"]))
    else:
        row = measured.iloc[0]
        colour = _colour(row["arm"])
        axes.plot([row["p50"], row["p99"]], [y, y], color=colour, linewidth=2.5, solid_capstyle="butt")
        axes.plot(row["p50"], y, "o", color=colour, markerfacecolor=colour if filled else "white", markersize=6)
        text = f"{number(row['p50'])} / {number(row['p99'])}  (n={row['n']})"
    axes.text(1.02, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5, color="#444444")


def _log_x(figure: Figure) -> None:
    """Logarithmic x axes labelled in plain numbers: decades, or 1-2-5 where there would be fewer than two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axes in figure.axes:
        axes.set_xscale("log")
    low = min(axes.dataLim.minposx for axes in figure.axes)
    high = max(axes.dataLim.x1 for axes in figure.axes)
    marks = (1.0,) if high >= 100 * low else (1.0, 2.0, 5.0)
    for axes in figure.axes:
        axes.xaxis.set_major_locator(LogLocator(subs=marks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


def _most_skewed(ends: pd.DataFrame) -> tuple[Case, list[str]]:
    """The case with the largest median skew, and which of its arms to show: the classic path and the goal."""

    def median_skew(rows: pd.DataFrame) -> float:
        by_step = rows.groupby(["arm", "step"], observed=True)["value"]
        return (by_step.max() - by_step.min()).groupby(level="arm", observed=True).median().max()

    case, rows = max(cases_in(ends), key=lambda found: median_skew(found[1]))
    arms = arm_order(rows["arm"])
    goal = [arm for arm in ("aten-eager", "fused-graph") if arm in arms]
    return case, goal if len(goal) == 2 else list(dict.fromkeys((arms[0], arms[-1])))


def _steps(rows: pd.DataFrame) -> pd.DataFrame:
    """[step, rank] x metric of one arm, steps of all ranks only."""
    parts = ("start_lag_us", "prep_host_us", "launch_host_us", "launch_end_us")
    rows = rows[rows["metric"].isin(parts) & (rows["rank"] >= 0) & (rows["step"] >= 0)]
    table = rows.pivot_table(index=["step", "rank"], columns="metric", values="value", observed=True)
    table = table.reindex(columns=parts).dropna(subset=["launch_end_us"])
    ranks = table.groupby(level="step").size()
    return table[table.index.get_level_values("step").isin(ranks.index[ranks == ranks.max()])]


def _draw_step(axes: Axes, steps: pd.DataFrame, arm: str, word: str, quantile: float) -> float:
    """One step as bars over ranks; returns when its last rank's launch returned, in us."""
    ends = steps["launch_end_us"].groupby(level="step")
    skews = (ends.max() - ends.min()).sort_values(kind="stable")
    step = skews.index[max(0, math.ceil(quantile * len(skews)) - 1)]
    bars = steps.loc[step]
    ranks, end = bars.index.to_numpy(), bars["launch_end_us"]
    lag = bars["start_lag_us"].fillna(0.0)

    def bar(left, width, colour: str, label: str, **more) -> None:
        axes.barh(ranks, width, left=left, height=0.7, color=colour, label=label, **more)

    bar(0.0, lag, LAG_COLOUR, "lag")
    bar(lag, bars["prep_host_us"].fillna(0.0), _colour(arm), "prep")
    launch = bars["launch_host_us"].fillna(0.0)
    bar(end - launch, launch, "white", "launch", edgecolor="black", hatch="////", linewidth=0.5)
    bar(end, end.max() - end, WAIT_COLOUR, "waits for the last")
    axes.plot(end, ranks, "|", color="black", markersize=9, label="launch returned")
    axes.set_title(f"{arm}, {word} of n={len(skews)} (step {step}): skew {number(skews[step])} us", loc="left")
    axes.set(xlabel="us from the common start", ylabel="rank", yticks=ranks)
    return end.max()


def _shared_gpu(tables: RunTables) -> str:
    """What a reader of skews must know where several ranks ran on one GPU; blank elsewhere."""
    gpus = sum(gpu.get("cuda_index") is not None for gpu in read_environment(tables.folder).gpus)
    ranks = tables.summary.loc[tables.summary["device"] != "cpu", "tp"].max()
    if not gpus or not ranks > gpus:
        return ""
    steps = tables.summary[(tables.summary["status"] == "ok") & (tables.summary["tp"] == ranks)]
    beside, alone = (steps.loc[steps["metric"] == name, "p50"] for name in ("step_host_us", "step_alone_us"))
    cost = ""
    if len(alone) and alone.median() > 0:
        cost = f" A step takes {number(beside.median() / alone.median())} times as long as with one rank at work."
    return f"Up to {ranks} ranks take turns on {_count(gpus, 'GPU')}, so skews are larger than with a GPU each.{cost}"


def _colour(arm: str) -> str:
    return ARM_COLOURS.get(arm, OTHER_COLOUR)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
