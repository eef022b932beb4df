"""Imports point one way: cli -> tuning -> profilers -> backends. Read from the source, so no import can hide."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("backends", "profilers", "tuning", "cli")
"""From the bottom up; a layer may import itself and those before it."""

HEAVY = {"torch", "triton", "pandas", "matplotlib", "scipy", "numpy"}
"""What a command may import only when it runs."""


def modules() -> list[tuple[str, str]]:
    """(dotted name below attn_graph, source) of every module."""
    found = []
    for path in (path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))):
        found.append((".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text()))
    return found


def imported(name: str, source: str) -> Iterator[str]:
    """Absolute names that module `name` imports, inside functions too; relative ones resolved."""
    package = ["attn_graph", *name.split(".")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            yield from (".".join([*base, alias.name]) for alias in node.names)


def upward(name: str, source: str) -> list[str]:
    """Imports of `name` that point to a layer above its own."""
    allowed = LAYERS[: LAYERS.index(name.split(".")[0]) + 1]
    ours = (target.split(".") for target in imported(name, source))
    return [".".join(parts) for parts in ours if parts[0] == "attn_graph" and parts[1] not in allowed]


def test_no_module_imports_a_layer_above_its_own():
    assert not {name: found for name, source in modules() if (found := upward(name, source))}


def test_all_four_layers_are_looked_at():
    assert {name.split(".")[0] for name, _ in modules()} == set(LAYERS)
    assert len(modules()) > 15


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("backends.base", "from ..profilers import clock", ["attn_graph.profilers.clock"]),
        ("backends.kernels.x", "from ...tuning.store import lookup", ["attn_graph.tuning.store.lookup"]),
        ("backends.kernels.__init__", "from ...cli import main", ["attn_graph.cli.main"]),
        ("profilers.ranks", "def f():\n    import attn_graph.cli.main", ["attn_graph.cli.main"]),
        ("profilers.ranks", "from .. import tuning", ["attn_graph.tuning"]),
        ("tuning.store", "from ..profilers.sample import Case\nfrom .space import x", []),
        ("cli.bench", "from ..tuning import store\nfrom . import errors\nimport torch", []),
    ],
)
def test_upward_imports_are_found_in_every_spelling(name, source, found):
    assert upward(name, source) == found


@pytest.mark.parametrize("module", ["backends.registry", "backends.modes", "profilers.sample", "cli.main"])
def test_what_must_stay_light_loads_no_torch_even_indirectly(module):
    code = f"import attn_graph.{module}, sys; sys.exit(', '.join({HEAVY!r} & set(sys.modules)) or 0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
