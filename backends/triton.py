"""Triton split-KV decode and extend attention: token-granular CSR index lists, KV splits, tree masks, windows.

| mode             | KV length                | qo_indptr   | mask_indptr             | num_kv_splits |
|------------------|--------------------------|-------------|-------------------------|---------------|
| decode, idle     | len                      |             |                         | by SplitRule  |
| target_verify    | len (prefix only)        | i * N       | sum of N * (len + N)    |               |
| draft_extend     | len                      | i * T // B  |                         |               |
| draft_extend_v2  | max(len - extend_len, 0) | i * N       |                         |               |

kv_indptr is the running sum of the KV lengths, kv_indices lists their slots. The window tables do the same for the last
min(length, window) tokens, through the sliding-window map where there is one; window_kv_offsets says where they begin.
Draft decode belongs to the multi_step_draft wrapper, which fills the tables of all steps at once. Page size plays no
role. Source: specs of SGLang's triton backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from .aten_ops import (
    bind_mask,
    check_slots,
    checked_mask,
    copy_live_mask,
    live_token_count,
    translate_in_place,
    write_running_sum,
    write_swa_slots,
)
from .base import Allowances, AttentionBackend, ConfigError, PeerMissing, tensors_of
from .batch import ForwardBatch
from .kernels.csr_metadata import CsrConfig, CsrMetadata, CsrTables, default_config
from .kernels.kv_indices import launch_kv_indices
from .kernels.kv_splits import SplitRule, head_programs, launch_kv_splits
from .kernels.launch import foreign_launch
from .modes import ForwardMode, Implementation, TailPolicy
from .oracle import Expected, HostBatch, HostPools, triton
from .schedules import multiprocessors

Mode = ForwardMode

DEFAULT_MAX_KV_SPLITS = 8
DETERMINISTIC_TILE = 256
"""Tokens per split where results must not depend on the batch and nobody says how many."""


@dataclass(slots=True)
class TritonMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size, T = tokens.

    Index lists, splits and masks are whole buffers: what is live, the indptr vectors say.
    """

    kv_indptr: torch.Tensor  # [B + 1] int32, device
    kv_indices: torch.Tensor  # [max_tokens * max_context] int64, device
    window_kv_indptr: torch.Tensor | None  # [B + 1] int32, device
    window_kv_indices: torch.Tensor | None  # [max_tokens * window] int64, device
    window_kv_offsets: torch.Tensor | None  # [max_bs] int32, device; not in decode
    num_kv_splits: torch.Tensor | None  # [max_tokens] int32, device; decode
    window_num_kv_splits: torch.Tensor | None  # [max_tokens] int32, device; decode
    qo_indptr: torch.Tensor | None  # [B + 1] int64, device
    mask_indptr: torch.Tensor | None  # [B + 1] int64, device; verify
    custom_mask: torch.Tensor | None  # [max_bs * N * (max_context + N)] uint8, device; verify with a mask
    swa_out_cache_loc: torch.Tensor | None  # [T] int64, device
    max_extend_len: int | None
    kernel_config: CsrConfig


