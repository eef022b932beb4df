"""The example of docs/adding-a-backend.md, taken from the page, installed as a package and verified."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "adding-a-backend.md"


@pytest.fixture
def acme(tmp_path) -> dict[str, str]:
    """An environment in which the example's package is importable and registered."""
    text = PAGE.read_text(encoding="utf-8")
    code = re.search(r"```python\n# acme_attention.py\n(.*?)```", text, re.DOTALL)[1]
    entry_point = re.search(r'\[project.entry-points."(.*?)"\]\n(.*?)\n```', text, re.DOTALL)
    site = tmp_path / "site"
    (site / "acme-1.0.dist-info").mkdir(parents=True)
    (site / "acme_attention.py").write_text(code, encoding="utf-8")
    (site / "acme-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    line = entry_point[2].replace('"', "")
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text(f"[{entry_point[1]}]\n{line}\n")
    return {"PYTHONPATH": str(site)}


def test_it_is_listed(cli, acme):
    listed = {entry["name"]: entry for entry in json.loads(cli("backends", "--json", env=acme).out)}
    assert listed["acme"]["family"] == "block_table" and "trtllm_mha" in listed


def test_it_conforms(cli, acme):
    ended = cli("verify", "--backend", "acme", "--mode", "decode", "--device", "cpu", "--json", env=acme, timeout_s=300)
    rows = json.loads(ended.out)
    assert ended.code == 0, [row for row in rows if row["status"] == "fail"]
    passed = {row["check"] for row in rows if row["status"] == "pass"}
    assert passed >= {"C1", "C3", "C4", "C5", "C6", "C8", "C9", "C11", "C25"}


def test_a_wrong_formula_in_it_would_be_noticed(cli, acme):
    module = Path(acme["PYTHONPATH"]) / "acme_attention.py"
    right = module.read_text()
    module.write_text(
        right.replace("            0,\n            fused_config", "            1,\n            fused_config")
    )
    assert module.read_text() != right
    ended = cli(
        "verify", "--backend", "acme", "--mode", "decode", "--device", "cpu", "--check", "C3", env=acme, timeout_s=300
    )
    assert ended.code == 1 and "lens" in ended.out


def test_it_is_measured(cli, acme):
    ended = cli(
        "bench", "--backend", "acme", "--device", "cpu", "--bs", "2", "--context", "40", "--max-context", "64",
        "--steps", "2", "--warmup", "1", "--tp", "1", "--graph-nodes", "2", "--no-plots", "--arm", "aten-eager,fused",
        "--json", "--out", "run", env=acme,
    )  # fmt: skip
    rows = json.loads(ended.out)["summary"]
    equal = [row["p50"] for row in rows if row["metric"] == "bit_equal" and row["rank"] == "all"]
    assert ended.code == 0 and equal == [1, 1, 1, 1]
