"""What somebody gets who installs the wheel: all of it, working, and nothing dropped beside it.

The new environment borrows torch and the rest from the one that runs the tests; attn-graph itself comes from the wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("cli", "backends", "profilers", "tuning")
TINY_BENCH = (
    "--arm aten-eager,fused-graph --device cpu --bs 2 --context 64 --page-size 16 --max-context 128 --steps 3 "
    "--warmup 1 --tp 1 --graph-nodes 3"
)


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    ended = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that the build leaves nothing in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    run(sys.executable, *build, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """`bin` of a new virtual environment with the wheel in it."""
    root = tmp_path_factory.mktemp("newcomer")
    run(sys.executable, "-m", "venv", "--without-pip", root / "venv", cwd=root)
    scripts = root / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    install = ("-m", "pip", "--python", scripts / "python", "install", "--quiet", "--no-deps", "--no-index", wheel)
    run(sys.executable, *install, cwd=root)
    # Only now: pip would else find the attn-graph of the borrowed packages and install nothing.
    probe = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(scripts / "python", "-c", probe, cwd=root).stdout.strip())
    borrowed = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    return scripts


def test_the_wheel_holds_every_module_and_data_file_and_nothing_outside_the_package(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    data = {"cli": ["templates/*"], "tuning": ["tables/*.json"]}
    wanted = {
        f"attn_graph/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for pattern in ["**/*.py", *data.get(folder, [])]
        for path in (ROOT / folder).glob(pattern)
    }
    assert held == wanted


def test_the_licence_travels_with_the_wheel(wheel):
    assert any(name.endswith("LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_the_installed_package_is_the_wheels_and_drops_no_top_level_modules(environment, tmp_path):
    code = (
        "import importlib.util as u, attn_graph.cli.main as m; print(m.__file__); "
        f"print([name for name in {FOLDERS!r} if u.find_spec(name)])"
    )
    file, stray = run(environment / "python", "-c", code, cwd=tmp_path).stdout.splitlines()
    assert Path(file).is_relative_to(environment.parent)
    assert stray == "[]"


def test_the_console_script_answers(environment, tmp_path):
    assert run(environment / "attn-graph", "--version", cwd=tmp_path).stdout.startswith("attn-graph ")
    listed = json.loads(run(environment / "attn-graph", "backends", "--json", cwd=tmp_path).stdout)
    assert "trtllm_mha" in [entry["name"] for entry in listed]


def test_a_tiny_bench_without_a_home_writes_to_the_chosen_folder_and_the_cache_it_names(environment, tmp_path):
    (tmp_path / "tmp").mkdir()
    variables = os.environ | {"HOME": "/proc/none", "TMPDIR": str(tmp_path / "tmp")}
    variables.pop("TRITON_INTERPRET", None)
    command = (environment / "attn-graph", "bench", *TINY_BENCH.split(), "--out", "results")
    ended = run(*command, cwd=tmp_path, env=variables)
    for name in ("samples.csv.gz", "summary.csv", "environment.json", "report.html"):
        assert (tmp_path / "results" / name).stat().st_size > 0
    saved = json.loads((tmp_path / "results" / "environment.json").read_text())
    assert saved["device"].startswith("cpu") and saved["git_commit"] == ""
    assert str(tmp_path / "tmp" / "attn-graph-") in ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"results", "tmp"}
