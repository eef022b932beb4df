"""The decode runner: static slots, padding to a captured size, hooks in order, one graph per captured size.

A step is `load_batch` (fill static slots, choose the graph), `rebuild` (the metadata, where the placement puts it),
`launch` (the main graph). The three are apart so that each can be timed alone; `replay` is what an engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..base import AttentionBackend, NotCapturedError
from ..batch import ForwardBatch, SpecInfo
from ..modes import ForwardMode, Placement
from .fork import ForkedPrep
from .glue import GlueGraphs
from .graph_runner import GraphRunner, Outputs
from .inputs import StepInputs, upload
from .read_done import ReadDone
from .slots import StaticSlots

__all__ = ["DecodeRunner", "StaticSlots", "StepInputs", "upload"]

Mode = ForwardMode


class DecodeRunner(GraphRunner):
    """Decode and verify of the target model. An IDLE step replays the same graph on padding.

    Args:
        body: device work of the forward pass, recorded behind the in-graph hook; may be empty. May return its outputs
            by name. With a fork it must join before it reads metadata.
        glue_graphs: graphs for the out-graph hook of an eager rebuild, at the steps that they can serve.
        others: see GraphRunner.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        mode: ForwardMode,
        buckets: Sequence[int],
        slots: StaticSlots,
        placement: Placement,
        new_graph: Callable[[], Any],
        body: Callable[[], Outputs | None] = lambda: None,
        *,
        read_done: ReadDone | None = None,
        fork: ForkedPrep | None = None,
        autotune: Callable[[Callable[[], None]], None] | None = None,
        glue_graphs: GlueGraphs | None = None,
    ) -> None:
        super().__init__(
            backend, mode, buckets, slots, placement, new_graph, read_done=read_done, fork=fork, autotune=autotune
        )
        self._body, self.glue_graphs = body, glue_graphs

    def capture(self) -> None:
        if self.glue_graphs is not None:
            self.glue_graphs.drop()
        super().capture()

    def _forward(self, bucket: int, batch: ForwardBatch) -> Outputs | None:
        return self._body()

    def capture_batch(self, bucket: int) -> ForwardBatch:
        return self._batch(bucket, None)

    def load_batch(self, step: StepInputs) -> None:
        self._check(step)
        bucket = self._bucket_of(step.batch_size)
        self.slots.fill(step, bucket)
        view = self._batch(bucket, step)
        self._select(bucket, step.batch_size, view)
        if self.glue_graphs is not None:
            self.rebuild = self.glue_graphs.rebuild_of(view, partial(self.capture_batch, bucket))

    def refresh_planned(self, step: StepInputs) -> None:
        """Only new tokens and positions, for a batch that a plan stream has loaded and rebuilt already.

        Raises:
            NotCapturedError: another batch size is loaded.
        """
        if self.view is None or self.live != step.batch_size:
            raise NotCapturedError(f"batch size {step.batch_size} was not planned, {self.live} was: call load_batch")
        self.slots.fill(step, self.bucket, only=("input_ids", "positions"))
        self.rebuild = _done_already

    def _batch(self, bucket: int, step: StepInputs | None) -> ForwardBatch:
        """The view of a padded batch: `step` None at capture.

        At replay the write slots and the speculative tensors are the live ones, unpadded, as engines pass them: an
        out-of-graph rebuild must pad by itself. Everything else is a static slice. Host lengths are None where the
        step has none: the slot would hold an earlier step's.
        """
        s, t = self.slots, self.slots.tokens_per_req
        live = 0 if step is None else step.batch_size
        mirrored = step is None or step.seq_lens_cpu is not None
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=bucket,
            req_pool_indices=s.req_pool_indices[:bucket],
            seq_lens=s.seq_lens[:bucket],
            seq_lens_cpu=s.seq_lens_cpu[:bucket] if mirrored else None,
            out_cache_loc=s.out_cache_loc[: bucket * s.slots_per_req] if step is None else step.out_cache_loc,
            positions=s.positions[: bucket * t],
            seq_lens_sum=self._sum_of_lengths(step, bucket),
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


def _done_already() -> None:
    """The metadata of a planned batch is there."""
