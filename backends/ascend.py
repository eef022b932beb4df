"""Ascend NPU attention (the fused-infer attention op): page tables of one width for the batch, lengths, host lists.

| mode                  | L = lengths       | actual_seq_lengths_q | host list at replay           |
|-----------------------|-------------------|----------------------|-------------------------------|
| decode, idle          | len               | 1, 2, ..., B         | len of live rows, then 0      |
| draft_decode          | len + step_id + 1 | 1, 2, ..., B         | len + step_id + 1, then 0     |
| target_verify         | len + N           | N, 2N, ..., B * N    | len + N, then 0               |
| draft_extend, _v2     | len (holds N)     | N, 2N, ..., B * N    | len, then 0                   |
| dllm_extend           | len               | 1, 2, ..., B         | len, then 0; cumsum of D too  |

With w = ceil(max(L) / P): block_tables[r, p] = floor(req_to_token[pool[r], p * P] / P) for p < w in every row, zeros
behind; the sliding-window table maps the page's first token before it divides. Padding rows have length 0.

The op takes its KV lengths as a host list that whoever replays swaps in beside the graph: `actual_seq_lengths_kv`. The
rebuild needs none. ``extra["swa_mask"]`` adds the mask of later releases, True where a token is not attended.

Upstream's seq_lens is the runner's own buffer, which it offsets in place: captures add up, and draft steps overwrite
each other. Here every instance has its own. Not metadata and not here: the zero heads that pad queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .aten_ops import check_slots
from .base import Allowances, AttentionBackend, ConfigError
from .batch import ForwardBatch
from .kernels.ascend_metadata import PreparedAscendMetadata
from .kernels.decode_metadata import default_config
from .modes import ForwardMode, TailPolicy
from .oracle import Expected, HostBatch, HostPools, ascend

Mode = ForwardMode

WIDE = frozenset({Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2})
"""Modes with N query tokens for each request."""


@dataclass(slots=True)
class AscendMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size, W = table columns.

    The lists are host data that capture records; each replay brings its own instead of the first.
    """

    block_tables: torch.Tensor  # [B, W] int32, device
    block_tables_swa: torch.Tensor | None  # [B, W] int32, device
    seq_lens: torch.Tensor  # [B] int32, device
    actual_seq_lengths_q: torch.Tensor  # [B] int32, device, preset
    swa_out_cache_loc: torch.Tensor | None  # [T] int64, device
    swa_mask: torch.Tensor | None  # [B, 1, W * P - 1 or more] bool, device
    seq_lens_cpu_list: list[int]
    seq_lens_list_cumsum: list[int] | None
    fused: PreparedAscendMetadata | None  # bound with the views above


