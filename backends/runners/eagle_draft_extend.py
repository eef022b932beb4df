"""The EAGLE draft-extend runner: the draft model over the N tokens that verify has looked at, at a fixed width.

| what          | value                                                                                     |
|---------------|-------------------------------------------------------------------------------------------|
| mode, tokens  | draft_extend_v2, N per request: a property of the shape; accepted counts select outputs    |
| sizes         | in requests                                                                               |
| replay's view | batch_size B over unsliced slots of max_bs rows: hooks must cut; write slots of live tokens |
| read-done     | clears what an earlier phase published, being the last reader; its graph holds no marker   |

Hidden states are handed out as copies: the next replay writes into the captured outputs. Source: specs of SGLang's
EAGLE draft-extend graph runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import AttentionBackend
from ..batch import ForwardBatch, SpecInfo
from ..modes import ForwardMode, Placement
from .graph_runner import GraphRunner, Outputs
from .inputs import StepInputs
from .read_done import ReadDone
from .slots import BufferPool, StaticSlots


@dataclass(frozen=True, slots=True)
class ExtendStep:
    """What a draft-extend forward pass sees: the layer's number, the captured batch, the static slots' rows by name."""

    index: int
    batch: ForwardBatch
    slots: Mapping[str, torch.Tensor]


class EagleDraftExtendRunner(GraphRunner):
    """Draft extend with one backend.

    Args:
        backend: of the draft model.
        buckets: requests to capture.
        slots: from `new_slots`.
        forward: the forward pass's device work; returns its outputs by name.
        others: see GraphRunner.
    """

    needs = ("num_accept_tokens", "extend_seq_lens", "hidden_states")
    marks_reads = False

    def __init__(
        self,
        backend: AttentionBackend,
        buckets: Sequence[int],
        slots: StaticSlots,
        placement: Placement,
        new_graph: Callable[[], Any],
        forward: Callable[[ExtendStep], Outputs | None] = lambda step: None,
        *,
        read_done: ReadDone | None = None,
        autotune: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        super().__init__(
            backend, ForwardMode.DRAFT_EXTEND_V2, buckets, slots, placement, new_graph,
            read_done=read_done, autotune=autotune,
        )  # fmt: skip
        self._extend_forward = forward

    @staticmethod
    def new_slots(
        backend: AttentionBackend,
        max_bs: int,
        hidden_size: int,
        *,
        lens: torch.dtype = torch.int64,
        dtype: torch.dtype = torch.float32,
        pool: BufferPool | None = None,
    ) -> StaticSlots:
        """Static slots for up to max_bs requests. lens: dtype of seq_lens; dtype: of hidden states."""
        n = backend.config.draft_tokens
        slots = StaticSlots(max_bs, n, backend.seq_len_fill_value, backend.device, lens=lens, slot_init=1, pool=pool)
        slots.add("hidden_states", n, dtype=dtype, width=(hidden_size,))
        return slots

    def capture_batch(self, bucket: int) -> ForwardBatch:
        return self._batch(bucket, None)

    def load_batch(self, step: StepInputs) -> None:
        self._check(step)
        bucket = self._bucket_of(step.batch_size)
        if self.read_done is not None:
            self.read_done.take()
        self.slots.fill(step, bucket)
        self._select(bucket, step.batch_size, self._batch(bucket, step))

    def outputs(self) -> dict[str, torch.Tensor]:
        return {name: x.clone() if name == "hidden_states" else x for name, x in super().outputs().items()}

    def _batch(self, bucket: int, step: StepInputs | None) -> ForwardBatch:
        s, c, t = self.slots, self.backend.config, self.slots.tokens_per_req
        rows = s.slices(bucket)
        live = bucket if step is None else step.batch_size
        mirrored = step is None or step.seq_lens_cpu is not None
        lent = rows if step is None else vars(s)
        accepted = None if step is None else step.num_accept_tokens_cpu
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=bucket,
            req_pool_indices=lent["req_pool_indices"],
            seq_lens=lent["seq_lens"],
            seq_lens_cpu=lent["seq_lens_cpu"] if mirrored else None,
            out_cache_loc=s.out_cache_loc[: live * t],
            positions=rows["positions"],
            seq_lens_sum=self._sum_of_lengths(step, bucket),
            spec_info=SpecInfo(
                draft_token_num=c.draft_tokens,
                topk=c.topk,
                num_steps=c.draft_steps,
                num_tokens_per_req=t,
                num_accept_tokens=rows["num_accept_tokens"],
                num_accept_tokens_cpu=None if accepted is None else accepted + (t,) * (bucket - live),
                positions=rows["positions"],
                extend_seq_lens=rows["extend_seq_lens"],
            ),
            actual_forward_mode=self.mode if step is None else step.mode,
            num_padding=bucket - live,
            num_token_non_padded=s.num_token_non_padded,
        )

    def _forward(self, bucket: int, batch: ForwardBatch) -> Outputs | None:
        return self._extend_forward(ExtendStep(0, batch, self.slots.slices(bucket)))
