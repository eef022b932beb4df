"""`attn-graph tune`: choose block sizes for this GPU, or say that the default is as good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, tune_run, tune_store
from .errors import CliError, ExitCode

if TYPE_CHECKING:
    from ..profilers.devices import Device
    from ..profilers.sample import Case

MIX = "loguniform"


def tune(
    backend: Annotated[
        str,
        typer.Option("--backend", help="Backends whose kernels to tune, comma list, or 'all': one for each kernel."),
    ] = "all",
    bs: Annotated[
        str, typer.Option("--bs", help="Captured batch sizes, comma list; each is tuned by itself.")
    ] = "1,8,64,256",
    context_mix: Annotated[
        str,
        typer.Option(
            "--context-mix",
            "--context",
            help="Mix of context lengths that a choice must serve: a number, uniform:LO:HI, loguniform:LO:HI, lengths "
            "joined by +, 'loguniform' for all lengths up to --max-context, or the folder of a run to take it from.",
        ),
    ] = MIX,
    page_size: options.PageSize = "64",
    max_context: Annotated[
        str, typer.Option("--max-context", help="Context limit of the tables in tokens, comma list.")
    ] = "131072",
    swa: options.Swa = None,
    tp: Annotated[
        int,
        typer.Option(
            "--tp",
            min=1,
            help="Ranks that time the finalists, on GPUs of their own where there are as many, else in turns. Their "
            "mean decides; what makes the slowest rank slower than the default does not win.",
        ),
    ] = 1,
    device: options.DeviceName = "auto",
    search: Annotated[
        str | None,
        typer.Option("--search", help="exhaustive, random or surrogate. Default: surrogate; exhaustive on a CPU."),
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option("--time-budget", min=1, help="Seconds for all, in equal parts; what it left out is said."),
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Then time the choices beside the default on shapes that were not tuned."),
    ] = False,
    against_autotune: Annotated[
        bool,
        typer.Option(
            "--against-autotune",
            help="Tune a dozen candidates of one case in four processes by triton.autotune and in four by us instead, "
            "and compare time to result, agreement, and regret on held-out lengths. Stores nothing; rows go to --out.",
        ),
    ] = False,
    static: Annotated[
        bool, typer.Option("--static", help="Only compile the candidates and say why some are out. Needs no GPU.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option("--target", help="With --static: sm_90, gfx942 and the like. Default: the GPU's own."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            help="Choose again from a file that --out wrote, by --search, or compare all searches on it. Needs no GPU, "
            "stores nothing.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="List what is stored, for every GPU.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget what is stored; the file is renamed, not deleted.")
    ] = False,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--diff", metavar="A B", help="Choices that differ between two files of stored block sizes."),
    ] = None,
    assert_hit: Annotated[
        bool,
        typer.Option("--assert-hit", help="Measure nothing; fail and say which if a case has no entry of its own."),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="With --assert-hit: name of the GPU, as 'NVIDIA H200'. Default: the one here."),
    ] = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="CSV to append every candidate to, as it comes; times in us.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that --out holds: what it has is not tried again.")
    ] = False,
) -> ExitCode:
    """Choose block sizes for this GPU, or say that the default is as good.

    Every candidate is first checked against the oracle on poisoned outputs, then timed
    inside a graph; the fastest few are timed again side by side. The default stays unless
    it is certainly beaten by more than 2%. The choice is stored, and later runs name it.

    Exit codes: 1 where no candidate is usable, an entry is missing (--assert-hit) or two
    files differ (--diff), 2 where there is no GPU to time on.

    Example: attn-graph tune --bs 64 --time-budget 60 --out candidates.csv
    """
    with _errors_explained():
        if show:
            return tune_store.show(as_json)
        if clear:
            return tune_store.clear()
        if diff is not None:
            return tune_store.diff(*diff, as_json)
        if replay is not None:
            return tune_run.replay(replay, search, seed, as_json)
        for name, given, other in (("--target", target, static), ("--gpu", gpu, assert_hit), ("--resume", resume, out)):
            if given and not other:
                raise CliError(f"{name} goes with {NEEDS[name]}")
        where = _device(device, needed=target is None and gpu is None)
        how = tune_run.search_of(search, where.is_cuda)
        cases = _cases(backend, bs, context_mix, page_size, max_context, swa, where.kind, seed)
        if assert_hit:
            return tune_store.assert_hit(cases, _gpu_name(gpu, where), as_json)
        if static:
            return tune_run.static(cases, where, target, out, as_json)
        _needs_timing(where)
        if against_autotune:
            return tune_run.against_autotune(cases, where, seed, out, as_json)
        run = tune_run.Run(where, how, seed, time_budget, tp, held_out, out, resume, as_json)
        return run.tune(cases)


NEEDS = {
    "--target": "--static: times are only true for the GPU that is there",
    "--gpu": "--assert-hit: what is measured is measured on the GPU that is there",
    "--resume": "--out, the file to go on with",
}
"""What an option makes no sense without, and why."""


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


def _device(request: str, needed: bool) -> Device:
    from ..profilers.devices import Device, resolve, use_interpreter

    where = resolve(request) if needed else Device("cpu")
    use_interpreter(where)
    return where


def _gpu_name(name: str | None, where: Device) -> str:
    if name is None and not where.is_cuda:
        raise CliError("--assert-hit: there is no GPU to look up. Name one: --gpu 'NVIDIA H200'")
    return name or where.name


def _needs_timing(where: Device) -> None:
    if not where.is_cuda and where.reason:
        raise CliError(
            f"no GPU: {where.reason}. Here {tune_run.UNTIMED} Try --device cpu to check values, or --static "
            "--target sm_90"
        )


def _cases(
    backend: str, bs: str, mix: str, page_size: str, max_context: str, swa: bool | None, device: str, seed: int
) -> list[Case]:
    """A case for each combination, with full batches of the captured size."""
    from ..tuning.space import kernel_of, representatives
    from . import plan

    names = representatives() if backend == "all" else plan.backends(backend)
    for name in names:
        kernel_of(name)
    if Path(mix).is_dir():
        mix = _recorded_mix(Path(mix))
    cases = []
    for limit in plan.numbers(max_context, "--max-context", 1):
        here = f"{MIX}:1:{limit}" if mix == MIX else mix
        _check_mix(here, limit)
        for name in names:  # one by one: each with and without a window, where it has both
            cases += plan.sweep(
                backend=name,
                mode="decode",
                bs=bs,
                context=here,
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
    return list(dict.fromkeys(replace(case, bs=case.bucket) for case in cases))


def _recorded_mix(folder: Path) -> str:
    """The context lengths of a recorded run as one mix."""
    from ..profilers.results import read_summary

    recorded = list(dict.fromkeys(read_summary(folder)["context"].astype(str)))
    if len(recorded) > 1 and any(":" in context for context in recorded):
        raise CliError(
            f"--context-mix {folder}: the run has several mixes ({', '.join(recorded)}). Give one of them instead"
        )
    return "+".join(recorded)


def _check_mix(mix: str, limit: int) -> None:
    import numpy as np

    from ..backends.batch import context_lengths, parse_context

    try:
        context_lengths(parse_context(mix), 1, limit, np.random.default_rng(0))
    except ValueError as error:
        raise CliError(f"--context-mix: {error}") from None
