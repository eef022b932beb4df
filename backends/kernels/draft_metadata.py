"""All of a draft decode's CSR metadata in one launch: the index lists of every step, their indptr, the split counts.

Programs: one for the indptr of all steps; one for split counts, if any; `programs_per_row` for each request. A program
reads a tile of the prefix once and stores it for every step and branch, where the classic launch reads it again for
each. What goes where: see draft_kv_indices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .csr_metadata import CsrConfig
from .draft_kv_indices import draft_column, scan_block, sum_before
from .kv_splits import SplitRule, write_splits
from .launch import PreparedLaunch


@triton.jit(
    do_not_specialize=[
        "nseq", "steps", "served", "capacity", "width", "cores", "head_programs", "max_splits", "tile",
    ]
)  # fmt: skip
def _draft_metadata_kernel(
    req_pool_indices, req_to_token, lens, positions, kv_indices, kv_indptr, num_kv_splits,
    nseq, steps, served, capacity, width, cores, head_programs, max_splits, tile,
    req_to_token_stride, kv_indices_stride, kv_indptr_stride,
    TOPK: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLIT_MODE: tl.constexpr, PROGRAMS_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr, SCAN: tl.constexpr, STEPS_BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    SPLIT_PROGRAMS: tl.constexpr = 1 if SPLIT_MODE != 0 else 0
    if pid == 0:
        total = tl.full((), 0, tl.int64)
        for begin in range(0, nseq * TOPK, SCAN):
            z = begin + tl.arange(0, SCAN)
            inside = z < nseq * TOPK
            counts = tl.load(positions + z, mask=inside, other=0).to(tl.int64)
            before = total + tl.cumsum(counts, 0)
            total += tl.sum(counts, 0)
            for step in range(0, served):
                at = kv_indptr + step * kv_indptr_stride + 1 + z
                tl.store(at, (before + (z + 1) * (step + 1)).to(tl.int32), mask=inside)
    elif pid <= SPLIT_PROGRAMS:
        write_splits(
            lens, num_kv_splits, nseq, 2147483647, TOPK, cores, head_programs, max_splits, tile, SPLIT_MODE, SCAN
        )
    else:
        part = pid - 1 - SPLIT_PROGRAMS
        row = part // PROGRAMS_PER_ROW
        first = (part % PROGRAMS_PER_ROW) * BLOCK
        pool = tl.load(req_pool_indices + row).to(tl.int64)
        length = tl.load(lens + row).to(tl.int32)
        tokens = req_to_token + pool * req_to_token_stride
        before = sum_before(lens, row, SCAN) * TOPK
        for begin in range(first, length, PROGRAMS_PER_ROW * BLOCK):
            t = begin + tl.arange(0, BLOCK)
            slot = tl.load(tokens + t, mask=t < length, other=0).to(kv_indices.dtype.element_ty)
            out = kv_indices
            for step in range(0, served):
                for branch in range(0, TOPK):
                    at = before + row * (step + 1) * TOPK + branch * (length + step + 1) + t
                    tl.store(out + at, slot, mask=(t < length) & (at < capacity))
                out += kv_indices_stride
        if first == 0:
            e = tl.arange(0, STEPS_BLOCK)
            for branch in range(0, TOPK):
                column = draft_column(length, branch, e, steps, PAGE_SIZE, TOPK)
                slot = tl.load(tokens + column, mask=(e < served) & (column < width), other=0)
                slot = slot.to(kv_indices.dtype.element_ty)
                out = kv_indices
                for step in range(0, served):
                    at = before + row * (step + 1) * TOPK + branch * (length + step + 1) + length + e
                    tl.store(out + at, slot, mask=(e <= step) & (at < capacity))
                    out += kv_indices_stride


class DraftMetadata:
    """The rebuild of every served draft step of one captured shape, bound to its tables.

    Args:
        config: block sizes.
        req_to_token: [rows, width] int32, row-contiguous, wide enough for the draft slots.
        kv_indices: [served, capacity] int32 or int64, out. Row i is the list of step i.
        kv_indptr: [served, >=nseq * topk + 1] int32, out from index 1.
        nseq, topk, page_size: requests, branches, P.
        steps: S, which the layout of draft slots depends on; served is usually S - 1.
        num_kv_splits: [>=nseq * topk] int32, out, by `splits`; the same for every step.

    Cost of a call: one launch, no allocation, no synchronisation; no recompilation when only lengths change.
    """

    def __init__(
        self,
        config: CsrConfig,
        req_to_token: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        nseq: int,
        topk: int,
        page_size: int,
        steps: int,
        num_kv_splits: torch.Tensor | None = None,
        splits: SplitRule | None = None,
    ) -> None:
        served = kv_indices.shape[0]
        rule = splits or SplitRule(1)
        mode = 0 if num_kv_splits is None else rule.mode
        args = (
            kv_indptr, req_to_token, kv_indptr, kv_indptr, kv_indices, kv_indptr,
            kv_indptr if num_kv_splits is None else num_kv_splits,
            nseq, steps, served, kv_indices.shape[1], req_to_token.shape[1],
            rule.cores, rule.head_programs, rule.max_splits, rule.tile,
            req_to_token.stride(0), kv_indices.stride(0), kv_indptr.stride(0),
        )  # fmt: skip
        options = {
            "TOPK": topk,
            "PAGE_SIZE": page_size,
            "SPLIT_MODE": mode,
            "PROGRAMS_PER_ROW": config.programs_per_row,
            "BLOCK": config.block,
            "SCAN": scan_block(nseq * topk),
            "STEPS_BLOCK": triton.next_power_of_2(max(served, 1)),
            "num_warps": config.num_warps,
        }
        grid = (1 + (mode != 0) + nseq * config.programs_per_row,)
        self._launch = PreparedLaunch(_draft_metadata_kernel, grid, args, options, varying=(0, 2, 3))

    def __call__(self, req_pool_indices: torch.Tensor, lens: torch.Tensor, positions: torch.Tensor) -> None:
        """Rebuild in place.

        Args:
            req_pool_indices, lens: [>=nseq] int32 or int64, padding included; lens is the prefix in tokens.
            positions: [>=nseq * topk] int32 or int64.
        """
        self._launch(req_pool_indices, lens, positions)
