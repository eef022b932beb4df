"""CUTLASS MLA decode: one block table of 128-token pages, plain decode only.

| mode         | table                                                                                   |
|--------------|-----------------------------------------------------------------------------------------|
| decode, idle | [r, p] = floor(req_to_token[pool[r], p * 128] / 128) for p < ceil(len[r] / 128)         |

Lengths are not metadata: the layer casts the runner's seq_lens inside the graph. The rebuild is one launch in upstream
too; what fusing removes is the two views before it. Batches with speculation go to another backend upstream and are
refused here. The opaque workspace, whose size only the vendor's library knows, is not kept here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import ConfigError
from .batch import ForwardBatch
from .block_table import BlockTableBackend
from .kernels.launch import PreparedLaunch
from .modes import ForwardMode
from .oracle import Expected, HostBatch, HostPools, cutlass_mla

PAGE = 128


@dataclass(slots=True)
class CutlassMlaMetadata:
    """A view bound at capture: full width, whatever the lengths. B = captured batch size, W = table columns."""

    block_kv_indices: torch.Tensor  # [B, W] int32, device
    fused: PreparedLaunch


class CutlassMlaBackend(BlockTableBackend):
    """Metadata of the CUTLASS MLA decode kernel. Pattern A: bind the table at capture, refill it at replay."""

    modes = frozenset({ForwardMode.DECODE})

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c = self.config
        if c.page_size != PAGE:
            raise ConfigError(f"page_size must be {PAGE}, the only one cutlass_mla has; got {c.page_size}")
        self.allocate_table(max_bs, (c.max_context + PAGE) // PAGE, fill=1)

    def bind(self, fb: ForwardBatch) -> CutlassMlaMetadata:
        if fb.spec_info is not None:
            raise ConfigError("cutlass_mla decodes without speculation only: spec_info must be None")
        table = self.table[: self.check_batch_size(fb)]
        return CutlassMlaMetadata(table, self.prepare_fused(fb, table, None, 0))

    def rebuild_aten(self, fb: ForwardBatch, md: CutlassMlaMetadata) -> None:
        b = fb.batch_size
        self.build_classic(fb.req_pool_indices[:b], fb.seq_lens[:b], md.block_kv_indices, b)

    rebuild_aten_static = rebuild_aten

    def rebuild_fused(self, fb: ForwardBatch, md: CutlassMlaMetadata) -> None:
        md.fused(fb.req_pool_indices, fb.seq_lens)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        return cutlass_mla.expected(batch, pools, width=self.table.shape[1])
