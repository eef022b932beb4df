"""Ragged (CSR) KV index lists: every request's KV slots, one request behind the other, in one launch.

``kv_indices[kv_indptr[r] + t] = req_to_token[pool[r], start[r] + t]`` for ``t < lens[r]``. Whatever lies behind
``kv_indptr[B]`` keeps its old values. `gather_slots` is the device side, shared with the fused CSR rebuild.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import swa_slot
from .launch import launch

SERIAL_BLOCK = 512
"""Tokens per turn of the classic launch, which gives each request one program however long it is."""


@triton.jit
def store_slots(out, base, t, slot, mask, mapping, capacity, HAS_MAP: tl.constexpr):
    """out[base + t] = slot, through `mapping` if HAS_MAP (-1 stays -1). Never writes at or past `capacity`."""
    if HAS_MAP:
        slot = swa_slot(mapping, slot, mask)
    at = base.to(tl.int64) + t
    tl.store(out + at, slot.to(out.dtype.element_ty), mask=mask & (at < capacity))


@triton.jit
def gather_slots(tokens, out, base, first, length, step, mapping, capacity, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr):
    """out[base + t] = tokens[t] for the blocks at t = first, first + step, ... below length. tokens: one row."""
    for begin in range(first, length, step):
        t = begin + tl.arange(0, BLOCK)
        mask = t < length
        slot = tl.load(tokens + t, mask=mask, other=0)
        store_slots(out, base, t, slot, mask, mapping, capacity, HAS_MAP)


@triton.jit(do_not_specialize=["capacity", "req_to_token_stride"])  # see csr_metadata
def _kv_indices_kernel(
    req_to_token, req_pool_indices, lens, kv_indptr, start, mapping, kv_indices, req_to_token_stride, capacity,
    HAS_START: tl.constexpr, HAS_MAP: tl.constexpr, PROGRAMS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    pool = tl.load(req_pool_indices + row).to(tl.int64)
    length = tl.load(lens + row).to(tl.int32)
    base = tl.load(kv_indptr + row)
    tokens = req_to_token + pool * req_to_token_stride
    if HAS_START:
        tokens += tl.load(start + row).to(tl.int64)
    gather_slots(
        tokens, kv_indices, base, tl.program_id(1) * BLOCK, length, PROGRAMS_PER_ROW * BLOCK, mapping, capacity,
        HAS_MAP, BLOCK,
    )  # fmt: skip


def build_kv_indices(
    *,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    bs: int | None = None,
    start: torch.Tensor | None = None,
    mapping: torch.Tensor | None = None,
    programs_per_row: int = 1,
    block: int = SERIAL_BLOCK,
) -> None:
    """Flatten each request's KV slots into one ragged list, in place, in one launch. All tensors on one device.

    Args:
        req_to_token: [rows, width] int32, row-contiguous. KV slot of each token.
        req_pool_indices: [>=bs] int32 or int64. Row of req_to_token for each request.
        lens: [>=bs] int32 or int64, in tokens; <= 0 writes nothing.
        kv_indptr: [>=bs + 1] int32 or int64. Where each request's entries begin.
        kv_indices: [capacity] int32 or int64, out: entries below kv_indptr[bs]; the tail keeps its old values.
        bs: requests; all of `lens` if None.
        start: [>=bs] int32 or int64, first token of each request, for sliding windows; 0 if None.
        mapping: [slots + 1] int64, full slot -> sliding-window slot, applied in the same pass; -1 stays -1.
        programs_per_row: programs that share one request. The classic launch has 1.
        block: tokens per program and turn, a power of two.

    Raises:
        ValueError: a dtype or shape differs from the above; nothing is launched then.

    Not checked: that the entries fit (reading kv_indptr[bs] would stall the stream). Entries at or past `capacity`
    are dropped, never written into the neighbour.
    Cost: one launch, 12 bytes moved per KV token with an int64 list, no allocation.
    """
    bs = lens.shape[0] if bs is None else bs
    index = (torch.int32, torch.int64)
    for name, x, least, dtypes in (
        ("req_pool_indices", req_pool_indices, bs, index),
        ("lens", lens, bs, index),
        ("kv_indptr", kv_indptr, bs + 1, index),
        ("kv_indices", kv_indices, 0, index),
        ("start", start, bs, index),
        ("mapping", mapping, 1, (torch.int64,)),
    ):
        if x is not None:
            check_vector(name, x, least, dtypes)
    if req_to_token.dim() != 2 or req_to_token.dtype is not torch.int32 or req_to_token.stride(1) != 1:
        raise ValueError(
            f"req_to_token must be a row-contiguous int32 table, got {req_to_token.dtype} of shape "
            f"{list(req_to_token.shape)} with strides {list(req_to_token.stride())}"
        )
    launch_kv_indices(
        req_to_token, req_pool_indices, lens, kv_indptr, kv_indices, bs, start, mapping, programs_per_row, block
    )


def launch_kv_indices(
    req_to_token, req_pool_indices, lens, kv_indptr, kv_indices, bs, start=None, mapping=None, programs_per_row=1,
    block=SERIAL_BLOCK,
):  # fmt: skip
    """`build_kv_indices` without its checks, for callers whose buffers were checked when they were bound."""
    launch(
        _kv_indices_kernel,
        (bs, programs_per_row),
        (
            req_to_token, req_pool_indices, lens, kv_indptr,
            lens if start is None else start,  # any valid pointer; the compiled variant never touches it
            lens if mapping is None else mapping,
            kv_indices, req_to_token.stride(0), kv_indices.shape[0],
        ),
        {
            "HAS_START": start is not None,
            "HAS_MAP": mapping is not None,
            "PROGRAMS_PER_ROW": programs_per_row,
            "BLOCK": block,
            "num_warps": 4,
        },
    )  # fmt: skip


def check_vector(name: str, x: torch.Tensor, least: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse a tensor that is not a contiguous vector of at least `least` elements of one of `dtypes`.

    Raises:
        ValueError: naming the argument, what was wanted and what came.
    """
    if x.dim() != 1 or x.shape[0] < least:
        raise ValueError(f"{name} must be a vector of at least {least}, got shape {list(x.shape)}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if x.shape[0] > 1 and x.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous, got stride {x.stride(0)}")