class TritonBackend(AttentionBackend):
    """Metadata of SGLang's Triton attention. Pattern B: capture and replay fill the same buffers by the same code.

    Options, in config.extra: max_kv_splits (8), core_count (the device's multiprocessors), static_kv_splits (every
    token gets the most), split_tile_size (a context of that many tokens a split bounds the splits), deterministic
    (results that do not depend on the batch: splits of split_tile_size, or of 256 tokens), use_mla (more splits),
    v_head_dim (128). A pool with a sliding-window map but no config.window gets a window of a quarter
    of the context.
    """

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2})
    allowances = Allowances(
        shared_between_modes=frozenset(
            {"kv_indptr", "kv_indices", "window_kv_indptr", "window_kv_indices", "window_kv_offsets", "qo_indptr"}
            | {"swa_out_cache_loc"}
        ),
        spills=frozenset({"swa_out_cache_loc"}),
    )
    index_dtype = torch.int64
    qo_dtype = torch.int64
    has_windows = True

    @staticmethod
    def default_tail(implementation: Implementation, recorded: bool) -> TailPolicy:
        """Index lists have no columns to fill: every implementation stops at the live length."""
        return TailPolicy.LIVE_ONLY

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c = self.config
        check_index_space("kv_indptr", max_bs, c.max_context)
        width = self.pools.req_to_token.shape[1]
        if width < c.max_context:
            raise ConfigError(
                f"req_to_token is {width} tokens wide, max_context is {c.max_context}: raise its width or lower it"
            )
        self.max_bs, self.max_tokens = max_bs, max_num_tokens
        maps = self.has_windows and self.pools.full_to_swa is not None
        self.window = (c.window or (max(c.max_context // 4, 1) if maps else 0)) if self.has_windows else 0
        self.splits = split_rule(c, self.device)
        self.fused: dict[tuple[ForwardMode, int], CsrMetadata] = {}
        rows = max(self.pools.req_to_token.shape[0], max_bs + 1)
        self.kv_indptr = self._zeros(rows)
        self.kv_indices = self._zeros(max_num_tokens * c.max_context, dtype=self.index_dtype)
        self.num_kv_splits = self._full_splits(max_num_tokens)
        # Scratch of the decode kernels: no rebuild touches it.
        m, heads = self.splits.max_splits, c.num_heads
        self.attn_logits = self._zeros(max_num_tokens, heads, m, c.extra.get("v_head_dim", 128), dtype=torch.float32)
        self.attn_lse = self._zeros(max_num_tokens, heads, m, dtype=torch.float32)
        self.row_numbers = torch.arange(rows, dtype=torch.int64, device=self.device)
        if self.window:
            self.window_kv_indptr = self._zeros(rows)
            self.window_kv_indices = self._zeros(max_num_tokens * self.window, dtype=self.index_dtype)
            self.window_kv_offsets = self._zeros(max_bs)
            self.window_num_kv_splits = self._full_splits(max_num_tokens)
        self.no_lens = self._zeros(max_bs)
        writes = maps and self.pools.writes_swa
        self.swa_out_buffer = self._zeros(max_num_tokens, dtype=torch.int64) if writes else None
        if c.draft_tokens > 0:
            self.qo_indptr = self._zeros(rows, dtype=self.qo_dtype)
            self.mask_indptr = self._zeros(rows, dtype=torch.int64)
            # Draft tokens see each other: upstream's first buffer forgot them and was too small at the context limit.
            cells = max_bs * c.draft_tokens * (c.max_context + c.draft_tokens)
            self.custom_mask = self._zeros(cells, dtype=torch.uint8)
            self.cell_numbers: torch.Tensor | None = None

    def bind(self, fb: ForwardBatch) -> TritonMetadata:
        c, b, mode = self.config, fb.batch_size, fb.forward_mode
        if b > self.max_bs:
            raise ConfigError(f"batch size {b} exceeds the buffers' {self.max_bs} rows")
        if fb.encoder_lens is not None:
            raise ConfigError("encoder_lens must be None: this backend has no cross attention under graphs")
        decode = mode is Mode.DECODE
        if not decode and c.draft_tokens == 0:
            raise ConfigError(f"mode {mode} needs draft_tokens > 0, got 0")
        queries = 1 if decode else self._queries(fb)
        if queries * b > self.max_tokens:
            raise ConfigError(f"a batch of {b} has {queries * b} tokens, the buffers hold {self.max_tokens}")
        verify, window = mode is Mode.TARGET_VERIFY, self.window > 0
        tables = CsrTables(
            kv_indptr=self.kv_indptr[: b + 1],
            kv_indices=self.kv_indices,
            window=self.window,
            window_kv_indptr=self.window_kv_indptr[: b + 1] if window else None,
            window_kv_indices=self.window_kv_indices if window else None,
            window_kv_offsets=self.window_kv_offsets if window and not decode else None,
            mapping=self.pools.full_to_swa if window else None,
            num_kv_splits=self.num_kv_splits if decode else None,
            window_num_kv_splits=self.window_num_kv_splits if window and decode else None,
            splits=self.splits,
            queries=queries,
            qo_indptr=None if decode else self.qo_indptr[: b + 1],
            mask_indptr=self.mask_indptr[: b + 1] if verify else None,
            custom_mask=bind_mask(self, fb) if verify else None,
            swa_out_cache_loc=None if self.swa_out_buffer is None else self.swa_out_buffer[: b * queries],
        )
        self.fused[mode, b] = CsrMetadata(
            tables,
            self.kernel_config(b),
            self.pools.req_to_token,
            b,
            takes_off=mode is Mode.DRAFT_EXTEND_V2,
            counts_mask=self.recorded and tables.custom_mask is not None,
        )
        return self._metadata(tables, None if decode else queries, self.kernel_config(b))

    def _metadata(self, tables: CsrTables, max_extend_len: int | None, config: CsrConfig) -> TritonMetadata:
        return TritonMetadata(
            kv_indptr=tables.kv_indptr,
            kv_indices=tables.kv_indices,
            window_kv_indptr=tables.window_kv_indptr,
            window_kv_indices=tables.window_kv_indices,
            window_kv_offsets=tables.window_kv_offsets,
            num_kv_splits=tables.num_kv_splits,
            window_num_kv_splits=tables.window_num_kv_splits,
            qo_indptr=tables.qo_indptr,
            mask_indptr=tables.mask_indptr,
            custom_mask=tables.custom_mask,
            swa_out_cache_loc=tables.swa_out_cache_loc,
            max_extend_len=max_extend_len,
            kernel_config=config,
        )

    def kernel_config(self, bs: int) -> CsrConfig:
        """Block sizes for a captured batch size; the tuner's choice if one was given, else the default."""
        return self.config.extra.get("kernel_config") or default_config(bs, self.config.max_context)

    # The classic chain, op for op: what a replay dispatches when it is written in PyTorch. The index lists and the
    # split counts are Triton launches there too.

    def rebuild_aten(self, fb: ForwardBatch, md: TritonMetadata) -> None:
        mode, b = fb.forward_mode, fb.batch_size
        if mode is Mode.DECODE:
            self._aten_decode(fb, b)
        elif mode is Mode.TARGET_VERIFY:
            self._aten_verify(fb, md, b)
        else:
            self._aten_draft_extend(fb, md, b)
        if self.swa_out_buffer is not None:
            write_swa_slots(self.swa_out_buffer, fb.out_cache_loc, self.pools.full_to_swa)

    def _aten_decode(self, fb: ForwardBatch, b: int) -> None:
        seq_lens, pool = fb.seq_lens[:b], fb.req_pool_indices[:b]
        kv_indptr = self.kv_indptr[: b + 1]
        write_running_sum(kv_indptr, seq_lens)
        self._kv_indices(pool, seq_lens, kv_indptr, self.kv_indices, b)
        window_lens = self._aten_window(pool, seq_lens, b) if self.window else None
        self._aten_splits(self.num_kv_splits[:b], fb.seq_lens[:b])
        if window_lens is not None:
            self._aten_splits(self.window_num_kv_splits[:b], window_lens[:b])

    def _aten_verify(self, fb: ForwardBatch, md: TritonMetadata, b: int) -> None:
        n = self.config.draft_tokens
        seq_lens, pool = rows(fb.seq_lens, b), fb.req_pool_indices
        self._aten_queries(b, n)
        kv_indptr = self.kv_indptr[: b + 1]
        write_running_sum(kv_indptr, seq_lens)
        self._kv_indices(pool, seq_lens, kv_indptr, self.kv_indices, b)
        if self.window:
            self.window_kv_offsets[:b].copy_(self._aten_window(pool[:b], seq_lens, b, starts=True))
        mask = checked_mask(fb, md.custom_mask, self.custom_mask)
        if mask is not None:
            self.custom_mask[: mask.shape[0]] = mask
        mask_lens = n * (seq_lens + n)
        write_running_sum(self.mask_indptr[: b + 1], mask_lens)

    def _aten_draft_extend(self, fb: ForwardBatch, md: TritonMetadata, b: int) -> None:
        lens = fb.seq_lens[:b]
        self._aten_queries(b, md.max_extend_len)
        if fb.forward_mode is Mode.DRAFT_EXTEND_V2:
            given = fb.spec_info.extend_seq_lens  # not there yet when a batch is captured
            new = torch.zeros(b, dtype=torch.int32, device=self.device) if given is None else given[:b]
            lens = torch.clamp(lens - new, min=0).to(torch.int32)
        kv_indptr = self.kv_indptr[: b + 1]
        write_running_sum(kv_indptr, lens)
        pool = fb.req_pool_indices
        self._kv_indices(pool, lens, kv_indptr, self.kv_indices, b)
        if self.window:
            self.window_kv_offsets[:b].copy_(self._aten_window(pool, lens, b, starts=True))

    def _aten_queries(self, b: int, n: int) -> None:
        self.qo_indptr[: b + 1].copy_(torch.arange(0, (b + 1) * n, n, dtype=torch.int32, device=self.device))

    def _aten_window(self, pool: torch.Tensor, lens: torch.Tensor, b: int, starts: bool = False) -> torch.Tensor:
        """Window tables; the window's lengths, or where it starts."""
        kept = torch.minimum(lens, torch.tensor(self.window))
        indptr = self.window_kv_indptr[: b + 1]
        write_running_sum(indptr, kept)
        start = lens - kept
        self._kv_indices(pool, kept, indptr, self.window_kv_indices, b, start)
        if self.pools.full_to_swa is not None:
            translate_in_place(self.window_kv_indices, indptr, self.pools.full_to_swa)
        return start if starts else kept

    def _aten_splits(self, splits: torch.Tensor, lens: torch.Tensor) -> None:
        rule = self.splits
        if rule.tile:
            splits[:] = (lens + rule.tile - 1) // rule.tile
        elif rule.cores > 0:
            launch_kv_splits(lens, splits, rule.cores, rule.head_programs, rule.max_splits)
        else:
            splits.fill_(rule.max_splits)

    def _kv_indices(self, pool, lens, indptr, indices, b, start=None, mapping=None) -> None:
        launch_kv_indices(self.pools.req_to_token, pool, lens, indptr, indices, b, start, mapping)

    def peer_rebuild(self) -> Callable[[ForwardBatch, Any], None]:
        """The classic chain with the engine's own kernel for the lists, which is how the engine runs it."""
        from .peers import sglang_index_gather

        gather = sglang_index_gather().update
        if self.pools.full_to_swa is not None:
            raise PeerMissing("sglang's index lists take no sliding-window map in every release: its arms are left out")

        def kv_indices(pool, lens, indptr, indices, b, start=None, mapping=None) -> None:
            arguments = (self.pools.req_to_token, pool, lens, indptr, indices, start)
            foreign_launch(partial(gather, *arguments), arguments)

        self._kv_indices = kv_indices
        return self.classic_rebuild()

    def rebuild_aten_static(self, fb: ForwardBatch, md: TritonMetadata) -> None:
        mode, b = fb.forward_mode, fb.batch_size
        t = self.fused[mode, b].tables
        seq_lens, pool = fb.seq_lens[:b], fb.req_pool_indices[:b]
        lens = seq_lens
        if mode is Mode.DRAFT_EXTEND_V2:
            lens = torch.clamp(seq_lens - self._static_extend_lens(fb)[:b], min=0)
        write_running_sum(md.kv_indptr, lens)
        self._kv_indices(pool, lens, md.kv_indptr, md.kv_indices, b)
        if t.num_kv_splits is not None:
            self._aten_splits(t.num_kv_splits[:b], lens)
        if t.window_kv_indptr is not None:
            kept = torch.clamp(lens, max=t.window)
            write_running_sum(t.window_kv_indptr, kept)
            start = lens - kept
            # Mapped in the launch: how long the list is, a graph cannot ask.
            self._kv_indices(pool, kept, t.window_kv_indptr, t.window_kv_indices, b, start, t.mapping)
            if t.window_num_kv_splits is not None:
                self._aten_splits(t.window_num_kv_splits[:b], kept)
            if t.window_kv_offsets is not None:
                t.window_kv_offsets[:b].copy_(start)
        if t.qo_indptr is not None:
            t.qo_indptr.copy_(self.row_numbers[: b + 1] * t.queries)
        if t.mask_indptr is not None:
            write_running_sum(t.mask_indptr, t.queries * (seq_lens + t.queries))
        if t.custom_mask is not None:
            self._static_mask(fb, t)
        if t.swa_out_cache_loc is not None:
            write_swa_slots(t.swa_out_cache_loc, fb.out_cache_loc, self.pools.full_to_swa)

    def _static_mask(self, fb: ForwardBatch, t: CsrTables) -> None:
        """Copy the live requests' cells of the runner's mask; where they end, their number and mask_indptr say."""
        live = live_token_count(fb) // t.queries
        copy_live_mask(
            t.custom_mask, fb.spec_info.custom_mask, t.mask_indptr, live, fb.batch_size, self.cell_numbers
        )  # fmt: skip

    def rebuild_fused(self, fb: ForwardBatch, md: TritonMetadata) -> None:
        mode, extend_lens, mask, live_tokens = fb.forward_mode, None, None, None
        if mode is Mode.DRAFT_EXTEND_V2:
            extend_lens = self._static_extend_lens(fb) if self.recorded else fb.spec_info.extend_seq_lens
            extend_lens = self.no_lens if extend_lens is None else extend_lens
        if mode is Mode.TARGET_VERIFY:
            mask = checked_mask(fb, md.custom_mask, self.custom_mask)
            live_tokens = live_token_count(fb) if self.recorded and mask is not None else None
        if md.swa_out_cache_loc is not None:
            check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
        self.fused[mode, fb.batch_size](
            fb.req_pool_indices,
            fb.seq_lens,
            extend_lens=extend_lens,
            out_cache_loc=None if md.swa_out_cache_loc is None else fb.out_cache_loc,
            mask=mask,
            live_tokens=live_tokens,
        )

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        c, rule = self.config, self.splits
        md = self.metadata[Mode(batch.mode), len(batch.seq_lens)]
        return triton.expected(
            batch,
            pools,
            shapes={name: (tuple(x.shape), numpy_type(x.dtype)) for name, x in tensors_of(md).items()},
            queries=md.max_extend_len or 1,
            window=self.window,
            splits=dict(
                max_splits=rule.max_splits,
                cores=rule.cores,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                tile=rule.tile,
            ),
        )

    def _queries(self, fb: ForwardBatch) -> int:
        """Tokens per request of the captured shape, never of accepted counts: draft extend v1 has S + 1, else N."""
        if fb.forward_mode is Mode.DRAFT_EXTEND:
            return fb.positions.shape[0] // fb.batch_size
        return self.config.draft_tokens

    def _static_extend_lens(self, fb: ForwardBatch) -> torch.Tensor:
        lens = fb.spec_info.extend_seq_lens
        if lens is None:
            raise ConfigError("extend_seq_lens is None: recorded work would take every new length as 0 for ever")
        return lens

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _full_splits(self, n: int) -> torch.Tensor:
        return torch.full((n,), self.splits.max_splits, dtype=torch.int32, device=self.device)


class TritonDraftStep(TritonBackend):
    """One step of a multi-step draft. The wrapper owns and fills its tables; this one hands them to the kernels."""

    modes = frozenset({Mode.DRAFT_DECODE})
    allowances = replace(TritonBackend.allowances, fused_launches=0)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c, rule = self.config, split_rule(self.config, self.device)
        self.max_bs, self.splits = max_bs, rule
        heads, v_dim = c.num_heads, c.extra.get("v_head_dim", 128)
        self.attn_logits = self._zeros(max_num_tokens, heads, rule.max_splits, v_dim, dtype=torch.float32)
        self.attn_lse = self._zeros(max_num_tokens, heads, rule.max_splits, dtype=torch.float32)

    def adopt(self, num_kv_splits: torch.Tensor) -> None:
        """Use the split counts that the wrapper fills for all steps: [max_tokens] int32."""
        self.num_kv_splits = num_kv_splits

    def bind(self, fb: ForwardBatch) -> TritonMetadata:
        spec = fb.spec_info
        if spec is None or spec.kv_indptr is None or spec.kv_indices is None:
            raise ConfigError("draft decode needs the kv_indptr and kv_indices of its step: use multi_step_draft")
        tables = CsrTables(spec.kv_indptr, spec.kv_indices, num_kv_splits=self.num_kv_splits, splits=self.splits)
        return self._metadata(tables, None, self.kernel_config(fb.batch_size))

    def rebuild_aten(self, fb: ForwardBatch, md: TritonMetadata) -> None:
        """Nothing: the wrapper fills the tables of all steps at once."""

    rebuild_aten_static = rebuild_fused = rebuild_aten


def numpy_type(dtype: torch.dtype) -> type:
    """The NumPy scalar type of a tensor's elements."""
    return getattr(np, str(dtype).removeprefix("torch."))


def rows(x: torch.Tensor, b: int) -> torch.Tensor:
    """The first b entries; `x` itself, with no dispatch, where the runner has cut it already."""
    return x if x.shape[0] == b else x[:b]


def check_index_space(name: str, requests: int, tokens: int) -> None:
    """Refuse index lists that int32 offsets cannot address.

    Raises:
        ConfigError: requests * tokens is 2**31 or more.
    """
    if requests * tokens >= 2**31:
        raise ConfigError(
            f"{name} is int32, but {requests} lists of {tokens} tokens have {requests * tokens} entries "
            f"(2**31 or more): lower the batch size or max_context"
        )


def split_rule(config, device: torch.device) -> SplitRule:
    """The split policy of a configuration, from its options: see TritonBackend."""
    extra = config.extra
    cores = extra.get("core_count", multiprocessors(device))
    most = extra.get("max_kv_splits", DEFAULT_MAX_KV_SPLITS)
    if extra.get("use_mla"):
        # One latent head leaves the device empty: allow a split per multiprocessor, or per 32 tokens.
        most = max(most, min(_power_of_2(cores), _power_of_2(-(-config.max_context // 32))))
    deterministic = extra.get("deterministic", False)
    tile = extra.get("split_tile_size", DETERMINISTIC_TILE if deterministic else 0)
    if tile:
        most = -(-config.max_context // tile)
    if extra.get("static_kv_splits"):
        cores = 0
    programs = head_programs(config.num_heads, config.num_kv_heads)
    return SplitRule(most, cores, programs, tile if deterministic else 0)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
