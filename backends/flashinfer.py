"""FlashInfer paged attention (FA2): one or two wrappers reading token-granular CSR lists, and a host plan for each.

| mode            | KV length L          | qo_indptr                      | packed mask                     |
|-----------------|----------------------|--------------------------------|---------------------------------|
| decode, idle    | len                  |                                |                                 |
| target_verify   | len + N              | i * N                          | N x L cells a request, if given |
| draft_extend    | len                  | running sum, num_accept_tokens |                                 |
| draft_extend_v2 | len                  | i * T // B                     |                                 |
| dllm_extend     | len - block, ragged, | i * block                      |                                 |
|                 | or len               |                                |                                 |

kv_indptr is the running sum of L, kv_indices lists the slots; FlashInfer's page size is 1 whatever the engine's is. A
sliding window gives two wrappers: 0 reads the last min(L, window + queries) tokens, through the sliding-window map
where there is one (a quarter of the context then, unless config.window says how many), 1 reads all. Encoder-decoder
models have two as well: 0 reads L tokens behind the encoder's, 1 the encoder's. In draft decode the multi_step_draft
wrapper fills the lists of all steps, of B * K branches, and only the plans are left to `FlashInferDraftStep`. Source:
specs of SGLang's flashinfer backend.

No graph can hold the plan: a host planner divides the lengths of `seq_lens_cpu` into tiles before every replay. Ours
stands in for FlashInfer's; its work list stays on the host. What it plans with must be what the device list was built
from, so everything it needs comes from the mirror of the same batch and nothing is read back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from .aten_ops import (
    check_mask_as_captured,
    check_slots,
    live_token_count,
    padded_mask,
    refill_swa_slots,
    tokens_on_host,
    translate_in_place,
    write_running_sum,
)
from .base import Allowances, AttentionBackend, AttentionConfig, ConfigError, tensors_of
from .batch import ForwardBatch
from .host_arrays import host_array
from .kernels.csr_metadata import CsrConfig, default_config
from .kernels.kv_indices import launch_kv_indices
from .kernels.paged_lists import KvRange, PagedList, PagedLists, QueryStarts, launch_pack_mask
from .modes import ForwardMode, Implementation, TailPolicy
from .oracle import Expected, HostBatch, HostPools, flashinfer
from .schedules import TilePlan, divide_kv, multiprocessors, query_tile_rows
from .triton import check_index_space, numpy_type, rows

Mode = ForwardMode


@dataclass(slots=True)
class HostPlan:
    """What one wrapper's planner takes, on the host, and what it made of it. B requests.

    Attributes:
        qo_indptr, kv_indptr: [B + 1] int32. qo_indptr never changes in decode: 0..B.
        work: the tiles, None before the first plan.
    """

    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    work: TilePlan | None = None


@dataclass(slots=True)
class PagedWrapper:
    """What one captured FlashInfer wrapper reads: views of the instance's buffers. B = captured batch size."""

    kv_indptr: torch.Tensor  # [B + 1] int32, device
    kv_indices: torch.Tensor  # [max_bs * (max_context + headroom)] int32, device; live up to kv_indptr[B]
    mask_indptr: torch.Tensor | None  # [B + 1] int32, device, in bytes; verify with a mask
    custom_mask: torch.Tensor | None  # [max_bs * ceil(N * (max_context + N) / 8)] uint8, device; verify with a mask
    plan: HostPlan


@dataclass(slots=True)
class FlashInferMetadata:
    """Bound at capture. B = captured batch size, T = tokens."""

    wrappers: tuple[PagedWrapper, ...]  # (full,), (window, full) or (self, cross)
    kv_last_page_len: torch.Tensor  # [B] int32, device; ones
    qo_indptr: torch.Tensor | None  # [B + 1] int32, device; not in decode
    swa_out_cache_loc: torch.Tensor | None  # [T] int64, device
    queries: int  # T // B of the captured shape
    kernel_config: CsrConfig
    fused: PagedLists | None  # None where the wrapper fills the lists


