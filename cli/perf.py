"""`attn-graph perf`: our kernels beside the floor of the device and beside the kernels that engines ship."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .errors import CliError, ExitCode

if TYPE_CHECKING:
    from ..profilers.devices import Device
    from ..profilers.floor import FloorRow
    from ..profilers.launch_cost import LaunchRow

FLOOR_LIMIT = 1.25
"""Times the floor beyond which a point is named."""


def perf(
    peer: Annotated[
        list[Path] | None,
        typer.Option(
            "--peer",
            help="Folder with an installed sglang (site-packages, or a pip --target). Repeatable. "
            "Default: the sglang that is installed here, if any.",
        ),
    ] = None,
    device: options.DeviceName = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for floor.csv and launch.csv. Default: results/<GPU>, as results/h200."),
    ] = None,
) -> ExitCode:
    """Device time of the fused rebuilds against the device's floor and against peers; host time of launches.

    floor.csv: page tables at sixteen shapes with and without a sliding window and index lists at four, caches hot and
    cold, with the default block sizes and with tuned ones, all in one run. launch.csv: what a rebuild, and a main graph
    of 1 to 3000 kernels, costs the host. Needs a GPU, and two to three minutes of it.
    Get a peer with: pip install --no-deps --target DIR sglang==0.5.23

    Example: attn-graph perf --peer /tmp/sglang-0.5.15 --peer /tmp/sglang-0.5.23
    """
    from ..profilers.devices import resolve

    where = resolve(device)
    if not where.is_cuda:
        raise CliError(f"perf measures device time, and there is no GPU: {where.title}")
    import torch

    from ..backends.base import PeerMissing
    from ..profilers.floor import POINTS, FloorRow, measure
    from ..profilers.launch_cost import LaunchRow, measure_launches

    folder = out or default_folder(where)
    folder.mkdir(parents=True, exist_ok=True)
    at = torch.device(str(where))
    # Host times first: they suffer from what a long run leaves in a process.
    launches = list(_saved(folder / "launch.csv", LaunchRow, measure_launches(at)))
    try:
        floors = list(_saved(folder / "floor.csv", FloorRow, measure(POINTS, peer or _installed_peers(), at)))
    except PeerMissing as error:
        raise CliError(str(error)) from None
    _print_floors(floors)
    _print_launches(launches)
    typer.echo(f"Results: {folder}/floor.csv, {folder}/launch.csv")
    return ExitCode.OK


def default_folder(device: Device) -> Path:
    """results/<GPU>: its name without the maker's, as ``results/h200``."""
    words = (device.name or device.kind).lower().split()
    known = [word for word in words if word not in ("nvidia", "amd", "instinct")]
    return Path("results") / "-".join(known or words)


def _installed_peers() -> list[Path]:
    from ..backends.base import PeerMissing
    from ..backends.peers import installed_site

    try:
        return [installed_site()]
    except PeerMissing as missing:
        typer.echo(str(missing), err=True)
        return []


def _saved(path: Path, kind: type, rows: Iterable[Any]) -> Iterator[Any]:
    """The rows, each written as it comes: an interrupted run keeps what it measured."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(kind)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row))
            file.flush()
            yield row


def _print_floors(rows: list[FloorRow]) -> None:
    from .tables import new_console, number, plain_table

    table = plain_table("Device time of the fused rebuilds, us")
    for heading in (
        "kernel", "bs", "context", "page", "max context", "SWA", "cache", "setting", "ours", "floor", "x floor", "peer",
        "peer us", "peer / ours",
    ):  # fmt: skip
        left = heading in ("kernel", "context", "cache", "setting", "peer")
        table.add_column(heading, justify="left" if left else "right")
    for r in rows:
        table.add_row(
            r.kernel.removesuffix("_metadata"), str(r.bs), r.context, str(r.page_size), str(r.max_context),
            "yes" if r.swa else "no", r.cache, r.setting, number(r.ours_us), number(r.floor_us),
            f"{r.ours_us / r.floor_us:.2f}", r.peer, number(r.peer_us),
            "" if r.peer_us is None else f"{r.peer_us / r.ours_us:.2f}",
        )  # fmt: skip
    console = new_console()
    console.print(table)
    for line in summary(rows):
        console.print(line, highlight=False)


def summary(rows: list[FloorRow]) -> list[str]:
    """Per kernel, setting and cache state: speed over each peer and over the faster one, and distance to the floor."""
    from scipy.stats import gmean

    lines = []
    for kernel, setting, cache in dict.fromkeys((r.kernel, r.setting, r.cache) for r in rows):
        own = [r for r in rows if (r.kernel, r.setting, r.cache) == (kernel, setting, cache)]
        points: dict[tuple, list[FloorRow]] = {}
        for r in own:
            points.setdefault((r.bs, r.context, r.page_size, r.max_context, r.swa), []).append(r)
        title = f"{kernel}, {setting}, {cache}"
        speeds: dict[str, dict[tuple, float]] = {}
        for point, at in points.items():
            ratios = {r.peer: r.peer_us / r.ours_us for r in at if r.peer_us is not None}
            for peer, ratio in ratios.items():
                speeds.setdefault(peer, {})[point] = ratio
            if len(ratios) > 1:
                speeds.setdefault("the faster peer", {})[point] = min(ratios.values())
        for peer, ratios in speeds.items():
            worst = min(ratios, key=ratios.get)
            mean = gmean(list(ratios.values()))
            lines.append(f"{title}: {mean:.2f}x over {peer}, least {ratios[worst]:.2f}x at {_named(worst)}")
        floors = {point: at[0].ours_us / at[0].floor_us for point, at in points.items()}
        beyond = [point for point, ratio in floors.items() if ratio > FLOOR_LIMIT]
        worst = max(floors, key=floors.get)
        lines.append(
            f"{title}: {floors[worst]:.2f}x the floor at most, at {_named(worst)}; "
            f"{len(beyond)} of {len(floors)} points above {FLOOR_LIMIT}, "
            f"{_unexplained(points)} of them also with the start of their programs in it"
        )
    return lines


def _unexplained(points: dict[tuple, list[FloorRow]]) -> int:
    return sum(at[0].ours_us > FLOOR_LIMIT * (at[0].floor_us + max(at[0].start_us, 0)) for at in points.values())


def _named(point: tuple) -> str:
    bs, context, page_size, max_context, swa = point
    return f"bs {bs} context {context} page {page_size} max {max_context}{' swa' if swa else ''}"


def _print_launches(rows: list[LaunchRow]) -> None:
    from .tables import new_console, number, plain_table

    table = plain_table("Host time of a launch, us")
    for heading in ("arm", "nodes", "loop", "p50", "p99", "n"):
        table.add_column(heading, justify="left" if heading in ("arm", "loop") else "right")
    for r in rows:
        table.add_row(r.arm, str(r.nodes or ""), r.loop, number(r.p50_us), number(r.p99_us), str(r.n))
    new_console().print(table)
