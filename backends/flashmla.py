"""FlashMLA: a block table of 64-token pages and the split-KV schedule that divides its rows over multiprocessors.

| mode            | K = lengths      | query rows of the schedule | seq_lens_k |
|-----------------|------------------|----------------------------|------------|
| decode, idle    | len              | H                          | None       |
| draft_decode    | len, every step  | H                          | None       |
| target_verify   | len + N          | N * H                      | None       |
| draft_extend_v2 | len (holds N)    | N * H                      | K          |

block_kv_indices[r, p] = floor(req_to_token[pool[r], p * 64] / 64) for p < ceil(K[r] / 64), the rest stays as it is.
flashmla_metadata holds one row for each part, num_splits the running count of splits: `schedules.split_kv`. The number
of parts depends on the mode and the hardware alone. The plan comes from our reference scheduler, written into the
captured rows, so that a graph can hold all of it; the vendor's `get_mla_metadata` allocates and cannot be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Allowances, ConfigError
from .batch import ForwardBatch
from .block_table import BlockTableBackend
from .kernels.flashmla import PAGE, prepare_flashmla_metadata
from .kernels.launch import PreparedLaunch
from .kernels.split_kv_schedule import split_kv_schedule
from .modes import ForwardMode
from .oracle import Expected, HostBatch, HostPools, flashmla
from .schedules import SplitLayout, multiprocessors, split_kv_parts

Mode = ForwardMode

MOST_FP8_REQUESTS = 4096


@dataclass(slots=True)
class FlashMlaMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size, W = table columns, P = parts.

    `live_columns` follows the live batch in an eager rebuild; upstream narrows its table view to it. No kernel bakes
    it: what a captured kernel keeps of the table is its address and row stride.
    """

    block_kv_indices: torch.Tensor  # [B, W] int32, device
    flashmla_metadata: torch.Tensor  # [P, 8] int32, device; see schedules.SplitLayout
    num_splits: torch.Tensor  # [B + 1] int32, device
    seq_lens_k: torch.Tensor | None  # [B] int32, device, draft extend
    live_columns: int
    fused: PreparedLaunch


