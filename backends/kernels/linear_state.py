"""Linear-attention metadata in one launch: state slots, query starts and lengths, token numbers, draft-tree links."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import PreparedLaunch

BLOCK = 256


@triton.jit(do_not_specialize=["bs", "n_links"])
def _linear_state_kernel(
    req_pool_indices, state_slots, live_tokens, next_token_in, next_sibling_in,
    state_indices, query_start_loc, query_lengths, token_numbers, next_token, next_sibling,
    bs, n_links,
    WIDTH: tl.constexpr, PADDING_SLOT: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_TOKENS: tl.constexpr,
    HAS_LINKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = tl.load(live_tokens).to(tl.int32) // WIDTH
    ours = i < tl.minimum(live, bs)
    # Padding reads nothing: its pool row is zero, which is also what is stored for it.
    pool = tl.load(req_pool_indices + i, mask=ours, other=0)
    slot = tl.load(state_slots + pool.to(tl.int64), mask=ours, other=0)
    tl.store(state_indices + i, tl.where(ours, slot, PADDING_SLOT), mask=i < bs)
    tl.store(req_pool_indices + i, pool, mask=(i < bs) & (i >= live))
    tl.store(query_start_loc + i, tl.minimum(i, live) * WIDTH, mask=i <= bs)
    if HAS_LENGTHS:
        tl.store(query_lengths + i, tl.where(ours, WIDTH, 0), mask=i < bs)
    if HAS_TOKENS:
        tl.store(token_numbers + i, i, mask=i < bs * WIDTH)
    if HAS_LINKS:
        linked = i < tl.minimum(live * WIDTH, n_links)
        tl.store(next_token + i, tl.load(next_token_in + i, mask=linked, other=0).to(tl.int32), mask=linked)
        tl.store(next_sibling + i, tl.load(next_sibling_in + i, mask=linked, other=0).to(tl.int32), mask=linked)


class PreparedLinearState:
    """The rebuild of one captured size, bound to its output buffers. v = live requests, the first rows of the batch.

    Args:
        req_pool_indices: [bs] int32 or int64. Rows from v on are set to 0, in place.
        state_slots: [rows] int32, request row -> state slot.
        live_tokens: [1] int32, v * width: on the device, so that a graph can hold the launch.
        state_indices: [bs] int32, out: state_slots[req_pool_indices], padding_slot from v on.
        query_start_loc: [bs + 1] int32, out: min(b, v) * width.
        query_lengths: [bs] int32, out: width, 0 from v on; None writes none.
        token_numbers: [bs * width] int32, out: 0, 1, 2, ...; None writes none.
        next_token, next_sibling: [bs, width] int32, out: the links of a call, rows below v; None writes none.
        bs: captured batch size.
        width: query tokens of a request.
        padding_slot: state index of padding rows.
    """

    def __init__(
        self,
        *,
        req_pool_indices: torch.Tensor,
        state_slots: torch.Tensor,
        live_tokens: torch.Tensor,
        state_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        query_lengths: torch.Tensor | None = None,
        token_numbers: torch.Tensor | None = None,
        next_token: torch.Tensor | None = None,
        next_sibling: torch.Tensor | None = None,
        bs: int,
        width: int,
        padding_slot: int,
    ) -> None:
        self._absent = absent = state_indices  # any valid pointer: no lane reads it
        has_links = next_token is not None
        args = (
            req_pool_indices, state_slots, live_tokens, absent, absent, state_indices, query_start_loc,
            absent if query_lengths is None else query_lengths,
            absent if token_numbers is None else token_numbers,
            next_token if has_links else absent,
            next_sibling if has_links else absent,
            bs, 0,
        )  # fmt: skip
        options = {
            "WIDTH": width,
            "PADDING_SLOT": padding_slot,
            "HAS_LENGTHS": query_lengths is not None,
            "HAS_TOKENS": token_numbers is not None,
            "HAS_LINKS": has_links,
            "LANES": BLOCK,
            "num_warps": 4,
        }
        lanes = max(bs + 1, bs * width if token_numbers is not None or has_links else 0)
        grid = (-(-lanes // BLOCK),)
        self._launch = PreparedLaunch(_linear_state_kernel, grid, args, options, varying=(0, 2, 3, 4, 12))

    def __call__(
        self,
        req_pool_indices: torch.Tensor,
        live_tokens: torch.Tensor,
        next_token: torch.Tensor | None = None,
        next_sibling: torch.Tensor | None = None,
    ) -> None:
        """Rebuild for these inputs. Links: contiguous [n, width], n rows at least v; None where there is no tree."""
        if next_token is None:
            self._launch(req_pool_indices, live_tokens, self._absent, self._absent, 0)
        else:
            self._launch(req_pool_indices, live_tokens, next_token, next_sibling, next_token.numel())
