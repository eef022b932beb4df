"""`attn-graph backends` says what the registry holds, in a form for people and one for programs."""

from __future__ import annotations

import json

import pytest
from attn_graph.backends.base import AttentionBackend
from attn_graph.backends.registry import registered


def test_json_is_one_list_with_every_entry_of_the_registry(cli):
    code, out, err = cli("backends", "--json")
    assert (code, err) == (0, "")
    listed = {entry["name"]: entry for entry in json.loads(out)}
    assert list(listed) == list(registered())
    for name, info in registered().items():
        entry = listed[name]
        assert set(entry) == {
            "name", "kind", "family", "pattern", "modes", "note", "dispatches", "host_work", "planners",
        }  # fmt: skip
        assert (entry["kind"], entry["family"], entry["pattern"]) == (info.kind, info.family, info.pattern)
        assert entry["modes"] == list(info.modes)
        assert entry["kind"] in ("backend", "wrapper", "runner")


def test_trtllm_mha_lists_its_dispatch_counts_without_and_with_swa(cli):
    entries = json.loads(cli("backends", "--json").out)
    counts = next(entry for entry in entries if entry["name"] == "trtllm_mha")["dispatches"]
    assert counts["decode"] == {"no_swa": 16, "swa": 28}
    assert counts["target_verify"] == {"no_swa": 18, "swa": 30}


def test_backends_with_host_work_in_fused_graph_say_why_and_they_are_those_that_plan():
    for info in registered().values():
        if info.kind != "backend":
            continue
        plans = info.load().plan is not AttentionBackend.plan
        assert [bool(info.host_work_in(mode)) for mode in info.modes] == [plans] * len(info.modes), info.name


def test_the_table_says_where_fused_graph_is_free_of_host_work(cli):
    out = cli("backends", env={"COLUMNS": "120"}).out
    assert "flashinfer: host work in fused-graph: the plan is made of host lengths" in out
    assert "trtllm_mha: host work" not in out and "zero" in out
    assert "flashmla: sgl_kernel.flash_mla.get_mla_metadata: compared by verify where it is installed" in out


@pytest.mark.parametrize("columns", ["80", "200"])
def test_table_shows_every_name_and_mode_at_any_width(cli, columns):
    out = cli("backends", env={"COLUMNS": columns}).out
    for info in registered().values():
        assert info.name in out
        assert all(mode in out for mode in info.modes)


def test_torch_is_not_needed(cli, tmp_path):
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no torch here')")
    assert cli("backends", env={"PYTHONPATH": str(tmp_path)}).code == 0


def test_a_plugin_that_is_no_backend_info_is_named(cli, tmp_path):
    package = tmp_path / "plugin-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[attn_graph.backends]\nmine = json:dumps\n")
    code, out, err = cli("backends", env={"PYTHONPATH": str(tmp_path)})
    assert code != 0 and out == "" and "'mine'" in err
