"""Linear-attention metadata in one launch: slots, query starts and lengths, token numbers, tree links, ring cursors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import PreparedLaunch

BLOCK = 256


@triton.jit(do_not_specialize=["bs", "n_links"])
def _linear_state_kernel(
    req_pool_indices, state_slots, live_tokens, next_token_in, next_sibling_in, track_in, physical_slots,
    state_indices, query_start_loc, query_lengths, token_numbers, next_token, next_sibling, track,
    bs, n_links, seq_lens, ring_cursors, write_pos, force_flush,
    WIDTH: tl.constexpr, PADDING_SLOT: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_TOKENS: tl.constexpr,
    HAS_LINKS: tl.constexpr, HAS_TRACK: tl.constexpr, HAS_PHYSICAL: tl.constexpr,
    RING_LENGTH: tl.constexpr, FLUSH_INTERVAL: tl.constexpr, MOVES_CURSORS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = tl.load(live_tokens).to(tl.int32) // WIDTH
    ours = i < tl.minimum(live, bs)
    # Padding reads nothing: its pool row is zero, which is also what is stored for it.
    pool = tl.load(req_pool_indices + i, mask=ours, other=0)
    slot = tl.load(state_slots + pool.to(tl.int64), mask=ours, other=0)
    if HAS_PHYSICAL:
        slot = tl.load(physical_slots + slot.to(tl.int64), mask=ours, other=0)
    tl.store(state_indices + i, tl.where(ours, slot, PADDING_SLOT), mask=i < bs)
    tl.store(req_pool_indices + i, pool, mask=(i < bs) & (i >= live))
    tl.store(query_start_loc + i, tl.minimum(i, live) * WIDTH, mask=i <= bs)
    if HAS_LENGTHS:
        tl.store(query_lengths + i, tl.where(ours, WIDTH, 0), mask=i < bs)
    if HAS_TRACK:
        tracked = tl.load(track_in + i, mask=i < bs, other=0).to(tl.int64)
        if HAS_PHYSICAL:
            tracked = tl.load(physical_slots + tracked, mask=i < bs, other=0).to(tl.int64)
        tl.store(track + i, tracked, mask=i < bs)
    if RING_LENGTH:
        # All rows are lanes of the first program.
        has_slot = ours & (slot >= 0)
        cursor = tl.load(ring_cursors + tl.where(has_slot, slot, 0), mask=i < bs, other=0)
        tl.store(write_pos + i, cursor, mask=i < bs)
        flush = i < 0
        if FLUSH_INTERVAL:
            flush = tl.load(seq_lens + i, mask=i < bs, other=1) % FLUSH_INTERVAL == 0
        tl.store(force_flush + i, flush.to(tl.int32), mask=i < bs)
        if MOVES_CURSORS:
            moves = has_slot & (pool > 0)  # row 0 is no request's
            tl.debug_barrier()  # a slot may stand in several rows: all have read before one writes
            tl.store(ring_cursors + slot, (cursor + 1) % RING_LENGTH, mask=moves)
            if FLUSH_INTERVAL:
                tl.debug_barrier()  # where its rows differ, a flush has the last word
                tl.store(ring_cursors + slot, tl.zeros_like(cursor), mask=moves & flush)
    if HAS_TOKENS:
        tl.store(token_numbers + i, i, mask=i < bs * WIDTH)
    if HAS_LINKS:
        linked = i < tl.minimum(live * WIDTH, n_links)
        tl.store(next_token + i, tl.load(next_token_in + i, mask=linked, other=0).to(tl.int32), mask=linked)
        tl.store(next_sibling + i, tl.load(next_sibling_in + i, mask=linked, other=0).to(tl.int32), mask=linked)


@dataclass(frozen=True, slots=True)
class Ring:
    """Replay rings of state slots, and what a rebuild says of them.

    Attributes:
        cursors: [slots] int32, in and out: next entry of each slot's ring.
        length: entries of a ring.
        seq_lens: [bs] int32 or int64, in tokens.
        interval: tokens between flushes; 0 never flushes.
        moves: whether the cursors move.
        write_pos: [bs] int32, out: each row's cursor as it was; slot 0's where it has no slot.
        force_flush: [bs] int32, out: seq_lens % interval == 0.
    """

    cursors: torch.Tensor
    length: int
    seq_lens: torch.Tensor
    interval: int
    moves: bool
    write_pos: torch.Tensor
    force_flush: torch.Tensor


class PreparedLinearState:
    """The rebuild of one captured size, bound to its output buffers. v = live requests, the first rows of the batch.

    Args:
        req_pool_indices: [bs] int32 or int64. Rows from v on are set to 0, in place.
        state_slots: [rows] int32, request row -> state slot.
        live_tokens: [1] int32, v * width: on the device, so that a graph can hold the launch.
        state_indices: [bs] int32, out: state_slots[req_pool_indices], padding_slot from v on.
        physical_slots: [slots] int32, what a slot becomes before it is stored; None leaves it.
        track: [bs] int64, out: the slots of a call, as physical_slots has them; None writes none.
        query_start_loc: [bs + 1] int32, out: min(b, v) * width.
        query_lengths: [bs] int32, out: width, 0 from v on; None writes none.
        token_numbers: [bs * width] int32, out: 0, 1, 2, ...; None writes none.
        next_token, next_sibling: [bs, width] int32, out: the links of a call, rows below v; None writes none.
        ring: where states are replayed from rings. Each distinct slot of a live row other than row 0 moves once; None:
            no ring.
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
        physical_slots: torch.Tensor | None = None,
        track: torch.Tensor | None = None,
        query_lengths: torch.Tensor | None = None,
        token_numbers: torch.Tensor | None = None,
        next_token: torch.Tensor | None = None,
        next_sibling: torch.Tensor | None = None,
        ring: Ring | None = None,
        bs: int,
        width: int,
        padding_slot: int,
    ) -> None:
        self._absent = absent = state_indices  # any valid pointer: no lane reads it
        there = lambda x: absent if x is None else x  # noqa: E731
        has_links = next_token is not None
        of_ring = (absent,) * 4 if ring is None else (ring.seq_lens, ring.cursors, ring.write_pos, ring.force_flush)
        args = (
            req_pool_indices, state_slots, live_tokens, absent, absent, absent, there(physical_slots),
            state_indices, query_start_loc, there(query_lengths), there(token_numbers), there(next_token),
            there(next_sibling), there(track), bs, 0, *of_ring,
        )  # fmt: skip
        options = {
            "WIDTH": width,
            "PADDING_SLOT": padding_slot,
            "HAS_LENGTHS": query_lengths is not None,
            "HAS_TOKENS": token_numbers is not None,
            "HAS_LINKS": has_links,
            "HAS_TRACK": track is not None,
            "HAS_PHYSICAL": physical_slots is not None,
            "RING_LENGTH": 0 if ring is None else ring.length,
            "FLUSH_INTERVAL": 0 if ring is None else ring.interval,
            "MOVES_CURSORS": ring is not None and ring.moves,
            # Rows that share a slot must wait for each other: one program.
            "LANES": BLOCK if ring is None else max(BLOCK, triton.next_power_of_2(bs)),
            "num_warps": 4,
        }
        lanes = max(bs + 1, bs * width if token_numbers is not None or has_links else 0)
        grid = (-(-lanes // options["LANES"]),)
        varying = (0, 2, 3, 4, 5, 15) + (() if ring is None else (16,))
        self._launch = PreparedLaunch(_linear_state_kernel, grid, args, options, varying)

    def __call__(
        self,
        req_pool_indices: torch.Tensor,
        live_tokens: torch.Tensor,
        next_token: torch.Tensor | None = None,
        next_sibling: torch.Tensor | None = None,
        track: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
    ) -> None:
        """Rebuild for these inputs.

        Links: contiguous [n, width], n rows at least v; None where there is no tree. track: [bs] int64, slots that
        states go to; as None as it was when this was made. seq_lens: [bs], where there is a ring.
        """
        track = self._absent if track is None else track
        ring = () if seq_lens is None else (seq_lens,)
        if next_token is None:
            self._launch(req_pool_indices, live_tokens, self._absent, self._absent, track, 0, *ring)
        else:
            self._launch(req_pool_indices, live_tokens, next_token, next_sibling, track, next_token.numel(), *ring)
