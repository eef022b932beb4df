"""TRT-LLM paged MLA decode (trtllm-gen): one block table, shared by every mode, and int32 lengths; no tree masks.

| mode            | L                | seq_lens_k     | bound max_seq_len | queries, q_len |
|-----------------|------------------|----------------|-------------------|----------------|
| decode, idle    | len              | None, see below| C                 | 1              |
| draft_decode    | len, every step  | None, see below| C                 | 1              |
| target_verify   | len + N          | L              | C + N             | N              |
| draft_extend(2) | len (holds N)    | L              | C + N             | N              |

block_kv_indices[r, p] = floor(req_to_token[pool[r], p * P] / P) for p < ceil(L[r] / P), the rest keeps what it holds.
In decode the kernel reads the runner's seq_lens; an engine whose lengths are int64 then casts them in every layer.
``extra["own_seq_lens"]`` gives decode a copy instead, as later releases do. ``extra["draft_step_offset"]`` adds
step_id + 1 in draft decode: upstream leaves the step's own draft tokens out of L, other backends do not.

Not metadata and not here: the padded query and unpadded output buffers of ragged draft extend, the tree-mask scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch

from .base import Allowances, ConfigError
from .batch import ForwardBatch
from .block_table import BlockTableBackend
from .kernels.launch import PreparedLaunch
from .modes import ForwardMode
from .oracle import Expected, HostBatch, HostPools, trtllm_mla

Mode = ForwardMode

TABLE_TOKENS = 4096
KERNEL_PAGE = 128
"""The kernel reads block tables in groups of this many tokens."""


@dataclass(slots=True)
class TrtllmMlaMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size, W = table columns.

    Nothing is rebound. The host numbers are upper bounds that a captured kernel bakes in.
    """

    block_kv_indices: torch.Tensor  # [B, W] int32, device
    seq_lens_k: torch.Tensor | None  # [B] int32, device
    cu_seqlens_q: torch.Tensor | None  # [B + 1] int32, device, draft extend, preset
    seq_lens_q: torch.Tensor | None  # [B] int32, device, draft extend, preset
    max_seq_len_q: int | None  # draft extend
    sum_seq_lens_q: int | None  # draft extend
    max_seq_len_k: int
    max_seq_len: int
    q_len: int
    fused: PreparedLaunch


