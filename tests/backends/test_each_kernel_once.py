"""Every backend's fused rebuild, eagerly and alone, through Triton and past it: what a sanitizer wants to see.

compute-sanitizer --tool memcheck python -m pytest -q tests/backends/test_each_kernel_once.py

Likewise racecheck and initcheck; PYTORCH_NO_CUDA_MEMORY_CACHING=1 lets memcheck see the end of each tensor.
"""

from __future__ import annotations

import pytest
import torch
from attn_graph.backends.registry import registered
from attn_graph.cli import plan
from attn_graph.cli.errors import CliError
from attn_graph.profilers.graphs import RecordedGraph
from attn_graph.profilers.measure import CaseBench, MeasureSettings
from attn_graph.profilers.sample import Case
from conftest import HAS_GPU

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
SIZES = {
    "bs": "3", "context": "loguniform:1:600", "page_size": None, "max_context": "1024", "topk": "1",
    "draft_tokens": "4", "tp": "1", "graph_nodes": "0", "graph_branches": "1", "allreduce_at": 0, "seed": 0,
}  # fmt: skip
MODES = [(info.name, mode) for info in registered().values() if info.kind == "backend" for mode in info.modes]


class NoGraphs:
    """A sanitizer slows graphs down and sees no more of them than of the launches alone."""

    stream = None

    def __call__(self) -> RecordedGraph:
        return RecordedGraph()


def cases(backend: str, mode: str) -> list[Case]:
    found = []
    for swa in (False, True):
        try:
            found += plan.sweep(backend=backend, mode=mode, swa=swa, device=DEVICE.type, **SIZES).cases
        except CliError:
            continue  # the backend has no such variant
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "mode"), MODES)
def test_a_fused_rebuild_alone_gives_the_oracles_tables(backend, mode):
    variants = cases(backend, mode)
    assert variants
    for case in variants:
        bench = CaseBench(case, MeasureSettings(("fused-eager",), 1, 0), DEVICE, NoGraphs())
        assert not bench.failed, bench.failed["fused-eager"].detail
        runner = bench.built["fused-eager"].runner
        for batch in bench.batches[:2]:
            runner.load_batch(batch)
            runner.rebuild()
            runner.rebuild()
        assert [sample.value for sample in bench.check()] == [1.0]
