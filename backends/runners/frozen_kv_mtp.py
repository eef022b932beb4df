"""The frozen-KV multi-token-prediction runner: a draft that reads the target's KV and writes none.

| what          | value                                                                                        |
|---------------|----------------------------------------------------------------------------------------------|
| mode          | decode without speculative fields: with them, a backend adds a draft step to every length     |
| sizes         | in requests; the batch has a row for each of a request's K branches, and state is sized by rows |
| pools         | the target's, swapped in wherever the backend allocates, binds or rebuilds                    |
| body          | a seed pass, then S - 1 more over the same metadata: no KV is added between them              |
| padding       | every slot's rows are reset, tokens and hidden states too                                     |

Source: specs of SGLang's frozen-KV MTP runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..base import AttentionBackend, ConfigError
from ..batch import ForwardBatch, Pools
from ..modes import ForwardMode, Placement
from .drafting import DraftStep, Forward, hidden_after, no_work
from .graph_runner import GraphRunner, Outputs
from .inputs import StepInputs
from .read_done import ReadDone
from .slots import BufferPool, StaticSlots
from .tree import every


@contextmanager
def reading(pools: Pools, backend: AttentionBackend) -> Iterator[None]:
    """Let `backend` and what it wraps read other tables for a while."""
    own = [(b, b.pools) for b in every(backend)]
    for b, _ in own:
        b.pools = pools
    try:
        yield
    finally:
        for b, kept in own:
            b.pools = kept


class FrozenKvMtpRunner(GraphRunner):
    """Multi-token prediction over the target's KV.

    Args:
        backend: of the draft model.
        target: the target's tables.
        buckets: requests to capture.
        slots: from `new_slots`.
        forward: one pass's device work.
        others: see GraphRunner.
    """

    needs = ("bonus_tokens", "hidden_states")

    def __init__(
        self,
        backend: AttentionBackend,
        target: Pools,
        buckets: Sequence[int],
        slots: StaticSlots,
        placement: Placement,
        new_graph: Callable[[], Any],
        forward: Forward = no_work,
        *,
        read_done: ReadDone | None = None,
    ) -> None:
        self.target, self._step_forward = target, forward
        self.rows_per_request = max(backend.config.topk, 1)
        with reading(target, backend):
            super().__init__(
                backend, ForwardMode.DECODE, buckets, slots, placement, new_graph, read_done=read_done
            )  # fmt: skip

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
        """Static slots for up to max_bs requests of K rows. lens: dtype of seq_lens; dtype: of hidden states."""
        rows = max_bs * max(backend.config.topk, 1)
        slots = StaticSlots(rows, 1, backend.seq_len_fill_value, backend.device, lens=lens, pool=pool)
        slots.add("bonus_tokens")
        slots.add("hidden_states", dtype=dtype, width=(hidden_size,))
        return slots

    def _capture_size(self, bucket: int, batch: ForwardBatch) -> None:
        with reading(self.target, self.backend):
            super()._capture_size(bucket, batch)

    def capture_batch(self, bucket: int) -> ForwardBatch:
        return self._batch(bucket, None)

    def load_batch(self, step: StepInputs) -> None:
        """`step` has K rows for each request, all with the request's own pool row and length.

        Raises:
            ConfigError: its rows are not K for each request.
        """
        self._check(step)
        branches = self.rows_per_request
        requests, rest = divmod(step.batch_size, branches)
        if rest:
            raise ConfigError(f"a batch of {step.batch_size} rows does not divide into {branches} branches a request")
        bucket = self._bucket_of(requests)
        self.slots.fill(step, bucket * branches)
        self._select(bucket, requests, self._batch(bucket, step))
        self.rebuild = partial(self._on_target, self.rebuild)

    def _on_target(self, rebuild: Callable[[], None]) -> None:
        with reading(self.target, self.backend):
            rebuild()

    def _batch(self, bucket: int, step: StepInputs | None) -> ForwardBatch:
        count = bucket * self.rows_per_request
        rows = self.slots.slices(count)
        mirrored = step is None or step.seq_lens_cpu is not None
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=count,
            req_pool_indices=rows["req_pool_indices"],
            seq_lens=rows["seq_lens"],
            seq_lens_cpu=rows["seq_lens_cpu"] if mirrored else None,
            out_cache_loc=rows["out_cache_loc"],
            positions=rows["positions"],
            seq_lens_sum=self._sum_of_lengths(step, count),
            actual_forward_mode=self.mode if step is None else step.mode,
            num_padding=0 if step is None else count - step.batch_size,
            num_token_non_padded=self.slots.num_token_non_padded,
        )

    def _forward(self, bucket: int, batch: ForwardBatch) -> Outputs | None:
        rows = self.slots.slices(batch.batch_size)
        hidden, made = rows["hidden_states"], None
        for i in range(max(self.backend.config.draft_steps, 1)):
            made = self._step_forward(DraftStep(i, batch, rows, hidden))
            hidden = hidden_after(made, hidden)
        return made
