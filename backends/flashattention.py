"""FlashAttention 3 and 4: paged decode with page tables, and cascades over draft trees where topk > 1.

| mode                  | cache_seqlens  | cu_seqlens_q                    | max_q | tables                           |
|-----------------------|----------------|---------------------------------|-------|----------------------------------|
| decode, idle          | len            | 0..B, preset                    | 1     | pages; local chunk; encoder      |
| draft_decode, K <= 1  | len + s + 1    | 0..B, preset                    | 1     | pages                            |
| draft_decode, K > 1   | len - len % P  | i * K, preset                   | K     | whole prefix pages               |
| its `expand`          | s + 1 + len % P| i, preset                       | 1     | pages of the branch's own slots  |
| target_verify, K <= 1 | len + N        | i * N, preset                   | N     | pages                            |
| target_verify, K > 1  | len            | i * N, preset                   | N     | prefix pages                     |
| its `expand`          | tokens seen    | i, preset                       | 1     | slots: seen first, then the rest |
| its `swa_spec_...`    | len + seen     | i, preset                       | 1     | slots: prefix, then what is seen |
| draft_extend          | len            | running sum, num_accept_tokens  | T / B | pages                            |
| draft_extend_v2       | len (holds N)  | running sum, extend_seq_lens    | N     | pages                            |

A page table holds floor(req_to_token[pool[r], p * P] / P), its sliding-window twin maps the page's first token before
it divides. A cascade attends to the prefix once for all of a request's queries and to the draft tokens with one row per
query; the row of a tree mask decides which those are. Layers with a window cannot cascade and read the merged rows.

Options in `config.extra`: ``local_chunk``, tokens of a local-attention chunk; ``encoder_tokens``, the longest encoder
input, for models that keep encoder tokens at the front of each row. Source: specs of SGLang's flashattention backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from .aten_ops import check_slots, live_token_count, write_running_sum, write_swa_slots
from .base import Allowances, AttentionBackend, ConfigError
from .batch import ForwardBatch
from .kernels.cascade_metadata import CascadeTables, prepare_draft_cascade, prepare_verify_cascade
from .kernels.decode_metadata import DecodeMetadataConfig, PreparedDecodeMetadata, QueryMode, default_config
from .kernels.flash_decode import DecodeTables, prepare_flash_decode
from .kernels.merge_draft_rows import merge_draft_rows
from .modes import ForwardMode, Implementation, TailPolicy
from .oracle import Expected, HostBatch, HostPools, flashattention

Mode = ForwardMode


@dataclass(slots=True)
class LocalAttentionMetadata:
    """One virtual request per request: the chunk of its last token."""

    local_query_start_loc: torch.Tensor  # [B + 1] int32, device, preset
    local_seqused_k: torch.Tensor  # [B] int32, device
    local_block_table: torch.Tensor  # [B, chunk / P] int32, device
    local_max_query_len: int
    local_max_seq_len: int


@dataclass(slots=True)
class FlashAttentionMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size, W = table columns.

    Only host lengths are ever rebound, and only by an eager rebuild: no kernel takes them from here.
    """

    cache_seqlens_int32: torch.Tensor  # [B] int32, device; [B * queries] in `expand` and `swa_spec_metadata`
    cu_seqlens_q: torch.Tensor  # one more, int32, device
    cu_seqlens_k: torch.Tensor  # one more, int32, device
    page_table: torch.Tensor  # [B, W] int32, device; see the table above
    max_seq_len_q: int
    max_seq_len_k: int
    swa_page_table: torch.Tensor | None = None  # [B, W] int32, device
    swa_out_cache_loc: torch.Tensor | None = None  # [T] int64, device
    expand: FlashAttentionMetadata | None = None
    swa_spec_metadata: FlashAttentionMetadata | None = None
    local_attn_metadata: LocalAttentionMetadata | None = None
    encoder_lens_int32: torch.Tensor | None = None  # [B] int32, device
    encoder_cu_seqlens_k: torch.Tensor | None = None  # [B + 1] int32, device
    encoder_page_table: torch.Tensor | None = None  # [B, encoder_tokens] int32, device
    encoder_max_seq_len_k: int = 0
    fused: Callable[..., None] | None = None  # bound by the first rebuild
    builder: PreparedDecodeMetadata | None = None  # the classic chain's own launch


