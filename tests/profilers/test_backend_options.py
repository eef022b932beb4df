"""What a backend does under an option is proven too: `verify` looks at each option in the modes that it changes."""

from __future__ import annotations

import pytest
import torch
from attn_graph.backends.modes import Arm, ForwardMode
from attn_graph.backends.registry import registered
from attn_graph.profilers.conformance import CHECKS, judge
from attn_graph.profilers.conformance.matrix import possible_sizes
from conftest import HAS_GPU

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
ARMS = tuple(map(Arm.parse, ("aten-eager", "fused-graph")))
OPTIONS = [
    (name, mode, options) for name, info in registered().items() for mode in info.modes
    for options in info.options_in(mode)
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode", "options"), OPTIONS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_an_option_is_among_the_sizes_and_its_values_are_the_oracles(name, mode, options):
    mode = ForwardMode(mode)
    sizes = [s for s, _ in possible_sizes(name, mode, DEVICE, ARMS, full=False)[0] if dict(s.options) == options]
    assert len(sizes) == 1
    subject = sizes[0].subject(name, mode, DEVICE, ARMS, seed=0)
    assert subject.config.extra == options
    found = judge(CHECKS["C3"], subject)[0]
    assert found.status == "pass", found.detail


def test_an_option_has_no_specified_number_of_dispatches_and_the_backend_itself_has():
    """aiter's 6 are those of lists; MLA takes 12, and what is specified for the one must not judge the other."""
    for options, number in ({}, "6"), ({"mla": True}, "no"):
        sizes = possible_sizes("aiter", ForwardMode.DECODE, DEVICE, ARMS[:1], full=False)[0][0][0]
        subject = sizes.subject("aiter", ForwardMode.DECODE, DEVICE, ARMS[:1], seed=0).but(extra=options or None)
        found = judge(CHECKS["C24"], subject)[0]
        assert found.status == "pass" and f"classic chain: {number} dispatches" in found.detail, found.detail
