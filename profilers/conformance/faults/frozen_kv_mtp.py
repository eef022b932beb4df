"""Faults of a draft that reads the target's KV."""

from __future__ import annotations

from dataclasses import replace

from ....backends.batch import SpecInfo
from ....backends.modes import ForwardMode
from ....backends.runners.frozen_kv_mtp import FrozenKvMtpRunner
from .variants import runner_variant


class OwnTables(FrozenKvMtpRunner):
    """The draft's tables stay in place, so pages are not the target's."""

    def __init__(self, backend, target, *args, **options):
        super().__init__(backend, backend.pools, *args, **options)


class SizedByRequests(FrozenKvMtpRunner):
    """State for as many rows as there are requests, although each has a row for every branch."""

    def __init__(self, backend, *args, **options):
        allocate, branches = backend.init_cuda_graph_state, backend.config.topk
        backend.init_cuda_graph_state = lambda rows, tokens: allocate(rows // branches, tokens // branches)
        super().__init__(backend, *args, **options)


class DraftingView(FrozenKvMtpRunner):
    """Speculative fields left in the view: a backend adds a draft step to every length."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mode = ForwardMode.DRAFT_DECODE

    def _batch(self, bucket, step):
        c = self.backend.config
        return replace(super()._batch(bucket, step), spec_info=SpecInfo(c.draft_tokens, c.topk, c.draft_steps))


class KeepsBonusTokens(FrozenKvMtpRunner):
    """Bonus tokens and hidden states behind the live rows stay those of the last batch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        hidden = self.slots.hidden_states
        self.slots.add("bonus_tokens", pad=None)
        self.slots.add("hidden_states", dtype=hidden.dtype, width=hidden.shape[1:], pad=None)


DECODE = ForwardMode.DECODE
FAULTS = (
    runner_variant(OwnTables, "R3", mode=DECODE),
    runner_variant(SizedByRequests, "R3", mode=DECODE),
    runner_variant(DraftingView, "R3", mode=DECODE),
    runner_variant(KeepsBonusTokens, "R2", mode=DECODE),
)