class TrtllmMlaBackend(BlockTableBackend):
    """Metadata of the TRT-LLM MLA decode kernel. Pattern B: capture and replay share the binding helper and the body;
    no host length is read anywhere."""

    modes = frozenset({Mode.DECODE, Mode.DRAFT_DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2})
    allowances = Allowances(shared_between_modes=frozenset({"block_kv_indices", "cu_seqlens_q", "seq_lens_q"}))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c = self.config
        if KERNEL_PAGE % c.page_size:
            raise ConfigError(f"page_size must divide {KERNEL_PAGE}, the kernel's block of tokens; got {c.page_size}")
        if c.topk > 1:
            raise ConfigError(f"trtllm_mla reads no tree mask, so topk is at most 1; got {c.topk}")
        group = lcm(KERNEL_PAGE // c.page_size, TABLE_TOKENS // c.page_size)
        # Unset cells are -1 until a row first grows over them; afterwards they hold ids of longer, older batches.
        self.allocate_table(max_bs, -(-c.table_columns // group) * group, fill=-1)
        self.lens = {mode: self.zeros(max_bs) for mode in self.modes if self._has_lens(mode)}
        self.query_starts = torch.arange(max_bs + 1, dtype=torch.int32, device=self.device) * c.draft_tokens
        self.query_lens = torch.full((max_bs,), c.draft_tokens, dtype=torch.int32, device=self.device)

    def bind(self, fb: ForwardBatch) -> TrtllmMlaMetadata:
        b, mode, c = self.check_batch_size(fb), fb.forward_mode, self.config
        if mode is not Mode.DECODE and c.draft_tokens < 1:
            raise ConfigError(f"mode {mode} needs draft_tokens > 0, got {c.draft_tokens}")
        wide = mode not in (Mode.DECODE, Mode.DRAFT_DECODE)
        queries = fb.positions.shape[0] // b if wide else 1
        if wide and queries != c.draft_tokens:
            raise ConfigError(
                f"mode {mode} is captured with {queries} tokens per request, draft_tokens is {c.draft_tokens}: "
                "lengths and query offsets count draft_tokens, so they must agree"
            )
        extend = mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
        table, lens = self.table[:b], self.lens[mode][:b] if mode in self.lens else None
        return TrtllmMlaMetadata(
            block_kv_indices=table,
            seq_lens_k=lens,
            cu_seqlens_q=self.query_starts[: b + 1] if extend else None,
            seq_lens_q=self.query_lens[:b] if extend else None,
            max_seq_len_q=queries if extend else None,
            sum_seq_lens_q=queries * b if extend else None,
            max_seq_len_k=c.max_context,
            max_seq_len=c.max_context + (queries if wide else 0),
            q_len=queries,
            fused=self.prepare_fused(fb, table, lens, self._offset(mode)),
        )

    # The classic chain, op for op as upstream's.

    def rebuild_aten(self, fb: ForwardBatch, md: TrtllmMlaMetadata) -> None:
        b, mode = fb.batch_size, fb.forward_mode
        if mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2):
            n = md.max_seq_len_q
            starts = torch.arange(0, b * n + 1, n, dtype=torch.int32, device=self.device)
            md.cu_seqlens_q[: b + 1].copy_(starts)
            md.seq_lens_q[:b].fill_(n)
            # Keys end where the widest query row ends; rows are all n wide here, so this is seq_lens.
            lens = fb.seq_lens[:b] - md.seq_lens_q[:b] + n
            md.seq_lens_k.copy_(lens.to(torch.int32))
        elif self._offset(mode):
            md.seq_lens_k.copy_((fb.seq_lens[:b] + self._offset(mode)).to(torch.int32))
        elif md.seq_lens_k is not None:
            md.seq_lens_k.copy_(fb.seq_lens[:b])
        self._classic_table(fb, md)

    def rebuild_aten_static(self, fb: ForwardBatch, md: TrtllmMlaMetadata) -> None:
        if md.seq_lens_k is not None:
            md.seq_lens_k.copy_(fb.seq_lens[: fb.batch_size] + self._offset(fb.forward_mode))
        self._classic_table(fb, md)

    def _classic_table(self, fb: ForwardBatch, md: TrtllmMlaMetadata) -> None:
        pool = fb.req_pool_indices[: fb.batch_size]
        lens = fb.seq_lens if md.seq_lens_k is None else md.seq_lens_k
        self.build_classic(pool, lens, md.block_kv_indices, fb.batch_size)

    def rebuild_fused(self, fb: ForwardBatch, md: TrtllmMlaMetadata) -> None:
        md.fused(fb.req_pool_indices, fb.seq_lens)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        c = self.config
        return trtllm_mla.expected(
            batch,
            pools,
            page_size=c.page_size,
            width=self.table.shape[1],
            draft_tokens=c.draft_tokens,
            own_seq_lens=bool(c.extra.get("own_seq_lens")),
            draft_offset=c.step_id + 1 if c.extra.get("draft_step_offset") else 0,
        )

    def _offset(self, mode: ForwardMode) -> int:
        if mode is Mode.TARGET_VERIFY:
            return self.config.draft_tokens
        step_counts = mode is Mode.DRAFT_DECODE and self.config.extra.get("draft_step_offset")
        return self.config.step_id + 1 if step_counts else 0

    def _has_lens(self, mode: ForwardMode) -> bool:
        """Whether the kernel reads lengths of its own instead of the runner's."""
        if mode in (Mode.DECODE, Mode.DRAFT_DECODE):
            return bool(self.config.extra.get("own_seq_lens")) or self._offset(mode) > 0
        return True