class FlashInferBackend(AttentionBackend):
    """Metadata of FlashInfer's paged wrappers. Pattern B: capture binds wrappers, replay refills and re-plans them.

    Options, in config.extra: encoder (cross attention: two wrappers), dllm_block (tokens of a diffusion block and
    length of padding, 1), use_ragged (False: a diffusion block reads its own tokens from the pages too),
    disable_split_kv (results that do not depend on the batch), num_sms (multiprocessors to plan for).
    """

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2, Mode.DLLM_EXTEND})
    allowances = Allowances(
        shared_between_modes=frozenset(
            {f"wrappers.{i}.{name}" for i in (0, 1) for name in ("kv_indptr", "kv_indices")}
            | {"kv_last_page_len", "qo_indptr", "swa_out_cache_loc"}
        ),
        spills=frozenset({"swa_out_cache_loc"}),
    )

    def take_options(self) -> None:
        self.block = self.seq_len_fill_value = self.config.extra.get("dllm_block", 1)

    @staticmethod
    def default_tail(implementation: Implementation, recorded: bool) -> TailPolicy:
        """Index lists have no columns to fill: every implementation stops at the live length."""
        return TailPolicy.LIVE_ONLY

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c, encoder = self.config, self.config.extra.get("encoder", False)
        if c.window and encoder:
            raise ConfigError(f"a sliding window ({c.window}) and an encoder both need wrapper 0: choose one")
        # A sliding-window pool has a window, said or not.
        maps = self.pools.full_to_swa is not None and not encoder
        self.window = c.window or (max(c.max_context // 4, 1) if maps else 0)
        capacity = c.max_context + c.headroom
        check_index_space("kv_indptr", max_bs, capacity)
        width = self.pools.req_to_token.shape[1]
        if width < c.max_context:
            raise ConfigError(
                f"req_to_token is {width} tokens wide, max_context is {c.max_context}: raise its width or lower it"
            )
        self.max_bs, self.max_tokens = max_bs, max_num_tokens
        if self.window:
            self.ranges = (KvRange.WINDOW, KvRange.FULL)
        elif encoder:
            self.ranges = (KvRange.AFTER_ENCODER, KvRange.ENCODER)
        else:
            self.ranges = (KvRange.FULL,)
        n = len(self.ranges)
        requests = max(self.pools.req_to_token.shape[0], max_bs + 1)
        self.kv_indptr = [self._zeros(requests) for _ in range(n)]
        self.kv_indices = [self._zeros(max_bs * capacity) for _ in range(n)]
        self.kv_last_page_len = torch.ones(max_bs, dtype=torch.int32, device=self.device)
        self.qo_indptr = self._zeros(requests)
        self.row_numbers = torch.arange(requests, dtype=torch.int32, device=self.device)
        self.swa_out_buffer = self._zeros(max_num_tokens, dtype=torch.int64) if self.pools.writes_swa else None
        self.mask_indptr = self.custom_mask = None
        if c.draft_tokens > 0:
            # Upstream has one mask buffer, whose second plan overwrites the first wrapper's mask.
            cells = c.draft_tokens * (c.max_context + c.draft_tokens)
            self.mask_indptr = [self._zeros(requests) for _ in range(n)]
            self.custom_mask = [self._zeros(max_bs * -(-cells // 8), dtype=torch.uint8) for _ in range(n)]
        self.most_tiles = most_tiles(c, self.device)

    def bind(self, fb: ForwardBatch) -> FlashInferMetadata:
        b, mode, c = fb.batch_size, fb.forward_mode, self.config
        if b > self.max_bs:
            raise ConfigError(f"batch size {b} exceeds the buffers' {self.max_bs} rows")
        if mode not in (Mode.DECODE, Mode.DLLM_EXTEND) and c.draft_tokens == 0:
            raise ConfigError(f"mode {mode} needs draft_tokens > 0, got 0")
        queries = self._queries(fb)
        if mode is Mode.DLLM_EXTEND and queries != self.block:
            raise ConfigError(
                f"mode {mode} has blocks of {queries} tokens, dllm_block is {self.block}: padding needs both"
            )
        if mode is Mode.DLLM_EXTEND and c.window:
            raise ConfigError(f"no window under mode {mode}, got {c.window}")
        encoder = KvRange.ENCODER in self.ranges
        if encoder is not (fb.encoder_lens is not None) or (encoder and mode is not Mode.DECODE):
            raise ConfigError(f"encoder is {encoder}, but encoder_lens is {_kind(fb.encoder_lens)} in mode {mode}")
        if queries * b > self.max_tokens:
            raise ConfigError(f"a batch of {b} has {queries * b} tokens, the buffers hold {self.max_tokens}")
        # A wrapper with a mask buffer always runs in mask mode, so it is bound only where the capture has a mask.
        masked = mode is Mode.TARGET_VERIFY and fb.spec_info.custom_mask is not None
        wrappers = tuple(
            PagedWrapper(
                kv_indptr=self.kv_indptr[i][: b + 1],
                kv_indices=self.kv_indices[i],
                mask_indptr=self.mask_indptr[i][: b + 1] if masked else None,
                custom_mask=self.custom_mask[i] if masked else None,
                plan=HostPlan(
                    np.arange(0, (b + 1) * queries, queries, dtype=np.int32), np.zeros(b + 1, dtype=np.int32)
                ),
            )
            for i, _ in self._lists(mode)
        )
        qo_indptr = None if mode is Mode.DECODE else self.qo_indptr[: b + 1]
        slots = None if self.swa_out_buffer is None else self.swa_out_buffer[: b * queries]
        config = self.kernel_config(b)
        starts = QueryStarts.STRIDED
        if mode in (Mode.DECODE, Mode.DRAFT_EXTEND):
            starts = QueryStarts.NONE if mode is Mode.DECODE else QueryStarts.CUMSUM
        fused = PagedLists(
            tuple(
                PagedList(r, w.kv_indptr, w.kv_indices, w.mask_indptr, w.custom_mask)
                for (_, r), w in zip(self._lists(mode), wrappers, strict=True)
            ),
            config,
            self.pools.req_to_token,
            b,
            offset=self._offset(mode),
            keep=self.window + (0 if mode is Mode.DRAFT_EXTEND else queries),
            queries=queries,
            query_starts=starts,
            qo_indptr=qo_indptr,
            mapping=self.pools.full_to_swa,
            swa_out_cache_loc=slots,
            counts_mask=self.recorded and masked,
        )
        return FlashInferMetadata(wrappers, self.kv_last_page_len[:b], qo_indptr, slots, queries, config, fused)

    def _lists(self, mode: ForwardMode) -> list[tuple[int, KvRange]]:
        """(number of its buffers, range) of each wrapper; diffusion blocks have one, over all tokens."""
        return [(0, KvRange.FULL)] if mode is Mode.DLLM_EXTEND else list(enumerate(self.ranges))

    def kernel_config(self, bs: int) -> CsrConfig:
        """Block sizes for a captured batch size; the tuner's choice if one was given, else the default."""
        return self.config.extra.get("kernel_config") or default_config(bs, self.config.max_context)

    def _queries(self, fb: ForwardBatch) -> int:
        """Tokens per request of the captured shape, never of accepted counts."""
        return 1 if fb.forward_mode is Mode.DECODE else fb.positions.shape[0] // fb.batch_size

    def _offset(self, mode: ForwardMode) -> int:
        """Tokens by which the KV length differs from seq_lens."""
        if mode is Mode.DLLM_EXTEND:
            return -self.block if self.config.extra.get("use_ragged", True) else 0
        return self.config.draft_tokens if mode is Mode.TARGET_VERIFY else 0

    # The classic chain, op for op: what a replay dispatches when it is written in PyTorch. Decode writes the captured
    # buffers itself; the other modes make fresh tensors, which upstream's plan copies into them.

    def rebuild_aten(self, fb: ForwardBatch, md: FlashInferMetadata) -> None:
        mode, b = fb.forward_mode, fb.batch_size
        seq_lens, pool = fb.seq_lens[:b], fb.req_pool_indices[:b]
        mirror = None if fb.seq_lens_cpu is None else fb.seq_lens_cpu[:b]
        if mode is Mode.DECODE:
            self._aten_decode(fb, md, pool, seq_lens, mirror)
        elif mode is Mode.DLLM_EXTEND:
            self._aten_dllm(fb, md, pool, seq_lens)
        else:
            self._aten_speculative(fb, md, pool, seq_lens)
        if self.swa_out_buffer is not None:
            refill_swa_slots(self.swa_out_buffer, fb.out_cache_loc, self.pools.full_to_swa)

    def _aten_decode(self, fb, md, pool, seq_lens, mirror) -> None:
        if self.ranges[0] is KvRange.WINDOW:
            keep = self.window + 1
            kept = torch.clamp(seq_lens, max=keep)
            kept_mirror = None if mirror is None else torch.clamp(mirror, max=keep)
            (kept if mirror is None else kept_mirror).sum().item()  # sizes a list that graphs do not need
            self._aten_list(md, 0, pool, kept, kept_mirror, seq_lens - kept)
            self._aten_list(md, 1, pool, seq_lens, mirror)
        elif self.ranges[0] is KvRange.AFTER_ENCODER:
            encoder_lens = fb.encoder_lens[: fb.batch_size]
            self._aten_list(md, 0, pool, seq_lens, mirror, encoder_lens)
            start = torch.zeros_like(encoder_lens)
            encoder_lens.sum().item()
            self._aten_list(md, 1, pool, encoder_lens, encoder_lens.cpu(), start)
        else:
            self._aten_list(md, 0, pool, seq_lens, mirror)

    def _aten_list(self, md, i: int, pool, lens, mirror, start=None) -> None:
        b = lens.shape[0]
        indptr, indices = self.kv_indptr[i], self.kv_indices[i]
        indptr[1 : b + 1] = torch.cumsum(lens, dim=0)
        indptr = indptr[: b + 1]
        launch_kv_indices(self.pools.req_to_token, pool, lens, indptr, indices, b, start)
        if self.ranges[i] is KvRange.WINDOW and self.pools.full_to_swa is not None:
            translate_in_place(indices, indptr, self.pools.full_to_swa)
        if mirror is not None:
            host = torch.empty_like(indptr, device="cpu")
            host[0] = 0
            host[1 : b + 1] = torch.cumsum(mirror, dim=0)
            md.wrappers[i].plan.kv_indptr[:] = host_array(host)
        self.kv_last_page_len[:b]
        if mirror is None:
            md.wrappers[i].plan.kv_indptr[:] = host_array(indptr.cpu())

    def _aten_speculative(self, fb, md, pool, seq_lens) -> None:
        n, b, mode = md.queries, fb.batch_size, fb.forward_mode
        keeps = None
        if self.window:
            accepted = rows(fb.spec_info.num_accept_tokens, b) if mode is Mode.DRAFT_EXTEND else n
            keeps = accepted + self.window
        mask = self._live_mask(fb, md)
        if mask is not None:
            mask = padded_mask(mask, n * (tokens_on_host(fb) + n * b))
        for i, kv_range in enumerate(self.ranges):
            if mode is Mode.DRAFT_EXTEND:
                qo_indptr = self._zeros(b + 1)
                write_running_sum(qo_indptr, rows(fb.spec_info.num_accept_tokens, b))
            else:
                qo_indptr = torch.arange(0, (1 + b) * n, step=n, dtype=torch.int32, device=self.device)
            indptr = self._zeros(b + 1)
            lens = seq_lens + n if mode is Mode.TARGET_VERIFY else seq_lens
            start = None
            if kv_range is KvRange.WINDOW:
                kept = torch.clamp(lens, max=keeps)
                start, lens = lens - kept, kept
            write_running_sum(indptr, lens)
            total = self._list_size(fb, i)
            indices = torch.empty(total, dtype=torch.int32, device=self.device)
            launch_kv_indices(self.pools.req_to_token, pool, lens, indptr, indices, b, start)
            if start is not None and self.pools.full_to_swa is not None:
                translate_in_place(indices, indptr, self.pools.full_to_swa)
            self.kv_last_page_len[:b]
            self._hand_over(md, i, qo_indptr, indptr, indices)
            if mask is not None:
                self._pack(md.wrappers[i], seq_lens, lens, mask, n, keeps if kv_range is KvRange.WINDOW else None)

    def _aten_dllm(self, fb, md, pool, seq_lens) -> None:
        b = fb.batch_size
        prefix = seq_lens - self.block
        lens = prefix if self.config.extra.get("use_ragged", True) else seq_lens
        indptr, qo_indptr = self.kv_indptr[0], self.qo_indptr
        indptr[1 : b + 1] = torch.cumsum(lens, dim=0)
        indptr = indptr[: b + 1]
        indices = torch.empty(self._list_size(fb, 0) + 256, dtype=torch.int32, device=self.device)
        launch_kv_indices(self.pools.req_to_token, pool, lens, indptr, indices, b)
        qo_indptr[1 : b + 1] = torch.cumsum(seq_lens - prefix, dim=0)
        qo_indptr = qo_indptr[: b + 1]
        self.kv_last_page_len[:b]
        # The 256 entries behind the list are never read, and the next wrapper's neighbour must not get them.
        self._hand_over(md, 0, qo_indptr, indptr, indices[:-256])

    def _hand_over(self, md: FlashInferMetadata, i: int, qo_indptr, indptr, indices) -> None:
        """The copies that a full plan makes into the captured buffers."""
        wrapper = md.wrappers[i]
        md.qo_indptr.copy_(qo_indptr)
        wrapper.kv_indptr.copy_(indptr)
        wrapper.kv_indices[: indices.shape[0]].copy_(indices)

    def _pack(self, wrapper: PagedWrapper, seq_lens, lens, mask, n: int, keep, live_tokens=None) -> None:
        """The mask as a plan packs it: request by request, each from a byte of its own."""
        write_running_sum(wrapper.mask_indptr, (lens * n + 7) // 8)
        launch_pack_mask(seq_lens, mask, wrapper.custom_mask, lens.shape[0], n, keep, live_tokens)

    def _list_size(self, fb: ForwardBatch, i: int) -> int:
        """Entries of a fresh list, padding included: a host sum of the mirror, as upstream's seq_lens_sum."""
        return int(self._ranges_on_host(fb)[i].sum())

    def rebuild_aten_static(self, fb: ForwardBatch, md: FlashInferMetadata) -> None:
        mode, b, n = fb.forward_mode, fb.batch_size, md.queries
        seq_lens, pool = fb.seq_lens[:b], fb.req_pool_indices[:b]
        total = seq_lens + self._offset(mode)
        for (_, kv_range), w in zip(self._lists(mode), md.wrappers, strict=True):
            lens, start, mapping, keep = total, None, None, None
            if kv_range is KvRange.WINDOW:
                own = fb.spec_info.num_accept_tokens[:b] if mode is Mode.DRAFT_EXTEND else n
                keep = self.window + own
                lens = torch.clamp(total, max=keep)
                start, mapping = total - lens, self.pools.full_to_swa
            elif kv_range is KvRange.AFTER_ENCODER:
                start = fb.encoder_lens[:b]
            elif kv_range is KvRange.ENCODER:
                lens = fb.encoder_lens[:b]
            write_running_sum(w.kv_indptr, lens)
            # Mapped in the launch: how long the list is, a graph cannot ask.
            launch_kv_indices(self.pools.req_to_token, pool, lens, w.kv_indptr, w.kv_indices, b, start, mapping)
            if w.custom_mask is not None:
                self._pack(w, seq_lens, lens, fb.spec_info.custom_mask, n, keep, live_token_count(fb))
        if mode is Mode.DRAFT_EXTEND:
            write_running_sum(md.qo_indptr, fb.spec_info.num_accept_tokens[:b])
        elif mode is not Mode.DECODE:
            md.qo_indptr.copy_(self.row_numbers[: b + 1] * n)
        if md.swa_out_cache_loc is not None:
            refill_swa_slots(md.swa_out_cache_loc, fb.out_cache_loc, self.pools.full_to_swa)

    def rebuild_fused(self, fb: ForwardBatch, md: FlashInferMetadata) -> None:
        aux = mask = live_tokens = None
        if fb.forward_mode is Mode.DECODE:
            aux = fb.encoder_lens
        elif fb.forward_mode is Mode.DRAFT_EXTEND:
            aux = fb.spec_info.num_accept_tokens
        elif fb.forward_mode is Mode.TARGET_VERIFY:
            mask = self._live_mask(fb, md)
            live_tokens = live_token_count(fb) if self.recorded and mask is not None else None
        if md.swa_out_cache_loc is not None:
            check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
        md.fused(
            fb.req_pool_indices,
            fb.seq_lens,
            aux=aux,
            out_cache_loc=None if md.swa_out_cache_loc is None else fb.out_cache_loc,
            mask=mask,
            live_tokens=live_tokens,
        )

    # The plan: host arrays of each wrapper, from the mirror, in place; then tiles.

    def plan(self, fb: ForwardBatch, md: FlashInferMetadata) -> None:
        c, mode = self.config, fb.forward_mode
        eager_chain = self.implementation is Implementation.ATEN and not self.recorded
        if not (eager_chain and mode is Mode.DECODE):  # that chain has made its own already
            for lens, w in zip(self._ranges_on_host(fb), md.wrappers, strict=True):
                np.cumsum(lens, out=w.plan.kv_indptr[1:])
        if mode is Mode.DRAFT_EXTEND and fb.spec_info.num_accept_tokens_cpu is not None:
            for w in md.wrappers:
                np.cumsum(fb.spec_info.num_accept_tokens_cpu, out=w.plan.qo_indptr[1:])
        group = c.num_heads // c.num_kv_heads
        tile = query_tile_rows(md.queries, group)
        split = not c.extra.get("disable_split_kv", False)
        for w in md.wrappers:
            query_tiles = np.maximum(-(-np.diff(w.plan.qo_indptr) * group // tile), 1)
            w.plan.work = divide_kv(np.diff(w.plan.kv_indptr), query_tiles, self.most_tiles, split)

    def _ranges_on_host(self, fb: ForwardBatch) -> list[np.ndarray]:
        """[B] KV tokens of each wrapper, from the mirror; without one, the lengths are read back."""
        b, mode = fb.batch_size, fb.forward_mode
        mirror = fb.seq_lens.cpu() if fb.seq_lens_cpu is None else fb.seq_lens_cpu
        total = host_array(mirror)[:b] + self._offset(mode)
        lens = []
        for _, kv_range in self._lists(mode):
            if kv_range is KvRange.WINDOW:
                own = self._queries(fb)
                if mode is Mode.DRAFT_EXTEND and fb.spec_info.num_accept_tokens_cpu is not None:
                    own = np.asarray(fb.spec_info.num_accept_tokens_cpu)
                lens.append(np.minimum(total, self.window + own))
            elif kv_range is KvRange.ENCODER:  # engines mirror no encoder lengths
                lens.append(host_array(fb.encoder_lens.cpu())[:b].copy())
            else:
                lens.append(total)
        return lens

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        md = self.metadata[Mode(batch.mode), len(batch.seq_lens)]
        return flashinfer.expected(
            batch,
            pools,
            shapes={path: (tuple(x.shape), numpy_type(x.dtype)) for path, x in tensors_of(md).items()},
            ranges=[r.name for _, r in self._lists(Mode(batch.mode))],
            offset=self._offset(Mode(batch.mode)),
            window=self.window,
            queries=md.queries,
        )

    def _live_mask(self, fb: ForwardBatch, md: FlashInferMetadata) -> torch.Tensor | None:
        mask, bound = fb.spec_info.custom_mask, md.wrappers[0].custom_mask
        if fb.forward_mode is not Mode.TARGET_VERIFY:
            return None
        check_mask_as_captured(mask, bound)
        return mask

    def _zeros(self, n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(n, dtype=dtype, device=self.device)


class FlashInferDraftStep(FlashInferBackend):
    """One step of a multi-step draft: the wrapper owns and fills its list, the plan is made here."""

    modes = frozenset({Mode.DRAFT_DECODE})
    allowances = replace(FlashInferBackend.allowances, fused_launches=0)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.max_bs = max_bs
        branches = max_bs * max(self.config.topk, 1)
        self.kv_last_page_len = torch.ones(branches, dtype=torch.int32, device=self.device)
        self.most_tiles = most_tiles(self.config, self.device)

    def bind(self, fb: ForwardBatch) -> FlashInferMetadata:
        kv_indptr, kv_indices = step_lists(fb)
        branches = kv_indptr.shape[0] - 1
        wrapper = PagedWrapper(
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            mask_indptr=None,
            custom_mask=None,
            plan=HostPlan(np.arange(branches + 1, dtype=np.int32), np.zeros(branches + 1, dtype=np.int32)),
        )
        last, config = self.kv_last_page_len[:branches], self.kernel_config(fb.batch_size)
        return FlashInferMetadata((wrapper,), last, None, None, 1, config, None)

    def rebuild_aten(self, fb: ForwardBatch, md: FlashInferMetadata) -> None:
        """Nothing: the wrapper fills the lists of all steps at once."""

    rebuild_aten_static = rebuild_fused = rebuild_aten

    def _ranges_on_host(self, fb: ForwardBatch) -> list[np.ndarray]:
        prefix = host_array(fb.seq_lens.cpu() if fb.seq_lens_cpu is None else fb.seq_lens_cpu)[: fb.batch_size]
        return [step_lens(prefix, fb.num_padding or 0, self.config)]


def step_lists(fb: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv_indptr, kv_indices) of a draft step.

    Raises:
        ConfigError: the batch has none.
    """
    spec = fb.spec_info
    if spec is None or spec.kv_indptr is None or spec.kv_indices is None:
        raise ConfigError("draft decode needs the kv_indptr and kv_indices of its step: use multi_step_draft")
    return spec.kv_indptr, spec.kv_indices


def step_lens(prefix: np.ndarray, padding: int, config: AttentionConfig) -> np.ndarray:
    """[B * K] KV tokens of each branch in draft step `config.step_id`, as the wrapper's kv_indptr counts them.

    That follows positions, which are 0 on the last `padding` rows whatever their lengths are.
    """
    live = prefix.copy()
    live[len(live) - padding :] = 0
    return np.repeat(live, max(config.topk, 1)) + config.step_id + 1


def most_tiles(config: AttentionConfig, device: torch.device) -> int:
    """Tiles of one KV head that fit on the device at once, two on a multiprocessor."""
    sms = config.extra.get("num_sms") or multiprocessors(device)
    return max(2 * sms // config.num_kv_heads, 1)


def _kind(x: torch.Tensor | None) -> str:
    return "None" if x is None else "given"
