"""FlashInfer absorbed MLA: one list of latent KV slots for each captured size, and the host plan that divides it.

| mode          | KV length | qo_indptr                      | plan reads                          |
|---------------|-----------|--------------------------------|-------------------------------------|
| decode, idle  | len       | 0..B, on the host              | host arrays from the mirror         |
| target_verify | len + N   | i * N                          | host arrays; upstream, device ones  |
| draft_extend  | len       | running sum, num_accept_tokens | host arrays; upstream, device ones  |

At run time the attention kernel reads kv_indices and the plan, nothing else: device lengths only serve to build the
list, so a mirror of another batch silently attends to the wrong ranges. Page size 1, topk at most 1, no window, no
mask. In draft decode the multi_step_draft wrapper fills the lists; see `FlashInferMlaDraftStep` for their plans.
Source: specs of SGLang's flashinfer_mla backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from .aten_ops import padded_mask, write_running_sum
from .base import Allowances, AttentionBackend, ConfigError, tensors_of
from .batch import ForwardBatch
from .flashinfer import most_tiles, step_lens, step_lists
from .host_arrays import host_array
from .kernels.csr_metadata import CsrConfig, default_config
from .kernels.kv_indices import launch_kv_indices
from .kernels.paged_lists import KvRange, PagedList, PagedLists, QueryStarts
from .modes import ForwardMode, Implementation, TailPolicy
from .oracle import Expected, HostBatch, HostPools, flashinfer_mla
from .schedules import TilePlan, divide_kv, query_tile_rows
from .triton import check_index_space, numpy_type, rows

Mode = ForwardMode


@dataclass(slots=True)
class MlaPlan:
    """What the planner takes, on the host, and what it made of it. B requests.

    Attributes:
        qo_indptr: [B + 1] int32; 0..B in decode.
        kv_indptr: [B + 1] int32, where each request's slots begin in kv_indices.
        kv_len: [B] int32, tokens.
        work: the tiles, None before the first plan.
    """

    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_len: np.ndarray
    work: TilePlan | None = None


@dataclass(slots=True)
class FlashInferMlaMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size."""

    kv_indptr: torch.Tensor  # [B + 1] int32, device; where the list's builder writes, no kernel reads it
    kv_indices: torch.Tensor  # [max_bs * (max_context + headroom)] int32, device; live up to kv_indptr[B]
    qo_indptr: torch.Tensor | None  # [B + 1] int32, device; not in decode
    kv_len: torch.Tensor | None  # [B] int32, device; not in decode
    queries: int  # T // B of the captured shape
    kernel_config: CsrConfig
    fused: PagedLists | None  # None where the wrapper fills the lists
    plans: tuple[MlaPlan]


