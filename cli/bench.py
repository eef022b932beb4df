"""`attn-graph bench`: what the rebuild costs in every arm, and how far ranks drift apart because of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .errors import CliError, ExitCode

if TYPE_CHECKING:
    from ..profilers.slow import SlowRow
    from .run import Outcome


def bench(
    backend: options.Backend = "trtllm_mha",
    mode: options.Mode = "decode",
    arm: options.ArmList = "all",
    impl: options.Implementations = None,
    bs: options.BatchSizes = None,
    context: options.Context = None,
    page_size: options.PageSize = None,
    max_context: options.MaxContext = None,
    swa: options.Swa = None,
    topk: options.TopK = "1",
    draft_tokens: options.DraftTokens = "4",
    tp: options.Ranks = None,
    graph_nodes: options.GraphNodes = "typical",
    graph_branches: options.GraphBranches = "1",
    allreduce_at: options.AllReduceAt = 10,
    steps: options.Steps = None,
    warmup: options.Warmup = None,
    device: options.DeviceName = "auto",
    seed: options.Seed = 0,
    out: options.Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out: only what is missing.")
    ] = False,
    tuned: options.Tuned = True,
    observer: Annotated[
        str | None,
        typer.Option(
            "--observer",
            metavar="NAMES",
            help="Measure what watching costs instead: prep, launch and step bare, under each of none, nvtx, "
            "torch-profiler-cpu, torch-profiler, cupti (comma list, or 'all') and after it, in a process each. "
            "--steps is the number of rounds. Writes observer.csv and observer_fit.csv.",
        ),
    ] = None,
    allreduce: Annotated[
        str,
        typer.Option(
            "--allreduce",
            help="How ranks meet in the graph: symm (flags in symmetric memory), nccl, gloo (CPU), none (simulated "
            "ranks that share a device), or auto: symm or nccl with a GPU per rank, else none.",
        ),
    ] = "auto",
    inject: Annotated[
        str | None,
        typer.Option(
            "--inject",
            metavar="RANK:US",
            help="Test the ruler instead: delay a rank (or 'each' in turn) before its launch by so many us (comma list "
            "of doses; 0 is always one), and see how the others wait. Writes inject.csv.",
        ),
    ] = None,
    predict_ranks: Annotated[
        str | None,
        typer.Option(
            "--predict-ranks",
            metavar="LO..HI",
            help="Rank counts to predict first waits for from this run's launch ends: doubling from LO to HI, or a "
            "comma list.",
        ),
    ] = None,
    rank_timeout: Annotated[
        float, typer.Option("--rank-timeout", min=1, help="Seconds of silence after which a rank counts as hung.")
    ] = 300.0,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline",
            help="Also write timeline.json.gz: all ranks' steps for ui.perfetto.dev or chrome://tracing.",
        ),
    ] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx/--no-nvtx", help="Push NVTX ranges around prep, launch, step.")] = True,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw plots and the HTML report at the end.")
    ] = True,
    as_json: options.Json = False,
) -> ExitCode:
    """Measure the metadata rebuild and the graph launch, arm by arm, on N ranks.

    With no options: a two-minute tour on whatever device there is. Every arm is first
    checked against the oracle, bit for bit. Each finished case is on disk at once: an
    interrupted run keeps what it measured, and --resume runs the rest.

    With a GPU per rank, or under torchrun, first waits are measured on the device; with
    fewer GPUs ranks are simulated and waits are predicted.

    Example: attn-graph bench --bs 1,8,64 --context 8192 --tp 8 --arm aten-eager,fused
    """
    from ..profilers.devices import resolve, use_interpreter
    from ..profilers.launcher import leave_outcome
    from ..profilers.slow import write_slow
    from ..profilers.waits import write_waits
    from . import plan
    from . import tp as ranks_of
    from .run import TOURS, Run, default_folder

    where = resolve(device)
    use_interpreter(where)
    place = ranks_of.place_here(where)
    arms, left_out = plan.without_missing_engines(plan.arms(arm, impl))
    if left_out and not (place and place.rank):
        typer.echo(left_out, err=True)
    tour = TOURS[where.kind]
    counts = plan.rank_counts(predict_ranks) if predict_ranks else ()
    planned = plan.sweep(
        backend=backend,
        mode=mode,
        bs=bs or (tour.bs if observer is None else tour.bs.split(",")[-1]),
        context=context or tour.context,
        page_size=page_size,
        max_context=max_context or tour.max_context,
        swa=swa if observer is None or swa is not None else True,
        topk=topk,
        draft_tokens=draft_tokens,
        tp=tp or str(ranks_of.usual_ranks(place, where, tour.ranks) if observer is None else 1),
        graph_nodes=graph_nodes,
        graph_branches=graph_branches,
        allreduce_at=allreduce_at,
        device=where.kind,
        seed=seed,
    )
    folder = out or default_folder(where)
    if observer is not None:
        from . import observe

        if timeline:
            raise CliError("--timeline draws the steps of an unobserved run; leave it or --observer out")
        if resume:
            raise CliError("--observer takes a minute or two and starts anew; leave --resume out")
        names = observe.observer_names(observer)
        chosen = observe.ARMS if arm == "all" and impl is None else arms
        observe.ObserverRun(names, planned, chosen, steps, where, folder, quiet=as_json).measure()
        return observe.finish(folder, plots=plots, as_json=as_json)
    sizes = [case.tp for case in planned.cases]
    injection = ranks_of.injection(inject, sizes)
    if ranks_of.needs_launch(place, max(sizes), where, allreduce):
        return ranks_of.launch(max(sizes), folder)
    outcome = Run(
        plan=planned,
        arms=arms,
        steps=steps or tour.steps,
        warmup=tour.warmup if warmup is None else warmup,
        device=where,
        folder=folder,
        resume=resume,
        tuned=tuned,
        nvtx=nvtx,
        quiet=as_json or bool(place and place.rank),
        place=place,
        allreduce=allreduce,
        injection=injection,
        timeout_s=rank_timeout,
    ).measure()
    if place and place.rank:
        return outcome.exit_code
    write_waits(folder, counts)
    slow = write_slow(folder)
    if timeline:
        outcome = replace(outcome, notes=(*outcome.notes, _draw_timeline(folder)))
    if plots:
        from .plots import save_plots
        from .report import write_report

        write_report(folder, save_plots(folder))
    return ExitCode(leave_outcome(_show(folder, outcome, slow, as_json)))


def _draw_timeline(folder: Path) -> str:
    from ..profilers.chrome_trace import TIMELINE, save_timeline

    return f"Timeline: {folder / TIMELINE}, for ui.perfetto.dev. {save_timeline(folder).note}"


def _show(folder: Path, outcome: Outcome, slow: list[SlowRow], as_json: bool) -> ExitCode:
    """Print the summary; say what went wrong last. An arm that is not bit-equal is something found wrong."""
    from ..profilers.results import read_summary
    from .tables import print_slow, print_summary

    summary = read_summary(folder)
    equal = summary[(summary["metric"] == "bit_equal") & (summary["status"] == "ok")]
    wrong = bool((equal["min"] < 1).any())
    if as_json:
        typer.echo(_document(folder, outcome))
    else:
        if len(summary):
            print_summary(summary)
            print_slow(slow)
        for line in outcome.notes:
            typer.echo(line)
        typer.echo(f"Results: {folder}")
    if outcome.problem:
        typer.echo(f"Error: {outcome.problem}", err=True)
    if wrong:
        typer.echo("Error: an arm does not leave what the oracle says; samples.csv.gz names the first cell.", err=True)
    return ExitCode.FOUND_WRONG if wrong else outcome.exit_code


def _document(folder: Path, outcome: Outcome) -> str:
    import json
    from dataclasses import asdict

    from ..profilers.results import read_environment, read_summary

    return json.dumps(
        {
            "folder": str(folder),
            "environment": asdict(read_environment(folder)),
            "problem": outcome.problem,
            "notes": list(outcome.notes),
            "summary": json.loads(read_summary(folder).to_json(orient="records")),
        },
        indent=1,
    )
