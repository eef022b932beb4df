"""TRT-LLM paged MHA (FlashInfer trtllm-gen and XQA): page tables, lengths and prefix sums; top-k of at most one.

| mode              | cache_seqlens       | cu_seqlens_q                  | max_seq_len_q |
|-------------------|---------------------|-------------------------------|---------------|
| decode, idle      | len                 | 0..B, preset                  | 1             |
| draft_decode      | len + step_id + 1   | 0..B, preset                  | 1             |
| target_verify     | len + T // B        | i * N, preset                 | T // B        |
| draft_extend      | len                 | running sum, num_accept_tokens| T // B        |
| draft_extend_v2   | len (bumped by N)   | i * w, w = num_tokens_per_req | w             |

cu_seqlens_k is the running sum of cache_seqlens, page_table[r, p] = floor(req_to_token[pool[r], p * P] / P), and the
sliding-window table maps the page's first token before it divides. Source: specs of SGLang's trtllm_mha backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .aten_ops import check_slots
from .base import Allowances, AttentionBackend, ConfigError
from .batch import ForwardBatch
from .kernels.decode_metadata import (
    DecodeMetadataConfig,
    PreparedDecodeMetadata,
    QueryMode,
    default_config,
)
from .kernels.launch import foreign_launch
from .modes import ForwardMode
from .oracle import Expected, HostBatch, HostPools, trtllm_mha

Mode = ForwardMode


_QUERY_MODES = {Mode.DRAFT_EXTEND: QueryMode.CUMSUM, Mode.DRAFT_EXTEND_V2: QueryMode.STRIDED}


@dataclass(slots=True)
class TrtllmMhaMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size, W = table columns.

    Only the two host lengths are ever rebound, and only by an eager rebuild: no kernel takes them from here.
    """

    cache_seqlens_int32: torch.Tensor  # [B] int32, device
    cu_seqlens_q: torch.Tensor  # [B + 1] int32, device
    cu_seqlens_k: torch.Tensor  # [B + 1] int32, device
    page_table: torch.Tensor  # [B, W] int32, device
    swa_page_table: torch.Tensor | None  # [B, W] int32, device
    swa_out_cache_loc: torch.Tensor | None  # [T] int64, device
    max_seq_len_q: int
    max_seq_len_k: int
    kernel_config: DecodeMetadataConfig
    fused: PreparedDecodeMetadata | None = None  # bound at the first fused rebuild


@dataclass(frozen=True, slots=True)
class _ModeBuffers:
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None  # None: allocated for each captured size
    cu_seqlens_k: torch.Tensor | None
    page_table: torch.Tensor
    swa_page_table: torch.Tensor | None


