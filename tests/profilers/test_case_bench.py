"""What `bench` builds for a case fits together: batches, slots and backend, in every mode of everything registered."""

from __future__ import annotations

import pytest
import torch
from attn_graph.backends.registry import registered
from attn_graph.cli import plan
from attn_graph.cli.errors import CliError
from attn_graph.profilers.graphs import GraphFactory
from attn_graph.profilers.measure import CaseBench, MeasureSettings

DEVICE = torch.device("cpu")
SIZES = {
    "bs": "3", "context": "loguniform:1:200", "page_size": None, "max_context": "512", "draft_tokens": "4", "tp": "1",
    "graph_nodes": "0", "graph_branches": "1", "allreduce_at": 0, "seed": 0, "device": "cpu",
}  # fmt: skip
MODES = [(info.name, mode) for info in registered().values() if info.kind == "backend" for mode in info.modes]


@pytest.mark.parametrize(("backend", "mode"), MODES)
def test_every_mode_loads_its_batches_and_rebuilds_what_the_oracle_says(backend, mode):
    cases = []
    for topk in ("1", "2"):
        for swa in (False, True):
            try:
                cases += plan.sweep(backend=backend, mode=mode, swa=swa, topk=topk, **SIZES).cases
            except CliError:
                continue  # the backend has no such variant
    assert cases
    for case in dict.fromkeys(cases):
        bench = CaseBench(case, MeasureSettings(("aten-eager",), 1, 0), DEVICE, GraphFactory(DEVICE))
        assert not bench.failed, bench.failed["aten-eager"].detail
        runner = bench.built["aten-eager"].runner
        for batch in bench.batches:
            runner.load_batch(batch)
            runner.rebuild()
        assert [sample.value for sample in bench.check()] == [1.0]
