"""DeepSeek sparse attention (DSA): an indexer keeps K tokens of each query row's context; every row has a table.

N = query rows of a request, row e = b * N + j, W = columns of req_to_token, P = page size.

| mode             | N | cache_seqlens | expanded, per row     |
|------------------|---|---------------|-----------------------|
| decode, idle     | 1 | len           | the same tensor       |
| draft_decode     | 1 | len           | the same tensor       |
| target_verify    | t | len + N       | len + 1 + j           |
| draft_extend_v2  | t | len           | max(len - N + 1 + j, 0) |

dsa_cache_seqlens = min(expanded, K); both have running sums. page_table_1[e, c] = req_to_token[pool[b], c] and
real_page_table[e, c] = floor(req_to_token[pool[b], c * P] / P). The indexer's logits kernel gets a schedule, the top-k
kernel (v2) a plan and FlashMLA a split-KV schedule. Draft steps share their lengths: there is no per-step offset.
Source: specs of SGLang's dsa backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Allowances, AttentionBackend, AttentionConfig, ConfigError
from .batch import ForwardBatch
from .kernels.decode_metadata import default_config
from .kernels.dsa_metadata import launch_dsa_metadata
from .kernels.expand_seqlens import expand_seqlens
from .kernels.paged_mqa_schedule import paged_mqa_schedule
from .kernels.split_kv_schedule import split_kv_schedule
from .kernels.topk_plan import topk_v2_plan
from .modes import ForwardMode, Implementation, TailPolicy
from .oracle import Expected, HostBatch, HostPools, dsa
from .schedules import multiprocessors, split_kv_parts

Mode = ForwardMode

TOPK_V2_LIMIT = 2048
"""Most KV tokens that the v2 top-k kernel keeps."""


@dataclass(frozen=True, slots=True)
class DsaOptions:
    """Options of this backend, read from `AttentionConfig.extra` by name.

    Attributes:
        index_topk: K, KV tokens the indexer keeps.
        num_sms: multiprocessors of the indexer's schedule; the device's own if 0.
        topk_v2: also build the plan of the v2 top-k kernel.
        flashmla_kv: also build FlashMLA's split-KV schedule.
        wide_table: build page_table_1; without it the top-k kernel reads pages. Needs topk_v2 and no draft tokens.
        mqa_2d: verify hands the logits kernel [B, N] contexts, one schedule row a request (SM100).
    """

    index_topk: int = 2048
    num_sms: int = 0
    topk_v2: bool = False
    flashmla_kv: bool = False
    wide_table: bool = True
    mqa_2d: bool = False

    @staticmethod
    def of(config: AttentionConfig) -> DsaOptions:
        names = DsaOptions.__slots__
        return DsaOptions(**{name: config.extra[name] for name in names if name in config.extra})


@dataclass(slots=True)
class SplitKVMetadata:
    """FlashMLA's schedule over the rows' kept tokens. One scheduler table serves every batch size."""

    flashmla_metadata: torch.Tensor  # [parts, 8] int32, device
    num_splits: torch.Tensor  # [rows + 1] int32, device


@dataclass(slots=True)
class DsaMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size, rows = B * N."""

    cache_seqlens_int32: torch.Tensor  # [B] int32, device
    cu_seqlens_q: torch.Tensor  # [rows + 1] int32, device, preset 0..rows
    cu_seqlens_k: torch.Tensor  # [B + 1] int32, device
    page_table_1: torch.Tensor | None  # [rows, W] int32, device
    real_page_table: torch.Tensor  # [rows, ceil(W / P)] int32, device; page_table_1 itself if P is 1
    dsa_cache_seqlens_int32: torch.Tensor  # [rows] int32, device
    dsa_cu_seqlens_q: torch.Tensor  # [rows + 1] int32, device, preset 0..rows
    dsa_cu_seqlens_k: torch.Tensor  # [rows + 1] int32, device
    dsa_seqlens_expanded: torch.Tensor  # [rows] int32, device; cache_seqlens_int32 itself if N is 1
    paged_mqa_ctx_lens_2d: torch.Tensor  # [rows, 1] int32, device, view of the lengths; [B, N] of its own if mqa_2d
    paged_mqa_schedule_metadata: torch.Tensor  # [num_sms + 1, 2] int32, device
    topk_v2_plan: torch.Tensor | None  # [rows + 1, 2] int32, device, defined up to its count
    flashmla_metadata: SplitKVMetadata | None
    page_size: int
    max_seq_len_q: int
    max_seq_len_k: int
    dsa_max_seqlen_q: int
    dsa_extend_seq_lens_list: tuple[int, ...]


