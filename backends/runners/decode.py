"""The decode runner: static slots, padding to a captured size, hooks in order, one graph per captured size.

A step is `load_batch` (fill static slots, choose the graph), `rebuild` (the metadata, where the placement puts it),
`launch` (the main graph). The three are apart so that each can be timed alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..base import AttentionBackend, ConfigError, NotCapturedError
from ..batch import ForwardBatch, LiveBatch, SpecInfo
from ..modes import ForwardMode, Placement

Mode = ForwardMode


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A live batch on the device, as a scheduler hands it over. b requests, t tokens each."""

    mode: ForwardMode
    req_pool_indices: torch.Tensor  # [b] int64, device
    seq_lens: torch.Tensor  # [b], device
    seq_lens_cpu: torch.Tensor  # [b], host
    out_cache_loc: torch.Tensor  # [b * t] int64, device
    positions: torch.Tensor  # [b * t] int64, device
    num_accept_tokens: torch.Tensor | None  # [b] int32, device
    num_accept_tokens_cpu: tuple[int, ...] | None
    custom_mask: torch.Tensor | None = None  # flat bool, device
    retrieve_next_token: torch.Tensor | None = None  # [b, N] int64, device
    retrieve_next_sibling: torch.Tensor | None = None  # [b, N] int64, device
    encoder_lens: torch.Tensor | None = None  # [b] int32, device
    mamba_track_indices: torch.Tensor | None = None  # [b] int64, device

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]


def upload(
    live: LiveBatch,
    device: torch.device | str,
    *,
    lens: torch.dtype = torch.int64,
    rows: torch.dtype = torch.int64,
) -> StepInputs:
    """Put a live batch on the device. lens, rows: dtypes of seq_lens and req_pool_indices, int32 or int64."""
    mirror = torch.from_numpy(live.seq_lens).to(lens)
    accepted = live.num_accept_tokens
    there = lambda x: None if x is None else torch.from_numpy(x).to(device)  # noqa: E731
    return StepInputs(
        mode=live.mode,
        req_pool_indices=torch.from_numpy(live.req_pool_indices).to(device, rows),
        seq_lens=mirror.to(device, copy=True),
        seq_lens_cpu=mirror,
        out_cache_loc=there(live.out_cache_loc),
        positions=there(live.positions),
        num_accept_tokens=there(accepted),
        num_accept_tokens_cpu=None if accepted is None else tuple(accepted.tolist()),
        custom_mask=there(live.custom_mask),
        retrieve_next_token=there(live.retrieve_next_token),
        retrieve_next_sibling=there(live.retrieve_next_sibling),
        encoder_lens=there(live.encoder_lens),
        mamba_track_indices=there(live.mamba_track_indices),
    )


