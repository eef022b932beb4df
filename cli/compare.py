"""`attn-graph compare`: one implementation against the other, in pairs of steps; or one saved run against another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..backends.modes import Arm, Implementation, Placement
from ..profilers.sample import Case
from . import options
from .errors import CliError, ExitCode

if TYPE_CHECKING:
    import pandas as pd

    from ..profilers.stats import Verdict
    from .saved import SavedComparisons

USUAL_PLACEMENT = {Implementation.ATEN: Placement.EAGER, Implementation.FUSED: Placement.GRAPH}
"""Where each implementation is deployed: small ops before the replay, one kernel inside the graph."""

DECIDING = "step_host_us"
METRICS = (DECIDING, "prep_host_us", "launch_host_us", "prep_device_us", "launch_skew_us")
FLOOR_US = 0.5


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """One metric of one case, candidate arm against baseline arm. `decides`: whether the exit code heeds it."""

    case: Case
    baseline: str
    candidate: str
    metric: str
    verdict: Verdict
    decides: bool


def compare(
    a: Annotated[Path | None, typer.Argument(metavar="[A", help="Saved run to compare from (baseline).")] = None,
    b: Annotated[Path | None, typer.Argument(metavar="B]", help="Saved run to compare to (candidate).")] = None,
    fused: Annotated[
        bool, typer.Option("--fused/--aten", help="Candidate implementation; the other one is the baseline.")
    ] = True,
    placement: Annotated[
        str | None,
        typer.Option(
            "--placement",
            help="eager, glue or graph, for both sides. Default: where each is deployed (aten eager, fused graph).",
        ),
    ] = None,
    backend: options.Backend = "trtllm_mha",
    mode: options.Mode = "decode",
    bs: options.BatchSizes = None,
    context: options.Context = None,
    page_size: options.PageSize = None,
    max_context: options.MaxContext = None,
    swa: options.Swa = None,
    topk: options.TopK = "1",
    draft_tokens: options.DraftTokens = "4",
    tp: options.Ranks = "1",
    graph_nodes: options.GraphNodes = "typical",
    graph_branches: options.GraphBranches = "1",
    allreduce_at: options.AllReduceAt = 10,
    steps: options.Steps = None,
    warmup: options.Warmup = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="Relative difference that counts as none.")
    ] = 0.02,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare saved runs of different machines or versions.")
    ] = False,
    device: options.DeviceName = "auto",
    seed: options.Seed = 0,
    out: options.Out = None,
    tuned: options.Tuned = True,
    as_json: options.Json = False,
) -> ExitCode:
    """Compare fused with aten here and now, or two saved runs (A B).

    Both arms are first checked against the oracle; arms that are not bit-equal are not
    compared by speed. Then they alternate on the same inputs, and host time from the
    common start to the end of the graph launch decides, step by step.

    Exit code: 0 faster or no difference, 1 slower or not bit-equal, 3 undecided,
    4 not comparable (on a CPU there is no launch to time).

    Example: attn-graph compare --fused --bs 1,64 --swa
    """
    if (a is None) != (b is None):
        raise CliError("a comparison of saved runs needs two: attn-graph compare A B")
    if a is not None:
        from .saved import compare_saved

        return _show_saved(compare_saved(a, b, allow_different, tolerance), as_json)
    from ..profilers.devices import resolve, use_interpreter
    from . import plan
    from .run import TOURS, Run, default_folder

    candidate, baseline = arms_of(fused, placement)
    where = resolve(device)
    use_interpreter(where)
    tour = TOURS[where.kind]
    folder = out or default_folder(where)
    outcome = Run(
        plan=plan.sweep(
            backend=backend,
            mode=mode,
            bs=bs or tour.bs,
            context=context or tour.context,
            page_size=page_size,
            max_context=max_context or tour.max_context,
            swa=swa,
            topk=topk,
            draft_tokens=draft_tokens,
            tp=tp or "1",
            graph_nodes=graph_nodes,
            graph_branches=graph_branches,
            allreduce_at=allreduce_at,
            device=where.kind,
            seed=seed,
        ),
        arms=(baseline, candidate),
        steps=steps or tour.steps,
        warmup=tour.warmup if warmup is None else warmup,
        device=where,
        folder=folder,
        tuned=tuned,
        quiet=as_json,
    ).measure()
    from ..profilers.results import read_samples

    rows = list(paired(read_samples(folder), baseline, candidate, tolerance))
    return _show_paired(rows, folder, outcome, as_json)


def arms_of(fused: bool, placement: str | None) -> tuple[str, str]:
    """(candidate, baseline) arm names.

    Raises:
        CliError: unknown placement.
    """
    if placement is not None and placement not in {str(p) for p in Placement}:
        raise CliError(f"unknown placement {placement!r}. Known: {', '.join(map(str, Placement))}")
    order = (Implementation.FUSED, Implementation.ATEN) if fused else (Implementation.ATEN, Implementation.FUSED)
    candidate, baseline = (str(Arm(i, Placement(placement) if placement else USUAL_PLACEMENT[i])) for i in order)
    return candidate, baseline


def paired(samples: pd.DataFrame, baseline: str, candidate: str, tolerance: float) -> Iterator[PairedComparison]:
    """Verdicts by case and metric, from pairs of the same rank and step."""
    from ..profilers.results import cases_in
    from ..profilers.stats import NOT_COMPARABLE, NOT_EQUAL, Verdict, paired_verdict

    for case, rows in cases_in(samples):
        measured = rows[(rows["status"] == "ok") & (rows["observer"] == "none")]
        equal = measured[measured["metric"] == "bit_equal"]["value"]
        for metric in METRICS:
            sides = [_series(measured, arm, metric) for arm in (baseline, candidate)]
            both = sides[0].index.intersection(sides[1].index)
            if len(equal) < 2 or (equal != 1).any():
                verdict = Verdict(NOT_EQUAL if (equal != 1).any() else NOT_COMPARABLE)
            elif not len(both):
                verdict = Verdict(NOT_COMPARABLE)
            else:
                verdict = paired_verdict(*(s.loc[both].to_numpy() for s in sides), tolerance=tolerance, floor=FLOOR_US)
            yield PairedComparison(case, baseline, candidate, metric, verdict, metric == DECIDING)


def _series(rows: pd.DataFrame, arm: str, metric: str) -> pd.Series:
    found = rows[(rows["arm"] == arm) & (rows["metric"] == metric)]
    return found.set_index(["rank", "step"])["value"]


def _show_paired(rows: list[PairedComparison], folder: Path, outcome, as_json: bool) -> ExitCode:
    from ..profilers import stats

    code = stats.exit_code(row.verdict.word for row in rows if row.decides)
    if outcome.problem:
        code = max(code, outcome.exit_code, key=[0, 4, 3, 1].index)
    if as_json:
        import json

        typer.echo(json.dumps({"folder": str(folder), "problem": outcome.problem, "exit_code": code,
                               "comparisons": [_record(row) for row in rows]}, indent=1))  # fmt: skip
    else:
        from .tables import new_console, paired_table

        new_console().print(paired_table(rows))
        typer.echo(f"Results: {folder}")
    if outcome.problem:
        typer.echo(f"Error: {outcome.problem}", err=True)
    return ExitCode(code)


def _record(row) -> dict:
    """A comparison as JSON: the case's columns, what was compared, and the verdict in words and numbers."""
    rest = {k: v for k, v in _shallow(row).items() if k not in ("case", "verdict")}
    return {**asdict(row.case), **rest, **asdict(row.verdict), "verdict": row.verdict.sentence}


def _shallow(row) -> dict:
    from dataclasses import fields

    return {f.name: getattr(row, f.name) for f in fields(row)}


def _show_saved(found: SavedComparisons, as_json: bool) -> ExitCode:
    code = ExitCode.NOT_COMPARABLE if found.refusal else ExitCode(found.exit_code)
    if as_json:
        import json

        document = {
            "refusal": found.refusal,
            "warnings": list(found.warnings),
            "exit_code": int(code),
            "comparisons": [_record(row) for row in found.rows],
        }
        typer.echo(json.dumps(document, indent=1))
        return code
    from .tables import new_console, saved_table

    for warning in found.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    if found.refusal:
        machines = found.refusal.startswith("different machines")
        hint = ". --allow-different compares them all the same" if machines else ""
        typer.echo(f"Error: not comparable: {found.refusal}{hint}", err=True)
    else:
        new_console().print(saved_table(found))
    return code