class FlashInferMlaBackend(AttentionBackend):
    """Metadata of FlashInfer's MLA wrapper. Pattern B: capture makes a wrapper a size, replay refills and re-plans it.

    Options, in config.extra: num_sms (multiprocessors to plan for).
    """

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND})
    allowances = Allowances(
        shared_between_modes=frozenset({"kv_indptr", "kv_indices", "qo_indptr", "kv_len"}),
    )

    @staticmethod
    def default_tail(implementation: Implementation, recorded: bool) -> TailPolicy:
        """Index lists have no columns to fill: every implementation stops at the live length."""
        return TailPolicy.LIVE_ONLY

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c = self.config
        if c.topk > 1:
            raise ConfigError(f"flashinfer_mla supports topk of at most 1, got {c.topk}")
        # Upstream's list has max_bs * max_context entries, too few for a verify of full requests.
        capacity = c.max_context + c.headroom
        check_index_space("kv_indptr", max_bs, capacity)
        width = self.pools.req_to_token.shape[1]
        if width < c.max_context:
            raise ConfigError(
                f"req_to_token is {width} tokens wide, max_context is {c.max_context}: raise its width or lower it"
            )
        self.max_bs = max_bs
        requests = max(self.pools.req_to_token.shape[0], max_bs + 1)
        self.kv_indptr, self.qo_indptr = self._zeros(requests), self._zeros(requests)
        self.kv_indices = self._zeros(max_bs * capacity)
        self.kv_len = torch.ones(max_bs, dtype=torch.int32, device=self.device)
        self.row_numbers = torch.arange(requests, dtype=torch.int32, device=self.device)
        self.row_numbers_cpu = torch.arange(requests, dtype=torch.int32)
        self.kv_indptr_cpu = torch.zeros(requests, dtype=torch.int32)
        self.most_tiles = most_tiles(c, self.device)

    def bind(self, fb: ForwardBatch) -> FlashInferMlaMetadata:
        b, decode = fb.batch_size, fb.forward_mode is Mode.DECODE
        if b > self.max_bs:
            raise ConfigError(f"batch size {b} exceeds the buffers' {self.max_bs} rows")
        if not decode and self.config.draft_tokens == 0:
            raise ConfigError(f"mode {fb.forward_mode} needs draft_tokens > 0, got 0")
        queries = 1 if decode else fb.positions.shape[0] // b
        kv_indptr, config = self.kv_indptr[: b + 1], self.kernel_config(b)
        qo_indptr, kv_len = (None, None) if decode else (self.qo_indptr[: b + 1], self.kv_len[:b])
        starts = QueryStarts.CUMSUM if fb.forward_mode is Mode.DRAFT_EXTEND else QueryStarts.STRIDED
        fused = PagedLists(
            (PagedList(KvRange.FULL, kv_indptr, self.kv_indices),),
            config,
            self.pools.req_to_token,
            b,
            offset=self._offset(fb.forward_mode),
            queries=queries,
            query_starts=QueryStarts.NONE if decode else starts,
            qo_indptr=qo_indptr,
            kv_lens=kv_len,
        )
        plans = (_new_plan(b, queries),)
        return FlashInferMlaMetadata(kv_indptr, self.kv_indices, qo_indptr, kv_len, queries, config, fused, plans)

    def kernel_config(self, bs: int) -> CsrConfig:
        """Block sizes for a captured batch size; the tuner's choice if one was given, else the default."""
        return self.config.extra.get("kernel_config") or default_config(bs, self.config.max_context)

    def _offset(self, mode: ForwardMode) -> int:
        return self.config.draft_tokens if mode is Mode.TARGET_VERIFY else 0

    # The classic chain, op for op: decode writes the captured list itself, the other modes make fresh tensors, which
    # upstream's plan copies into the captured ones.

    def rebuild_aten(self, fb: ForwardBatch, md: FlashInferMlaMetadata) -> None:
        if fb.forward_mode is Mode.DECODE:
            self._aten_decode(fb, md)
        else:
            self._aten_speculative(fb, md)

    def _aten_decode(self, fb: ForwardBatch, md: FlashInferMlaMetadata) -> None:
        b, plan = fb.batch_size, md.plans[0]
        mirror = self._mirror(fb)[:b]
        self.kv_indptr_cpu[1 : b + 1] = torch.cumsum(mirror, dim=0)
        qo_cpu, kv_cpu = self.row_numbers_cpu[: b + 1], self.kv_indptr_cpu[: b + 1]
        pool, lens = fb.req_pool_indices[:b], fb.seq_lens[:b]
        self.row_numbers[: b + 1]
        if lens.dtype is not torch.int32:
            lens = lens.to(torch.int32)
        indptr = self.kv_indptr
        indptr[1 : b + 1] = torch.cumsum(lens, dim=0)
        indptr = indptr[: b + 1]
        launch_kv_indices(self.pools.req_to_token, pool, lens, indptr, self.kv_indices, b)
        plan.qo_indptr[:], plan.kv_indptr[:], plan.kv_len[:] = map(host_array, (qo_cpu, kv_cpu, mirror))

    def _aten_speculative(self, fb: ForwardBatch, md: FlashInferMlaMetadata) -> None:
        b, n, verify = fb.batch_size, md.queries, fb.forward_mode is Mode.TARGET_VERIFY
        lens, pool = fb.seq_lens[:b], fb.req_pool_indices[:b]
        if verify:
            qo_indptr = torch.arange(0, (1 + b) * n, step=n, dtype=torch.int32, device=self.device)
        else:
            qo_indptr = self._zeros(b + 1)
            write_running_sum(qo_indptr, rows(fb.spec_info.num_accept_tokens, b))
        indptr = self._zeros(b + 1)
        if verify:
            lens = lens + n
        write_running_sum(indptr, lens)
        total = int(self._lens_on_host(fb).sum())
        indices = torch.empty(total, dtype=torch.int32, device=self.device)
        launch_kv_indices(self.pools.req_to_token, pool, lens, indptr, indices, b)
        if verify and fb.spec_info.custom_mask is not None:
            padded_mask(fb.spec_info.custom_mask, n * total)  # made and never read
        kv_len = indptr[1:] - indptr[:-1]
        self._hand_over(md, qo_indptr, indptr, indices, kv_len)

    def _hand_over(self, md: FlashInferMlaMetadata, qo_indptr, indptr, indices, kv_len) -> None:
        """The copies that a full plan makes into the captured buffers."""
        md.qo_indptr.copy_(qo_indptr)
        md.kv_indptr.copy_(indptr)
        md.kv_indices[: indices.shape[0]].copy_(indices)
        md.kv_len.copy_(kv_len)

    def rebuild_aten_static(self, fb: ForwardBatch, md: FlashInferMlaMetadata) -> None:
        mode, b = fb.forward_mode, fb.batch_size
        lens = fb.seq_lens[:b] + self._offset(mode)
        write_running_sum(md.kv_indptr, lens)
        launch_kv_indices(self.pools.req_to_token, fb.req_pool_indices[:b], lens, md.kv_indptr, md.kv_indices, b)
        if mode is Mode.DECODE:
            return
        md.kv_len.copy_(lens)
        if mode is Mode.DRAFT_EXTEND:
            write_running_sum(md.qo_indptr, fb.spec_info.num_accept_tokens[:b])
        else:
            md.qo_indptr.copy_(self.row_numbers[: b + 1] * md.queries)

    def rebuild_fused(self, fb: ForwardBatch, md: FlashInferMlaMetadata) -> None:
        accepted = fb.spec_info.num_accept_tokens if fb.forward_mode is Mode.DRAFT_EXTEND else None
        md.fused(fb.req_pool_indices, fb.seq_lens, aux=accepted)

    def plan(self, fb: ForwardBatch, md: FlashInferMlaMetadata) -> None:
        """Host arrays from the mirror, in place, then tiles."""
        c, plan, mode = self.config, md.plans[0], fb.forward_mode
        chain = self.implementation is Implementation.ATEN and not self.recorded and mode is Mode.DECODE
        if not chain:  # that one has filled its own already
            plan.kv_len[:] = self._lens_on_host(fb)
            np.cumsum(plan.kv_len, out=plan.kv_indptr[1:])
        if mode is Mode.DRAFT_EXTEND and fb.spec_info.num_accept_tokens_cpu is not None:
            np.cumsum(fb.spec_info.num_accept_tokens_cpu, out=plan.qo_indptr[1:])
        self._divide(plan, md.queries, c.num_heads)

    def _divide(self, plan: MlaPlan, queries: int, heads: int) -> None:
        """All heads share the latent KV head."""
        tile = query_tile_rows(queries, heads)
        query_tiles = np.maximum(-(-np.diff(plan.qo_indptr) * heads // tile), 1)
        plan.work = divide_kv(plan.kv_len, query_tiles, self.most_tiles)

    def _mirror(self, fb: ForwardBatch) -> torch.Tensor:
        if fb.seq_lens_cpu is None:
            raise ConfigError("seq_lens_cpu is None: the plan needs the lengths on the host, so keep a mirror of them")
        return fb.seq_lens_cpu

    def _lens_on_host(self, fb: ForwardBatch) -> np.ndarray:
        """[B] KV tokens."""
        return host_array(self._mirror(fb))[: fb.batch_size] + self._offset(fb.forward_mode)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        md = self.metadata[Mode(batch.mode), len(batch.seq_lens)]
        return flashinfer_mla.expected(
            batch,
            pools,
            shapes={path: (tuple(x.shape), numpy_type(x.dtype)) for path, x in tensors_of(md).items()},
            offset=self._offset(Mode(batch.mode)),
            queries=md.queries,
        )

    def _zeros(self, n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int32, device=self.device)


class FlashInferMlaDraftStep(FlashInferMlaBackend):
    """One step of a multi-step draft: the wrapper owns and fills its list, the plan is made here.

    The list has step + 1 draft tokens behind each prefix. Upstream plans as if it had none: request r then starts
    r * (step + 1) entries too early, in its neighbour's drafts. Drafts get worse, verified output does not. We plan
    what the list holds; config.extra["upstream_draft_plan"] gives upstream's plan.
    """

    modes = frozenset({Mode.DRAFT_DECODE})
    allowances = replace(FlashInferMlaBackend.allowances, fused_launches=0)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self.config.topk > 1:
            raise ConfigError(f"flashinfer_mla supports topk of at most 1, got {self.config.topk}")
        self.max_bs = max_bs
        self.most_tiles = most_tiles(self.config, self.device)

    def bind(self, fb: ForwardBatch) -> FlashInferMlaMetadata:
        b, (kv_indptr, kv_indices) = fb.batch_size, step_lists(fb)
        plans = (_new_plan(b, 1),)
        return FlashInferMlaMetadata(kv_indptr, kv_indices, None, None, 1, self.kernel_config(b), None, plans)

    def rebuild_aten(self, fb: ForwardBatch, md: FlashInferMlaMetadata) -> None:
        """Nothing: the wrapper fills the lists of all steps at once."""

    rebuild_aten_static = rebuild_fused = rebuild_aten

    def _lens_on_host(self, fb: ForwardBatch) -> np.ndarray:
        prefix = host_array(self._mirror(fb))[: fb.batch_size]
        if self.config.extra.get("upstream_draft_plan"):
            return prefix
        return step_lens(prefix, fb.num_padding or 0, self.config)


def _new_plan(b: int, queries: int) -> MlaPlan:
    numbers = np.arange(0, (b + 1) * queries, queries, dtype=np.int32)
    return MlaPlan(numbers, np.zeros(b + 1, dtype=np.int32), np.zeros(b, dtype=np.int32))
