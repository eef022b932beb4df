"""Ragged KV index lists of every draft step of EAGLE decoding: the prefix, then the branch's own draft tokens.

Step i serves n = i + 1 draft tokens per branch. Branch k of request r starts in row i of kv_indices at
``K * sum(lens[:r]) + r * n * K + k * (lens[r] + n)``; row i of kv_indptr is ``sum(positions[:z]) + z * n``. The two
agree where positions equal lens: on padding (position 0, fill length) they do not, and only live rows mean anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import floor_div
from .kv_indices import check_vector
from .launch import launch

SERIAL_BLOCK = 128
"""Tokens per turn of the classic launch: one program per (step, request, branch), however long the prefix."""


@triton.jit
def draft_column(length, branch, entry, steps, PAGE_SIZE: tl.constexpr, TOPK: tl.constexpr):
    """Column of req_to_token that holds draft token `entry` of a branch.

    With pages and branches, each branch owns whole pages, whose first slots repeat the last partial prefix page.
    """
    if PAGE_SIZE == 1 or TOPK == 1:
        return length + branch * steps + entry
    else:
        last = length % PAGE_SIZE
        pages = floor_div(last + steps + (PAGE_SIZE - 1), PAGE_SIZE)
        return length - last + branch * pages * PAGE_SIZE + last + entry


@triton.jit
def sum_before(values, n, BLOCK: tl.constexpr):
    """sum(values[:n]) as int64, in chunks of BLOCK."""
    total = tl.full((), 0, tl.int64)
    for begin in range(0, n, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(values + i, mask=i < n, other=0).to(tl.int64), 0)
    return total


@triton.jit
def store_draft_slots(
    tokens, out, base, length, branch, count, steps, capacity,
    PAGE_SIZE: tl.constexpr, TOPK: tl.constexpr, STEPS_BLOCK: tl.constexpr,
):  # fmt: skip
    """out[base + e] = slot of draft token e < count of a branch. tokens: the request's row of req_to_token."""
    e = tl.arange(0, STEPS_BLOCK)
    at = base + e
    slot = tl.load(tokens + draft_column(length, branch, e, steps, PAGE_SIZE, TOPK), mask=e < count, other=0)
    tl.store(out + at, slot.to(out.dtype.element_ty), mask=(e < count) & (at < capacity))


@triton.jit(do_not_specialize=["nseq", "steps", "capacity"])
def _draft_kv_indices_kernel(
    req_pool_indices, req_to_token, lens, positions, kv_indices, kv_indptr,
    nseq, steps, capacity, req_to_token_stride, kv_indices_stride, kv_indptr_stride,
    TOPK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr, STEPS_BLOCK: tl.constexpr,
):  # fmt: skip
    step = tl.program_id(0)
    row = tl.program_id(1)
    branch = tl.program_id(2)
    drafts = step + 1
    pool = tl.load(req_pool_indices + row).to(tl.int64)
    length = tl.load(lens + row).to(tl.int32)
    tokens = req_to_token + pool * req_to_token_stride
    out = kv_indices + step.to(tl.int64) * kv_indices_stride

    base = TOPK * sum_before(lens, row, SCAN) + row * drafts * TOPK + branch * (length + drafts)
    for begin in range(0, length, BLOCK):
        t = begin + tl.arange(0, BLOCK)
        slot = tl.load(tokens + t, mask=t < length, other=0)
        tl.store(out + base + t, slot.to(out.dtype.element_ty), mask=(t < length) & (base + t < capacity))
    store_draft_slots(tokens, out, base + length, length, branch, drafts, steps, capacity, PAGE_SIZE, TOPK, STEPS_BLOCK)

    z = row * TOPK + branch
    if z == 0:  # index 0 is a constant, so its program writes the last one
        z = nseq * TOPK
    total = sum_before(positions, z, SCAN) + z * drafts
    tl.store(kv_indptr + step.to(tl.int64) * kv_indptr_stride + z, total.to(tl.int32))


def build_draft_kv_indices(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    lens: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    topk: int,
    page_size: int,
) -> None:
    """Index lists of all draft steps in place, in one launch. All tensors on one device.

    Args:
        req_pool_indices: [nseq] int32 or int64. Row of req_to_token for each request.
        req_to_token: [rows, width] int32, row-contiguous; wide enough for the longest prefix and its draft slots.
        lens: [nseq] int32 or int64, prefix length of each request, in tokens.
        positions: [nseq * topk] int32 or int64, equal to the request's length on live rows, 0 on padding.
        kv_indices: [S, capacity] int32 or int64, out: row i holds the list of step i; the tail keeps its old values.
        kv_indptr: [S, >= nseq * topk + 1] int32, out from index 1.
        topk: draft branches of each request, at least 1.
        page_size: P.

    Raises:
        ValueError: a dtype or shape differs from the above; nothing is launched then.

    Not checked: that the lists fit (that would stall the stream). Entries at or past `capacity` are dropped, never
    written into the next step's row.
    Cost: one launch of S * nseq * topk programs, each walking its prefix alone; no allocation.
    """
    nseq, index = lens.shape[0], (torch.int32, torch.int64)
    check_vector("req_pool_indices", req_pool_indices, nseq, index)
    check_vector("lens", lens, nseq, index)
    check_vector("positions", positions, nseq * topk, index)
    for name, x, least, dtypes in (
        ("req_to_token", req_to_token, 1, (torch.int32,)),
        ("kv_indices", kv_indices, 1, index),
        ("kv_indptr", kv_indptr, nseq * topk + 1, (torch.int32,)),
    ):
        if x.dim() != 2 or x.shape[1] < least or x.dtype not in dtypes or x.stride(1) != 1:
            raise ValueError(
                f"{name} must be a row-contiguous table of {' or '.join(map(str, dtypes))} with at least {least} "
                f"columns, got {x.dtype} of shape {list(x.shape)} with strides {list(x.stride())}"
            )
    if kv_indices.shape[0] != kv_indptr.shape[0]:
        raise ValueError(f"kv_indices has {kv_indices.shape[0]} steps, kv_indptr {kv_indptr.shape[0]}")
    launch_draft_kv_indices(req_pool_indices, req_to_token, lens, positions, kv_indices, kv_indptr, topk, page_size)


def launch_draft_kv_indices(
    req_pool_indices, req_to_token, lens, positions, kv_indices, kv_indptr, topk, page_size, nseq=None
):
    """`build_draft_kv_indices` without its checks, for callers whose buffers were checked when they were bound."""
    nseq, steps = lens.shape[0] if nseq is None else nseq, kv_indices.shape[0]
    launch(
        _draft_kv_indices_kernel,
        (steps, nseq, topk),
        (
            req_pool_indices, req_to_token, lens, positions, kv_indices, kv_indptr, nseq, steps, kv_indices.shape[1],
            req_to_token.stride(0), kv_indices.stride(0), kv_indptr.stride(0),
        ),
        {
            "TOPK": topk,
            "PAGE_SIZE": page_size,
            "BLOCK": SERIAL_BLOCK,
            "SCAN": scan_block(nseq * topk),
            "STEPS_BLOCK": triton.next_power_of_2(steps),
            "num_warps": 4,
        },
    )  # fmt: skip


def scan_block(n: int) -> int:
    """Elements a program sums at once: all of them up to 1024."""
    return min(1024, max(16, triton.next_power_of_2(n)))
