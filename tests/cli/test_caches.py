"""A home directory that cannot be written costs a note, not a crash, and nothing lands outside the folder it names."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from attn_graph.cli.caches import CACHE_VARIABLES, redirect_unwritable_caches


@pytest.fixture
def temporary(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("home", ["/", "/proc/none", "~"])
def test_every_cache_moves_into_one_private_folder(monkeypatch, temporary, home):
    monkeypatch.setenv("HOME", home)
    variables: dict[str, str] = {}
    folder = redirect_unwritable_caches(variables)
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o077 == 0
    assert {Path(value).parent for value in variables.values()} == {folder}
    assert set(variables) == set(CACHE_VARIABLES)


def test_a_writable_home_changes_nothing(monkeypatch, temporary):
    (temporary / "home").mkdir()
    monkeypatch.setenv("HOME", str(temporary / "home"))
    variables: dict[str, str] = {}
    assert redirect_unwritable_caches(variables) is None
    assert variables == {} and os.listdir(temporary) == ["home"]


def test_what_the_user_set_stays(monkeypatch, temporary):
    monkeypatch.setenv("HOME", "/proc/none")
    variables = {"TRITON_CACHE_DIR": "/data/triton"}
    redirect_unwritable_caches(variables)
    assert variables["TRITON_CACHE_DIR"] == "/data/triton"


def test_a_folder_of_somebody_else_is_not_used(monkeypatch, temporary):
    monkeypatch.setenv("HOME", "/proc/none")
    stranger = os.getuid() + 1
    (temporary / f"attn-graph-{stranger}").mkdir()  # made by us, so not owned by the user we now pretend to be
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    folder = redirect_unwritable_caches({})
    assert folder.parent == temporary and folder.name != f"attn-graph-{stranger}"


def test_the_command_line_names_the_folder(cli, tmp_path):
    code, _, err = cli("backends", env={"HOME": "/proc/none", "TMPDIR": str(tmp_path)})
    assert code == 0 and str(tmp_path / "attn-graph-") in err