class DsaBackend(AttentionBackend):
    """Metadata of sparse MLA. Every row of every table is rewritten at the captured width; no host length is read.

    Upstream keys its metadata by batch size alone, so that one instance cannot serve decode and verify; here the mode
    is part of the key. Each mode has lengths of its own, because they alias one another in decode; the large buffers
    are shared, and each replay rewrites what it uses of them.
    """

    modes = frozenset({Mode.DECODE, Mode.DRAFT_DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2})
    allowances = Allowances(
        aliases=frozenset(
            {
                frozenset({"cache_seqlens_int32", "dsa_seqlens_expanded", "paged_mqa_ctx_lens_2d"}),
                frozenset({"page_table_1", "real_page_table"}),
            }
        ),
        shared_between_modes=frozenset(
            {
                "cu_seqlens_q",
                "cu_seqlens_k",
                "page_table_1",
                "real_page_table",
                "dsa_cache_seqlens_int32",
                "dsa_cu_seqlens_q",
                "dsa_cu_seqlens_k",
                "paged_mqa_schedule_metadata",
                "topk_v2_plan",
                "flashmla_metadata.flashmla_metadata",
                "flashmla_metadata.num_splits",
            }
        ),
    )

    @staticmethod
    def default_tail(implementation: Implementation, recorded: bool) -> TailPolicy:
        return TailPolicy.LIVE_ONLY if implementation is Implementation.FUSED else TailPolicy.STATIC_FULL

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c, self.options = self.config, DsaOptions.of(self.config)
        self._check_options()
        if self.tail is TailPolicy.BATCH_MAX:
            self.tail = TailPolicy.STATIC_FULL  # no host length is read, so the static width is the batch's
        width = self.pools.req_to_token.shape[1]
        if width < c.max_context + c.headroom:
            raise ConfigError(
                f"page_table_1 is as wide as req_to_token, {width} tokens, but lengths reach "
                f"{c.max_context + c.headroom} (max_context {c.max_context} and {c.headroom} draft tokens)"
            )
        self.max_bs, self.max_rows = max_bs, max(max_num_tokens, max_bs)
        rows, pages = self.max_rows, -(-width // c.page_size)
        self.num_sms = self.options.num_sms or multiprocessors(self.device)
        self.cache_seqlens = {mode: self._ones(max_bs) for mode in self.modes}
        self.expanded = {mode: self._ones(rows) for mode in self.modes}
        self.cu_seqlens_k = self._zeros(max_bs + 1)
        self.dsa_cache_seqlens = self._ones(rows)
        self.dsa_cu_seqlens_k = self._zeros(rows + 1)
        self.row_numbers, self.sparse_row_numbers = (
            torch.arange(rows + 1, dtype=torch.int32, device=self.device) for _ in range(2)
        )
        self.page_columns = torch.arange(0, width, c.page_size, dtype=torch.int64, device=self.device)
        self.page_table = self._zeros(rows, width) if self.options.wide_table else None
        self.real_page_table = self._zeros(rows, pages) if c.page_size > 1 else None
        self.ctx_lens_2d = self._ones(rows) if self.options.mqa_2d else None
        self.schedule, self.planned_schedule = self._zeros(self.num_sms + 1, 2), self._zeros(self.num_sms + 1, 2)
        self.plan_buffer = self._zeros(rows + 1, 2) if self.options.topk_v2 else None
        self.split = self.planned_split = None
        if self.options.flashmla_kv:
            # The kernel pads its query heads to 64 or 128 and reads one latent KV head.
            parts = split_kv_parts(self.num_sms, 64 if c.num_heads <= 64 else 128)
            self.split, self.planned_split = (
                SplitKVMetadata(self._zeros(parts, 8), self._zeros(rows + 1)) for _ in range(2)
            )

    def _check_options(self) -> None:
        c, o = self.config, self.options
        if self.tail is TailPolicy.ZERO_TAIL or (
            self.tail is TailPolicy.LIVE_ONLY and self.implementation is not Implementation.FUSED
        ):
            raise ConfigError(f"dsa's {self.implementation} rebuild leaves no {self.tail} tail: leave it out")
        if c.topk > 1:
            raise ConfigError(f"dsa supports topk of at most 1, got {c.topk}")
        if o.index_topk < 1:
            raise ConfigError(f"index_topk must be at least 1, got {o.index_topk}")
        if o.topk_v2 and o.index_topk > TOPK_V2_LIMIT:
            raise ConfigError(f"topk_v2 keeps at most {TOPK_V2_LIMIT} tokens, index_topk is {o.index_topk}")
        if not o.wide_table and (c.page_size == 1 or c.draft_tokens or not o.topk_v2):
            raise ConfigError(
                "wide_table=False needs a page size above 1, no draft tokens and topk_v2, got page_size "
                f"{c.page_size}, draft_tokens {c.draft_tokens}, topk_v2 {o.topk_v2}"
            )

    def bind(self, fb: ForwardBatch) -> DsaMetadata:
        b, n = fb.batch_size, self._queries(fb)
        rows = b * n
        if b > self.max_bs:
            raise ConfigError(f"batch size {b} exceeds the buffers' {self.max_bs} requests")
        if rows > self.max_rows:
            raise ConfigError(f"page_table_1 holds {self.max_rows} rows, {b} requests of {n} queries need {rows}")
        lens = self.cache_seqlens[fb.forward_mode][:b]
        expanded = lens if n == 1 else self.expanded[fb.forward_mode][:rows]
        wide = None if self.page_table is None else self.page_table[:rows]
        two_d = self.options.mqa_2d and fb.forward_mode is Mode.TARGET_VERIFY and n > 1
        return DsaMetadata(
            cache_seqlens_int32=lens,
            cu_seqlens_q=self.row_numbers[: rows + 1],
            cu_seqlens_k=self.cu_seqlens_k[: b + 1],
            page_table_1=wide,
            real_page_table=wide if self.config.page_size == 1 else self.real_page_table[:rows],
            dsa_cache_seqlens_int32=self.dsa_cache_seqlens[:rows],
            dsa_cu_seqlens_q=self.sparse_row_numbers[: rows + 1],
            dsa_cu_seqlens_k=self.dsa_cu_seqlens_k[: rows + 1],
            dsa_seqlens_expanded=expanded,
            paged_mqa_ctx_lens_2d=self.ctx_lens_2d[:rows].view(b, n) if two_d else expanded.view(-1, 1),
            paged_mqa_schedule_metadata=self.schedule,
            topk_v2_plan=None if self.plan_buffer is None else self.plan_buffer[: rows + 1],
            flashmla_metadata=self.split
            and SplitKVMetadata(self.split.flashmla_metadata, self.split.num_splits[: rows + 1]),
            page_size=self.config.page_size,
            max_seq_len_q=1,
            max_seq_len_k=self.pools.req_to_token.shape[1],
            dsa_max_seqlen_q=1,
            dsa_extend_seq_lens_list=(1,) * rows,
        )

    # The classic chain, op for op, with its order and repetitions: the number of dispatches is what is measured.

    def rebuild_aten(self, fb: ForwardBatch, md: DsaMetadata) -> None:
        b, n, rows = fb.batch_size, self._queries(fb), md.dsa_cache_seqlens_int32.shape[0]
        seq_lens, pool = fb.seq_lens[:b], fb.req_pool_indices[:b]
        width = md.max_seq_len_k
        lens = seq_lens.to(torch.int32)
        if fb.forward_mode is Mode.TARGET_VERIFY:
            lens = lens + n
        md.cache_seqlens_int32.copy_(lens)
        md.cu_seqlens_k[1:].copy_(torch.cumsum(lens, dim=0, dtype=torch.int32))
        slots = self.pools.req_to_token[pool]
        if rows > b:
            slots = torch.repeat_interleave(slots, repeats=n, dim=0)
        if md.page_table_1 is not None:
            md.page_table_1[:, :width].copy_(slots)
        expanded = md.cache_seqlens_int32
        if rows > b:
            expanded = self._aten_expand(fb, md, lens, n, rows)
        md.dsa_cache_seqlens_int32.copy_(torch.clamp(expanded, max=self.options.index_topk))
        two_d = md.paged_mqa_ctx_lens_2d.shape[1] > 1
        ctx = lens.view(-1, 1).expand(-1, n).clone() if two_d else expanded.view(-1, 1)
        paged_mqa_schedule(lens if two_d else ctx, self.planned_schedule)
        md.paged_mqa_schedule_metadata.copy_(self.planned_schedule)
        md.paged_mqa_ctx_lens_2d.copy_(ctx)
        if md.topk_v2_plan is not None:
            plan = md.topk_v2_plan.clone()  # a plan is defined up to its count only
            topk_v2_plan(expanded, plan)
            md.topk_v2_plan.copy_(plan)
        if md.flashmla_metadata is not None:
            planned = SplitKVMetadata(self.planned_split.flashmla_metadata, self.planned_split.num_splits[: rows + 1])
            split_kv_schedule(md.dsa_cache_seqlens_int32, planned.flashmla_metadata, planned.num_splits)
            md.flashmla_metadata.flashmla_metadata.copy_(planned.flashmla_metadata)
            md.flashmla_metadata.num_splits.copy_(planned.num_splits)
        md.dsa_cu_seqlens_k[1:].copy_(torch.cumsum(md.dsa_cache_seqlens_int32, dim=0, dtype=torch.int32))
        if md.page_size > 1:
            columns = torch.arange(0, width, md.page_size, device=self.device)
            pages = slots[:, columns] // md.page_size
            md.real_page_table[:, : pages.shape[1]].copy_(pages)

    def _aten_expand(self, fb: ForwardBatch, md: DsaMetadata, lens: torch.Tensor, n: int, rows: int) -> torch.Tensor:
        device = self.device
        queries = torch.full((fb.batch_size,), n, dtype=torch.int32, device=device)
        offsets = torch.zeros(fb.batch_size + 1, dtype=torch.int32, device=device)
        offsets[1:].copy_(torch.cumsum(queries, dim=0))
        expanded = torch.empty(rows, dtype=torch.int32, device=device)
        expand_seqlens(queries, lens, offsets, expanded)
        if fb.forward_mode is Mode.TARGET_VERIFY:
            md.dsa_seqlens_expanded.copy_(expanded)
        else:
            md.dsa_seqlens_expanded[:rows].copy_(expanded)
        return expanded

    def rebuild_aten_static(self, fb: ForwardBatch, md: DsaMetadata) -> None:
        b, n = fb.batch_size, self._queries(fb)
        lens, kept = md.cache_seqlens_int32, md.dsa_cache_seqlens_int32
        lens.copy_(fb.seq_lens[:b] + (n if fb.forward_mode is Mode.TARGET_VERIFY else 0))
        md.cu_seqlens_k[1:].copy_(torch.cumsum(lens, 0))
        slots = self.pools.req_to_token[fb.req_pool_indices[:b]]
        if md.page_table_1 is not None:
            md.page_table_1.view(b, n, -1).copy_(slots[:, None])
        if n > 1:
            rows = lens[:, None] + (self.row_numbers[1 : n + 1] - n)
            md.dsa_seqlens_expanded.view(b, n).copy_(rows.clamp(min=0))
        kept.copy_(md.dsa_seqlens_expanded.clamp(max=self.options.index_topk))
        md.dsa_cu_seqlens_k[1:].copy_(torch.cumsum(kept, 0))
        if md.paged_mqa_ctx_lens_2d.shape[1] > 1:
            md.paged_mqa_ctx_lens_2d.copy_(lens[:, None])
            paged_mqa_schedule(lens, md.paged_mqa_schedule_metadata)
        else:
            paged_mqa_schedule(md.dsa_seqlens_expanded, md.paged_mqa_schedule_metadata)
        if md.topk_v2_plan is not None:
            topk_v2_plan(md.dsa_seqlens_expanded, md.topk_v2_plan)
        if md.flashmla_metadata is not None:
            split_kv_schedule(kept, md.flashmla_metadata.flashmla_metadata, md.flashmla_metadata.num_splits)
        if md.page_size > 1:
            md.real_page_table.view(b, n, -1).copy_((slots[:, self.page_columns] // md.page_size)[:, None])

    def rebuild_fused(self, fb: ForwardBatch, md: DsaMetadata) -> None:
        n, columns = self._queries(fb), (md.real_page_table if md.page_table_1 is None else md.page_table_1).shape[1]
        launch_dsa_metadata(
            fb.req_pool_indices,
            fb.seq_lens,
            self.pools.req_to_token,
            md,
            fb.batch_size,
            n if fb.forward_mode is Mode.TARGET_VERIFY else 0,
            n,
            self.options.index_topk,
            self.tail,
            self.config.extra.get("kernel_config") or default_config(fb.batch_size, columns),
        )

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        o = self.options
        return dsa.expected(
            batch,
            pools,
            page_size=self.config.page_size,
            topk=o.index_topk,
            num_sms=self.num_sms,
            tail=self.tail,
            wide_table=o.wide_table,
            mqa_2d=o.mqa_2d,
            topk_v2=o.topk_v2,
            split_parts=self.split.flashmla_metadata.shape[0] if self.split else 0,
        )

    def _queries(self, fb: ForwardBatch) -> int:
        """N, a property of the captured shape, never of the accepted counts."""
        if fb.forward_mode in (Mode.DECODE, Mode.DRAFT_DECODE):
            return 1
        return fb.positions.shape[0] // fb.batch_size

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)

    def _ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.int32, device=self.device)
