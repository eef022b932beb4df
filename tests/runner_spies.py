"""Backends and graphs that note what a runner does to them, and steps to hand to it."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch
from attn_graph.backends.base import AttentionBackend, AttentionConfig
from attn_graph.backends.batch import live_batch, make_pools
from attn_graph.backends.modes import ForwardMode, Placement
from attn_graph.backends.runners.inputs import StepInputs, upload
from attn_graph.profilers.graphs import GraphFactory
from attn_graph.profilers.recorded import RecordedGraph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAPHS = GraphFactory(torch.device(DEVICE))
"""Real graphs where there is a GPU, in a test that uses `on_stream` of conftest.py."""

H = 3
"""Size of hidden states."""


def pools(width: int = 128, page_size: int = 1, rows: int = 9):
    return make_pools(rows=rows, width=width, page_size=page_size, swa=False, seed=0, device=DEVICE)


class SpyBackend(AttentionBackend):
    """Copies lengths and rows into buffers of its own and writes every call into `log`."""

    modes = frozenset(ForwardMode) - {ForwardMode.IDLE}

    def __init__(self, log: list, name: str = "", *, recorded: bool = True, tables=None, **options) -> None:
        config = AttentionConfig(page_size=1, max_context=100, **options)
        super().__init__(config, tables or pools(), recorded=recorded)
        self.log, self.name = log, name
        self.seen = []
        self.captured_batches = []

    def note(self, *event) -> None:
        self.log.append((self.name, *event) if self.name else event if len(event) > 1 else event[0])

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.note("state", max_bs, max_num_tokens)
        self.max_bs = max_bs
        self.lens = torch.zeros(max_bs, dtype=torch.int64, device=self.device)
        self.first = torch.zeros(max_bs, dtype=torch.int64, device=self.device)

    def init_forward_metadata_out_graph(self, fb, in_capture=False):
        self.note("out_capture" if in_capture else "out")
        (self.captured_batches if in_capture else self.seen).append(fb)
        super().init_forward_metadata_out_graph(fb, in_capture)

    def init_forward_metadata_in_graph(self, fb):
        self.note("in")
        self.captured_batches.append(fb)
        super().init_forward_metadata_in_graph(fb)

    def on_after_cuda_graph_warmup(self):
        self.note("warm")

    def bind(self, fb):
        return {"lens": self.lens[: fb.batch_size], "first": self.first[: fb.batch_size]}

    def rebuild_aten(self, fb, md):
        b = fb.batch_size
        md["lens"].copy_(fb.seq_lens[:b])
        md["first"].copy_(self.pools.req_to_token[fb.req_pool_indices[:b], 0])

    rebuild_aten_static = rebuild_fused = rebuild_aten

    def expected(self, batch, pools):
        return {}


def graphs_noting(log: list):
    """A factory of recorded graphs that note capture and launch."""

    class Noting(RecordedGraph):
        def capture(self, body, *, warmups=2, after_warmup=None):
            log.append("capture")
            super().capture(body, warmups=warmups, after_warmup=after_warmup)

        def launch(self):
            log.append("launch")
            super().launch()

    return Noting


def placement(backend: AttentionBackend) -> Placement:
    return Placement.GRAPH if backend.recorded else Placement.EAGER


def a_step(
    mode: ForwardMode, lengths, tables, tokens_per_req=1, *, topk=0, draft_steps=0, page_size=1, rows=None, lens=None,
    seed=0, **also,
) -> StepInputs:  # fmt: skip
    """A live step; `also` sets further fields."""
    rows = 1 + np.arange(len(lengths)) if rows is None else rows
    live = live_batch(
        mode, lengths, rows, tables, tokens_per_req, np.random.default_rng(seed), topk=topk, draft_steps=draft_steps,
        page_size=page_size,
    )  # fmt: skip
    return on_device(replace(upload(live, DEVICE, lens=lens or torch.int64), **also))


def on_device(step: StepInputs) -> StepInputs:
    """The step with all tensors but the host mirror where the runner is."""
    given = ((f.name, getattr(step, f.name)) for f in fields(step) if f.name != "seq_lens_cpu")
    return replace(step, **{name: x.to(DEVICE) for name, x in given if isinstance(x, torch.Tensor)})