class FlashMlaBackend(BlockTableBackend):
    """Metadata of FlashMLA. Pattern A: capture and replay run the same body over the same views.

    Every mode's schedule starts at row 0 of one buffer, so it must be rebuilt before each replay. Options in
    `config.extra`: ``num_sms``, multiprocessors to plan for, the device's own if absent; ``fp8``, dense 8-bit KV, whose
    planner counts tokens; ``older_plan``, the columns of earlier releases.
    """

    modes = frozenset({Mode.DECODE, Mode.DRAFT_DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2})
    allowances = Allowances(
        shared_between_modes=frozenset({"block_kv_indices", "flashmla_metadata", "num_splits"}),
    )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c = self.config
        if c.page_size != PAGE:
            raise ConfigError(f"page_size must be {PAGE}, the only one flashmla has; got {c.page_size}")
        # Upstream leaves no room for the draft tokens: a verify near the limit then writes into the next row.
        self.allocate_table(max_bs, (c.max_context + c.headroom + PAGE) // PAGE, fill=1)
        self.num_sms = c.extra.get("num_sms") or multiprocessors(self.device)
        self.layout = SplitLayout.OLDER if c.extra.get("older_plan") else SplitLayout.CURRENT
        if c.extra.get("fp8"):
            self.layout = SplitLayout.TOKENS
            if max_bs >= MOST_FP8_REQUESTS:
                raise ConfigError(
                    f"the planner of 8-bit KV takes fewer than {MOST_FP8_REQUESTS} requests, got {max_bs}"
                )
        self.schedule, self.num_splits = self.zeros(self.num_sms, 8), self.zeros(max_bs + 1)
        self.planned_schedule, self.planned_splits = self.zeros(self.num_sms, 8), self.zeros(max_bs + 1)
        self.plans: dict[tuple[ForwardMode, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.lens = torch.ones(max_bs, dtype=torch.int32, device=self.device)

    def bind(self, fb: ForwardBatch) -> FlashMlaMetadata:
        b, mode = self.check_batch_size(fb), fb.forward_mode
        if mode is not Mode.DECODE and self.config.draft_tokens < 1:
            raise ConfigError(f"mode {mode} needs draft_tokens > 0, got {self.config.draft_tokens}")
        if mode is Mode.DRAFT_DECODE and self.config.topk > 1:
            raise ConfigError(f"flashmla drafts chains only, so topk is at most 1; got {self.config.topk}")
        parts = self.parts(mode)
        self.plans[mode, b] = self.planned_schedule[:parts], self.planned_splits[: b + 1]
        table, schedule, splits = self.table[:b], self.schedule[:parts], self.num_splits[: b + 1]
        lens = self.lens[:b] if mode is Mode.DRAFT_EXTEND_V2 else None
        return FlashMlaMetadata(
            block_kv_indices=table,
            flashmla_metadata=schedule,
            num_splits=splits,
            seq_lens_k=lens,
            live_columns=self.table.shape[1],
            fused=prepare_flashmla_metadata(
                self.pools.req_to_token, fb.req_pool_indices, fb.seq_lens, table, schedule, splits, lens, b,
                self._offset(mode), self.kernel_config(b), self.layout,
            ),
        )  # fmt: skip

    def parts(self, mode: ForwardMode) -> int:
        """Parts of a mode's schedule. Wide queries are folded into the heads, 64 rows to a multiprocessor."""
        wide = mode in (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2)
        return split_kv_parts(self.num_sms, self.config.num_heads * (self.config.draft_tokens if wide else 1))

    def _offset(self, mode: ForwardMode) -> int:
        return self.config.draft_tokens if mode is Mode.TARGET_VERIFY else 0

    # The classic chain, op for op as upstream's. The vendor's planner returns tensors of its own, which are copied;
    # ours writes into tensors of its own, so that the copies are still there to be measured.

    def rebuild_aten(self, fb: ForwardBatch, md: FlashMlaMetadata) -> None:
        b, offset, parts = fb.batch_size, self._offset(fb.forward_mode), md.flashmla_metadata.shape[0]
        lens = fb.seq_lens[:b]
        mirror = None if fb.seq_lens_cpu is None else fb.seq_lens_cpu[:b]
        if offset:
            lens = lens + offset
            mirror = None if mirror is None else mirror + offset
        longest = int((lens if mirror is None else mirror).max().item())
        if md.seq_lens_k is not None:
            self.lens[:b].copy_(lens)
            md.seq_lens_k = self.lens[:b]
        self.build_classic(fb.req_pool_indices[:b], lens, self.table, b)
        schedule, splits = self.plans[fb.forward_mode, b]
        split_kv_schedule(lens.to(torch.int32), schedule, splits, layout=self.layout)
        md.num_splits = self.num_splits[: b + 1]
        self.schedule[:parts].copy_(schedule)
        self.num_splits[: b + 1].copy_(splits)
        md.live_columns = self.table[:b][:, : -(-longest // PAGE)].shape[1]

    def rebuild_aten_static(self, fb: ForwardBatch, md: FlashMlaMetadata) -> None:
        b, offset = fb.batch_size, self._offset(fb.forward_mode)
        lens = fb.seq_lens[:b] + offset if offset else fb.seq_lens[:b]
        if md.seq_lens_k is not None:
            md.seq_lens_k.copy_(lens)
        self.build_classic(fb.req_pool_indices[:b], lens, md.block_kv_indices, b)
        split_kv_schedule(lens, md.flashmla_metadata, md.num_splits, layout=self.layout)

    def rebuild_fused(self, fb: ForwardBatch, md: FlashMlaMetadata) -> None:
        md.fused(fb.req_pool_indices, fb.seq_lens)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        return flashmla.expected(
            batch,
            pools,
            width=self.table.shape[1],
            parts=self.parts(Mode(batch.mode)),
            draft_tokens=self.config.draft_tokens,
            layout=self.layout,
        )