class StaticSlots:
    """The runner's input buffers. Graphs read these addresses; every fill resets the padding behind the live rows.

    Args:
        max_bs: largest captured batch.
        tokens_per_req: t, tokens per request and step.
        fill: seq_lens of padding rows.
        lens, rows: dtypes of seq_lens and req_pool_indices, int32 or int64.
        mask_context: longest context of a tree mask, in tokens; 0 without a mask (topk of at most 1).
        encoder_fill: encoder_lens at start, or None without an encoder; its padding keeps the last content.
        slots_per_token: write slots for each token; S where a draft decode brings those of all steps.
        tracks: whether batches bring slots for states that go to the prefix cache.
    """

    def __init__(
        self,
        max_bs: int,
        tokens_per_req: int,
        fill: int,
        device: torch.device | str,
        *,
        lens: torch.dtype = torch.int64,
        rows: torch.dtype = torch.int64,
        mask_context: int = 0,
        encoder_fill: int | None = None,
        slots_per_token: int = 1,
        tracks: bool = False,
    ) -> None:
        tokens = max_bs * tokens_per_req
        self.tokens_per_req, self.fill_value = tokens_per_req, fill
        self.req_pool_indices = torch.zeros(max_bs, dtype=rows, device=device)
        self.seq_lens = torch.full((max_bs,), fill, dtype=lens, device=device)
        self.seq_lens_cpu = torch.full((max_bs,), fill, dtype=lens)
        self.slots_per_req = tokens_per_req * slots_per_token
        self.out_cache_loc = torch.zeros(max_bs * self.slots_per_req, dtype=torch.int64, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.num_accept_tokens = torch.full((max_bs,), tokens_per_req, dtype=torch.int32, device=device)
        self.extend_seq_lens = torch.full((max_bs,), tokens_per_req, dtype=torch.int32, device=device)
        self.num_token_non_padded = torch.zeros(1, dtype=torch.int32, device=device)
        links = (max_bs, tokens_per_req)
        self.retrieve_next_token = torch.full(links, -1, dtype=torch.int64, device=device)
        self.retrieve_next_sibling = torch.full(links, -1, dtype=torch.int64, device=device)
        cells = tokens * (mask_context + tokens_per_req) if mask_context else 0
        self.custom_mask = torch.ones(cells, dtype=torch.bool, device=device) if cells else None
        # Padding rows of an idle step: they see everything, and no stale tree.
        idle_cells = tokens * (fill + tokens_per_req)
        self.idle_mask = torch.ones(idle_cells, dtype=torch.bool, device=device) if cells else None
        self.encoder_lens = (
            None if encoder_fill is None else torch.full((max_bs,), encoder_fill, dtype=torch.int32, device=device)
        )
        self.mamba_track_indices = torch.zeros(max_bs, dtype=torch.int64, device=device) if tracks else None

    def fill(self, step: StepInputs, bucket: int) -> None:
        """Copy live rows in, pad [b:bucket]: row 0, fill length, slot 0, position 0, all tokens accepted."""
        b, t = step.batch_size, self.tokens_per_req
        for slot, live, pad in (
            (self.req_pool_indices, step.req_pool_indices, 0),
            (self.seq_lens, step.seq_lens, self.fill_value),
            (self.seq_lens_cpu, step.seq_lens_cpu, self.fill_value),
        ):
            slot[:b].copy_(live)
            slot[b:bucket].fill_(pad)
        for slot, live, n in (
            (self.out_cache_loc, step.out_cache_loc, self.slots_per_req),
            (self.positions, step.positions, t),
        ):
            slot[: b * n].copy_(live)
            slot[b * n : bucket * n].zero_()
        self.num_token_non_padded.fill_(b * t)
        if step.num_accept_tokens is not None:
            self.num_accept_tokens[:b].copy_(step.num_accept_tokens)
            self.num_accept_tokens[b:bucket].fill_(t)
        if step.retrieve_next_token is not None:
            self.retrieve_next_token[:b].copy_(step.retrieve_next_token)
            self.retrieve_next_sibling[:b].copy_(step.retrieve_next_sibling)
        if self.custom_mask is not None and step.custom_mask is not None:
            # In place: a recorded rebuild reads this address, whoever built the tree.
            self.custom_mask[: step.custom_mask.shape[0]].copy_(step.custom_mask)
        if self.encoder_lens is not None and step.encoder_lens is not None:
            self.encoder_lens[:b].copy_(step.encoder_lens)
        if self.mamba_track_indices is not None:
            self.mamba_track_indices[:bucket].zero_()
            if step.mamba_track_indices is not None:
                self.mamba_track_indices[:b].copy_(step.mamba_track_indices)


class DecodeRunner:
    """Captures one graph per bucket and replays it for live batches of any size up to the largest.

    Attributes:
        rebuild: rebuilds the metadata of the loaded batch where the placement says; in the main graph it only selects
            the bound object.
        launch: launches the loaded batch's graph.

    Args:
        backend: with its state initialised by this runner.
        mode: captured mode; an IDLE step replays the same graph on padding.
        buckets: batch sizes to capture.
        slots: static inputs, possibly shared with other runners that never run at the same time.
        placement: where the rebuild runs.
        new_graph: makes an empty graph.
        body: device work of the forward pass, recorded behind the in-graph hook; may be empty.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        mode: ForwardMode,
        buckets: Sequence[int],
        slots: StaticSlots,
        placement: Placement,
        new_graph: Callable[[], Any],
        body: Callable[[], None] = lambda: None,
    ) -> None:
        if backend.recorded is (placement is Placement.EAGER):
            raise ConfigError(
                f"placement {placement} with recorded={backend.recorded}: eager rebuilds are not recorded"
            )
        self.backend, self.mode, self.slots, self.placement = backend, mode, slots, placement
        self.buckets = sorted(set(buckets))
        self._new_graph, self._body = new_graph, body
        self.graphs: dict[int, Any] = {}
        self.glue: dict[int, Any] = {}
        backend.init_cuda_graph_state(self.buckets[-1], self.buckets[-1] * slots.tokens_per_req)
        self.bucket = 0
        self.view: ForwardBatch | None = None
        self.rebuild: Callable[[], None] = _nothing_loaded
        self.launch: Callable[[], None] = _nothing_loaded

    def capture(self) -> None:
        """Capture every bucket, largest first, so that smaller graphs reuse the larger ones' memory.

        Raises:
            CaptureError: from the graph, if a hook does what a graph cannot hold.
        """
        for bucket in reversed(self.buckets):
            batch = self.capture_batch(bucket)
            self.slots.seq_lens[:bucket].fill_(self.slots.fill_value)
            self.slots.seq_lens_cpu[:bucket].fill_(self.slots.fill_value)
            self.slots.req_pool_indices[:bucket].zero_()
            self.slots.out_cache_loc[: bucket * self.slots.slots_per_req].zero_()
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            if self.placement is Placement.GLUE:
                self.glue[bucket] = self._captured(lambda fb=batch: self._hook(fb))
                self.graphs[bucket] = self._captured(self._body)
            else:
                self.graphs[bucket] = self._captured(lambda fb=batch: (self._hook(fb), self._body()))

    def _hook(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_in_graph(batch)

    def _captured(self, body: Callable[[], None]) -> Any:
        graph = self._new_graph()
        graph.capture(body, after_warmup=self.backend.on_after_cuda_graph_warmup)
        return graph

    def capture_batch(self, bucket: int) -> ForwardBatch:
        """The batch a capture sees: static slices only, so that recorded work reads live data at replay."""
        return self._batch(bucket, None)

    def load_batch(self, step: StepInputs) -> None:
        """Fill static slots, choose the graph, make the view for `rebuild`.

        Raises:
            NotCapturedError: the batch is larger than the largest captured size.
            ConfigError: a length does not fit the tables.
        """
        self._check_lengths(step)
        i = bisect_left(self.buckets, step.batch_size)
        if i == len(self.buckets):
            raise NotCapturedError(
                f"batch size {step.batch_size} exceeds the captured sizes {', '.join(map(str, self.buckets))}"
            )
        self.bucket = self.buckets[i]
        self.slots.fill(step, self.bucket)
        self.view = self._batch(self.bucket, step)
        self.launch = self.graphs[self.bucket].launch
        hook = partial(self.backend.init_forward_metadata_out_graph, self.view)
        glue = self.glue.get(self.bucket)
        self.rebuild = hook if glue is None else partial(_in_turn, hook, glue.launch)

    def replay(self) -> None:
        """Rebuild, then launch."""
        self.rebuild()
        self.launch()

    def _batch(self, bucket: int, step: StepInputs | None) -> ForwardBatch:
        """The view of a padded batch: `step` None at capture.

        At replay the write slots and the speculative tensors are the live ones, unpadded, as engines pass them: an
        out-of-graph rebuild must pad by itself. Everything else is a static slice.
        """
        s, t = self.slots, self.slots.tokens_per_req
        live = 0 if step is None else step.batch_size
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=bucket,
            req_pool_indices=s.req_pool_indices[:bucket],
            seq_lens=s.seq_lens[:bucket],
            seq_lens_cpu=s.seq_lens_cpu[:bucket],
            out_cache_loc=s.out_cache_loc[: bucket * s.slots_per_req] if step is None else step.out_cache_loc,
            positions=s.positions[: bucket * t],
            seq_lens_sum=int(s.seq_lens_cpu[:bucket].sum()),
            encoder_lens=None if s.encoder_lens is None else s.encoder_lens[:bucket],
            spec_info=self._spec_info(bucket, step) if self.mode.is_speculative else None,
            actual_forward_mode=self.mode if step is None else step.mode,
            num_padding=0 if step is None else bucket - live,
            num_token_non_padded=s.num_token_non_padded,
            mamba_track_indices=None if s.mamba_track_indices is None else s.mamba_track_indices[:bucket],
        )

    def _spec_info(self, bucket: int, step: StepInputs | None) -> SpecInfo:
        s, t, config = self.slots, self.slots.tokens_per_req, self.backend.config
        common = dict(
            draft_token_num=t,
            topk=config.topk,
            num_steps=config.draft_steps,
            num_tokens_per_req=t,
            num_accept_tokens=s.num_accept_tokens[:bucket],
        )
        if step is None or step.mode is Mode.IDLE:
            # An idle rank has no tree: the engine substitutes a mask of the runner's own.
            idle = step is not None and s.idle_mask is not None
            return SpecInfo(
                **common,
                custom_mask=s.idle_mask[: bucket * t * (s.fill_value + t)] if idle else s.custom_mask,
                positions=s.positions[: bucket * t] if step is None else s.positions[:0],
                extend_seq_lens=s.extend_seq_lens[:bucket],
                retrieve_next_token=None if step is not None else s.retrieve_next_token[:bucket],
                retrieve_next_sibling=None if step is not None else s.retrieve_next_sibling[:bucket],
            )
        accepted = step.num_accept_tokens_cpu
        return SpecInfo(
            **common,
            num_accept_tokens_cpu=None if accepted is None else accepted + (t,) * (bucket - step.batch_size),
            custom_mask=step.custom_mask,
            positions=step.positions,
            extend_seq_lens=s.extend_seq_lens[:bucket],
            retrieve_next_token=step.retrieve_next_token,
            retrieve_next_sibling=step.retrieve_next_sibling,
        )

    def _check_lengths(self, step: StepInputs) -> None:
        if step.batch_size == 0:
            return
        longest, limit = int(step.seq_lens_cpu.max()), self.backend.config.max_context
        if longest > limit:
            raise ConfigError(f"seq_lens has {longest} tokens, more than max_context {limit}")


def _in_turn(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _nothing_loaded() -> None:
    raise NotCapturedError("no batch is loaded: call load_batch first")