class AscendBackend(AttentionBackend):
    """Metadata of Ascend's paged attention. Pattern A: bind views and lists at capture, refresh the views."""

    modes = frozenset({Mode.DECODE, Mode.DRAFT_DECODE, Mode.DLLM_EXTEND}) | WIDE
    seq_len_fill_value = 0
    allowances = Allowances(
        shared_between_modes=frozenset(
            {"block_tables", "block_tables_swa", "seq_lens", "actual_seq_lengths_q", "swa_out_cache_loc", "swa_mask"}
        ),
        spills=frozenset({"swa_out_cache_loc"}),
    )

    @staticmethod
    def default_tail(implementation, recorded) -> TailPolicy:
        """All implementations fill to the batch's longest row; zeros follow it, so no cell of a row goes unwritten."""
        return TailPolicy.BATCH_MAX

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        c, columns = self.config, self.config.table_columns
        if self.tail is not TailPolicy.BATCH_MAX:
            raise ConfigError(
                f"ascend fills tables to the longest row of the batch, got tail {self.tail}: leave it out"
            )
        width = self.pools.req_to_token.shape[1]
        if (columns - 1) * c.page_size >= width:
            raise ConfigError(
                f"block_tables needs {columns} columns of {c.page_size} tokens, but req_to_token is only {width} "
                f"tokens wide: raise its width or lower max_context ({c.max_context})"
            )
        masked, maps = bool(c.extra.get("swa_mask")), self.pools.full_to_swa is not None
        if masked and (c.window is None or not maps):
            raise ConfigError(f"swa_mask needs a window and a full_to_swa map, got window {c.window} and map {maps}")
        new = lambda *shape, dtype=torch.int32: torch.zeros(*shape, dtype=dtype, device=self.device)  # noqa: E731
        self.max_bs, self.max_tokens = max_bs, max_num_tokens
        self.tables, self.lens = new(max_bs, columns), new(max_bs)
        self.swa_tables = new(max_bs, columns) if maps else None
        self.swa_out_buffer = new(max_num_tokens, dtype=torch.int64) if self.pools.writes_swa else None
        cells = c.max_context + c.page_size - 1 + c.headroom
        self.swa_mask = new(max_bs, 1, cells, dtype=torch.bool).fill_(True) if masked else None
        self.swa_indices = torch.arange(cells if masked else 0, dtype=torch.int32, device=self.device)
        self.column_numbers = torch.arange(columns, dtype=torch.int64, device=self.device)
        self.page_starts = self.column_numbers * c.page_size
        self.query_ends = torch.arange(1, max_bs + 1, dtype=torch.int32, device=self.device)
        self.wide_query_ends = self.query_ends * c.draft_tokens

    def bind(self, fb: ForwardBatch) -> AscendMetadata:
        b, mode, n = fb.batch_size, fb.forward_mode, fb.out_cache_loc.shape[0]
        if not 0 < b <= self.max_bs:
            raise ConfigError(f"batch size {b} is not within 1..{self.max_bs}, the rows of block_tables")
        if self.swa_out_buffer is not None and n > self.max_tokens:
            raise ConfigError(f"swa_out_cache_loc holds {self.max_tokens} tokens, a batch of {b} writes {n}")
        per_request = fb.positions.shape[0] // b
        if mode in WIDE and per_request != self.config.draft_tokens:
            raise ConfigError(
                f"mode {mode} is captured with {per_request} tokens per request, draft_tokens is "
                f"{self.config.draft_tokens}: query offsets count draft_tokens, so they must agree"
            )
        given = fb.seq_lens if fb.seq_lens_cpu is None else fb.seq_lens_cpu
        md = AscendMetadata(
            block_tables=self.tables[:b],
            block_tables_swa=None if self.swa_tables is None else self.swa_tables[:b],
            seq_lens=self.lens[:b],
            actual_seq_lengths_q=(self.wide_query_ends if mode in WIDE else self.query_ends)[:b],
            swa_out_cache_loc=None if self.swa_out_buffer is None else self.swa_out_buffer[:n],
            swa_mask=None if self.swa_mask is None else self.swa_mask[:b],
            seq_lens_cpu_list=given.tolist()[:b],
            seq_lens_list_cumsum=_multiples(per_request, b) if mode is Mode.DLLM_EXTEND else None,
            fused=None,
        )
        md.fused = self._prepared(fb, md)
        return md

    def _prepared(self, fb: ForwardBatch, md: AscendMetadata) -> PreparedAscendMetadata:
        c = self.config
        return PreparedAscendMetadata(
            req_to_token=self.pools.req_to_token,
            req_pool_indices=fb.req_pool_indices,
            seq_lens=fb.seq_lens,
            lens=md.seq_lens,
            tables=md.block_tables,
            bs=fb.batch_size,
            page_size=c.page_size,
            offset=self._offset(fb.forward_mode),
            config=c.extra.get("kernel_config") or default_config(fb.batch_size, c.table_columns),
            full_to_swa=self.pools.full_to_swa,
            swa_tables=md.block_tables_swa,
            swa_out_cache_loc=md.swa_out_cache_loc,
            swa_mask=md.swa_mask,
            window=c.window or 0,
        )

    def actual_seq_lengths_kv(self, fb: ForwardBatch) -> list[int]:
        """What whoever replays hands to the attention op beside the graph: live lengths, zeros for padding.

        Reads the host mirror only, so that it can run while the graph does.
        """
        padding, offset = fb.num_padding or 0, self._offset(fb.forward_mode)
        live = fb.seq_lens_cpu.tolist()[: fb.batch_size - padding]
        return [n + offset for n in live] + [0] * padding

    # The classic chain, op for op as upstream's.

    def rebuild_aten(self, fb: ForwardBatch, md: AscendMetadata) -> None:
        b, offset, page_size = fb.batch_size, self._offset(fb.forward_mode), self.config.page_size
        if md.swa_out_cache_loc is not None:
            n = check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
            self.swa_out_buffer[n:].zero_()
            self.swa_out_buffer[:n].copy_(self.pools.full_to_swa[fb.out_cache_loc])
        mirror = fb.seq_lens if fb.seq_lens_cpu is None else fb.seq_lens_cpu
        longest = int(mirror[:b].max().item()) + offset
        columns = self._columns(longest)
        for table, mapped in ((md.block_tables_swa, True), (md.block_tables, False)):
            if table is None:
                continue
            destination = table[:b, :columns]
            slots = self.pools.req_to_token[fb.req_pool_indices[:b], :longest]
            if mapped:
                slots = self.pools.full_to_swa[slots]
            destination.copy_(slots[:, ::page_size] // page_size)
            table[:b, columns:].fill_(0)
            table[b:, :].fill_(0)
        lens = fb.seq_lens + offset if offset else fb.seq_lens
        md.seq_lens[:b].copy_(lens[:b])
        if md.swa_mask is not None:
            self._aten_mask(md)

    def rebuild_aten_static(self, fb: ForwardBatch, md: AscendMetadata) -> None:
        b, page_size = fb.batch_size, self.config.page_size
        if md.swa_out_cache_loc is not None:
            n = check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
            md.swa_out_cache_loc[n:].zero_()
            md.swa_out_cache_loc[:n].copy_(self.pools.full_to_swa[fb.out_cache_loc])
        md.seq_lens.copy_(fb.seq_lens[:b] + self._offset(fb.forward_mode))
        filled = self.column_numbers < (md.seq_lens.amax() + page_size - 1) // page_size
        slots = self.pools.req_to_token[fb.req_pool_indices[:b, None], self.page_starts]
        md.block_tables.copy_(slots // page_size * filled)
        if md.block_tables_swa is not None:
            md.block_tables_swa.copy_(self.pools.full_to_swa[slots] // page_size * filled)
        if md.swa_mask is not None:
            self._aten_mask(md)

    def _aten_mask(self, md: AscendMetadata) -> None:
        """From the lengths that the layer will attend to. Upstream takes them before the draft tokens are added, and
        so hides the draft from itself."""
        ends, tokens = md.seq_lens[:, None], self.swa_indices[None, :]
        hidden = (tokens < ends - self.config.window) | (tokens >= ends)
        md.swa_mask.copy_(hidden.unsqueeze(1))

    def rebuild_fused(self, fb: ForwardBatch, md: AscendMetadata) -> None:
        if md.swa_out_cache_loc is not None:
            check_slots(fb.out_cache_loc, md.swa_out_cache_loc)
        md.fused(fb.req_pool_indices, fb.seq_lens, fb.out_cache_loc)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        c = self.config
        return ascend.expected(
            batch,
            pools,
            page_size=c.page_size,
            width=c.table_columns,
            step_id=c.step_id,
            draft_tokens=c.draft_tokens,
            mask_window=c.window if self.swa_mask is not None else None,
            mask_cells=c.max_context + c.page_size - 1 + c.headroom,
        )

    def _offset(self, mode: ForwardMode) -> int:
        if mode is Mode.DRAFT_DECODE:
            return self.config.step_id + 1
        return self.config.draft_tokens if mode is Mode.TARGET_VERIFY else 0

    def _columns(self, longest: int) -> int:
        columns = -(-longest // self.config.page_size)
        if columns > self.config.table_columns:
            raise ConfigError(
                f"seq_lens of {longest} tokens need {columns} columns of block_tables, which has "
                f"{self.config.table_columns} (max_context {self.config.max_context})"
            )
        return columns


def _multiples(step: int, count: int) -> list[int]:
    """step, 2 * step, ..., count * step."""
    return list(range(step, step * count + 1, step))
