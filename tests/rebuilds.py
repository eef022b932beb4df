"""Replays live batches through a captured runner, on poisoned buffers, and compares every field with the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from attn_graph.backends.base import AttentionBackend, tensors_of
from attn_graph.backends.batch import LiveBatch, Pools
from attn_graph.backends.modes import Arm, ForwardMode, Placement
from attn_graph.backends.oracle import Expected, HostBatch, HostPools
from attn_graph.backends.runners.decode import DecodeRunner, StaticSlots, upload
from attn_graph.profilers.counters import Counts, count
from attn_graph.profilers.graphs import GraphFactory

ARMS = tuple(map(Arm.parse, ("aten-eager", "aten-graph", "fused-eager", "fused-graph")))


def host_pools(pools: Pools) -> HostPools:
    there = lambda x: None if x is None else x.cpu().numpy()  # noqa: E731
    tables = (pools.req_to_token, pools.full_to_swa, pools.state_slots, pools.physical_slots)
    table, mapping, states, physical = map(there, tables)
    cursors = None if pools.ring_cursors is None else pools.ring_cursors.cpu().numpy().copy()  # a rebuild moves them
    return HostPools(table, mapping, pools.swa_write, states, physical, cursors, pools.ring_length)


@dataclass(slots=True)
class Replayer:
    """A backend captured for one mode and one batch size."""

    backend: AttentionBackend
    runner: DecodeRunner
    graphs: GraphFactory

    @staticmethod
    def capture(
        backend: AttentionBackend,
        mode: ForwardMode,
        bucket: int,
        placement: Placement = Placement.EAGER,
        *,
        max_bs: int | None = None,
        tokens_per_req: int = 1,
        fill: int | None = None,
        lens: torch.dtype = torch.int64,
        slots: StaticSlots | None = None,
        **slot_options,
    ) -> Replayer:
        """Args: bucket, the size to replay; max_bs, a larger captured size, which the buffers then have."""
        fill = backend.seq_len_fill_value if fill is None else fill
        device, buckets = backend.device, {bucket, max_bs or bucket}
        slots = slots or StaticSlots(max(buckets), tokens_per_req, fill, device, lens=lens, **slot_options)
        graphs = GraphFactory(device)
        own = Replayer(backend, DecodeRunner(backend, mode, sorted(buckets), slots, placement, graphs), graphs)
        with own.stream():
            own.runner.capture()
        return own

    def stream(self) -> AbstractContextManager:
        """The stream that everything runs on; what is inside is done when it is left."""
        if self.graphs.stream is None:
            return nullcontext()
        return _synchronised(self.graphs.stream)

    def load(self, live: LiveBatch) -> HostBatch:
        """Fill the static slots; the padded batch as the oracle sees it."""
        slots = self.runner.slots
        with self.stream():
            self.runner.load_batch(upload(live, self.backend.device, lens=slots.seq_lens.dtype))
        b = self.runner.bucket
        return HostBatch(
            mode=str(self.runner.mode),
            req_pool_indices=slots.req_pool_indices[:b].cpu().numpy().copy(),
            seq_lens=slots.seq_lens[:b].cpu().numpy().copy(),
            out_cache_loc=live.out_cache_loc,
            tokens_per_req=slots.tokens_per_req,
            num_accept_tokens=slots.num_accept_tokens[:b].cpu().numpy().copy(),
            positions=slots.positions[: b * slots.tokens_per_req].cpu().numpy().copy(),
            custom_mask=live.custom_mask,
            live_requests=live.batch_size,
            retrieve_next_token=live.retrieve_next_token,
            retrieve_next_sibling=live.retrieve_next_sibling,
            encoder_lens=None if slots.encoder_lens is None else slots.encoder_lens[:b].cpu().numpy().copy(),
            seq_lens_fill=slots.fill_value,
            mamba_track_indices=(
                None if slots.mamba_track_indices is None else slots.mamba_track_indices[:b].cpu().numpy().copy()
            ),
        )

    def differences(self, live: LiveBatch, seed: int = 0) -> list[str]:
        """Poison, replay, compare: one line for every field that is not as the oracle says."""
        batch = self.load(live)
        expected = self.backend.expected(batch, host_pools(self.backend.pools))
        bound = tensors_of(self.backend.metadata[self.runner.mode, self.runner.bucket])
        with self.stream():
            before = {path: _poison(bound[path], want, seed) for path, want in expected.items()}
            self.runner.replay()
        return [line for path, want in expected.items() for line in _compare(path, bound[path], want, before[path])]

    def counts(self, live: LiveBatch) -> Counts:
        """What one rebuild makes the host do."""
        self.load(live)
        with self.stream():
            return count(self.runner.rebuild, [self.runner.slots.seq_lens_cpu])


@contextmanager
def _synchronised(stream: torch.cuda.Stream) -> Iterator[None]:
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize()


def replayed(replayer: Replayer, batches: Iterable[LiveBatch]) -> Iterator[list[str]]:
    """`differences` batch after batch, each on poison of its own."""
    for seed, live in enumerate(batches):
        yield replayer.differences(live, seed)


def with_chain_masks(batches: Iterable[LiveBatch]) -> Iterator[LiveBatch]:
    """Verify batches of chains, each with the tree mask that engines make for topk 1 too: a triangle."""
    for live in batches:
        n = live.out_cache_loc.shape[0] // max(live.batch_size, 1)
        rows = [np.hstack([np.ones((n, int(length)), bool), np.tri(n, dtype=bool)]) for length in live.seq_lens]
        yield replace(live, custom_mask=np.concatenate([r.ravel() for r in rows]) if rows else None)


def _poison(tensor: torch.Tensor, want: Expected, seed: int) -> np.ndarray:
    """Spoil every cell but the presets, which a rebuild only reads; what the tensor holds now."""
    assert tuple(tensor.shape) == want.values.shape, (tuple(tensor.shape), want.values.shape)
    kind = want.values.dtype.kind
    spoiled = ~want.values if kind == "b" else np.full_like(want.values, 249 if kind == "u" else -1000003 - seed)
    now = np.where(want.live & ~want.written, tensor.cpu().numpy(), spoiled)
    tensor.copy_(torch.from_numpy(now))
    return now


def _compare(path: str, tensor: torch.Tensor, want: Expected, before: np.ndarray) -> Iterator[str]:
    got = tensor.cpu().numpy()
    if got.dtype != want.values.dtype:
        yield f"{path}: dtype {got.dtype}, expected {want.values.dtype}"
    wanted = np.where(want.written | want.live, want.values, before)
    wrong = np.argwhere(got != wanted)
    if len(wrong):
        at = tuple(map(int, wrong[0]))
        yield f"{path}{list(at)}: {got[at]}, expected {wanted[at]} ({len(wrong)} cells differ)"
