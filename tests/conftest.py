"""What every test needs: Triton's interpreter where there is no GPU, and the real command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., Finished]:
    """Runs `attn-graph ARGUMENTS` through its real entry point, in a process and a folder of its own."""

    def run(
        *arguments: str, env: dict[str, str | None] | None = None, timeout_s: float = 120, cwd: Path = tmp_path
    ) -> Finished:
        """`env` adds variables to the environment; None removes one."""
        command = [sys.executable, "-m", "attn_graph.cli.main", *map(str, arguments)]
        # A user has not set TRITON_INTERPRET: whatever needs it must set it itself.
        changes = {"TRITON_INTERPRET": None, "COLUMNS": "200", "NO_COLOR": "1"} | (env or {})
        variables = {k: v for k, v in (os.environ | changes).items() if v is not None}
        ended = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=cwd, timeout=timeout_s)
        return Finished(ended.returncode, ended.stdout, ended.stderr)

    return run
