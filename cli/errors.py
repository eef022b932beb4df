"""What an exit code says, and which errors are the user's to act on rather than bugs of ours."""

from __future__ import annotations

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """Every exit code of `attn-graph`. Commands return one; nothing else decides them."""

    OK = 0
    FOUND_WRONG = 1
    USAGE = 2
    UNDECIDED = 3
    NOT_COMPARABLE = 4
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class CliError(Exception):
    """A sentence for the user: what was wrong, what was found, what to do."""

    exit_code = ExitCode.USAGE


class NotComparableError(CliError):
    """Two runs or arms that cannot be set side by side; names what differs."""

    exit_code = ExitCode.NOT_COMPARABLE


EXPECTED: dict[str, ExitCode] = {
    "attn_graph.backends.base.ConfigError": ExitCode.USAGE,
    "attn_graph.backends.base.NotCapturedError": ExitCode.USAGE,
    "attn_graph.backends.registry.UnknownName": ExitCode.USAGE,
    "attn_graph.backends.runners.fork.ForkError": ExitCode.FOUND_WRONG,
    "attn_graph.profilers.barrier.BarrierError": ExitCode.USAGE,
    "attn_graph.profilers.devices.DeviceError": ExitCode.USAGE,
    "attn_graph.profilers.driver.DriverError": ExitCode.USAGE,
    "attn_graph.profilers.exchange.ExchangeError": ExitCode.FOUND_WRONG,
    "attn_graph.profilers.environment.EnvironmentProblem": ExitCode.USAGE,
    "attn_graph.profilers.observers.CuptiError": ExitCode.USAGE,
    "attn_graph.profilers.ranks.RankFailure": ExitCode.FOUND_WRONG,
    "attn_graph.profilers.recorded.CaptureError": ExitCode.FOUND_WRONG,
    "attn_graph.profilers.results.ResultsError": ExitCode.USAGE,
    "attn_graph.profilers.team.TeamError": ExitCode.USAGE,
    "attn_graph.tuning.log.LogError": ExitCode.USAGE,
    "attn_graph.tuning.space.NotTunable": ExitCode.USAGE,
    "attn_graph.tuning.static.TargetError": ExitCode.USAGE,
    "attn_graph.tuning.store.StoreError": ExitCode.USAGE,
    "torch.OutOfMemoryError": ExitCode.USAGE,
}
"""Error class -> exit code, subclasses included. By name, since importing them would import torch."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def explain(error: BaseException) -> tuple[ExitCode, str] | None:
    """Exit code and message for an error that is no bug of ours; None for a bug, which keeps its traceback."""
    if isinstance(error, CliError):
        return error.exit_code, str(error)
    for kind in type(error).__mro__:
        code = EXPECTED.get(f"{kind.__module__}.{kind.__qualname__}")
        if code is not None:
            return code, str(error)
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK_FULL):
        where = f"{error.filename}: " if error.filename is not None else ""
        return ExitCode.USAGE, f"{where}{error.strerror or error}"
    if isinstance(error, ImportError) and not (error.name or "").startswith("attn_graph"):
        return ExitCode.USAGE, f"{error}. Reinstall attn-graph with its dependencies: pip install attn-graph"
    return None