@dataclass(frozen=True, slots=True)
class _Tables:
    """Full-size buffers of one mode, or of one half of a cascade; a row for each of `queries` per request."""

    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    swa_page_table: torch.Tensor | None = None

    def bound(self, rows: int, max_q: int, max_k: int) -> FlashAttentionMetadata:
        return FlashAttentionMetadata(
            cache_seqlens_int32=self.cache_seqlens[:rows],
            cu_seqlens_q=self.cu_seqlens_q[: rows + 1],
            cu_seqlens_k=self.cu_seqlens_k[: rows + 1],
            page_table=self.page_table[:rows],
            swa_page_table=None if self.swa_page_table is None else self.swa_page_table[:rows],
            max_seq_len_q=max_q,
            max_seq_len_k=max_k,
        )


class FlashAttentionBackend(AttentionBackend):
    """Metadata of flash_attn_with_kvcache. Pattern A: bind slices at capture, refill them at replay."""

    modes = frozenset({Mode.DECODE, Mode.DRAFT_DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2})
    allowances = Allowances(
        shared_between_modes=frozenset(
            {"cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "page_table", "swa_page_table"}
            | {"swa_out_cache_loc"}
        ),
        spills=frozenset(
            {"swa_out_cache_loc", "local_attn_metadata.local_query_start_loc"}
            | {"local_attn_metadata.local_seqused_k", "local_attn_metadata.local_block_table"}
        ),
    )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c = self.config
        self.chunk = c.extra.get("local_chunk", 0)
        self.encoder_tokens = c.extra.get("encoder_tokens", 0)
        self._refuse_what_cannot_work()
        self.max_bs, self.max_tokens = max_bs, max_num_tokens
        self.max_seq_len = c.max_context + c.headroom
        self.strided_indices = self._numbers(c.table_columns) * c.page_size
        self.swa_out_buffer = self._zeros(max_num_tokens, dtype=torch.int64) if self.pools.writes_swa else None
        decode = self._tables(max_bs, 1)
        self.tables = {Mode.DECODE: decode}
        self.expand: dict[ForwardMode, _Tables] = {}
        self.merged: _Tables | None = None
        if c.draft_tokens > 0:
            self._init_speculation(decode, max_bs)
        if self.chunk:
            # Upstream has a row for every chunk of every request; in decode each request has one.
            self.local = LocalAttentionMetadata(
                self._arange(max_bs + 1), self._zeros(max_bs), self._zeros(max_bs, self.chunk // c.page_size), 1, 0
            )
            self.chunk_pages = self._numbers(self.chunk // c.page_size)
        if self.encoder_tokens:
            self.encoder_lens, self.encoder_cu = self._zeros(max_bs), self._zeros(max_bs + 1)
            self.encoder_table = self._zeros(max_bs, self.encoder_tokens)
            self.encoder_numbers = self._numbers(self.encoder_tokens)

    def _init_speculation(self, decode: _Tables, max_bs: int) -> None:
        c, n, k = self.config, self.config.draft_tokens, self.config.topk
        extend = self._tables(max_bs, 0)
        self.tables[Mode.DRAFT_EXTEND] = self.tables[Mode.DRAFT_EXTEND_V2] = extend
        self.tables[Mode.TARGET_VERIFY] = self._tables(max_bs, n, windowed=k <= 1)
        if k <= 1:
            # Lengths and the sliding-window table are shared with decode.
            table = self._zeros(max_bs, c.table_columns)
            self.tables[Mode.DRAFT_DECODE] = replace(decode, page_table=table)
            return
        drafts = c.step_id + 1
        self.tables[Mode.DRAFT_DECODE] = self._tables(max_bs, k, windowed=False)
        self.expand[Mode.DRAFT_DECODE] = _Tables(
            self._zeros(max_bs * k) + drafts,
            self._arange(max_bs * k + 1),
            self._arange(max_bs * k + 1, drafts),
            self._zeros(max_bs * k, drafts + 1),
        )
        self.expand[Mode.TARGET_VERIFY] = self._query_tables(max_bs * n, n)
        if c.window is not None:
            self.merged = self._query_tables(max_bs * n, c.table_columns)
        self.draft_numbers = self._numbers(n)
        self.query_numbers = self._numbers(max_bs * n)
        self.arrived = self._zeros(1)

    def _refuse_what_cannot_work(self) -> None:
        c, width, cascades = self.config, self.pools.req_to_token.shape[1], self.config.topk > 1
        if (c.table_columns - 1) * c.page_size >= width:
            raise ConfigError(
                f"page_table needs {c.table_columns} columns of {c.page_size} tokens, but req_to_token is only "
                f"{width} tokens wide: raise its width or lower max_context ({c.max_context})"
            )
        if cascades and c.max_context + c.draft_tokens > width:
            raise ConfigError(
                f"draft tokens lie at up to {c.max_context} + {c.draft_tokens} in a row of req_to_token, which is only "
                f"{width} tokens wide"
            )
        windowed = c.window is not None or self.pools.full_to_swa is not None
        if cascades and windowed and c.page_size > 1:
            raise ConfigError(f"topk {c.topk} with a sliding window needs page_size 1, got {c.page_size}")
        if self.chunk and (self.chunk < c.page_size or self.chunk % c.page_size):
            raise ConfigError(f"local_chunk must be whole pages of {c.page_size} tokens, got {self.chunk}")
        if self.encoder_tokens and c.page_size > 1:
            raise ConfigError(f"text behind encoder tokens starts at any token: page_size must be 1, got {c.page_size}")
        if self.encoder_tokens and (windowed or self.chunk):
            raise ConfigError("encoder_tokens excludes a sliding window and local_chunk: no model has both")
        more = cascades or self.chunk or self.encoder_tokens
        if more and self.implementation is Implementation.FUSED and self.tail is not TailPolicy.LIVE_ONLY:
            raise ConfigError(f"fused cascades, local and encoder tables write live cells only, got tail {self.tail}")

    def bind(self, fb: ForwardBatch) -> FlashAttentionMetadata:
        b, mode, c = fb.batch_size, fb.forward_mode, self.config
        if mode not in self.tables:
            raise ConfigError(f"mode {mode} needs draft_tokens > 0, got {c.draft_tokens}")
        if b > self.max_bs:
            raise ConfigError(f"batch size {b} exceeds the buffers' {self.max_bs} rows")
        queries = 1 if mode is Mode.DECODE else fb.positions.shape[0] // b
        if queries * b > self.max_tokens:
            raise ConfigError(f"the buffers hold {self.max_tokens} tokens, a batch of {b} has {queries * b}")
        md = self.tables[mode].bound(b, queries, self.max_seq_len)
        if mode in self.expand:
            self._bind_cascade(fb, md, queries)
        elif mode is Mode.DECODE:
            self._bind_decode(fb, md)
        if self.swa_out_buffer is not None:
            md.swa_out_cache_loc = self.swa_out_buffer[: queries * b]
        return md

    def _bind_cascade(self, fb: ForwardBatch, md: FlashAttentionMetadata, queries: int) -> None:
        c, mode = self.config, fb.forward_mode
        drafts = mode is Mode.DRAFT_DECODE
        wanted = c.topk if drafts else c.draft_tokens
        if queries != wanted:
            raise ConfigError(f"mode {mode} has {queries} tokens per request, {'topk' if drafts else 'draft_tokens'} "
                              f"is {wanted}: they must agree")  # fmt: skip
        if drafts and self.pools.full_to_swa is not None:
            raise ConfigError("a draft model with topk > 1 has no sliding-window pool: full_to_swa must be None")
        rows = fb.batch_size * queries
        md.expand = self.expand[mode].bound(rows, 1, c.step_id + 2 if drafts else queries)
        if not drafts and self.merged is not None:
            md.swa_spec_metadata = self.merged.bound(rows, 1, self.max_seq_len)

    def _bind_decode(self, fb: ForwardBatch, md: FlashAttentionMetadata) -> None:
        b = fb.batch_size
        if self.chunk:
            own = self.local
            md.local_attn_metadata = LocalAttentionMetadata(
                own.local_query_start_loc[: b + 1], own.local_seqused_k[:b], own.local_block_table[:b], 1, self.chunk
            )
        if self.encoder_tokens:
            if fb.encoder_lens is None:
                raise ConfigError("encoder_tokens is set, but the batch has no encoder_lens")
            md.encoder_lens_int32 = self.encoder_lens[:b]
            md.encoder_cu_seqlens_k = self.encoder_cu[: b + 1]
            md.encoder_page_table = self.encoder_table[:b]
            md.encoder_max_seq_len_k = self.encoder_tokens

    def kernel_config(self, bs: int) -> DecodeMetadataConfig:
        """Block sizes for a captured batch size; the tuner's choice if one was given, else the default."""
        return self.config.extra.get("kernel_config") or default_config(bs, self.config.table_columns)

    # The classic chain, op for op as upstream's. Decode's builder is one launch there, and here.

    def rebuild_aten(self, fb: ForwardBatch, md: FlashAttentionMetadata) -> None:
        b, mode = fb.batch_size, fb.forward_mode
        seq_lens, pool = fb.seq_lens[:b], fb.req_pool_indices[:b]
        mirror = (fb.seq_lens if fb.seq_lens_cpu is None else fb.seq_lens_cpu)[:b]
        if md.expand is not None:
            draft = mode is Mode.DRAFT_DECODE
            (self._classic_draft_cascade if draft else self._classic_verify_cascade)(fb, md, seq_lens, pool, mirror)
            return
        if mode in (Mode.DECODE, Mode.DRAFT_DECODE):
            self._classic_decode(fb, md, mirror)
            if md.local_attn_metadata is not None:
                self._classic_local(md, b)
            if md.encoder_page_table is not None:
                self._classic_encoder(fb, md, pool)
        else:
            offset = self._length_offset(mode)
            md.cache_seqlens_int32.copy_(seq_lens + offset if offset else seq_lens)
            md.max_seq_len_k = int(mirror.max().item()) + offset
            write_running_sum(md.cu_seqlens_k, md.cache_seqlens_int32)
            if mode is not Mode.TARGET_VERIFY:
                self._classic_queries(fb, md)
            self._classic_pages(md, pool)
        self._classic_write_slots(fb, md)

    def _classic_decode(self, fb: ForwardBatch, md: FlashAttentionMetadata, mirror: torch.Tensor) -> None:
        md.max_seq_len_k = int(mirror.max().item()) + self._length_offset(fb.forward_mode)
        self._columns(md.max_seq_len_k)
        if self.config.page_size > 1 and md.swa_page_table is None:
            # What upstream's launcher passes for the tables that are not there, made anew each time.
            for dtype in (torch.int32, torch.int64):
                torch.empty(0, dtype=dtype, device=self.device)
        if md.builder is None:
            md.builder = PreparedDecodeMetadata(**self._update_arguments(fb, md), tail=TailPolicy.BATCH_MAX)
        md.builder(fb.req_pool_indices, fb.seq_lens, None, None)

    def _classic_queries(self, fb: ForwardBatch, md: FlashAttentionMetadata) -> None:
        spec, b = fb.spec_info, fb.batch_size
        if fb.forward_mode is Mode.DRAFT_EXTEND:
            if spec.num_accept_tokens_cpu is not None:  # at capture T // B stays: a graph bakes it
                md.max_seq_len_q = max(spec.num_accept_tokens_cpu, default=1)
            new = spec.num_accept_tokens[:b]
        elif spec.extend_seq_lens is not None:
            new = spec.extend_seq_lens
        else:
            new = torch.full((b,), md.max_seq_len_q, dtype=torch.int32, device=self.device)
        write_running_sum(md.cu_seqlens_q, new)

    def _classic_pages(self, md: FlashAttentionMetadata, pool: torch.Tensor) -> torch.Tensor:
        """Both page tables up to the batch's longest row; the pages of the first."""
        columns, page_size = self._columns(md.max_seq_len_k), self.config.page_size
        slots = self.pools.req_to_token[pool[:, None], self.strided_indices[:columns]]
        if md.swa_page_table is not None:
            mapped = self.pools.full_to_swa[slots]
            mapped //= page_size
            md.swa_page_table[:, :columns].copy_(mapped)
        slots //= page_size
        md.page_table[:, :columns].copy_(slots)
        return slots

    def _classic_write_slots(self, fb: ForwardBatch, md: FlashAttentionMetadata) -> None:
        if md.swa_out_cache_loc is not None:
            n = check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
            self.swa_out_buffer[n:].zero_()
            self.swa_out_buffer[:n].copy_(self.pools.full_to_swa[fb.out_cache_loc])

    def _classic_local(self, md: FlashAttentionMetadata, b: int) -> None:
        """Upstream leaves for NumPy here: lengths come to the host, indices and results go back."""
        local, own, page_size = md.local_attn_metadata, self.local, self.config.page_size
        starts = torch.arange(b + 1, dtype=torch.int32, device=self.device)
        lengths = md.cache_seqlens_int32
        columns = self._columns(int(lengths.max().item()))
        tables = self.tables[Mode.DECODE]
        table = (tables.page_table if md.swa_page_table is None else tables.swa_page_table)[:b, :columns]
        starts, lengths, pages = starts.cpu().numpy(), lengths.cpu().numpy(), self.chunk // page_size
        used = (lengths - 1) % self.chunk + 1
        first = (lengths - used) // page_size
        at = np.minimum(first[:, None] + np.arange(pages), columns - 1).ravel()
        chosen = table[np.repeat(np.arange(b), pages), at].view(b, -1)
        own.local_query_start_loc[: b + 1].copy_(torch.from_numpy(starts).to(self.device))
        own.local_query_start_loc[b + 1 :].fill_(0)
        own.local_seqused_k[:b].copy_(torch.from_numpy(used).to(self.device))
        own.local_seqused_k[b:].fill_(0)
        own.local_block_table[:b, :pages].copy_(chosen)
        own.local_block_table[b:, :].fill_(0)
        own.local_block_table[:b, pages:].fill_(0)
        local.local_max_seq_len = int(used.max())

    def _classic_encoder(self, fb: ForwardBatch, md: FlashAttentionMetadata, pool: torch.Tensor) -> None:
        b, table = fb.batch_size, self.pools.req_to_token
        lens = fb.encoder_lens[:b]
        md.encoder_max_seq_len_k = longest = int(lens.max().item())
        if longest > self.encoder_tokens:
            raise ConfigError(
                f"encoder_lens of {longest} tokens do not fit encoder_page_table, which has {self.encoder_tokens}"
            )
        self.encoder_lens[:b].copy_(lens)
        write_running_sum(md.encoder_cu_seqlens_k, md.encoder_lens_int32)
        self.encoder_table[:b, :longest].copy_(table[pool[:, None], self.encoder_numbers[:longest]])
        text = torch.arange(md.max_seq_len_k, device=self.device)
        columns = (lens[:, None] + text[None, :]).clamp_(max=table.shape[1] - 1)
        self.tables[Mode.DECODE].page_table[:b, : md.max_seq_len_k].copy_(table[pool[:, None], columns])

    def _classic_draft_cascade(self, fb, md, seq_lens, pool, mirror) -> None:
        c, page_size = self.config, self.config.page_size
        drafts = c.step_id + 1
        if page_size > 1:
            partial = seq_lens[: fb.batch_size] % page_size
            md.cache_seqlens_int32.copy_(seq_lens - partial)
        else:
            md.cache_seqlens_int32.copy_(seq_lens)
        md.max_seq_len_k = int(mirror.max().item())
        self._classic_pages(md, pool)
        slots = self._slots_of_steps(fb)[:, :drafts]
        n, table = slots.shape[0], self.expand[fb.forward_mode].page_table
        if page_size == 1:
            table[:n, :drafts].copy_(slots)
            return
        md.expand.cache_seqlens_int32.copy_(partial.repeat_interleave(c.topk) + drafts)
        ids = (slots // page_size).to(torch.int32)
        opens = torch.ones_like(ids, dtype=torch.bool)
        opens[:, 1:] = ids[:, 1:] != ids[:, :-1]
        table[:n].scatter_(1, opens.cumsum(1) - 1, ids)

    def _classic_verify_cascade(self, fb, md, seq_lens, pool, mirror) -> None:
        n, spec, expand = self.config.draft_tokens, fb.spec_info, md.expand
        md.cache_seqlens_int32.copy_(seq_lens)
        md.max_seq_len_k = int(mirror.max().item())
        write_running_sum(md.cu_seqlens_k, md.cache_seqlens_int32)
        prefix = self._classic_pages(md, pool)

        offsets = torch.arange(n, device=self.device).unsqueeze(0)
        columns = offsets.expand(fb.batch_size, -1) + seq_lens.unsqueeze(1)
        cells = torch.cumsum((seq_lens + n).repeat_interleave(n), 0)
        before = torch.nn.functional.pad(cells, (1, 0))[:-1]
        indices = (columns.repeat_interleave(n, dim=0) + before[:, None]).view(1, -1)
        indices[:, spec.positions.shape[0] * n :].fill_(0)  # padding has no cells: it repeats the first one
        sees = spec.custom_mask[indices].view(-1, n)
        order = offsets.expand(sees.shape[0], n)
        _, order = torch.sort(torch.where(sees, order, order + n), dim=1)
        slots = self.pools.req_to_token[pool].gather(1, columns).repeat_interleave(n, dim=0)
        expand.page_table.copy_(slots.gather(1, order))
        expand.cache_seqlens_int32.copy_(sees.sum(dim=1))
        write_running_sum(expand.cu_seqlens_k, expand.cache_seqlens_int32)
        self._classic_write_slots(fb, md)
        if md.swa_spec_metadata is not None:
            self._classic_merge(md, prefix)

    def _classic_merge(self, md: FlashAttentionMetadata, prefix: torch.Tensor) -> None:
        merged, expand = md.swa_spec_metadata, md.expand
        lengths = md.cache_seqlens_int32.repeat_interleave(self.config.draft_tokens) + expand.cache_seqlens_int32
        running = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        self._merge(md, prefix)
        merged.cache_seqlens_int32.copy_(lengths)
        merged.cu_seqlens_k.copy_(running)

    def _merge(self, md: FlashAttentionMetadata, prefix: torch.Tensor) -> None:
        drafts = md.expand.page_table
        if self.pools.full_to_swa is not None:
            prefix = self.pools.full_to_swa[prefix].to(torch.int32)
            drafts = self.pools.full_to_swa[drafts].to(torch.int32)
        merge_draft_rows(
            prefix,
            md.cache_seqlens_int32,
            drafts,
            md.expand.cache_seqlens_int32,
            md.swa_spec_metadata.page_table,
        )

    # The same at captured widths, without the host: what a graph can hold.

    def rebuild_aten_static(self, fb: ForwardBatch, md: FlashAttentionMetadata) -> None:
        b, mode, page_size = fb.batch_size, fb.forward_mode, self.config.page_size
        seq_lens, pool = fb.seq_lens[:b], fb.req_pool_indices[:b]
        slots = self.pools.req_to_token[pool[:, None], self.strided_indices]
        if md.encoder_page_table is not None:
            slots = self._static_encoder(fb, md, pool)
        if mode is Mode.DRAFT_DECODE and md.expand is not None:
            self._static_draft_cascade(fb, md, seq_lens)
        else:
            md.cache_seqlens_int32.copy_(seq_lens + self._length_offset(mode))
            write_running_sum(md.cu_seqlens_k, md.cache_seqlens_int32)
        if mode in (Mode.DECODE, Mode.DRAFT_DECODE):
            md.cu_seqlens_k[:1].zero_()
        elif mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2):
            write_running_sum(md.cu_seqlens_q, self._new_tokens(fb)[:b])
        md.page_table.copy_(slots // page_size)
        if md.swa_page_table is not None:
            md.swa_page_table.copy_(self.pools.full_to_swa[slots] // page_size)
        if md.swa_out_cache_loc is not None:
            write_swa_slots(md.swa_out_cache_loc, fb.out_cache_loc, self.pools.full_to_swa)
        if md.local_attn_metadata is not None:
            self._static_local(md)
        if mode is Mode.TARGET_VERIFY and md.expand is not None:
            self._static_verify_cascade(fb, md, seq_lens, pool, slots)

    def _static_local(self, md: FlashAttentionMetadata) -> None:
        local, lengths = md.local_attn_metadata, md.cache_seqlens_int32
        table = md.page_table if md.swa_page_table is None else md.swa_page_table
        local.local_seqused_k.copy_((lengths - 1) % self.chunk + 1)
        first = (lengths - local.local_seqused_k) // self.config.page_size
        columns = (first[:, None] + self.chunk_pages).clamp(max=table.shape[1] - 1)
        local.local_block_table.copy_(table.gather(1, columns))

    def _static_encoder(self, fb: ForwardBatch, md: FlashAttentionMetadata, pool: torch.Tensor) -> torch.Tensor:
        """The encoder's tables; slots of the text behind it."""
        lens, table = fb.encoder_lens[: fb.batch_size], self.pools.req_to_token
        md.encoder_lens_int32.copy_(lens)
        write_running_sum(md.encoder_cu_seqlens_k, md.encoder_lens_int32)
        md.encoder_page_table.copy_(table[pool[:, None], self.encoder_numbers])
        return table[pool[:, None], (lens[:, None] + self.strided_indices).clamp(max=table.shape[1] - 1)]

    def _static_draft_cascade(self, fb: ForwardBatch, md: FlashAttentionMetadata, seq_lens: torch.Tensor) -> None:
        page_size, drafts, table = self.config.page_size, self.config.step_id + 1, md.expand.page_table
        partial = seq_lens % page_size
        md.cache_seqlens_int32.copy_(seq_lens - partial)
        ids = (self._slots_of_steps(fb)[:, :drafts] // page_size).to(torch.int32)
        if page_size == 1:
            table[:, :drafts].copy_(ids)
            return
        md.expand.cache_seqlens_int32.view(fb.batch_size, -1).copy_(partial[:, None] + drafts)
        opens = (ids[:, 1:] != ids[:, :-1]).to(torch.int64)
        table[:, :1].copy_(ids[:, :1])
        table.scatter_(1, opens.cumsum(1), ids[:, 1:])

    def _static_verify_cascade(self, fb, md, seq_lens, pool, prefix) -> None:
        b, n, expand = fb.batch_size, self.config.draft_tokens, md.expand
        columns = seq_lens[:, None] + self.draft_numbers
        cells = seq_lens.to(torch.int64) + n
        before = (torch.cumsum(cells, 0) - cells) * n
        rows = before[:, None] + self.draft_numbers * cells[:, None]
        indices = (rows[:, :, None] + columns[:, None, :]).view(b * n, n)
        padding = self.query_numbers[: b * n, None] >= live_token_count(fb, "where the live queries end")
        sees = fb.spec_info.custom_mask[indices.masked_fill(padding, 0)]
        unseen_last = self.draft_numbers + n * (~sees).to(torch.int64)
        slots = self.pools.req_to_token[pool[:, None], columns][:, None, :].expand(b, n, n).reshape(b * n, n)
        expand.page_table.copy_(slots.gather(1, torch.sort(unseen_last, dim=1).indices))
        expand.cache_seqlens_int32.copy_(sees.sum(dim=1))
        write_running_sum(expand.cu_seqlens_k, expand.cache_seqlens_int32)
        if (merged := md.swa_spec_metadata) is not None:
            self._merge(md, prefix)
            seen = expand.cache_seqlens_int32.view(b, n)
            merged.cache_seqlens_int32.view(b, n).copy_(md.cache_seqlens_int32[:, None] + seen)
            write_running_sum(merged.cu_seqlens_k, merged.cache_seqlens_int32)
            merged.cu_seqlens_k[:1].zero_()

    # One launch.

    def rebuild_fused(self, fb: ForwardBatch, md: FlashAttentionMetadata) -> None:
        if md.swa_out_cache_loc is not None:
            check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
        if md.fused is None:
            md.fused = self._prepared(fb, md)
        pool, lens, slots = fb.req_pool_indices, fb.seq_lens, fb.out_cache_loc
        if md.expand is not None:
            if fb.forward_mode is Mode.DRAFT_DECODE:
                md.fused(pool, lens, slots)
            else:
                md.fused(pool, lens, fb.spec_info.custom_mask, slots)
        elif md.local_attn_metadata is not None or md.encoder_page_table is not None:
            md.fused(pool, lens, slots, fb.encoder_lens)
        else:
            md.fused(pool, lens, slots, self._new_tokens(fb))

    def _prepared(self, fb: ForwardBatch, md: FlashAttentionMetadata) -> Callable[..., None]:
        c, config, table = self.config, self.kernel_config(fb.batch_size), self.pools.req_to_token
        if md.expand is not None and fb.forward_mode is Mode.DRAFT_DECODE:
            expand = md.expand
            lens = expand.cache_seqlens_int32 if c.page_size > 1 else None
            tables = CascadeTables(md.cache_seqlens_int32, None, md.page_table, lens, None, expand.page_table)
            return prepare_draft_cascade(
                tables, table, fb.req_pool_indices, fb.seq_lens, fb.out_cache_loc, c.topk, c.draft_steps,
                c.step_id + 1, c.page_size, config,
            )  # fmt: skip
        if md.expand is not None:
            return prepare_verify_cascade(
                self._verify_tables(md), table, fb.req_pool_indices, fb.seq_lens, fb.spec_info.custom_mask,
                live_token_count(fb, "where the live queries end"), fb.out_cache_loc, self.arrived, c.page_size, config,
            )  # fmt: skip
        if md.local_attn_metadata is not None or md.encoder_page_table is not None:
            return prepare_flash_decode(
                self._decode_tables(md), table, fb.req_pool_indices, fb.seq_lens, fb.out_cache_loc, fb.encoder_lens,
                c.page_size, self.chunk, config,
            )  # fmt: skip
        return PreparedDecodeMetadata(**self._update_arguments(fb, md), tail=self.tail)

    def _verify_tables(self, md: FlashAttentionMetadata) -> CascadeTables:
        expand, merged = md.expand, md.swa_spec_metadata
        return CascadeTables(
            md.cache_seqlens_int32, md.cu_seqlens_k, md.page_table,
            expand.cache_seqlens_int32, expand.cu_seqlens_k, expand.page_table,
            None if merged is None else merged.cache_seqlens_int32,
            None if merged is None else merged.cu_seqlens_k,
            None if merged is None else merged.page_table,
            self.pools.full_to_swa,
            md.swa_out_cache_loc,
        )  # fmt: skip

    def _decode_tables(self, md: FlashAttentionMetadata) -> DecodeTables:
        local = md.local_attn_metadata
        return DecodeTables(
            md.cache_seqlens_int32, md.cu_seqlens_k, md.page_table,
            self.pools.full_to_swa, md.swa_page_table, md.swa_out_cache_loc,
            None if local is None else local.local_seqused_k,
            None if local is None else local.local_block_table,
            md.encoder_lens_int32, md.encoder_cu_seqlens_k, md.encoder_page_table,
        )  # fmt: skip

    def _update_arguments(self, fb: ForwardBatch, md: FlashAttentionMetadata) -> dict:
        """Keyword arguments of the shared page-table kernel, all but `tail`."""
        mode, new = fb.forward_mode, self._new_tokens(fb)
        queries = QueryMode.PRESET
        if mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2):
            queries = QueryMode.CUMSUM if new is not None else QueryMode.STRIDED
        writes = md.swa_out_cache_loc is not None and self.implementation is Implementation.FUSED
        return {
            "req_pool_indices": fb.req_pool_indices,
            "seq_lens": fb.seq_lens,
            "req_to_token": self.pools.req_to_token,
            "cache_seqlens": md.cache_seqlens_int32,
            "cu_seqlens_k": md.cu_seqlens_k,
            "page_table": md.page_table,
            "bs": fb.batch_size,
            "seqlen_offset": self._length_offset(mode),
            "max_seq_pages": self.config.table_columns,
            "page_size": self.config.page_size,
            "swa_mapping": self.pools.full_to_swa,
            "swa_page_table": md.swa_page_table,
            "out_cache_loc": fb.out_cache_loc if writes else None,
            "swa_out_cache_loc": md.swa_out_cache_loc if writes else None,
            "cu_seqlens_q": md.cu_seqlens_q,
            "qlens": new,
            "q_stride": md.max_seq_len_q,
            "q_mode": int(queries),
            "write_cu_zero": mode in (Mode.DECODE, Mode.DRAFT_DECODE),
            "config": self.kernel_config(fb.batch_size),
        }

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        c = self.config
        return flashattention.expected(
            batch,
            pools,
            flashattention.Sizes(
                page_size=c.page_size,
                width=c.table_columns,
                topk=c.topk,
                draft_steps=c.draft_steps,
                step_id=c.step_id,
                windowed=c.window is not None,
                local_chunk=self.chunk,
                encoder_columns=self.encoder_tokens,
                tail=self.tail,
            ),
        )

    def _new_tokens(self, fb: ForwardBatch) -> torch.Tensor | None:
        """Queries of each request in draft extend: [B] int32, or None where all are as wide as captured."""
        if fb.forward_mode is Mode.DRAFT_EXTEND:
            return fb.spec_info.num_accept_tokens
        return fb.spec_info.extend_seq_lens if fb.forward_mode is Mode.DRAFT_EXTEND_V2 else None

    def _length_offset(self, mode: ForwardMode) -> int:
        """Tokens that are in the cache on top of seq_lens, where one table serves all queries."""
        if self.config.topk <= 1 and mode is Mode.DRAFT_DECODE:
            return self.config.step_id + 1
        return self.config.draft_tokens if self.config.topk <= 1 and mode is Mode.TARGET_VERIFY else 0

    def _slots_of_steps(self, fb: ForwardBatch) -> torch.Tensor:
        """[queries, S] write slots.

        Raises:
            ConfigError: the batch does not bring slots of every step.
        """
        n, steps = fb.out_cache_loc.shape[0], self.config.draft_steps
        if n % (steps * self.config.topk):
            raise ConfigError(f"out_cache_loc must hold {self.config.topk} x {steps} slots a request, got {n} in all")
        return fb.out_cache_loc.view(-1, steps)

    def _columns(self, max_seq_len_k: int) -> int:
        columns = -(-max_seq_len_k // self.config.page_size)
        if columns > self.config.table_columns:
            raise ConfigError(
                f"seq_lens of {max_seq_len_k} tokens need {columns} page_table columns, the buffer has "
                f"{self.config.table_columns} (max_context {self.config.max_context})"
            )
        return columns

    def _tables(self, max_bs: int, queries: int, windowed: bool = True) -> _Tables:
        shape = (max_bs, self.config.table_columns)
        swa = self._zeros(*shape) if windowed and self.pools.full_to_swa is not None else None
        starts = self._arange(max_bs + 1, queries) if queries else self._zeros(max_bs + 1)
        return _Tables(self._zeros(max_bs), starts, self._zeros(max_bs + 1), self._zeros(*shape), swa)

    def _query_tables(self, rows: int, columns: int) -> _Tables:
        return _Tables(self._zeros(rows), self._arange(rows + 1), self._zeros(rows + 1), self._zeros(rows, columns))

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _arange(self, n: int, step: int = 1) -> torch.Tensor:
        return torch.arange(0, n * step, step, dtype=torch.int32, device=self.device)

    def _numbers(self, n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.int64, device=self.device)
