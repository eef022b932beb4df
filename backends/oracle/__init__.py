"""Obvious references in plain NumPy: what every metadata field must hold after a rebuild.

Independent of torch and of the kernels on purpose. `values` is what a correct rebuild leaves, `written` which cells it
writes under a tail policy, `live` which cells an attention kernel may read. Everything else must keep its poison.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..modes import TailPolicy


@dataclass(frozen=True, slots=True)
class Expected:
    """One metadata field after a rebuild.

    Attributes:
        values: array of the field's own shape and dtype; meaningful where `written`.
        written: bool, same shape.
        live: bool, same shape; a subset of `written` plus presets.
        overflow: what the field has no room for; empty where everything fits.
    """

    values: np.ndarray
    written: np.ndarray
    live: np.ndarray
    overflow: str = ""

    @staticmethod
    def whole(values: np.ndarray) -> Expected:
        """A field that a rebuild writes entirely."""
        every = np.ones(values.shape, dtype=bool)
        return Expected(values, every, every)

    @staticmethod
    def preset(values: np.ndarray) -> Expected:
        """A constant: read by kernels, never rewritten."""
        return Expected(values, np.zeros(values.shape, dtype=bool), np.ones(values.shape, dtype=bool))

    @staticmethod
    def state(values: np.ndarray) -> Expected:
        """What a rebuild reads and carries on: `values` behind it, and poisoned never, for it goes on from what is
        there."""
        return Expected.preset(values)

    @staticmethod
    def prefix_sum(counts: np.ndarray, dtype: type = np.int32) -> Expected:
        """[B + 1]: zero, then the running sum; index 0 is set once and not rewritten."""
        values = np.zeros(len(counts) + 1, dtype=dtype)
        values[1:] = np.cumsum(counts, dtype=np.int64)
        written = np.ones(values.shape, dtype=bool)
        written[0] = False
        return Expected(values, written, np.ones(values.shape, dtype=bool))


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A padded batch on the host. B rows.

    Attributes:
        mode: captured mode.
        req_pool_indices, seq_lens: [B].
        out_cache_loc: [n], n <= T.
        tokens_per_req: T // B.
        num_accept_tokens: [B] or None.
        positions: [T] or None.
        custom_mask: flat bool, live requests only, or None.
        live_requests: b; rows from b on are padding.
        retrieve_next_token, retrieve_next_sibling: [b, N] or None.
        encoder_lens: [B] or None.
        seq_lens_fill: seq_lens of padding rows.
        extend_seq_lens: [B] new tokens of each request in draft extend; tokens_per_req everywhere if None.
        mamba_track_indices: [B] or None.
        kv_indptr, kv_indices: index lists that the engine brings, or None.
    """

    mode: str
    req_pool_indices: np.ndarray
    seq_lens: np.ndarray
    out_cache_loc: np.ndarray
    tokens_per_req: int
    num_accept_tokens: np.ndarray | None = None
    positions: np.ndarray | None = None
    custom_mask: np.ndarray | None = None
    live_requests: int = 0
    retrieve_next_token: np.ndarray | None = None
    retrieve_next_sibling: np.ndarray | None = None
    encoder_lens: np.ndarray | None = None
    seq_lens_fill: int = 1
    extend_seq_lens: np.ndarray | None = None
    mamba_track_indices: np.ndarray | None = None
    kv_indptr: np.ndarray | None = None
    kv_indices: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class HostPools:
    """The engine's tables on the host, as they are before a rebuild: see `batch.Pools`."""

    req_to_token: np.ndarray
    full_to_swa: np.ndarray | None = None
    swa_write: bool = True
    state_slots: np.ndarray | None = None
    physical_slots: np.ndarray | None = None
    ring_cursors: np.ndarray | None = None
    ring_length: int = 0


def pages(length: int, page_size: int) -> int:
    """Pages that `length` tokens occupy."""
    return -(-int(length) // page_size)


def columns_written(lengths: np.ndarray, page_size: int, width: int, tail: TailPolicy) -> np.ndarray:
    """Columns each row's rebuild touches."""
    live = np.clip(-(-lengths.astype(np.int64) // page_size), 0, width)
    if tail in (TailPolicy.STATIC_FULL, TailPolicy.ZERO_TAIL):
        return np.full(len(live), width)
    if tail is TailPolicy.BATCH_MAX:
        return np.full(len(live), live.max(initial=0))
    return live


def swa_slot(slots: np.ndarray, full_to_swa: np.ndarray) -> np.ndarray:
    """Sliding-window slots; -1 has none."""
    return np.where(slots == -1, -1, full_to_swa[np.maximum(slots, 0)])


def page_table(
    rows: np.ndarray,
    lengths: np.ndarray,
    pools: HostPools,
    page_size: int,
    width: int,
    tail: TailPolicy,
    *,
    swa: bool = False,
) -> Expected:
    """int32 [B, width]: page id of each page's first token, floor division, so that slot -1 gives page -1.

    A length that needs more columns than there are loses its last pages, and `overflow` says so.
    """
    column = np.arange(width)
    live = column < columns_written(lengths, page_size, width, TailPolicy.LIVE_ONLY)[:, None]
    written = column < columns_written(lengths, page_size, width, tail)[:, None]
    values = np.zeros(written.shape, dtype=np.int32)
    r, p = np.nonzero(live if tail is TailPolicy.ZERO_TAIL else written)
    slots = pools.req_to_token[np.asarray(rows)[r], p * page_size].astype(np.int64)
    values[r, p] = (swa_slot(slots, pools.full_to_swa) if swa else slots) // page_size
    longest = pages(lengths.max(initial=0), page_size)
    overflow = f"a length needs {longest} columns, the table has {width}" if longest > width else ""
    return Expected(values, written, live, overflow)


def write_slots(out_cache_loc: np.ndarray, size: int, full_to_swa: np.ndarray) -> Expected:
    """int64 [size]: mapped write slots, zeros behind them."""
    values = np.zeros(size, dtype=np.int64)
    values[: len(out_cache_loc)] = swa_slot(out_cache_loc, full_to_swa)
    return Expected.whole(values)


def index_list(
    rows: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    pools: HostPools,
    size: int,
    dtype: type,
    *,
    swa: bool = False,
) -> Expected:
    """[size]: slots of tokens starts[r] .. starts[r] + lengths[r] - 1, request behind request; the rest untouched."""
    values = np.zeros(size, dtype=dtype)
    written = np.zeros(size, dtype=bool)
    at = 0
    for row, start, length in zip(rows, starts, lengths, strict=True):
        slots = pools.req_to_token[row, int(start) : int(start) + int(length)]
        values[at : at + len(slots)] = swa_slot(slots, pools.full_to_swa) if swa else slots
        at += len(slots)
    written[:at] = True
    return Expected(values, written, written)
