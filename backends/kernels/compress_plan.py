"""Plans of the KV compressors: which tokens complete a compressed entry, what they read, where states are kept.

A request keeps the states of its last tokens in a ring. With ratio 4 the ring hangs on the token's sliding-window
page, with ratio 128 on the request's row. Layouts, in little-endian bytes as the compressors read them:

    decode     [B, 16]   u32 length, i32 write slot, i32 read page 0, i32 read page 1
    compress   [T, 16]   u32 length, u16 token, u16 tokens from the ring, i32 read page 0, i32 read page 1
    write      [T, 8]    u32 token, i32 slot

Upstream numbers the entries of a verify plan atomically; here they are in token order. Rows behind the last entry are
marked unused, with -1 in every index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import floor_div, swa_slot
from .launch import launch

PLAN_SCAN = 256
"""Tokens per turn."""


def plan_scan(tokens: int) -> int:
    return min(PLAN_SCAN, max(16, triton.next_power_of_2(tokens)))


@triton.jit
def _ring_slot(
    req_to_token, swa_mapping, pool, position, mask, stride, RATIO: tl.constexpr, RING: tl.constexpr
):  # fmt: skip
    """State slot of a token; RING is a power of two, so the mask is the floor remainder."""
    if RATIO == 4:
        slot = tl.load(req_to_token + pool * stride + position, mask=mask, other=0)
        swa = swa_slot(swa_mapping, slot, mask).to(tl.int32)
        return floor_div(swa, 128) * RING + (swa & (RING - 1))
    else:
        return pool.to(tl.int32) * RING + (position & (RING - 1))


@triton.jit
def _read_pages(req_to_token, swa_mapping, pool, position, mask, stride, RATIO: tl.constexpr, RING: tl.constexpr):
    """Ring pages of the block before this token's and of its own."""
    before = tl.maximum(position - RATIO, 0)
    own = _ring_slot(req_to_token, swa_mapping, pool, position, mask, stride, RATIO, RING)
    previous = _ring_slot(req_to_token, swa_mapping, pool, before, mask, stride, RATIO, RING)
    return floor_div(previous, RATIO), floor_div(own, RATIO)


