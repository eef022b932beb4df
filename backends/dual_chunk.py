"""DualChunk FlashAttention: three paged calls per layer, over a length's own chunk, the one before it, and the rest.

| field                | decode, idle; c = (len - 1) // chunk, chunk = chunk_size - local_size                        |
|----------------------|----------------------------------------------------------------------------------------------|
| block_tables         | pages up to the batch's longest row, then 0                                                  |
| seq_lens_intra       | len - c * chunk; its table holds pages from c * chunk on                                     |
| seq_lens_succ        | chunk if c > 0 else 0; its table, the chunk before, is left alone while none has one         |
| seq_lens_inter       | max(c - 1, 0) * chunk, in block_tables                                                       |
| scaling_factor       | max(1, 0.1 * ln(len / original_context) + 1)                                                 |

A layer decides on the host, from the four maxima, which calls to launch; a graph must hold all of them, so captured
maxima are the context length whatever the captured batch was. Decode only; the engine dropped this backend later.

Options in `config.extra`: ``chunk_size``, ``local_size``, ``original_context`` (0 disables scaling). Source: specs of
SGLang's dual-chunk backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Allowances, AttentionBackend, ConfigError
from .batch import ForwardBatch
from .kernels.decode_metadata import DecodeMetadataConfig, default_config
from .kernels.dual_chunk import prepare_dual_chunk
from .kernels.launch import PreparedLaunch
from .modes import ForwardMode, Implementation, TailPolicy
from .oracle import Expected, HostBatch, HostPools, dual_chunk


@dataclass(slots=True)
class DualChunkMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size, W = table columns.

    The host lists and maxima follow the live batch in an eager rebuild; a capture leaves the maxima at the context
    length, which is what the recorded layers were told.
    """

    seq_lens_tensor: torch.Tensor  # [B] int32, device
    orig_seq_lens_tensor: torch.Tensor  # [B] int32, device
    block_tables: torch.Tensor  # [B, W] int32, device
    seq_lens_intra: torch.Tensor  # [B] int32, device
    block_tables_intra: torch.Tensor  # [B, W] int32, device
    seq_lens_succ: torch.Tensor  # [B] int32, device
    block_tables_succ: torch.Tensor  # [B, W] int32, device
    seq_lens_inter: torch.Tensor  # [B] int32, device
    scaling_factor: torch.Tensor | None  # [B] float32, device
    max_seq_len: int
    max_seq_len_intra: int
    max_seq_len_succ: int
    max_seq_len_inter: int
    seq_lens: list[int] | None = None
    orig_seq_lens: list[int] | None = None
    fused: PreparedLaunch | None = None

    def set_maxima(self, tokens: int) -> None:
        self.max_seq_len = self.max_seq_len_intra = self.max_seq_len_succ = self.max_seq_len_inter = tokens


