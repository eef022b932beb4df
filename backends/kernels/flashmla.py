"""FlashMLA metadata in one launch: block table, split-KV schedule and, for draft extend, lengths.

Program 0 walks the schedule, which is serial and the longest; the others write the table. Both read only the lengths,
so nothing waits for anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..schedules import SplitLayout
from .block_table import reachable_columns, write_block_row
from .decode_metadata import DecodeMetadataConfig
from .launch import PreparedLaunch
from .split_kv_schedule import split_kv_walk, split_scan

PAGE = 64


@triton.jit(do_not_specialize=["bs", "offset", "columns", "parts"])
def _flashmla_kernel(
    req_pool_indices, seq_lens, req_to_token, lens, table, schedule, num_splits,
    bs, offset, columns, parts, req_to_token_stride, table_stride,
    PAGE_SIZE: tl.constexpr, WRITE_LENS: tl.constexpr, PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
    SCAN: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid == 0:
        split_kv_walk(seq_lens, offset, 2147483647, bs, schedule, num_splits, parts, 1, SCAN, LAYOUT)
    else:
        part = pid - 1
        write_block_row(
            req_pool_indices, seq_lens, req_to_token, lens, table,
            part // PROGRAMS_PER_ROW, (part % PROGRAMS_PER_ROW) * BLOCK, offset, columns,
            req_to_token_stride, table_stride,
            PAGE_SIZE, WRITE_LENS, PROGRAMS_PER_ROW * BLOCK, BLOCK,
        )  # fmt: skip


def prepare_flashmla_metadata(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    schedule: torch.Tensor,
    num_splits: torch.Tensor,
    lens: torch.Tensor | None,
    bs: int,
    offset: int,
    config: DecodeMetadataConfig,
    layout: SplitLayout,
) -> PreparedLaunch:
    """The rebuild for lengths seq_lens + offset, in place; call it with (req_pool_indices, seq_lens).

    Args:
        req_to_token: [rows, width] int32, row-contiguous.
        req_pool_indices, seq_lens: [>=bs] int32 or int64.
        table: [>=bs, columns] int32, row-contiguous, out: ids of each row's live pages; the rest keeps what it holds.
        schedule: [parts, 8] int32, contiguous, out; see `schedules.split_kv`.
        num_splits: [bs + 1] int32, out.
        lens: [>=bs] int32, out: the lengths; None stores none.
        bs: at least 1.
        offset: tokens added to each length.
        layout: of the schedule.
    """
    stored = table if lens is None else lens
    return PreparedLaunch(
        _flashmla_kernel,
        (1 + bs * config.programs_per_row,),
        (
            req_pool_indices, seq_lens, req_to_token, stored, table, schedule, num_splits,
            bs, offset, reachable_columns(table, req_to_token, PAGE), schedule.shape[0],
            req_to_token.stride(0), table.stride(0),
        ),
        {
            "PAGE_SIZE": PAGE,
            "WRITE_LENS": lens is not None,
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "SCAN": split_scan(bs),
            "LAYOUT": int(layout),
            "num_warps": config.num_warps,
        },
        varying=(0, 1),
    )  # fmt: skip
