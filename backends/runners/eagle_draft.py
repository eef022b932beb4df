"""The EAGLE draft runner: S - 1 draft decodes in one graph, over the multi-step wrapper.

| what          | value                                                                                   |
|---------------|-----------------------------------------------------------------------------------------|
| mode, tokens  | draft_decode, K per request                                                             |
| sizes         | in requests                                                                             |
| positions     | len at entry, K times; step i stands at len + i, and the graph takes the S - 1 off again |
| write slots   | flat [B, K, S]; a step writes its own column                                            |
| replay's view | the live batch where it fills the captured size, else static slices                     |

Hidden states go from step to step beside the slot, so that the slot and the live batch are after a replay what they
were before. Source: specs of SGLang's EAGLE draft graph runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base import AttentionBackend
from ..batch import ForwardBatch, SpecInfo
from ..modes import ForwardMode, Placement
from .drafting import DraftStep, Forward, hidden_after, no_work, write_slots
from .graph_runner import GraphRunner, Outputs
from .inputs import StepInputs
from .read_done import ReadDone
from .slots import BufferPool, StaticSlots


class EagleDraftRunner(GraphRunner):
    """Draft decode of S steps.

    Args:
        backend: a multi-step wrapper.
        buckets: requests to capture.
        slots: from `new_slots`.
        forward: one draft step's device work.
        others: see GraphRunner.
    """

    needs = ("topk_p", "topk_index", "hidden_states")

    def __init__(
        self,
        backend: AttentionBackend,
        buckets: Sequence[int],
        slots: StaticSlots,
        placement: Placement,
        new_graph: Callable[[], Any],
        forward: Forward = no_work,
        *,
        read_done: ReadDone | None = None,
        autotune: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        super().__init__(
            backend, ForwardMode.DRAFT_DECODE, buckets, slots, placement, new_graph,
            read_done=read_done, autotune=autotune,
        )  # fmt: skip
        self._step_forward = forward

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
        c = backend.config
        branches = max(c.topk, 1)
        slots = StaticSlots(
            max_bs, branches, backend.seq_len_fill_value, backend.device,
            lens=lens, slots_per_token=c.draft_steps, pool=pool,
        )  # fmt: skip
        slots.add("extend_seq_lens", dtype=torch.int32, init=1, pad=1)
        slots.add("topk_p", dtype=torch.float32, width=(branches,))
        slots.add("topk_index", width=(branches,))
        slots.add("hidden_states", dtype=dtype, width=(hidden_size,))
        return slots

    def capture_batch(self, bucket: int) -> ForwardBatch:
        return self._batch(bucket, None)

    def load_batch(self, step: StepInputs) -> None:
        self._check(step)
        bucket = self._bucket_of(step.batch_size)
        self.slots.fill(step, bucket)
        self._select(bucket, step.batch_size, self._batch(bucket, step))

    def _batch(self, bucket: int, step: StepInputs | None) -> ForwardBatch:
        c, rows = self.backend.config, self.slots.slices(bucket)
        live = bucket if step is None else step.batch_size
        # A full batch is handed on as it came: hooks may read it, and nothing may bind it.
        lent = rows if step is None or live != bucket else {name: getattr(step, name) for name in _LENT}
        mirrored = step is None or step.seq_lens_cpu is not None
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=bucket,
            req_pool_indices=lent["req_pool_indices"],
            seq_lens=lent["seq_lens"],
            seq_lens_cpu=lent["seq_lens_cpu"] if mirrored else None,
            out_cache_loc=lent["out_cache_loc"],
            positions=lent["positions"],
            seq_lens_sum=self._sum_of_lengths(step, bucket),
            spec_info=SpecInfo(draft_token_num=c.draft_tokens, topk=c.topk, num_steps=c.draft_steps),
            actual_forward_mode=self.mode if step is None else step.mode,
            num_padding=bucket - live,
            num_token_non_padded=self.slots.num_token_non_padded,
        )

    def _forward(self, bucket: int, batch: ForwardBatch) -> Outputs | None:
        rows, steps = self.slots.slices(bucket), self.backend.config.draft_steps
        branches, hidden, made = len(rows["positions"]), rows["hidden_states"], None
        for i in range(steps - 1):
            made = self._step_forward(
                DraftStep(i, batch, rows, hidden, write_slots(rows["out_cache_loc"], branches, steps, i))
            )
            hidden = hidden_after(made, hidden)
            rows["positions"].add_(1)
        if steps > 1:
            rows["positions"].sub_(steps - 1)
        return made


_LENT = ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "positions")