class DualChunkBackend(AttentionBackend):
    """Metadata of dual-chunk decode. Pattern A with restored host constants."""

    modes = frozenset({ForwardMode.DECODE})
    allowances = Allowances(dispatches_per_request={"decode": 20, "idle": 20}, syncs_per_request=4, lists_read=2)

    @staticmethod
    def default_tail(implementation: Implementation, recorded: bool) -> TailPolicy:
        """Every implementation writes whole rows: pages, then zeros."""
        return TailPolicy.ZERO_TAIL

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c = self.config
        self.chunk = c.extra.get("chunk_size", 8192) - c.extra.get("local_size", 1024)
        self.original_context = c.extra.get("original_context", 0)
        if self.chunk < 1 or self.chunk % c.page_size:
            raise ConfigError(f"chunk_size - local_size must be whole pages of {c.page_size} tokens, got {self.chunk}")
        if self.tail is not TailPolicy.ZERO_TAIL:
            raise ConfigError(f"dual_chunk writes whole rows, zeros behind the pages; got tail {self.tail}")
        columns, width = (c.max_context - 1) // c.page_size + 1, self.pools.req_to_token.shape[1]
        if (columns - 1) * c.page_size >= width:
            raise ConfigError(
                f"block_tables needs {columns} columns of {c.page_size} tokens, but req_to_token is only {width} "
                f"tokens wide: raise its width or lower max_context ({c.max_context})"
            )
        self.max_bs, self.columns = max_bs, columns
        self.lens, self.orig_lens, self.intra_lens, self.succ_lens, self.inter_lens = (
            self._zeros(max_bs) for _ in range(5)
        )
        self.table, self.intra_table, self.succ_table = (self._zeros(max_bs, columns) for _ in range(3))
        self.page_starts = torch.arange(columns, dtype=torch.int64, device=self.device) * c.page_size
        self.page_numbers = torch.arange(columns, dtype=torch.int64, device=self.device)
        self.scaling = self.scale = None
        if self.original_context:
            self.scaling = torch.zeros(max_bs, dtype=torch.float32, device=self.device)
            # By length, made once by the classic operations: every rebuild then has the same bits, whatever logarithm
            # its own device function would be.
            self.scale = self._scaled(torch.arange(c.max_context + 1, dtype=torch.int32, device=self.device))

    def bind(self, fb: ForwardBatch) -> DualChunkMetadata:
        b, c = fb.batch_size, self.config
        if fb.spec_info is not None:
            raise ConfigError("dual_chunk decodes without speculation only: spec_info must be None")
        if not 0 < b <= self.max_bs:
            raise ConfigError(f"batch size {b} is not within 1..{self.max_bs}, the tables' rows")
        md = DualChunkMetadata(
            seq_lens_tensor=self.lens[:b],
            orig_seq_lens_tensor=self.orig_lens[:b],
            block_tables=self.table[:b],
            seq_lens_intra=self.intra_lens[:b],
            block_tables_intra=self.intra_table[:b],
            seq_lens_succ=self.succ_lens[:b],
            block_tables_succ=self.succ_table[:b],
            seq_lens_inter=self.inter_lens[:b],
            scaling_factor=None if self.scaling is None else self.scaling[:b],
            max_seq_len=c.max_context,
            max_seq_len_intra=c.max_context,
            max_seq_len_succ=c.max_context,
            max_seq_len_inter=c.max_context,
        )
        md.fused = prepare_dual_chunk(
            self.pools.req_to_token, fb.req_pool_indices, fb.seq_lens, md.seq_lens_tensor, md.orig_seq_lens_tensor,
            md.seq_lens_intra, md.seq_lens_succ, md.seq_lens_inter, md.block_tables, md.block_tables_intra,
            md.block_tables_succ, md.scaling_factor, self.scale, c.page_size, self.chunk, self.kernel_config(b),
        )  # fmt: skip
        return md

    def kernel_config(self, bs: int) -> DecodeMetadataConfig:
        """Block sizes for a captured batch size; the tuner's choice if one was given, else the default."""
        return self.config.extra.get("kernel_config") or default_config(bs, self.columns)

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(fb, in_capture)
        if in_capture:
            # The captured lengths are fillers of 1, from which the layer would conclude that it needs one call only.
            self.forward_metadata.set_maxima(self.config.max_context)

    # The classic chain, op for op as upstream's: two Python loops over requests, which read the device row by row.

    def rebuild_aten(self, fb: ForwardBatch, md: DualChunkMetadata) -> None:
        page_size, chunk = self.config.page_size, self.chunk
        lens, pool = fb.seq_lens[: fb.batch_size], fb.req_pool_indices[: fb.batch_size]
        if lens.dtype is not torch.int32:
            lens = lens.to(torch.int32)
        md.seq_lens_tensor.copy_(lens)
        md.seq_lens = md.seq_lens_tensor.tolist()
        md.max_seq_len = int(md.seq_lens_tensor.max().item())
        md.orig_seq_lens_tensor.copy_(lens)
        md.orig_seq_lens = md.orig_seq_lens_tensor.tolist()
        table = self.pools.req_to_token[:, : self._checked(md.max_seq_len)][pool]
        if page_size > 1:
            table = table[:, torch.arange(0, md.max_seq_len, page_size, device=self.device)] // page_size
        md.block_tables.fill_(0)
        md.block_tables[:, : table.shape[1]].copy_(table)
        if md.scaling_factor is not None:
            md.scaling_factor.copy_(self._scaled(lens))

        index = (lens - 1) // chunk
        intra = lens - index * chunk
        md.max_seq_len_intra = int(intra.max().item())
        md.seq_lens_intra.copy_(intra)
        self._classic_rows(md.block_tables_intra, md.block_tables, lens, index, md.max_seq_len_intra, previous=False)
        succ = (index - (index - 1).clamp(min=0)) * chunk
        md.seq_lens_succ.copy_(succ)
        md.max_seq_len_succ = int(succ.max().item())
        if md.max_seq_len_succ:
            self._classic_rows(md.block_tables_succ, md.block_tables, lens, index, md.max_seq_len_succ, previous=True)
        inter = (index - 1).clamp(min=0) * chunk
        md.seq_lens_inter.copy_(inter)
        md.max_seq_len_inter = int(inter.max().item())

    def _classic_rows(self, out, table, lens, index, longest: int, *, previous: bool) -> None:
        page_size = self.config.page_size
        out.fill_(0)
        for r in range(lens.shape[0]):
            chunks = (index[r] - 1).clamp(min=0) if previous else index[r]
            first = chunks * self.chunk // page_size
            until = min(first + (longest - 1) // page_size + 1, (lens[r] - 1) // page_size + 1)
            out[r, : until - first] = table[r, first:until]

    def _scaled(self, lens: torch.Tensor) -> torch.Tensor:
        return ((lens / self.original_context).log() * 0.1 + 1).clamp(min=1)

    # The same without the host: what a graph can hold.

    def rebuild_aten_static(self, fb: ForwardBatch, md: DualChunkMetadata) -> None:
        page_size, chunk = self.config.page_size, self.chunk
        lens = fb.seq_lens[: fb.batch_size].to(torch.int32)
        md.seq_lens_tensor.copy_(lens)
        md.orig_seq_lens_tensor.copy_(lens)
        slots = self.pools.req_to_token[fb.req_pool_indices[: fb.batch_size, None], self.page_starts]
        longest = lens.max()
        widest = (longest + (page_size - 1)) // page_size
        md.block_tables.copy_((slots // page_size).masked_fill(self.page_numbers >= widest, 0))
        if md.scaling_factor is not None:
            md.scaling_factor.copy_(self.scale[lens])

        index = (lens - 1) // chunk
        previous = (index - 1).clamp(min=0)
        md.seq_lens_intra.copy_(lens - index * chunk)
        md.seq_lens_succ.copy_((index - previous) * chunk)
        md.seq_lens_inter.copy_(previous * chunk)
        own = (lens + (page_size - 1)) // page_size
        first, before = index * chunk // page_size, previous * chunk // page_size
        until = torch.minimum(before + chunk // page_size, own)
        md.block_tables_intra.copy_(self._rows(md.block_tables, first, own))
        succ = self._rows(md.block_tables, before, until)
        md.block_tables_succ.copy_(torch.where(longest > chunk, succ, md.block_tables_succ))

    def _rows(self, table: torch.Tensor, first: torch.Tensor, until: torch.Tensor) -> torch.Tensor:
        """Columns first .. until - 1 of each row, moved to the left; zeros behind."""
        columns = self.page_numbers + first[:, None]
        return table.gather(1, columns.clamp(max=self.columns - 1)).masked_fill(columns >= until[:, None], 0)

    def rebuild_fused(self, fb: ForwardBatch, md: DualChunkMetadata) -> None:
        md.fused(fb.req_pool_indices, fb.seq_lens)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        scale = None if self.scale is None else self.scale.cpu().numpy()
        return dual_chunk.expected(
            batch, pools, page_size=self.config.page_size, width=self.columns, chunk=self.chunk, scale=scale
        )

    def _checked(self, longest: int) -> int:
        if longest > self.columns * self.config.page_size:
            raise ConfigError(
                f"a length of {longest} tokens needs more than the {self.columns} columns of block_tables "
                f"(max_context {self.config.max_context})"
            )
        return longest

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)
