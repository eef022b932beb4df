"""Vendor planners: compared where they are installed, skipped by name where not, and a wrong plan is noticed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from attn_graph.backends.modes import Arm, ForwardMode
from attn_graph.backends.registry import COMPARED, registered
from attn_graph.backends.schedules import paged_mqa_schedule, split_kv
from attn_graph.backends.vendors import VENDORS
from attn_graph.profilers.conformance import CHECKS, judge
from attn_graph.profilers.conformance.matrix import Sizes

PARTS = 10


def get_mla_metadata(lens, query_rows, kv_heads):
    """As the vendor's: idle parts and the last column hold what they may."""
    plan = split_kv(lens.tolist(), PARTS)
    parts = torch.tensor(plan.parts, dtype=torch.int32)
    parts[parts[:, 0] == len(lens), 2] = 77
    parts[:, 7] = 99
    return parts, torch.tensor(plan.num_splits, dtype=torch.int32)


def get_paged_mqa_logits_metadata(context_lens, block, sms):
    assert context_lens.shape[1] == 1 and context_lens.dtype == torch.int32 and block == 64
    return torch.tensor(paged_mqa_schedule(context_lens.flatten().tolist(), sms), dtype=torch.int32)


def wrong(function):
    def planned(*args):
        made = function(*args)
        first = made[0] if isinstance(made, tuple) else made
        first[0, 1] += 1
        return made

    return planned


BACKENDS = {"flashmla": get_mla_metadata, "dsa": get_paged_mqa_logits_metadata}


def installed(monkeypatch, path: str, function) -> None:
    module_name, _, name = path.rpartition(".")
    parts = module_name.split(".")
    for i in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:i]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(module, name, function)


def on(backend: str):
    sizes = Sizes(64, 256, (2,))
    return sizes.subject(backend, ForwardMode.DECODE, torch.device("cpu"), (Arm.parse("aten-eager"),), seed=0)


def path_of(backend: str) -> str:
    return next(name for name, how in registered()[backend].planners.items() if how == COMPARED)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_plan_passes_and_a_wrong_one_is_named(backend, monkeypatch):
    path, function = path_of(backend), BACKENDS[backend]
    installed(monkeypatch, path, function)
    (found,) = judge(CHECKS["V1"], on(backend))
    assert found.status == "pass" and f"{path} compared" in found.detail
    installed(monkeypatch, path, wrong(function))
    found = judge(CHECKS["V1"], on(backend))
    assert found[0].status == "fail" and path in found[0].detail and "the reference has" in found[0].detail


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_package_that_is_missing_is_named(backend, monkeypatch):
    path = path_of(backend)
    monkeypatch.setitem(sys.modules, path.split(".")[0], None)
    (found,) = judge(CHECKS["V1"], on(backend))
    assert found.status == "skip" and f"{path.rpartition('.')[0]} is not installed" in found.detail


def test_every_planner_that_is_said_to_be_compared_is():
    named = {name for info in registered().values() for name, how in info.planners.items() if how == COMPARED}
    assert named == set(VENDORS)
