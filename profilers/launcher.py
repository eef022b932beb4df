"""Starting ranks with a device each: N copies of this command under torch's own elastic launcher.

The launcher watches the processes and ends all when one ends badly. What a rank knows about its failure it leaves in a
folder of notes; a rank that could not (killed) is known by its exit code.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from .ranks import Failure, RankFailure, culprit, exit_text
from .results import ResultsError
from .team import LAUNCHER, NOTES

_OUTCOME = "outcome"
_SHUTDOWN_S = 15  # from the signal that ends the other ranks to SIGKILL; above the longest device-side wait


_TOLD_TO_END = (-signal.SIGTERM, 128 + signal.SIGTERM)


def launch_copies(n: int, arguments: Sequence[str]) -> int:
    """Run ``python -m attn_graph.cli.main arguments`` as n ranks of this host; returns what rank 0 left as outcome.

    Raises:
        RankFailure: a rank failed, died or hung; no process is left.
        ResultsError: rank 0 could not write the results.
        KeyboardInterrupt: the ranks have ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = {"shutdown_timeout": _SHUTDOWN_S} if "shutdown_timeout" in {f.name for f in fields(LaunchConfig)} else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n,
        run_id=f"attn-graph-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        **options,
    )
    with tempfile.TemporaryDirectory(prefix="attn_graph-") as notes, _environment(notes), _quiet():
        try:
            elastic_launch(config, sys.executable)("-m", "attn_graph.cli.main", *arguments)
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise _verdict(Path(notes), codes) from None
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
        outcome = Path(notes, _OUTCOME)
        return int(outcome.read_text()) if outcome.exists() else 0


def leave_outcome(code: int) -> int:
    """On rank 0 of `launch_copies`: what the command's exit code is to be. Returns this process's own."""
    if not os.environ.get(NOTES):
        return code
    Path(os.environ[NOTES], _OUTCOME).write_text(str(int(code)))
    return 0  # anything else would read as a rank that failed


def _verdict(notes: Path, codes: dict[int, int]) -> RankFailure | ResultsError:
    cases, failures = {}, []
    for path in sorted(notes.glob("rank*.json")):
        note = json.loads(path.read_text(encoding="utf-8"))
        rank = int(path.stem.removeprefix("rank"))
        if note["usage"]:
            return ResultsError(note["failure"]["cause"])
        cases[rank] = note["case"]
        failures.append((rank, Failure(**note["failure"])))
    if all(failure.echo for _, failure in failures):
        # Nobody knows the cause, so it is a rank that could not tell. Those that were only told to end come last.
        told = {rank for rank, _ in failures}
        silent = {rank: code for rank, code in codes.items() if rank not in told}
        dead = {rank: code for rank, code in silent.items() if code not in _TOLD_TO_END} or silent
        failures += [(rank, Failure(exit_text(code))) for rank, code in dead.items()]
    rank, failure = culprit(failures)
    case = cases.get(rank) or next((case for case in cases.values() if case), "")
    return RankFailure(rank, case, failure.cause, [], failure.traceback)


@contextmanager
def _environment(notes: str) -> Iterator[None]:
    """Ranks inherit this process's variables."""
    os.environ |= {NOTES: notes, LAUNCHER: str(os.getpid())}
    try:
        yield
    finally:
        for name in (NOTES, LAUNCHER):
            del os.environ[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """The launcher logs a traceback of its own for each rank that fails; ours says it in a line."""
    log = logging.getLogger("torch.distributed.elastic")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
