"""AITER (AMD): flat token lists, page tables for unified attention, and the work schedule of persistent MLA.

| mode            | MLA                      | unified                        | otherwise                     |
|-----------------|--------------------------|--------------------------------|-------------------------------|
| decode, idle    | list of len, qo 0..B     | page table, qo 0..B preset     | list of len                   |
| target_verify   | list of len + N, qo i*N  | page table of len + N, qo i*N  | list of len, qo i*N, tree mask|
| draft_extend    | list of len, qo = running sum of num_accept_tokens                                        |
| draft_extend_v2 | list of len, qo i*N                                                                       |

A list is kv_indptr (running sum) and kv_indices (slots, page size 1); a page table holds page ids of the first token of
each page, and its sliding-window twin maps that token first. Unified attention is an option and forced by a
sliding-window pool; its verify needs a chain (topk of at most 1), else the tree mask decides. mask_indptr is the
running sum of N * (len + N). Persistent MLA also gets a schedule: `schedules.mla_work_even` and `mla_work_filling`.
Padding has length N under speculation, else 1. Source: specs of SGLang's aiter backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .aten_ops import (
    bind_mask,
    check_slots,
    checked_mask,
    copy_live_mask,
    live_token_count,
    write_running_sum,
    write_swa_slots,
)
from .base import Allowances, AttentionBackend, ConfigError, tensors_of
from .batch import ForwardBatch
from .flashinfer import step_lists
from .kernels.csr_metadata import CsrConfig, CsrMetadata, CsrTables
from .kernels.csr_metadata import default_config as list_config
from .kernels.decode_metadata import (
    DecodeMetadataConfig,
    PreparedDecodeMetadata,
    QueryMode,
    default_config,
    update_decode_metadata,
)
from .kernels.kv_indices import launch_kv_indices
from .kernels.mla_work_plan import MlaLists, MlaPlanBuffers, launch_mla_plan
from .kernels.paged_lists import KvRange, PagedList, PagedLists, QueryStarts
from .kernels.ragged_pages import RaggedPages, launch_ragged_pages
from .modes import ForwardMode, TailPolicy
from .oracle import Expected, HostBatch, HostPools, aiter
from .schedules import MLA_GRANULARITY, multiprocessors
from .triton import check_index_space, numpy_type, rows

Mode = ForwardMode

GFX942_SPLITS = 16
"""Chunks of a tile on the MI300 series, whatever its length."""


@dataclass(frozen=True, slots=True)
class MlaWorkBuffers:
    """The persistent MLA kernel's schedule; whole buffers. W = works, R = tiles, C = multiprocessors."""

    work_indptr: torch.Tensor  # [C + 1] int32, device
    work_info_set: torch.Tensor  # [W, 8] int32, device
    reduce_indptr: torch.Tensor  # [R + 1] int32, device
    reduce_final_map: torch.Tensor  # [R, 2] int32, device
    reduce_partial_map: torch.Tensor  # [W] int32, device


