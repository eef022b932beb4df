"""What tests of linear-attention backends share: small captured instances, batches, and recorded replays of a class."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from attn_graph.backends.base import AttentionBackend, AttentionConfig
from attn_graph.backends.batch import BatchShape, LiveBatch, Pools, batch_sequence, live_batch, make_pools
from attn_graph.backends.modes import Arm, ForwardMode, Placement
from attn_graph.profilers.counters import Counts, count
from golden_replays import Golden
from rebuilds import ARMS, Replayer

VERIFY = ForwardMode.TARGET_VERIFY
BUCKET, N, CONTEXT = 4, 4, 200


def pools_for(moves: bool = False) -> Pools:
    """moves: states do not lie where their slot numbers say."""
    pools = make_pools(rows=9, width=CONTEXT + 12, page_size=16, swa=False, seed=0, device="cpu")
    places = torch.from_numpy(40 + np.random.default_rng(1).permutation(9).astype(np.int32))
    cursors = torch.arange(49, dtype=torch.int32) % pools.ring_length
    return dataclasses.replace(pools, physical_slots=places, ring_cursors=cursors) if moves else pools


def tokens_of(mode: ForwardMode) -> int:
    return N if mode is VERIFY else 1


def batches(mode: ForwardMode, pools: Pools, topk: int = 0, tracks: bool = False) -> Iterator[LiveBatch]:
    """tracks: with slots for the prefix cache, other ones in each batch."""
    rng = np.random.default_rng(2)
    for live in batch_sequence(BatchShape(mode, BUCKET, 16, CONTEXT, tokens_of(mode), N, topk=topk), pools, seed=1):
        yield dataclasses.replace(live, mamba_track_indices=rng.integers(0, 9, live.batch_size)) if tracks else live


def backend_of(
    cls: type[AttentionBackend], mode: ForwardMode, arm: Arm, topk: int = 1, moves: bool = False, **extra
) -> AttentionBackend:
    spec = {"draft_tokens": N, "draft_steps": 3, "topk": topk} if mode is VERIFY else {}
    config = AttentionConfig(page_size=16, max_context=CONTEXT, extra=extra, **spec)
    return cls(config, pools_for(moves), arm.implementation, recorded=arm.placement is not Placement.EAGER)


def capture(
    cls: type[AttentionBackend], mode: ForwardMode, arm: Arm, topk: int = 1, fill=None, tracks=False, **extra
) -> Replayer:
    """A captured instance; fill: the runner's, where it is not the backend's own."""
    return Replayer.capture(
        backend_of(cls, mode, arm, topk, **extra),
        mode,
        BUCKET,
        arm.placement,
        tokens_per_req=tokens_of(mode),
        mask_context=CONTEXT if topk > 1 else 0,
        fill=fill,
        tracks=tracks,
    )


def requests(own: Replayer, lengths: list[int]) -> LiveBatch:
    """A batch of these lengths on rows 2, 3, ..."""
    mode, topk = own.runner.mode, own.backend.config.topk
    rows = list(range(2, 2 + len(lengths)))
    return live_batch(
        mode, lengths, rows, own.backend.pools, tokens_of(mode), np.random.default_rng(0), topk=max(topk, 1)
    )


def counts_by_value(own: Replayer, live: LiveBatch) -> Counts:
    """What a rebuild costs where the engine does not say how many rows are padding."""
    own.load(live)
    view = dataclasses.replace(own.runner.view, num_padding=None)
    return count(lambda: own.backend.init_forward_metadata_out_graph(view), [own.runner.slots.seq_lens_cpu])


def counted(golden: Golden, backend: str = "mamba") -> bool:
    """Whether the recorded release counts padding by value; lightning did for longer than the others."""
    release = tuple(int(part) for part in golden.config["release"].split(".")[:3])
    return release < ((0, 5, 23) if backend == "lightning" else (0, 5, 14))


def recorded(golden: Golden, cls: type[AttentionBackend], **extra) -> Iterator[tuple[int, Replayer, Counts]]:
    """(replay, instance behind it, what it cost) for each replay of a file by the classic chain of `cls`; no oracle."""
    own = golden.captured(cls, ARMS[0], **extra)
    for i in range(golden.config["replays"]):
        yield i, own, own.counts(golden.live(i))
