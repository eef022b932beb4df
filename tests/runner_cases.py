"""Runners over real and over noting backends, and what a replay left wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attn_graph.backends.base import AttentionBackend, tensors_of
from attn_graph.backends.batch import Pools
from attn_graph.backends.modes import ForwardMode
from attn_graph.backends.oracle import HostBatch
from attn_graph.backends.runners.frozen_kv_mtp import reading
from attn_graph.backends.runners.graph_runner import GraphRunner
from rebuilds import host_pools
from runner_spies import GRAPHS, H, graphs_noting, placement


@contextmanager
def on_graphs_stream() -> Iterator[None]:
    """The stream that `GRAPHS` are captured and launched on."""
    if GRAPHS.stream is None:
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(GRAPHS.stream):
        yield
    torch.cuda.synchronize()


def built(
    cls: type[GraphRunner],
    backends: AttentionBackend | Sequence[AttentionBackend],
    buckets: Sequence[int],
    *given: Any,
    log: list | None = None,
    target: Pools | None = None,
    lens: torch.dtype | None = None,
    **options: Any,
) -> GraphRunner:
    """A runner of `cls`, with slots of its own, that has captured nothing.

    Args:
        backends: its backend, or one a layer.
        given, options: what its constructor takes behind the graphs.
        log: where graphs note capture and launch; None for graphs of the device.
        target: tables of the target model, where the runner wants them.
        lens: dtype of seq_lens, the runner's own if None.
    """
    first = backends if isinstance(backends, AttentionBackend) else backends[0]
    slots = cls.new_slots(first, max(buckets), H, **({} if lens is None else {"lens": lens}))
    where = (backends,) if target is None else (backends, target)
    graphs = GRAPHS if log is None else graphs_noting(log)
    return cls(*where, buckets, slots, placement(first), graphs, *given, **options)


def captured(*args: Any, **options: Any) -> GraphRunner:
    """The same, captured."""
    runner = built(*args, **options)
    runner.capture()
    return runner


def wrong_fields(runner: GraphRunner, tables: Pools, mode: ForwardMode | None = None) -> list[str]:
    """Fields of the replayed step whose live cells are not the oracle's for what the slots hold.

    Args:
        tables: those that must have been read.
        mode: what the batch is, the runner's own if None.
    """
    size, slots = runner.view.batch_size, runner.slots
    rows = {name: x.cpu().numpy() for name, x in slots.slices(size).items()}
    batch = HostBatch(
        mode=str(mode or runner.mode),
        req_pool_indices=rows["req_pool_indices"],
        seq_lens=rows["seq_lens"],
        out_cache_loc=rows["out_cache_loc"],
        tokens_per_req=slots.tokens_per_req,
        num_accept_tokens=rows["num_accept_tokens"],
        positions=rows["positions"],
        live_requests=size - runner.view.num_padding,
        seq_lens_fill=slots.fill_value,
        extend_seq_lens=rows["extend_seq_lens"],
    )
    got = tensors_of(runner.backend.metadata[runner.mode, size])
    with reading(tables, runner.backend):
        wanted = runner.backend.expected(batch, host_pools(tables))
    return [p for p, want in wanted.items() if p not in got or not _same(got[p], want)]


def _same(found: torch.Tensor, want: Any) -> bool:
    return np.array_equal(found.cpu().numpy()[want.live], want.values[want.live])
