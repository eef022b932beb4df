"""What every test needs: Triton's interpreter where there is no GPU, and the real command line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before anything imports one
    from attn_graph.profilers.conformance.interpreter import lighten

    lighten()
torch.set_num_threads(1)


def pytest_configure() -> None:
    # A shell starts background jobs with Ctrl-C ignored, and so would every process that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Of several workers (`pytest -n 2`) only one runs while a test marked `alone` does."""
    with _turn(item.get_closest_marker("alone") is not None) if "PYTEST_XDIST_WORKER" in os.environ else ALWAYS:
        yield


ALWAYS = contextlib.nullcontext()


@contextlib.contextmanager
def _turn(alone: bool) -> Iterator[None]:
    """Everybody passes the gate to enter the room; who wants it empty keeps the gate until the others have left."""
    import fcntl

    here = Path(__file__)  # any two files that are always there can be the locks
    with here.open() as gate, (here.parents[1] / "pyproject.toml").open() as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


class Finished(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def command_line(folder: Path) -> Callable[..., Finished]:
    """Runs `attn-graph ARGUMENTS` through its real entry point, in a process of its own and in `folder`."""

    def run(
        *arguments: str, env: dict[str, str | None] | None = None, timeout_s: float = 120, cwd: Path = folder
    ) -> Finished:
        """`env` adds variables to the environment; None removes one."""
        command = [sys.executable, "-m", "attn_graph.cli.main", *map(str, arguments)]
        # A user has not set TRITON_INTERPRET: whatever needs it must set it itself.
        changes = {"TRITON_INTERPRET": None, "COLUMNS": "200", "NO_COLOR": "1"} | (env or {})
        variables = {k: v for k, v in (os.environ | changes).items() if v is not None}
        ended = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=cwd, timeout=timeout_s)
        return Finished(ended.returncode, ended.stdout, ended.stderr)

    return run


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., Finished]:
    """The command line in this test's own folder."""
    return command_line(tmp_path)


@pytest.fixture
def on_stream() -> Iterator[None]:
    """Run a test on the stream that graphs of runner_spies.py are captured and launched on."""
    from runner_cases import on_graphs_stream

    with on_graphs_stream():
        yield
