"""Faults that engines have shipped, by backend, wrapper and runner: `verify` notices each, and nothing without it."""

from __future__ import annotations

import pytest
import torch
from attn_graph.backends.registry import registered
from attn_graph.profilers.conformance.faults import known_faults
from attn_graph.profilers.conformance.matrix import HAVE_METADATA
from attn_graph.profilers.conformance.run import caught
from conftest import HAS_GPU

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
ELSEWHERE = {"trtllm_mha"}
"""Whose faults are the broken twins of the checks, see test_conformance.py."""

KINDS = (*HAVE_METADATA, "runner")
NAMES = [name for name, info in registered().items() if info.kind in KINDS and name not in ELSEWHERE]
FAULTS = [(name, fault) for name in NAMES for fault in known_faults(name)]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=lambda x: getattr(x, "name", x))
def test_a_known_fault_is_noticed_and_only_with_the_fault(name, fault):
    found = caught(fault, name, DEVICE)
    assert found.status == "pass", found.detail


@pytest.mark.parametrize("name", NAMES)
def test_every_backend_wrapper_and_runner_has_faults_of_its_own(name):
    names = [fault.name for fault in known_faults(name)]
    assert len(names) == len(set(names)) >= 2