@triton.jit
def decode_plan(
    req_pool_indices, seq_lens, req_to_token, swa_mapping, plan_bytes, bs, stride,
    RATIO: tl.constexpr, RING: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """One decode entry for each request, by one program."""
    plan = plan_bytes.to(tl.pointer_type(tl.int32))
    for start in range(0, bs, SCAN):
        b = start + tl.arange(0, SCAN)
        mask = b < bs
        pool = tl.load(req_pool_indices + b, mask=mask, other=0).to(tl.int64)
        length = tl.load(seq_lens + b, mask=mask, other=1).to(tl.int32)
        position = tl.maximum(length - 1, 0)
        write = _ring_slot(req_to_token, swa_mapping, pool, position, mask, stride, RATIO, RING)
        page0, page1 = _read_pages(req_to_token, swa_mapping, pool, position, mask, stride, RATIO, RING)
        tl.store(plan + b * 4, length, mask=mask)
        tl.store(plan + b * 4 + 1, write, mask=mask)
        tl.store(plan + b * 4 + 2, page0, mask=mask)
        tl.store(plan + b * 4 + 3, page1, mask=mask)


@triton.jit
def _verify_token(
    seq_lens, token, mask, N: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, KEEP_DRAFT: tl.constexpr
):  # fmt: skip
    """Position of a draft token, whether it completes an entry, whether its state is kept."""
    length = tl.load(seq_lens + token // N, mask=mask, other=0).to(tl.int32) + N
    position = length - N + token % N
    first_kept = length // RATIO * RATIO
    if RATIO == 4:
        first_kept -= 4
    if KEEP_DRAFT:
        first_kept = tl.minimum(first_kept, length - min(RING - RATIO, 4))
    kept = position >= first_kept
    if RATIO == 4:
        kept = kept | (position % 128 >= 124)
    return position, mask & ((position + 1) % RATIO == 0), mask & kept


@triton.jit
def _store_compress(
    plan_bytes, slot, mask, token, position, req_pool_indices, req_to_token, swa_mapping, stride,
    N: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    WINDOW: tl.constexpr = 8 if RATIO == 4 else 128
    plan = plan_bytes.to(tl.pointer_type(tl.int32))
    b = token // N
    pool = tl.load(req_pool_indices + b, mask=mask, other=0).to(tl.int64)
    from_ring = WINDOW - tl.minimum(token % N + 1, WINDOW)
    reads = mask & (from_ring > 0)
    page0, page1 = _read_pages(req_to_token, swa_mapping, pool, position, reads, stride, RATIO, RING)
    tl.store(plan + slot * 4, position + 1, mask=mask)
    tl.store(plan + slot * 4 + 1, token | (from_ring << 16), mask=mask)
    tl.store(plan + slot * 4 + 2, tl.where(reads, page0, -1), mask=mask)
    tl.store(plan + slot * 4 + 3, tl.where(reads, page1, b), mask=mask)


@triton.jit
def _store_write(
    plan_bytes, slot, mask, token, position, req_pool_indices, req_to_token, swa_mapping, stride,
    N: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    plan = plan_bytes.to(tl.pointer_type(tl.int32))
    pool = tl.load(req_pool_indices + token // N, mask=mask, other=0).to(tl.int64)
    state = _ring_slot(req_to_token, swa_mapping, pool, position, mask, stride, RATIO, RING)
    tl.store(plan + slot * 2, token, mask=mask)
    tl.store(plan + slot * 2 + 1, state, mask=mask)


@triton.jit
def _store_unused(compress_bytes, write_bytes, row, compress_mask, write_mask):
    compress = compress_bytes.to(tl.pointer_type(tl.int32))
    write = write_bytes.to(tl.pointer_type(tl.int32))
    none = tl.full(row.shape, -1, tl.int32)
    tl.store(compress + row * 4, none, mask=compress_mask)
    tl.store(compress + row * 4 + 1, tl.zeros(row.shape, tl.int32), mask=compress_mask)
    tl.store(compress + row * 4 + 2, none, mask=compress_mask)
    tl.store(compress + row * 4 + 3, none, mask=compress_mask)
    tl.store(write + row * 2, none, mask=write_mask)
    tl.store(write + row * 2 + 1, none, mask=write_mask)


@triton.jit
def verify_plan(
    req_pool_indices, seq_lens, req_to_token, swa_mapping, compress, write, tokens, stride,
    N: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, KEEP_DRAFT: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Both verify plans, by one program: entries in token order, then unused rows."""
    compressed = tl.full((), 0, tl.int32)
    written = tl.full((), 0, tl.int32)
    for start in range(0, tokens, SCAN):
        token = start + tl.arange(0, SCAN)
        position, ends, keeps = _verify_token(seq_lens, token, token < tokens, N, RATIO, RING, KEEP_DRAFT)
        ends_at = compressed + tl.cumsum(ends.to(tl.int32), 0) - 1
        kept_at = written + tl.cumsum(keeps.to(tl.int32), 0) - 1
        _store_compress(
            compress, ends_at, ends, token, position, req_pool_indices, req_to_token, swa_mapping, stride,
            N, RATIO, RING,
        )  # fmt: skip
        _store_write(
            write, kept_at, keeps, token, position, req_pool_indices, req_to_token, swa_mapping, stride,
            N, RATIO, RING,
        )  # fmt: skip
        compressed += tl.sum(ends.to(tl.int32), 0)
        written += tl.sum(keeps.to(tl.int32), 0)
    for start in range(0, tokens, SCAN):
        row = start + tl.arange(0, SCAN)
        inside = row < tokens
        _store_unused(compress, write, row, inside & (row >= compressed), inside & (row >= written))


@triton.jit(do_not_specialize=["bs"])
def _decode_plan_kernel(
    req_pool_indices, seq_lens, req_to_token, swa_mapping, plan, bs, stride,
    RATIO: tl.constexpr, RING: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    decode_plan(req_pool_indices, seq_lens, req_to_token, swa_mapping, plan, bs, stride, RATIO, RING, SCAN)


@triton.jit(do_not_specialize=["tokens"])
def _number_kernel(
    seq_lens, numbers, tokens, N: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
    KEEP_DRAFT: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """numbers [2, tokens + 1]: each token's entry in either plan or -1, and the number of entries at the end."""
    compressed = tl.full((), 0, tl.int32)
    written = tl.full((), 0, tl.int32)
    for start in range(0, tokens, SCAN):
        token = start + tl.arange(0, SCAN)
        mask = token < tokens
        _, ends, keeps = _verify_token(seq_lens, token, mask, N, RATIO, RING, KEEP_DRAFT)
        ends_at = compressed + tl.cumsum(ends.to(tl.int32), 0) - 1
        kept_at = written + tl.cumsum(keeps.to(tl.int32), 0) - 1
        tl.store(numbers + token, tl.where(ends, ends_at, -1), mask=mask)
        tl.store(numbers + tokens + 1 + token, tl.where(keeps, kept_at, -1), mask=mask)
        compressed += tl.sum(ends.to(tl.int32), 0)
        written += tl.sum(keeps.to(tl.int32), 0)
    tl.store(numbers + tokens, compressed)
    tl.store(numbers + 2 * tokens + 1, written)


@triton.jit(do_not_specialize=["tokens"])
def _finalise_kernel(
    req_pool_indices, seq_lens, req_to_token, swa_mapping, numbers, compress, write, tokens, stride,
    N: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    position = tl.load(seq_lens + token // N, mask=mask, other=0).to(tl.int32) + token % N
    ends_at = tl.load(numbers + token, mask=mask, other=-1)
    kept_at = tl.load(numbers + tokens + 1 + token, mask=mask, other=-1)
    _store_compress(
        compress, ends_at, ends_at >= 0, token, position, req_pool_indices, req_to_token, swa_mapping, stride,
        N, RATIO, RING,
    )  # fmt: skip
    _store_write(
        write, kept_at, kept_at >= 0, token, position, req_pool_indices, req_to_token, swa_mapping, stride,
        N, RATIO, RING,
    )  # fmt: skip
    compressed = tl.load(numbers + tokens)
    written = tl.load(numbers + 2 * tokens + 1)
    _store_unused(compress, write, token, mask & (token >= compressed), mask & (token >= written))


def build_decode_plan(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa: torch.Tensor,
    plan: torch.Tensor,
    ratio: int,
    ring: int,
) -> None:
    """Fill plan, [B, 16] uint8, in one launch.

    Args:
        req_pool_indices, seq_lens: [B] int32 or int64.
        req_to_token: [rows, width] int32. full_to_swa: [slots + 1] int64.
        ratio: 4 or 128. ring: states a request keeps, a power of two.
    """
    bs = seq_lens.shape[0]
    launch(
        _decode_plan_kernel,
        (1,),
        (req_pool_indices, seq_lens, req_to_token, full_to_swa, plan, bs, req_to_token.stride(0)),
        {"RATIO": ratio, "RING": ring, "SCAN": plan_scan(bs), "num_warps": 4},
    )


def build_verify_plan(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa: torch.Tensor,
    numbers: torch.Tensor,
    compress: torch.Tensor,
    write: torch.Tensor,
    queries: int,
    ratio: int,
    ring: int,
    keep_draft: bool,
) -> None:
    """Fill compress, [T, 16] uint8, and write, [T, 8] uint8, in two launches as upstream: number, then write.

    Args:
        seq_lens: [B] int32 or int64, without the draft tokens.
        numbers: [2, T + 1] int32, scratch.
        queries: draft tokens per request.
        keep_draft: also keep the states of the last 4 tokens, so that rejected drafts can be undone.
    """
    tokens, block = seq_lens.shape[0] * queries, 128
    shared = {"N": queries, "RATIO": ratio, "RING": ring}
    launch(
        _number_kernel,
        (1,),
        (seq_lens, numbers, tokens),
        {**shared, "KEEP_DRAFT": keep_draft, "SCAN": plan_scan(tokens), "num_warps": 4},
    )
    launch(
        _finalise_kernel,
        (triton.cdiv(tokens, block),),
        (
            req_pool_indices, seq_lens, req_to_token, full_to_swa, numbers, compress, write, tokens,
            req_to_token.stride(0),
        ),
        {**shared, "BLOCK": block, "num_warps": 4},
    )  # fmt: skip
