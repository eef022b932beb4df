"""Which kind of ranks a run gets: with a device each where there are enough, else simulated on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CliError, ExitCode

if TYPE_CHECKING:
    from ..profilers.devices import Device
    from ..profilers.inject import Injection
    from ..profilers.team import Place

ALLREDUCES = ("auto", "symm", "nccl", "gloo", "none")


def place_here(device: Device) -> Place | None:
    """This process's place, where torchrun or `launch` started it as one of several ranks."""
    from ..profilers.team import place_of

    place = place_of()
    if place is not None and device.is_cuda and device.index > 0:
        raise CliError(f"--device {device}: under torchrun every rank takes the GPU of its local rank. Leave it out")
    return place


def needs_launch(place: Place | None, ranks: int, device: Device, allreduce: str) -> bool:
    """Whether this process must start the ranks, with a device each.

    Raises:
        CliError: that cannot be had.
    """
    if allreduce not in ALLREDUCES:
        raise CliError(f"--allreduce {allreduce}: give one of {', '.join(ALLREDUCES)}")
    if allreduce in (("gloo",) if device.is_cuda else ("symm", "nccl")):
        kind = "symm or nccl" if device.is_cuda else "gloo"
        raise CliError(f"--allreduce {allreduce} does not run on {device.kind}. Use {kind}, or auto")
    if place is not None:
        if ranks > place.size:
            raise CliError(f"--tp {ranks}: torchrun started {place.size} ranks. Start more, or lower --tp")
        if allreduce == "none":
            raise CliError("--allreduce none: ranks that torchrun started have a device each. Use auto")
        return False
    if allreduce == "none" or ranks < 2:
        return False
    if not device.is_cuda:
        return allreduce == "gloo"
    there = gpus()
    if there >= ranks:
        return True
    if allreduce != "auto":
        raise CliError(f"--allreduce {allreduce}: {ranks} ranks need a GPU each, and there are {there}. Lower --tp")
    return False


def usual_ranks(place: Place | None, device: Device, simulated: int) -> int:
    """How many ranks where nobody said: those that are there, else one a GPU if there are several."""
    if place is not None:
        return place.size
    return max(gpus(), 1) if device.is_cuda and gpus() > 1 else simulated


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def launch(ranks: int, folder: Path) -> ExitCode:
    """Run this command again as so many ranks. What rank 0 prints is the output."""
    from ..profilers.launcher import launch_copies
    from ..profilers.ranks import RankFailure
    from ..profilers.results import close_abandoned

    arguments = sys.argv[1:] if "--out" in sys.argv else [*sys.argv[1:], "--out", str(folder)]
    try:
        return ExitCode(launch_copies(ranks, arguments))
    except KeyboardInterrupt:
        close_abandoned(folder, "interrupted")
        raise
    except RankFailure as failure:
        close_abandoned(folder, "failed", str(failure))
        raise


def injection(text: str | None, ranks: list[int]) -> Injection | None:
    """Of --inject; every rank count of the run must have the rank that is delayed."""
    from ..profilers.inject import parse_injection

    if text is None:
        return None
    try:
        found = parse_injection(text)
    except ValueError as error:
        raise CliError(str(error)) from None
    if min(ranks) < 2:
        raise CliError("--inject: one rank has nobody who could wait for it. Give --tp 2 or more")
    if found.rank is not None and found.rank >= min(ranks):
        raise CliError(f"--inject {text}: there is no rank {found.rank} among --tp {min(ranks)}")
    return found