@dataclass(slots=True)
class AiterMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size, W = table columns.

    Only max_kv_len is rebound, by an eager rebuild; no kernel takes it from a graph.
    """

    kv_indptr: torch.Tensor | None  # [B + 1] int32, device; None where pages are read
    kv_indices: torch.Tensor  # flat int32 list, or page table [B or max_bs, W] int32, device
    qo_indptr: torch.Tensor | None  # [B + 1] int32, device
    kv_last_page_len: torch.Tensor | None  # [B] int32, device; ones
    mask_indptr: torch.Tensor | None  # [B + 1] int64, device
    custom_mask: torch.Tensor | None  # [max_bs * N * (max_context + N)] uint8, device
    swa_page_table: torch.Tensor | None  # as the page table
    swa_out_cache_loc: torch.Tensor | None  # [T] int64, device
    work: MlaWorkBuffers | None
    max_q_len: int | None
    max_kv_len: int
    max_extend_len: int | None
    kernel_config: CsrConfig | DecodeMetadataConfig
    fused: Callable[..., None]


class AiterBackend(AttentionBackend):
    """Metadata of AITER's attention. Pattern A: one body refreshes the same buffers at capture and replay.

    Options, in config.extra: mla; unified (forced by a sliding-window pool); unified_verify (True: verify of chains
    reads pages too); persistent (True: a schedule for MLA where the kernel has one); fp8 (KV dtype); num_sms (compute
    units to plan for); gfx942 (True on the MI300 series); dp_attention (no more splits than a request's share of them).
    """

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2})
    allowances = Allowances(
        shared_between_modes=frozenset(
            {"kv_indptr", "kv_indices", "qo_indptr", "kv_last_page_len", "swa_page_table", "swa_out_cache_loc"}
            | {f"work.{name}" for name in MlaWorkBuffers.__dataclass_fields__}
        ),
        spills=frozenset({"swa_out_cache_loc"}),
    )

    def take_options(self) -> None:
        config, extra = self.config, self.config.extra
        self.mla = extra.get("mla", False)
        self.unified = extra.get("unified", False) or self.pools.full_to_swa is not None
        self.seq_len_fill_value = config.draft_tokens or 1
        heads = max(config.num_heads, 16)
        # These kernels have no persistent form for 16-bit KV.
        there = extra.get("fp8", False) or heads not in (16, 128)
        self.persistent = self.mla and there and extra.get("persistent", True)
        self.plans: dict[tuple[ForwardMode, int], MlaPlanBuffers | None] = {}

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c = self.config
        if self.unified and self.mla:
            raise ConfigError("unified attention has no MLA: set one of unified (or a sliding-window pool) and mla")
        longest = c.max_context + c.headroom
        check_index_space("kv_indptr", max_bs, longest)
        width = self.pools.req_to_token.shape[1]
        needed = (c.table_columns - 1) * c.page_size + 1 if self.unified else c.max_context
        if width < needed:
            raise ConfigError(
                f"req_to_token is {width} tokens wide, but max_context {c.max_context} needs {needed}: "
                f"raise its width or lower max_context"
            )
        self.max_bs, self.max_tokens = max_bs, max_num_tokens
        requests = max(self.pools.req_to_token.shape[0], max_bs) + 1
        self.kv_indptr, self.qo_indptr = self._zeros(requests), self._zeros(requests)
        self.decode_qo_indptr = self._zeros(requests)
        self.row_numbers = torch.arange(requests, dtype=torch.int32, device=self.device)
        self.kv_last_page_len = torch.ones(max_bs, dtype=torch.int32, device=self.device)
        # One entry a token: in pages, as an older upstream had it, a longer context overflows.
        self.kv_indices = self._zeros(max_bs * longest)
        self.page_table = self.swa_page_table = None
        if self.unified:
            self.page_table = self._zeros(max_bs, c.table_columns)
            self.strided = torch.arange(0, c.table_columns * c.page_size, c.page_size, device=self.device)
            self.scratch_lens, self.scratch_indptr = self._zeros(max_bs), self._zeros(max_bs + 1)
        if self.pools.full_to_swa is not None and self.unified:
            self.swa_page_table = self._zeros(max_bs, c.table_columns)
        self.swa_out_buffer = self._zeros(max_num_tokens, dtype=torch.int64) if self.pools.writes_swa else None
        self.mask_indptr = self.custom_mask = None
        if c.draft_tokens > 0:
            cells = max_bs * c.draft_tokens * (c.max_context + c.draft_tokens)
            self.mask_indptr = self._zeros(requests, dtype=torch.int64)
            self.custom_mask = self._zeros(cells, dtype=torch.uint8)
            self.cell_numbers: torch.Tensor | None = None
        self.work = self._work_buffers(max_bs) if self.persistent else None

    def _work_buffers(self, max_bs: int) -> MlaWorkBuffers:
        self.cus = self.config.extra.get("num_sms") or multiprocessors(self.device)
        fold = max(self._fold(q)[0] for q in (1, max(self.config.draft_tokens, self.config.draft_steps + 1)))
        tiles = max_bs * fold
        works = tiles * max(self._max_splits(1), GFX942_SPLITS) + self.cus
        indptr, info = self._zeros(self.cus + 1), self._zeros(works, 8)
        # What the kernel takes for the schedule: where its first two vectors lie. No rebuild touches it.
        self.work_metadata = torch.tensor([indptr.data_ptr(), info.data_ptr()], dtype=torch.uint64).to(self.device)
        return MlaWorkBuffers(indptr, info, self._zeros(tiles + 1), self._zeros(tiles, 2), self._zeros(works))

    def _fold(self, queries: int) -> tuple[int, int]:
        """(tiles of a request, query rows of a tile): the kernel takes 16 heads, or one query of 128."""
        heads = max(self.config.num_heads, 16)
        if heads == 128:
            return queries, 1
        return heads // 16, queries

    def _max_splits(self, bs: int) -> int:
        most = 32 if self.config.draft_tokens else 64
        return min(-(-self.cus // bs), most) if self.config.extra.get("dp_attention") else most

    def _plan_buffers(self, bs: int, queries: int) -> MlaPlanBuffers | None:
        if self.work is None:
            return None
        c, heads, w = self.config, max(self.config.num_heads, 16), self.work
        fold, rows_of_tile = self._fold(queries)
        return MlaPlanBuffers(
            work_indptr=w.work_indptr,
            work_info=w.work_info_set,
            reduce_indptr=w.reduce_indptr,
            reduce_final_map=w.reduce_final_map,
            reduce_partial_map=w.reduce_partial_map,
            fold=fold,
            queries=rows_of_tile,
            cus=self.cus,
            max_splits=self._max_splits(bs),
            fixed_splits=GFX942_SPLITS if c.extra.get("gfx942", _is_gfx942(self.device)) else 0,
            granularity=max(c.page_size, MLA_GRANULARITY),
            filling=heads in (32, 64, 128),
            ladder=heads == 128,
        )

    def bind(self, fb: ForwardBatch) -> AiterMetadata:
        b, mode, c = fb.batch_size, fb.forward_mode, self.config
        if b > self.max_bs:
            raise ConfigError(f"batch size {b} exceeds the buffers' {self.max_bs} rows")
        decode = mode is Mode.DECODE
        if not decode and c.draft_tokens == 0:
            raise ConfigError(f"mode {mode} needs draft_tokens > 0, got 0")
        if mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2) and c.topk > 1:
            raise ConfigError(f"aiter has no {mode} for trees, so topk is at most 1; got {c.topk}")
        queries = 1 if decode else fb.positions.shape[0] // b
        if queries * b > self.max_tokens:
            raise ConfigError(f"a batch of {b} has {queries * b} tokens, the buffers hold {self.max_tokens}")
        md = AiterMetadata(
            kv_indptr=self.kv_indptr[: b + 1],
            kv_indices=self.kv_indices,
            qo_indptr=self.qo_indptr[: b + 1],
            kv_last_page_len=self.kv_last_page_len[:b],
            mask_indptr=None,
            custom_mask=None,
            swa_page_table=None,
            swa_out_cache_loc=None if self.swa_out_buffer is None else self.swa_out_buffer[: b * queries],
            work=None,
            max_q_len=queries,
            max_kv_len=c.max_context,
            max_extend_len=None,
            kernel_config=self.kernel_config(b),
            fused=_unbound,
        )
        if self._reads_pages(mode):
            self._bind_pages(md, b, decode, queries)
        elif self.mla:
            md.work, self.plans[mode, b] = self.work, self._plan_buffers(b, queries)
            if decode:
                md.qo_indptr = self.decode_qo_indptr[: b + 1]
            md.fused = self._fused_lists(md, mode, b, queries)
        elif decode:
            md.qo_indptr = md.kv_last_page_len = md.max_q_len = None
            md.fused = self._fused_lists(md, mode, b, queries)
        elif mode is Mode.TARGET_VERIFY:
            self._bind_mask(fb, md, b, queries)
        else:
            md.fused = self._fused_lists(md, mode, b, queries)
        return md

    def _reads_pages(self, mode: ForwardMode) -> bool:
        """Whether unified attention serves this mode: decode, and verify of a chain unless that is switched off."""
        chain = self.config.topk <= 1 and self.config.extra.get("unified_verify", True)
        return self.unified and (mode is Mode.DECODE or (mode is Mode.TARGET_VERIFY and chain))

    def _bind_pages(self, md: AiterMetadata, b: int, decode: bool, queries: int) -> None:
        md.kv_indptr = None
        md.kv_indices = self.page_table if decode else self.page_table[:b]
        md.swa_page_table = self.swa_page_table
        if not decode:
            md.swa_page_table = None if self.swa_page_table is None else self.swa_page_table[:b]
            md.max_kv_len = self.config.table_columns * self.config.page_size
            md.max_extend_len = queries
        if decode:
            md.qo_indptr, md.kv_last_page_len = self.row_numbers[: b + 1], None
        arguments = self._page_arguments(md, b, 0 if decode else queries)
        arguments |= {"swa_out_cache_loc": md.swa_out_cache_loc, "config": md.kernel_config}
        if not decode:
            arguments |= {"cu_seqlens_q": md.qo_indptr, "q_stride": queries, "q_mode": int(QueryMode.STRIDED)}
        md.fused = _Pages(arguments, self.tail if decode else TailPolicy.LIVE_ONLY)

    def _page_arguments(self, md: AiterMetadata, b: int, offset: int) -> dict[str, Any]:
        """Keyword arguments of the page-table update that this backend shares with trtllm_mha."""
        c = self.config
        return {
            "req_to_token": self.pools.req_to_token,
            "cache_seqlens": self.scratch_lens,
            "cu_seqlens_k": self.scratch_indptr,
            "page_table": md.kv_indices,
            "bs": b,
            "seqlen_offset": offset,
            "max_seq_pages": c.table_columns,
            "page_size": c.page_size,
            "swa_mapping": self.pools.full_to_swa,
            "swa_page_table": md.swa_page_table,
        }

    def _bind_mask(self, fb: ForwardBatch, md: AiterMetadata, b: int, queries: int) -> None:
        md.mask_indptr, md.max_extend_len = self.mask_indptr[: b + 1], queries
        md.custom_mask = bind_mask(self, fb)
        tables = CsrTables(
            md.kv_indptr, md.kv_indices, queries=queries, qo_indptr=md.qo_indptr, mask_indptr=md.mask_indptr,
            custom_mask=md.custom_mask, mapping=self.pools.full_to_swa, swa_out_cache_loc=md.swa_out_cache_loc,
        )  # fmt: skip
        counts_mask = self.recorded and md.custom_mask is not None
        md.fused = CsrMetadata(tables, md.kernel_config, self.pools.req_to_token, b, counts_mask=counts_mask)

    def _fused_lists(self, md: AiterMetadata, mode: ForwardMode, b: int, queries: int) -> Callable[..., None]:
        own = mode is Mode.DRAFT_EXTEND
        common = dict(offset=self._offset(mode), queries=queries, mapping=self.pools.full_to_swa)
        common["swa_out_cache_loc"] = md.swa_out_cache_loc
        plan = self.plans.get((mode, b))
        if plan is not None:
            return MlaLists(
                md.kernel_config, self.pools.req_to_token, md.kv_indptr, md.kv_indices, md.qo_indptr, plan, b,
                own_queries=own, **common,
            )  # fmt: skip
        starts = QueryStarts.CUMSUM if own else QueryStarts.STRIDED
        return PagedLists(
            (PagedList(KvRange.FULL, md.kv_indptr, md.kv_indices),),
            md.kernel_config,
            self.pools.req_to_token,
            b,
            query_starts=QueryStarts.NONE if md.qo_indptr is None else starts,
            qo_indptr=md.qo_indptr,
            **common,
        )

    def kernel_config(self, bs: int) -> CsrConfig | DecodeMetadataConfig:
        """Block sizes for a captured batch size; the tuner's choice if one was given, else the default."""
        c = self.config
        default = default_config(bs, c.table_columns) if self.unified else list_config(bs, c.max_context)
        return c.extra.get("kernel_config") or default

    def _offset(self, mode: ForwardMode) -> int:
        return self.config.draft_tokens if mode is Mode.TARGET_VERIFY and self.mla else 0

    # The classic chain, op for op; index lists, verify's page tables and the schedule are launches there too.

    def rebuild_aten(self, fb: ForwardBatch, md: AiterMetadata) -> None:
        mode, b = fb.forward_mode, fb.batch_size
        lens = fb.seq_lens if fb.seq_lens_cpu is None else fb.seq_lens_cpu
        longest = int(rows(lens, b).max().item())
        if mode is Mode.DECODE:
            md.max_kv_len = longest
            self._aten_decode(fb, md, b, longest)
        elif mode is Mode.TARGET_VERIFY:
            self._aten_verify(fb, md, b, longest)
        else:
            md.max_kv_len = longest
            self._aten_draft_extend(fb, md, b)
        self._launch_plan(fb, md.kv_indptr)
        if self.swa_out_buffer is not None:
            write_swa_slots(self.swa_out_buffer, fb.out_cache_loc, self.pools.full_to_swa)

    def _launch_plan(self, fb: ForwardBatch, kv_indptr: torch.Tensor) -> None:
        """The schedule of persistent MLA, where there is one."""
        plan = self.plans.get((fb.forward_mode, fb.batch_size))
        if plan is not None:
            launch_mla_plan(kv_indptr, plan, fb.batch_size)

    def _aten_decode(self, fb: ForwardBatch, md: AiterMetadata, b: int, longest: int) -> None:
        if self.unified:
            self._aten_pages(fb, b, longest)
            self.row_numbers[: b + 1]
            return
        self._aten_list(fb.req_pool_indices, fb.seq_lens, b)
        if self.mla:
            qo_indptr, last = self.decode_qo_indptr[: b + 1], self.kv_last_page_len[:b]
            qo_indptr[1 : b + 1] = torch.cumsum(last, dim=0)
            self.kv_last_page_len[:b]

    def _aten_pages(self, fb: ForwardBatch, b: int, longest: int) -> None:
        page, width = self.config.page_size, self.config.max_context + self.config.headroom
        if longest > width:
            raise ConfigError(f"seq_lens has {longest} tokens, the page table has room for {width}")
        slots = self.pools.req_to_token[fb.req_pool_indices[:b], :longest]
        table = slots
        if page > 1:
            strided = torch.arange(0, longest, page, device=self.device)
            table = slots[:, strided] // page
        columns = table.shape[1]
        # narrow, as indexing makes no slice where it takes everything: the count would depend on the batch.
        self.page_table.narrow(0, 0, b).narrow(1, 0, columns).copy_(table)
        if self.swa_page_table is not None:
            table = self.pools.full_to_swa[slots].to(torch.int32)
            if page > 1:
                strided = torch.arange(0, longest, page, device=self.device)
                table = table[:, strided] // page
            self.swa_page_table.narrow(0, 0, b).narrow(1, 0, columns).copy_(table)

    def _aten_list(self, pool: torch.Tensor, lens: torch.Tensor, b: int) -> None:
        indptr = self.kv_indptr
        indptr[1 : b + 1] = torch.cumsum(lens, dim=0)
        indptr = indptr[: b + 1]
        launch_kv_indices(self.pools.req_to_token, pool, lens, indptr, self.kv_indices, b)

    def _aten_queries(self, b: int, n: int) -> None:
        self.qo_indptr[: b + 1] = torch.arange(0, (1 + b) * n, step=n, dtype=torch.int32, device=self.device)

    def _aten_verify(self, fb: ForwardBatch, md: AiterMetadata, b: int, longest: int) -> None:
        n, room = md.max_q_len, self.kv_indices.shape[0]
        if fb.seq_lens_sum is not None and fb.seq_lens_sum + self._offset(fb.forward_mode) * b > room:
            raise ConfigError(f"kv_indices holds {room} entries, this batch has {fb.seq_lens_sum} and its draft tokens")
        seq_lens = rows(fb.seq_lens, b)
        self._aten_queries(b, n)
        self._aten_list(fb.req_pool_indices, seq_lens + n if self.mla else seq_lens, b)
        self.kv_last_page_len[:b]
        if self.mla:
            md.max_kv_len = longest
        elif md.kv_indptr is None:
            self.page_table[:b]
            if self.swa_page_table is not None:
                for _ in range(2):
                    self.swa_page_table[:b]
            update_decode_metadata(
                req_pool_indices=fb.req_pool_indices, seq_lens=seq_lens, tail=TailPolicy.LIVE_ONLY,
                **self._page_arguments(md, b, n),
            )  # fmt: skip
            self._aten_queries(b, n)
        else:
            md.max_kv_len = longest
            mask = checked_mask(fb, md.custom_mask, self.custom_mask)
            if mask is not None:
                self.custom_mask[: mask.shape[0]] = mask
            indptr = self.mask_indptr
            indptr[1 : b + 1] = torch.cumsum(n * (seq_lens + n), dim=0)
            indptr[: b + 1]

    def _aten_draft_extend(self, fb: ForwardBatch, md: AiterMetadata, b: int) -> None:
        if fb.forward_mode is Mode.DRAFT_EXTEND:
            new = fb.spec_info.num_accept_tokens[:b]
        else:
            new = torch.full((b,), md.max_q_len, dtype=torch.int32, device=self.device)
        self.qo_indptr[1 : b + 1] = torch.cumsum(new, dim=0)
        self.qo_indptr[: b + 1]
        self._aten_list(fb.req_pool_indices, fb.seq_lens[:b], b)
        self.kv_last_page_len[:b]

    def rebuild_aten_static(self, fb: ForwardBatch, md: AiterMetadata) -> None:
        mode, b = fb.forward_mode, fb.batch_size
        seq_lens, pool = fb.seq_lens[:b], fb.req_pool_indices[:b]
        if md.kv_indptr is None:
            if mode is Mode.DECODE:
                self._static_pages(pool, b)
            else:
                update_decode_metadata(
                    req_pool_indices=pool, seq_lens=seq_lens, tail=TailPolicy.LIVE_ONLY,
                    **self._page_arguments(md, b, md.max_q_len),
                )  # fmt: skip
        else:
            lens = seq_lens + self._offset(mode)
            write_running_sum(md.kv_indptr, lens)
            launch_kv_indices(self.pools.req_to_token, pool, lens, md.kv_indptr, md.kv_indices, b)
        if mode is Mode.DRAFT_EXTEND:
            write_running_sum(md.qo_indptr, fb.spec_info.num_accept_tokens[:b])
        elif md.qo_indptr is not None and not (self.unified and mode is Mode.DECODE):
            md.qo_indptr.copy_(self.row_numbers[: b + 1] * md.max_q_len)
        if md.mask_indptr is not None:
            write_running_sum(md.mask_indptr, md.max_q_len * (seq_lens + md.max_q_len))
        if md.custom_mask is not None:
            live = live_token_count(fb) // md.max_q_len
            copy_live_mask(md.custom_mask, fb.spec_info.custom_mask, md.mask_indptr, live, b, self.cell_numbers)
        self._launch_plan(fb, md.kv_indptr)
        if md.swa_out_cache_loc is not None:
            write_swa_slots(md.swa_out_cache_loc, fb.out_cache_loc, self.pools.full_to_swa)

    def _static_pages(self, pool: torch.Tensor, b: int) -> None:
        slots, page = self.pools.req_to_token[pool[:, None], self.strided], self.config.page_size
        self.page_table[:b].copy_(slots // page)
        if self.swa_page_table is not None:
            self.swa_page_table[:b].copy_(self.pools.full_to_swa[slots].to(torch.int32) // page)

    def rebuild_fused(self, fb: ForwardBatch, md: AiterMetadata) -> None:
        given: dict[str, torch.Tensor] = {}
        if md.swa_out_cache_loc is not None:
            check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
            given["out_cache_loc"] = fb.out_cache_loc
        if fb.forward_mode is Mode.DRAFT_EXTEND:
            given["aux"] = fb.spec_info.num_accept_tokens
        elif md.mask_indptr is not None and checked_mask(fb, md.custom_mask, self.custom_mask) is not None:
            given["mask"] = fb.spec_info.custom_mask
            if self.recorded:
                given["live_tokens"] = live_token_count(fb)
        md.fused(fb.req_pool_indices, fb.seq_lens, **given)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        mode = Mode(batch.mode)
        captured = mode, len(batch.seq_lens)
        md, plan = self.metadata[captured], self.plans.get(captured)
        return aiter.expected(
            batch,
            pools,
            shapes={path: (tuple(x.shape), numpy_type(x.dtype)) for path, x in tensors_of(md).items()},
            offset=self.config.draft_tokens if mode is Mode.TARGET_VERIFY and (self.mla or md.kv_indptr is None) else 0,
            queries=md.max_q_len or 1,
            page_size=self.config.page_size,
            tail=self.tail if mode is Mode.DECODE else TailPolicy.LIVE_ONLY,
            preset_queries=self.unified and mode is Mode.DECODE,
            work=None if plan is None else _plan_options(plan),
        )

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)


class AiterDraftStep(AiterBackend):
    """One step of a multi-step draft: the wrapper owns and fills its list; pages and schedule are made from that."""

    modes = frozenset({Mode.DRAFT_DECODE})

    def take_options(self) -> None:
        super().take_options()
        # Pages, or a schedule, are made of a list that must be there first; lists are the wrapper's.
        self.allowances = replace(self.allowances, fused_launches=int(self.unified or self.persistent))

    def bind(self, fb: ForwardBatch) -> AiterMetadata:
        b, (kv_indptr, kv_indices) = fb.batch_size, step_lists(fb)
        if self.config.topk > 1 and (self.unified or self.mla):
            raise ConfigError(
                f"aiter drafts chains only under mla and unified, so topk is at most 1; got {self.config.topk}"
            )
        md = AiterMetadata(
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            qo_indptr=None,
            kv_last_page_len=None,
            mask_indptr=None,
            custom_mask=None,
            swa_page_table=None,
            swa_out_cache_loc=None if self.swa_out_buffer is None else self.swa_out_buffer[:b],
            work=None,
            max_q_len=None,
            max_kv_len=self.config.max_context,
            max_extend_len=None,
            kernel_config=self.kernel_config(b),
            fused=_unbound,
        )
        if self.mla or self.unified:
            md.qo_indptr, md.max_q_len = self.row_numbers[: b + 1], 1
        if self.mla:
            md.kv_last_page_len = self.kv_last_page_len[:b]
            md.work, self.plans[fb.forward_mode, b] = self.work, self._plan_buffers(b, 1)
        if self.unified:
            md.kv_indptr, md.kv_indices, md.swa_page_table = None, self.page_table, self.swa_page_table
            md.fused = RaggedPages(
                md.kernel_config, b, self.config.page_size, kv_indptr, kv_indices, self.page_table,
                self.pools.full_to_swa, self.swa_page_table, md.swa_out_cache_loc,
            )  # fmt: skip
        return md

    def rebuild_aten(self, fb: ForwardBatch, md: AiterMetadata) -> None:
        b, (kv_indptr, kv_indices) = fb.batch_size, step_lists(fb)
        if self.unified:
            launch_ragged_pages(
                md.kernel_config, b, self.config.page_size, kv_indptr, kv_indices, self.page_table,
                self.pools.full_to_swa, self.swa_page_table,
            )  # fmt: skip
        self._launch_plan(fb, kv_indptr)
        if md.swa_out_cache_loc is not None:
            write_swa_slots(md.swa_out_cache_loc, fb.out_cache_loc, self.pools.full_to_swa)

    rebuild_aten_static = rebuild_aten

    def rebuild_fused(self, fb: ForwardBatch, md: AiterMetadata) -> None:
        if self.unified:
            if md.swa_out_cache_loc is not None:
                check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
            md.fused(None if md.swa_out_cache_loc is None else fb.out_cache_loc)
        else:
            self._launch_plan(fb, md.kv_indptr)


class _Pages:
    """The page-table launch, bound at its first call, which brings what its checks want to see."""

    def __init__(self, arguments: dict[str, Any], tail: TailPolicy) -> None:
        self._arguments = arguments | {"tail": tail, "write_cu_zero": False, "qlens": None}
        self._arguments = {"cu_seqlens_q": None, "q_stride": 0, "q_mode": int(QueryMode.PRESET)} | self._arguments
        self._call: PreparedDecodeMetadata | None = None

    def __call__(self, req_pool_indices, seq_lens, *, out_cache_loc=None) -> None:
        if self._call is None:
            self._call = PreparedDecodeMetadata(
                req_pool_indices=req_pool_indices, seq_lens=seq_lens, out_cache_loc=out_cache_loc, **self._arguments
            )
        self._call(req_pool_indices, seq_lens, out_cache_loc, None)


def _plan_options(plan: MlaPlanBuffers) -> dict[str, int | bool]:
    names = ("fold", "queries", "cus", "max_splits", "fixed_splits", "granularity", "filling", "ladder")
    return {name: getattr(plan, name) for name in names}


def _is_gfx942(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is None:
        return False
    return torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx942")


def _unbound(*_: Any, **__: Any) -> None:
    raise AssertionError("no fused rebuild is bound")
