"""Gated delta rule on Ascend NPUs, the linear half of a hybrid model: state slots, query starts, per-token indices.

With v live requests, the first rows of the batch (padding is its tail), and N tokens each in verify:

| field                   | decode, idle                          | target_verify                     |
|-------------------------|---------------------------------------|-----------------------------------|
| mamba_cache_indices     | state_slots[pool[b]], 0 from v on     | the same                          |
| query_start_loc         | min(b, v)                             | min(b, v) * N                     |
| mamba_cache_indices_gdn | not rebuilt, not read                 | 0, 1, ..., B * N - 1              |
| retrieve_next_*         | None                                  | topk > 1: links of live rows      |
| req_pool_indices        | the runner's: 0 from v on             | the same                          |

Padding rows use state slot 0, which is therefore reserved. In verify their token indices are their own: an older
release pointed them at token 0, a live request's. Draft extend leaves everything as it is.

How many rows are padding is asked of the engine. Upstream counts the rows whose length is the fill value, which takes a
live row of that length for padding, and all padding for live where another backend chose the fill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Allowances
from .batch import ForwardBatch
from .mamba import MambaBackend, MambaMetadata, first_rows
from .modes import ForwardMode
from .oracle import Expected, HostBatch, HostPools, ascend_gdn

Mode = ForwardMode

SKIPPED = frozenset({Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2})


@dataclass(slots=True, kw_only=True)
class AscendGdnMetadata(MambaMetadata):
    """Views into the instance's buffers, bound at capture. B = captured batch size."""

    mamba_cache_indices_gdn: torch.Tensor  # [B * N] int32, device


@dataclass(frozen=True, slots=True)
class EagerArguments:
    """Constants that layers outside a graph take from here; inside one they make their own.

    Made anew by every classic rebuild, as upstream does, and therefore no part of the metadata.
    """

    num_accept_tokens: torch.Tensor  # [B] int32 ones, device
    actual_seq_lengths: torch.Tensor  # [B] int32, device
    ssm_state_indices: torch.Tensor  # [B] or [B * N] int32, device


class AscendGdnBackend(MambaBackend):
    """Metadata of the NPU's gated-delta-rule layers. Pattern A, on top of the recurrent layers' refresh."""

    seq_len_fill_value = 0
    padding_slot = 0
    allowances = Allowances(
        shared_between_modes=MambaBackend.allowances.shared_between_modes | {"mamba_cache_indices_gdn"}
    )

    has_rings = False

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.token_indices = self._ints(-1, max_num_tokens)
        self.token_numbers = torch.arange(max_num_tokens, dtype=torch.int32, device=self.device)
        self.graph_mode = False
        self.eager: EagerArguments | None = None

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        """As in the base class; draft extend keeps what the mode before it left."""
        if fb.forward_mode in SKIPPED:
            return
        super().init_forward_metadata_out_graph(fb, in_capture)
        self.graph_mode = True

    def init_forward_metadata_in_graph(self, fb: ForwardBatch) -> None:
        if fb.forward_mode not in SKIPPED:
            super().init_forward_metadata_in_graph(fb)

    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        super().init_forward_metadata(fb)
        self.graph_mode = False

    def bind(self, fb: ForwardBatch) -> AscendGdnMetadata:
        tokens = self.token_indices[: fb.batch_size * self.tokens]
        return AscendGdnMetadata(**self._views(fb), mamba_cache_indices_gdn=tokens)

    def rebuild_aten(self, fb: ForwardBatch, md: AscendGdnMetadata) -> None:
        b, n, verify = fb.batch_size, self.tokens, self._verifies(fb)
        padding = self._padding(fb)
        slots = self._aten_slots(fb, md, padding)
        if verify:
            numbers = torch.arange(len(slots[: b - padding]) * n, dtype=torch.int32, device=self.device)
            md.mamba_cache_indices_gdn[: len(slots[: b - padding]) * n].copy_(numbers)
            self._number_padding(md, len(slots[: b - padding]) * n)
        self._aten_track(fb, md)
        self._aten_starts(fb, md, padding)
        self._aten_links(fb, md)
        ones = torch.ones(b, dtype=torch.int32, device=self.device)
        lengths = torch.ones(b, dtype=torch.int32, device=self.device)
        if verify:
            lengths, slots = lengths * n, torch.arange(b * n, dtype=torch.int32, device=self.device)
        self.eager = EagerArguments(ones, lengths, slots)

    def _padding(self, fb: ForwardBatch) -> torch.Tensor | int:
        """Padding rows: counted as upstream counts them, unless the engine says that there are others."""
        if fb.seq_lens_cpu is None:
            return fb.num_padding or 0
        mirror = first_rows(fb.seq_lens_cpu, fb.batch_size)
        counted = (mirror == self.seq_len_fill_value).count_nonzero()
        if fb.num_padding is None or mirror.tolist().count(self.seq_len_fill_value) == fb.num_padding:
            return counted
        return fb.num_padding

    def _number_padding(self, md: AscendGdnMetadata, live_tokens: int) -> None:
        """Token indices of padding rows, their own."""
        end = md.mamba_cache_indices_gdn.shape[0]
        md.mamba_cache_indices_gdn[live_tokens:] = self.token_numbers[live_tokens:end]

    def rebuild_aten_static(self, fb: ForwardBatch, md: AscendGdnMetadata) -> None:
        super().rebuild_aten_static(fb, md)
        if self._verifies(fb):
            md.mamba_cache_indices_gdn.copy_(self.token_numbers[: md.mamba_cache_indices_gdn.shape[0]])

    def _launch_arguments(self, fb: ForwardBatch, md: AscendGdnMetadata) -> dict:
        numbers = md.mamba_cache_indices_gdn if self._verifies(fb) else None
        return super()._launch_arguments(fb, md) | {"token_numbers": numbers}

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        return ascend_gdn.expected(batch, pools, draft_tokens=self.tokens, topk=self.config.topk)
