"""Take over KV index lists that the engine made, with the split counts that go with them, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .draft_kv_indices import scan_block
from .kv_splits import SplitRule, write_splits
from .launch import launch

COPY_BLOCK = 1024
COPY_PROGRAMS = 256


@triton.jit(do_not_specialize=["n", "given", "bs", "group", "cores", "head_programs", "max_splits", "tile"])
def _given_lists_kernel(
    indptr_in, indices_in, lens, kv_indptr, kv_indices, num_kv_splits,
    n, given, bs, group, cores, head_programs, max_splits, tile,
    SPLIT_MODE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid == 0:
        for begin in range(0, n, SCAN):
            z = begin + tl.arange(0, SCAN)
            tl.store(kv_indptr + z, tl.load(indptr_in + z, mask=z < n, other=0), mask=z < n)
    elif pid == 1:
        write_splits(
            lens, num_kv_splits, bs, 2147483647, group, cores, head_programs, max_splits, tile, SPLIT_MODE, SCAN
        )
    else:
        # Recorded work sees the engine's whole list; what of it is live, its own indptr says.
        live = tl.minimum(tl.load(indptr_in + n - 1).to(tl.int32), given)
        for first in range((pid - 2) * BLOCK, live, PROGRAMS * BLOCK):
            i = first + tl.arange(0, BLOCK)
            slot = tl.load(indices_in + i, mask=i < live, other=0)
            tl.store(kv_indices + i, slot.to(kv_indices.dtype.element_ty), mask=i < live)


def launch_given_lists(
    indptr_in: torch.Tensor,
    indices_in: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    num_kv_splits: torch.Tensor,
    bs: int,
    splits: SplitRule,
) -> None:
    """Copy the lists and choose the split counts, in place. All tensors on one device, checked by the caller.

    Args:
        indptr_in: [n] int32, n - 1 a multiple of bs.
        indices_in: [m] int32 or int64; entries below indptr_in[-1] are copied.
        lens: [>=bs] int32 or int64, in tokens.
        kv_indptr: [>=n] int32, out. kv_indices: [>=m] int32 or int64, out. num_kv_splits: [>=n - 1] int32, out.
        bs: requests; each has (n - 1) / bs branches.

    Cost: one launch, no allocation, no synchronisation.
    """
    n, m = indptr_in.shape[0], indices_in.shape[0]
    programs = max(1, min(COPY_PROGRAMS, triton.cdiv(m, COPY_BLOCK)))
    launch(
        _given_lists_kernel,
        (2 + programs,),
        (
            indptr_in, indices_in, lens, kv_indptr, kv_indices, num_kv_splits, n, m, bs, (n - 1) // bs,
            splits.cores, splits.head_programs, splits.max_splits, splits.tile,
        ),
        {
            "SPLIT_MODE": splits.mode,
            "PROGRAMS": programs,
            "BLOCK": COPY_BLOCK,
            "SCAN": scan_block(n),
            "num_warps": 4,
        },
    )  # fmt: skip
