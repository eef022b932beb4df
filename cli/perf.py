"""`attn-graph perf`: our kernels beside the floor of the device and beside the kernels that engines ship."""

from __future__ import annotations

import csv
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .errors import CliError, ExitCode

if TYPE_CHECKING:
    from ..profilers.floor import FloorRow


def perf(
    peer: Annotated[
        list[Path] | None,
        typer.Option("--peer", help="Folder with an installed sglang (site-packages, or a pip --target). Repeatable."),
    ] = None,
    device: options.DeviceName = "auto",
    out: Annotated[Path, typer.Option("--out", help="CSV to write; one row per point, cache state and peer.")] = Path(
        "floor.csv"
    ),
) -> ExitCode:
    """Device time of the fused rebuild against the device's floor and against peers.

    Sixteen shapes with and without a sliding window, caches hot and cold, all in one run.
    Needs a GPU. Get a peer with: pip install --no-deps --target DIR sglang==0.5.15

    Example: attn-graph perf --peer /tmp/sglang-0.5.15 --out results/h200/floor.csv
    """
    from ..profilers.devices import resolve

    where = resolve(device)
    if not where.is_cuda:
        raise CliError(f"perf measures device time, and there is no GPU: {where.title}")
    import torch

    from ..profilers.floor import POINTS, FloorRow, measure

    out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with open(out, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(FloorRow)], lineterminator="\n")
        writer.writeheader()
        for row in measure(POINTS, peer or [], torch.device(str(where))):
            writer.writerow(asdict(row))
            file.flush()
            rows.append(row)
    _print(rows)
    typer.echo(f"Results: {out}")
    return ExitCode.OK


def _print(rows: list[FloorRow]) -> None:
    from scipy.stats import gmean

    from .tables import new_console, number, plain_table

    table = plain_table("Device time of the fused page-table rebuild, us")
    for heading in (
        "bs", "context", "page", "max context", "SWA", "cache", "ours", "floor", "x floor", "peer", "peer us",
        "peer / ours",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("context", "cache", "peer") else "right")
    for r in rows:
        ratio = "" if r.peer_us is None else f"{r.peer_us / r.ours_us:.2f}"
        table.add_row(
            str(r.bs), r.context, str(r.page_size), str(r.max_context), "yes" if r.swa else "no", r.cache,
            number(r.ours_us), number(r.floor_us), f"{r.ours_us / r.floor_us:.2f}", r.peer, number(r.peer_us), ratio,
        )  # fmt: skip
    console = new_console()
    console.print(table)
    for peer in dict.fromkeys(r.peer for r in rows if r.peer):
        for cache in ("hot", "cold"):
            ratios = [r.peer_us / r.ours_us for r in rows if r.peer == peer and r.cache == cache]
            console.print(f"{peer}, {cache}: geometric mean {gmean(ratios):.2f}x, least {min(ratios):.2f}x")