class TrtllmMhaBackend(AttentionBackend):
    """Metadata of FlashInfer's TRT-LLM paged attention. Pattern A: bind slices at capture, refill them at replay."""

    modes = frozenset({Mode.DECODE, Mode.DRAFT_DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2})
    allowances = Allowances(
        shared_between_modes=frozenset({"cache_seqlens_int32", "swa_out_cache_loc"}),
        spills=frozenset({"swa_out_cache_loc"}),
    )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c = self.config
        if c.topk > 1:
            raise ConfigError(f"trtllm_mha supports topk of at most 1, got {c.topk}")
        width = self.pools.req_to_token.shape[1]
        if (c.table_columns - 1) * c.page_size >= width:
            raise ConfigError(
                f"page_table needs {c.table_columns} columns of {c.page_size} tokens, but req_to_token is only "
                f"{width} tokens wide: raise its width or lower max_context ({c.max_context})"
            )
        self.max_bs = max_bs
        self.max_tokens = max_num_tokens
        self.strided_indices = torch.arange(
            0, c.table_columns * c.page_size, c.page_size, dtype=torch.int64, device=self.device
        )
        self.swa_out_buffer = (
            torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device) if self.pools.writes_swa else None
        )
        self.max_seq_len = c.max_context + c.headroom
        self.row_numbers = self._arange(max_bs + 1, 1)
        self.prefix_sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        decode_lens = self._zeros(max_bs)
        self.buffers = {Mode.DECODE: self._mode_buffers(decode_lens, None, None)}
        if c.draft_tokens > 0:
            self.buffers[Mode.DRAFT_DECODE] = self._mode_buffers(
                decode_lens, self._arange(max_bs + 1, 1), self._zeros(max_bs + 1)
            )
            self.buffers[Mode.TARGET_VERIFY] = self._mode_buffers(
                self._zeros(max_bs), self._arange(max_bs + 1, c.draft_tokens), self._zeros(max_bs + 1)
            )
            extend = self._mode_buffers(self._zeros(max_bs), self._zeros(max_bs + 1), self._zeros(max_bs + 1))
            self.buffers[Mode.DRAFT_EXTEND] = self.buffers[Mode.DRAFT_EXTEND_V2] = extend

    def bind(self, fb: ForwardBatch) -> TrtllmMhaMetadata:
        if fb.forward_mode not in self.buffers:
            raise ConfigError(f"mode {fb.forward_mode} needs draft_tokens > 0, got {self.config.draft_tokens}")
        if fb.batch_size > self.max_bs:
            raise ConfigError(f"batch size {fb.batch_size} exceeds the buffers' {self.max_bs} rows")
        b, own = fb.batch_size, self.buffers[fb.forward_mode]
        tokens_per_req = self._tokens_per_req(fb)
        if tokens_per_req * b > self.max_tokens:
            raise ConfigError(
                f"swa_out_cache_loc holds {self.max_tokens} tokens, a batch of {b} writes {tokens_per_req * b}"
            )
        if own.cu_seqlens_k is not None:
            queries, keys = own.cu_seqlens_q[: b + 1], own.cu_seqlens_k[: b + 1]
        else:
            # Allocated per captured size, and once: a re-capture must find the addresses that graphs already read.
            if b not in self.prefix_sums:
                self.prefix_sums[b] = self._arange(b + 1, 1), self._zeros(b + 1)
            queries, keys = self.prefix_sums[b]
        return TrtllmMhaMetadata(
            cache_seqlens_int32=own.cache_seqlens[:b],
            cu_seqlens_q=queries,
            cu_seqlens_k=keys,
            page_table=own.page_table[:b],
            swa_page_table=None if own.swa_page_table is None else own.swa_page_table[:b],
            swa_out_cache_loc=None if self.swa_out_buffer is None else self.swa_out_buffer[: tokens_per_req * b],
            max_seq_len_q=tokens_per_req,
            max_seq_len_k=self.max_seq_len,
            kernel_config=self.kernel_config(b),
        )

    def kernel_config(self, bs: int) -> DecodeMetadataConfig:
        """Block sizes for a captured batch size; the tuner's choice if one was given, else the default."""
        return self.config.extra.get("kernel_config") or default_config(bs, self.config.table_columns)

    # The classic chain, op for op: what a replay dispatches when it is written in PyTorch. Its order and its
    # repetitions are upstream's, because the number of dispatches is what is measured.

    def rebuild_aten(self, fb: ForwardBatch, md: TrtllmMhaMetadata) -> None:
        b, mode = fb.batch_size, fb.forward_mode
        seq_lens = fb.seq_lens[:b]
        mirror = (fb.seq_lens if fb.seq_lens_cpu is None else fb.seq_lens_cpu)[:b]
        pool = fb.req_pool_indices[:b]
        if mode is Mode.DECODE:
            md.max_seq_len_k = int(mirror.max().item())
            md.cache_seqlens_int32.copy_(seq_lens)
        elif mode is Mode.DRAFT_DECODE:
            seq_lens, step = seq_lens[:b], self.config.step_id
            md.max_seq_len_k = int(seq_lens.max().item()) + step + 1
            md.cache_seqlens_int32.copy_(seq_lens + step + 1)
        elif mode is Mode.TARGET_VERIFY:
            md.cache_seqlens_int32.copy_(seq_lens + md.max_seq_len_q)
            for _ in range(2):
                md.max_seq_len_k = int(mirror.max().item()) + md.max_seq_len_q
        else:
            md.cache_seqlens_int32.copy_(seq_lens)
            for _ in range(2):
                md.max_seq_len_k = int(mirror.max().item())
        md.cu_seqlens_k[1:].copy_(torch.cumsum(md.cache_seqlens_int32, 0))
        if mode is Mode.DRAFT_EXTEND:
            accepted = fb.spec_info.num_accept_tokens[:b]
            md.cu_seqlens_q[1:].copy_(torch.cumsum(accepted, 0))
            if fb.spec_info.num_accept_tokens_cpu is not None:  # at capture T // B stays: a graph bakes it
                md.max_seq_len_q = max(fb.spec_info.num_accept_tokens_cpu, default=1)
        elif mode is Mode.DRAFT_EXTEND_V2:
            w = md.max_seq_len_q
            md.cu_seqlens_q[1:].copy_(torch.arange(w, b * w + 1, w, dtype=torch.int32, device=self.device))
        columns = self._columns(md.max_seq_len_k)
        if mode in (Mode.DECODE, Mode.DRAFT_DECODE):
            slots = self.pools.req_to_token[pool[:, None], self.strided_indices[:columns][None, :]]
        else:
            slots = self.pools.req_to_token[pool[:, None], self.strided_indices[:columns]]
        self._aten_pages(md, slots, columns)
        if md.swa_out_cache_loc is not None:
            n = check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
            self.swa_out_buffer[n:].zero_()
            self.swa_out_buffer[:n].copy_(self.pools.full_to_swa[fb.out_cache_loc])

    def rebuild_aten_static(self, fb: ForwardBatch, md: TrtllmMhaMetadata) -> None:
        b, mode = fb.batch_size, fb.forward_mode
        md.cache_seqlens_int32.copy_(fb.seq_lens[:b] + self._length_offset(mode, md))
        md.cu_seqlens_k[1:].copy_(torch.cumsum(md.cache_seqlens_int32, 0))
        if mode is Mode.DRAFT_EXTEND:
            md.cu_seqlens_q[1:].copy_(torch.cumsum(fb.spec_info.num_accept_tokens[:b], 0))
        elif mode is Mode.DRAFT_EXTEND_V2:
            # Both draft-extend modes share this buffer, so a preset would not survive the other's replay.
            md.cu_seqlens_q[1:].copy_(self.row_numbers[1 : b + 1] * md.max_seq_len_q)
        slots = self.pools.req_to_token[fb.req_pool_indices[:b, None], self.strided_indices]
        self._aten_pages(md, slots, self.config.table_columns)
        if md.swa_out_cache_loc is not None:
            n = check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
            md.swa_out_cache_loc[n:].zero_()
            md.swa_out_cache_loc[:n].copy_(self.pools.full_to_swa[fb.out_cache_loc])

    def _aten_pages(self, md: TrtllmMhaMetadata, slots: torch.Tensor, columns: int) -> None:
        page_size = self.config.page_size
        md.page_table[:, :columns].copy_(slots // page_size)
        if md.swa_page_table is not None:
            mapped = self.pools.full_to_swa[slots.view(-1)].view(slots.shape).to(torch.int32)
            md.swa_page_table[:, :columns].copy_(mapped // page_size)

    def rebuild_fused(self, fb: ForwardBatch, md: TrtllmMhaMetadata) -> None:
        if md.fused is None:
            md.fused = PreparedDecodeMetadata(
                **self._update_arguments(fb, md), tail=self.tail, write_cu_zero=False, config=md.kernel_config
            )
        md.fused(fb.req_pool_indices, fb.seq_lens, fb.out_cache_loc, None if fb.spec_info is None else _accepted(fb))

    def peer_rebuild(self) -> Callable[[ForwardBatch, Any], None]:
        from .peers import sglang_page_table_update

        peer = sglang_page_table_update()
        self.tail = peer.tail

        def rebuild(fb: ForwardBatch, md: TrtllmMhaMetadata) -> None:
            arguments = self._update_arguments(fb, md)
            foreign_launch(partial(peer.update, **arguments), tuple(arguments.values()))

        return rebuild

    def _update_arguments(self, fb: ForwardBatch, md: TrtllmMhaMetadata) -> dict[str, Any]:
        """Keyword arguments of the fused update, as engines call it."""
        c, mode = self.config, fb.forward_mode
        return {
            "req_pool_indices": fb.req_pool_indices,
            "seq_lens": fb.seq_lens,
            "req_to_token": self.pools.req_to_token,
            "cache_seqlens": md.cache_seqlens_int32,
            "cu_seqlens_k": md.cu_seqlens_k,
            "page_table": md.page_table,
            "bs": fb.batch_size,
            "seqlen_offset": self._length_offset(mode, md),
            "max_seq_pages": c.table_columns,
            "page_size": c.page_size,
            "swa_mapping": self.pools.full_to_swa,
            "swa_page_table": md.swa_page_table,
            "out_cache_loc": fb.out_cache_loc,
            "swa_out_cache_loc": md.swa_out_cache_loc,
            "cu_seqlens_q": md.cu_seqlens_q,
            "qlens": _accepted(fb),
            "q_stride": md.max_seq_len_q,
            "q_mode": int(_QUERY_MODES.get(mode, QueryMode.PRESET)),
        }

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        c = self.config
        return trtllm_mha.expected(
            batch, pools, page_size=c.page_size, width=c.table_columns, step_id=c.step_id, tail=self.tail
        )

    def _length_offset(self, mode: ForwardMode, md: TrtllmMhaMetadata) -> int:
        if mode is Mode.DRAFT_DECODE:
            return self.config.step_id + 1
        return md.max_seq_len_q if mode is Mode.TARGET_VERIFY else 0

    def _tokens_per_req(self, fb: ForwardBatch) -> int:
        """T // B of the captured shape: a property of the shape, never of the accepted counts."""
        if fb.forward_mode in (Mode.DECODE, Mode.DRAFT_DECODE):
            return 1
        return fb.positions.shape[0] // fb.batch_size

    def _columns(self, max_seq_len_k: int) -> int:
        columns = -(-max_seq_len_k // self.config.page_size)
        if columns > self.config.table_columns:
            raise ConfigError(
                f"seq_lens of {max_seq_len_k} tokens need {columns} page_table columns, the buffer has "
                f"{self.config.table_columns} (max_context {self.config.max_context})"
            )
        return columns

    def _mode_buffers(self, lens, cu_q, cu_k) -> _ModeBuffers:
        shape = (self.max_bs, self.config.table_columns)
        swa = self._zeros(*shape) if self.pools.full_to_swa is not None else None
        return _ModeBuffers(lens, cu_q, cu_k, self._zeros(*shape), swa)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)

    def _arange(self, n: int, step: int) -> torch.Tensor:
        return torch.arange(0, n * step, step, dtype=torch.int32, device=self.device)


def _accepted(fb: ForwardBatch) -> torch.Tensor | None:
    return fb.spec_info.num_accept_tokens if fb.forward_mode is Mode.DRAFT_EXTEND else None
