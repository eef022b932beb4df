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

from .base import Allowances, AttentionBackend, ConfigError
from .batch import ForwardBatch
from .kernels.linear_state import PreparedLinearState
from .modes import ForwardMode
from .oracle import Expected, HostBatch, HostPools, ascend_gdn

Mode = ForwardMode

SKIPPED = frozenset({Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2})
PADDING_SLOT = 0


@dataclass(slots=True)
class AscendGdnMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size."""

    mamba_cache_indices: torch.Tensor  # [B] int32, device
    query_start_loc: torch.Tensor  # [B + 1] int32, device
    mamba_cache_indices_gdn: torch.Tensor  # [B * N] int32, device
    retrieve_next_token: torch.Tensor | None  # [B, N] int32, device
    retrieve_next_sibling: torch.Tensor | None  # [B, N] int32, device
    retrieve_parent_token: torch.Tensor | None  # [B, N] int32, device; the conv kernel's to write
    fused: PreparedLinearState | None = None  # bound at the first fused rebuild


@dataclass(frozen=True, slots=True)
class EagerArguments:
    """Constants that layers outside a graph take from here; inside one they make their own.

    Made anew by every classic rebuild, as upstream does, and therefore no part of the metadata.
    """

    num_accept_tokens: torch.Tensor  # [B] int32 ones, device
    actual_seq_lengths: torch.Tensor  # [B] int32, device
    ssm_state_indices: torch.Tensor  # [B] or [B * N] int32, device


class AscendGdnBackend(AttentionBackend):
    """Metadata of the NPU's gated-delta-rule layers. Pattern A: capture and replay run the same refresh."""

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY})
    seq_len_fill_value = 0
    allowances = Allowances(
        shared_between_modes=frozenset({"mamba_cache_indices", "query_start_loc", "mamba_cache_indices_gdn"})
    )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_num_tokens % max_bs:
            raise ConfigError(f"max_num_tokens {max_num_tokens} is no multiple of max_bs {max_bs}")
        if self.pools.state_slots is None:
            raise ConfigError("ascend_gdn needs pools.state_slots, the state slot of each request row; got None")
        self.max_bs, self.tokens = max_bs, max_num_tokens // max_bs
        n = self.tokens
        new = lambda value, *shape: torch.full(shape, value, dtype=torch.int32, device=self.device)  # noqa: E731
        self.state_indices, self.token_indices = new(-1, max_bs), new(-1, max_bs * n)
        self.query_starts = new(0, max_bs + 1)
        links = self.config.topk > 1
        self.links = tuple(new(0, max_bs, n) for _ in range(3)) if links else None
        self.row_numbers = torch.arange(max_bs + 1, dtype=torch.int32, device=self.device)
        self.row_starts = self.row_numbers * n
        self.token_numbers = torch.arange(max_bs * n, dtype=torch.int32, device=self.device)
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
        b, n = fb.batch_size, self.tokens
        if not 0 < b <= self.max_bs:
            raise ConfigError(f"batch size {b} is not within 1..{self.max_bs}, the rows of mamba_cache_indices")
        verify = fb.forward_mode is Mode.TARGET_VERIFY
        if verify and fb.spec_info.draft_token_num != n:
            raise ConfigError(f"verify has {fb.spec_info.draft_token_num} draft tokens, the buffers have {n} a request")
        next_token, next_sibling, parents = (x[:b] for x in self.links) if verify and self.links else (None,) * 3
        return AscendGdnMetadata(
            mamba_cache_indices=self.state_indices[:b],
            query_start_loc=self.query_starts[: b + 1],
            mamba_cache_indices_gdn=self.token_indices[: b * n],
            retrieve_next_token=next_token,
            retrieve_next_sibling=next_sibling,
            retrieve_parent_token=parents,
        )

    # The classic chain, op for op as upstream's. The count of padding rows is a tensor on the host, so that every use
    # of it subtracts, reads and slices anew.

    def rebuild_aten(self, fb: ForwardBatch, md: AscendGdnMetadata) -> None:
        b, n, verify = fb.batch_size, self.tokens, fb.forward_mode is Mode.TARGET_VERIFY
        pool, padding = _rows(fb.req_pool_indices, b), self._padding(fb)
        pool[b - padding :] = 0
        slots = self.pools.state_slots[pool]
        slots[b - padding :] = PADDING_SLOT
        md.mamba_cache_indices[: len(slots)].copy_(slots)
        if verify:
            numbers = torch.arange(len(slots[: b - padding]) * n, dtype=torch.int32, device=self.device)
            md.mamba_cache_indices_gdn[: len(slots[: b - padding]) * n].copy_(numbers)
            self._number_padding(md, len(slots[: b - padding]) * n)
        starts = self.row_starts if verify else self.row_numbers
        if padding == 0:
            md.query_start_loc.copy_(starts[: b + 1])
        else:
            md.query_start_loc[: b - padding].copy_(starts[: b - padding])
            end = b - padding
            md.query_start_loc[b - padding :].fill_(end * n if verify else end)
        if md.retrieve_next_token is not None and fb.spec_info.retrieve_next_token is not None:
            for field, links in (
                (md.retrieve_next_token, fb.spec_info.retrieve_next_token),
                (md.retrieve_next_sibling, fb.spec_info.retrieve_next_sibling),
            ):
                field[: links.shape[0]].copy_(links)
        ones = torch.ones(b, dtype=torch.int32, device=self.device)
        lengths = torch.ones(b, dtype=torch.int32, device=self.device)
        if verify:
            lengths, slots = lengths * n, torch.arange(b * n, dtype=torch.int32, device=self.device)
        self.eager = EagerArguments(ones, lengths, slots)

    def _padding(self, fb: ForwardBatch) -> torch.Tensor | int:
        """Padding rows: counted as upstream counts them, unless the engine says that there are others."""
        if fb.seq_lens_cpu is None:
            return fb.num_padding or 0
        mirror = _rows(fb.seq_lens_cpu, fb.batch_size)
        counted = (mirror == self.seq_len_fill_value).count_nonzero()
        if fb.num_padding is None or mirror.tolist().count(self.seq_len_fill_value) == fb.num_padding:
            return counted
        return fb.num_padding

    def _number_padding(self, md: AscendGdnMetadata, live_tokens: int) -> None:
        """Token indices of padding rows, their own."""
        end = md.mamba_cache_indices_gdn.shape[0]
        md.mamba_cache_indices_gdn[live_tokens:] = self.token_numbers[live_tokens:end]

    def rebuild_aten_static(self, fb: ForwardBatch, md: AscendGdnMetadata) -> None:
        b, verify = fb.batch_size, fb.forward_mode is Mode.TARGET_VERIFY
        n = self.tokens if verify else 1
        requests = self._live_tokens(fb) // n
        live = self.row_numbers[:b] < requests
        pool = fb.req_pool_indices[:b]
        pool.mul_(live)
        md.mamba_cache_indices.copy_(self.pools.state_slots[pool] * live)
        md.query_start_loc.copy_(torch.minimum(self.row_numbers[: b + 1], requests) * n)
        if verify:
            md.mamba_cache_indices_gdn.copy_(self.token_numbers[: b * n])
        if md.retrieve_next_token is not None:
            rows = live[:, None]
            for field, links in (
                (md.retrieve_next_token, fb.spec_info.retrieve_next_token),
                (md.retrieve_next_sibling, fb.spec_info.retrieve_next_sibling),
            ):
                field.copy_(torch.where(rows, links, field))

    def rebuild_fused(self, fb: ForwardBatch, md: AscendGdnMetadata) -> None:
        if md.fused is None:
            md.fused = self._prepared(fb, md)
        links = (None, None)
        if md.retrieve_next_token is not None:
            links = fb.spec_info.retrieve_next_token, fb.spec_info.retrieve_next_sibling
        md.fused(fb.req_pool_indices, self._live_tokens(fb), *links)

    def _prepared(self, fb: ForwardBatch, md: AscendGdnMetadata) -> PreparedLinearState:
        verify = fb.forward_mode is Mode.TARGET_VERIFY
        return PreparedLinearState(
            req_pool_indices=fb.req_pool_indices,
            state_slots=self.pools.state_slots,
            live_tokens=self._live_tokens(fb),
            state_indices=md.mamba_cache_indices,
            query_start_loc=md.query_start_loc,
            token_numbers=md.mamba_cache_indices_gdn if verify else None,
            next_token=md.retrieve_next_token,
            next_sibling=md.retrieve_next_sibling,
            bs=fb.batch_size,
            width=self.tokens if verify else 1,
            padding_slot=PADDING_SLOT,
        )

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        return ascend_gdn.expected(batch, pools, draft_tokens=self.tokens, topk=self.config.topk)

    def _live_tokens(self, fb: ForwardBatch) -> torch.Tensor:
        if fb.num_token_non_padded is None:
            raise ConfigError("num_token_non_padded is None: recorded work cannot tell which rows are padding")
        return fb.num_token_non_padded


def _rows(x: torch.Tensor, b: int) -> torch.Tensor:
    """The first b rows; no view where that is all of them."""
    return x if x.shape[0] == b else x[:b]
