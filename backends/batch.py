"""The batch a metadata rebuild reads, and seeded generators of batches.

Host side first: a `LiveBatch` is what the scheduler hands over (NumPy, unpadded). The runner copies it into static
slots and passes a `ForwardBatch` of tensors to the backend. Lengths are in tokens, slots are token indices in the KV
pool, rows are rows of ``req_to_token``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .modes import ForwardMode

PADDING_ROW = 0
"""Row of req_to_token that padding points at; all zeros, never a live request."""

RING_LENGTH = 5
"""Entries of a replay ring of made-up pools: short, so that a few steps go all around."""


@dataclass(frozen=True, slots=True)
class SpecInfo:
    """What speculative decoding adds to a batch. Tensors live on the batch's device.

    Attributes:
        draft_token_num: draft tokens per request in verify (N).
        topk: draft branches (K).
        num_steps: draft steps (S).
        num_tokens_per_req: query width of draft extend v2, host int; <= 0 where the engine left it unset.
        num_accept_tokens: [B] int32, draft extend.
        num_accept_tokens_cpu: the same on the host; None at capture.
        custom_mask: flat bool tree mask, request-major.
        positions: [tokens] int64; its length says how many tokens are live in verify.
        extend_seq_lens: [B] int32, draft extend v2.
        retrieve_next_token, retrieve_next_sibling: [B, N] tree links of verify.
        kv_indptr, kv_indices: index lists of one draft step, made by the multi-step wrapper for its inner backends.
    """

    draft_token_num: int = 0
    topk: int = 0
    num_steps: int = 0
    num_tokens_per_req: int = -1
    num_accept_tokens: torch.Tensor | None = None
    num_accept_tokens_cpu: tuple[int, ...] | None = None
    custom_mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One padded batch as a backend's hooks see it. B = batch_size, T = B * tokens per request.

    Attributes:
        forward_mode: the captured mode.
        batch_size: B, padded.
        req_pool_indices: [>=B] int32 or int64. Row of req_to_token; 0 on padding.
        seq_lens: [>=B] int32 or int64, in tokens. Meaning by mode: specs of the engines, see base.py.
        seq_lens_cpu: host mirror of seq_lens, or None.
        out_cache_loc: [n] int64, KV slot written per token; n may be the live count, below T.
        positions: [T] int64 or None.
        seq_lens_sum: host int, padding included, or None.
        encoder_lens: [B] int32 or None.
        spec_info: speculative fields or None.
        actual_forward_mode: live mode; IDLE while the captured mode is DECODE or TARGET_VERIFY.
        num_padding: padded rows, B minus live rows, or None where the engine does not say.
        num_token_non_padded: [1] int32, live tokens of the batch on the device: what recorded work must read
            where an eager rebuild would read the length of a live tensor. None where the runner has no such slot.
        mamba_track_indices: [>=B] int64, state slot that each request's state is copied to for the prefix cache, 0 on
            padding; None where no state is cached.
    """

    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None = None
    out_cache_loc: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    seq_lens_sum: int | None = None
    encoder_lens: torch.Tensor | None = None
    spec_info: SpecInfo | None = None
    actual_forward_mode: ForwardMode | None = None
    num_padding: int | None = None
    num_token_non_padded: torch.Tensor | None = None
    mamba_track_indices: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """What the scheduler hands over for one step: real requests only, on the host.

    Attributes:
        mode: live mode (IDLE has no requests).
        req_pool_indices: [b] int64.
        seq_lens: [b] int64, in tokens, with the meaning of the mode.
        out_cache_loc: [b * tokens_per_req] int64.
        positions: [b * tokens_per_req] int64.
        num_accept_tokens: [b] int32 or None, draft extend.
        custom_mask: flat bool tree mask or None, target verify with topk > 1. Request r has N rows of seq_lens[r] + N
            cells; cell j of row i says whether draft token i may read KV position j.
        retrieve_next_token, retrieve_next_sibling: [b, N] int64 tree links or None, target verify; -1 ends a chain.
        encoder_lens: [b] int32 or None; encoder tokens stored at the front of the req_to_token row.
        mamba_track_indices: [b] int64 or None; where linear attention's states go for the prefix cache.
    """

    mode: ForwardMode
    req_pool_indices: np.ndarray
    seq_lens: np.ndarray
    out_cache_loc: np.ndarray
    positions: np.ndarray
    num_accept_tokens: np.ndarray | None = None
    custom_mask: np.ndarray | None = None
    retrieve_next_token: np.ndarray | None = None
    retrieve_next_sibling: np.ndarray | None = None
    encoder_lens: np.ndarray | None = None
    mamba_track_indices: np.ndarray | None = None

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True)
class Pools:
    """The engine's shared tables. The scheduler rewrites them between steps; backends only read, cursors excepted.

    Attributes:
        req_to_token: [rows, width] int32, row-contiguous. KV slot of each token; row 0 zeros; -1 = no slot.
        full_to_swa: [slots + page + 1] int64 or None. Slot in the sliding-window pool; last element -1, so that
            index -1 maps to -1.
        swa_write: whether the active KV pool itself is a sliding-window pool, i.e. writes need mapping too.
        state_slots: [rows] int32 or None. Request row -> recurrent-state slot, for linear attention.
        physical_slots: [slots] int32 or None. State slot -> place in a pool that moves states; None: they are the same.
        ring_cursors: [slots] int32 or None. Place of each slot's state -> next entry of the ring of inputs from which
            it is replayed. A rebuild moves them.
        ring_length: entries of a ring.
    """

    req_to_token: torch.Tensor
    full_to_swa: torch.Tensor | None = None
    swa_write: bool = True
    state_slots: torch.Tensor | None = None
    physical_slots: torch.Tensor | None = None
    ring_cursors: torch.Tensor | None = None
    ring_length: int = 0

    @property
    def writes_swa(self) -> bool:
        return self.full_to_swa is not None and self.swa_write


def make_pools(
    *,
    rows: int,
    width: int,
    page_size: int,
    swa: bool,
    seed: int,
    device: torch.device | str,
    unmapped: float = 0.25,
) -> Pools:
    """Random but page-consistent tables: every page of a row is a distinct page of the pool, row 0 is zeros.

    Args:
        rows: rows of req_to_token, the padding row included.
        width: columns, in tokens.
        unmapped: share of pages with no sliding-window copy (evicted), which map to slot 0.
    """
    rng = np.random.default_rng(seed)
    pages_per_row = -(-width // page_size)
    n_pages = (rows - 1) * pages_per_row + 1
    if n_pages * page_size >= 2**31:
        raise ValueError(
            f"req_to_token of {rows} x {width} needs {n_pages * page_size} slots; slots are int32 (below 2**31)"
        )
    # Page 0 is the padding page. A permutation makes every cell of the table tell which row and column it is. All
    # int32: tables of a long context are gigabytes.
    pages = (rng.permutation(n_pages - 1).astype(np.int32) + 1).reshape(rows - 1, pages_per_row)
    table = np.zeros((rows, width), dtype=np.int32)
    table[1:] = np.repeat(pages, page_size, axis=1)[:, :width] * np.int32(page_size)
    table[1:] += np.arange(width, dtype=np.int32) % page_size
    mapping = None
    if swa:
        swa_pages = rng.permutation(n_pages)
        swa_pages[rng.random(n_pages) < unmapped] = 0
        swa_pages[0] = 0
        full = np.zeros((n_pages + 1) * page_size + 1, dtype=np.int64)
        full[: n_pages * page_size] = (swa_pages[:, None] * page_size + np.arange(page_size)).ravel()
        full[: n_pages * page_size][np.repeat(swa_pages == 0, page_size)] = 0
        full[-1] = -1
        mapping = torch.from_numpy(full).to(device)
    states = torch.from_numpy(rng.permutation(rows).astype(np.int32)).to(device)
    cursors = torch.from_numpy(rng.integers(0, RING_LENGTH, rows).astype(np.int32)).to(device)
    return Pools(
        torch.from_numpy(table).to(device), mapping, state_slots=states, ring_cursors=cursors, ring_length=RING_LENGTH
    )


def context_lengths(spec: str | int | Sequence[int], n: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """n context lengths in tokens, within 1..limit.

    Args:
        spec: a number (all equal), ``uniform:LO:HI``, ``loguniform:LO:HI``, or a list (cycled over requests).

    Raises:
        ValueError: not one of these, or a length outside 1..limit.
    """
    if isinstance(spec, str) and not spec.strip().isdigit():
        kind, *bounds = spec.split(":")
        try:
            low, high = (int(x) for x in bounds)
        except ValueError:
            raise ValueError(
                f"context {spec!r} is not a number, 'uniform:LO:HI', 'loguniform:LO:HI' or a list like 1+63+64"
            ) from None
        _check_lengths(np.array([low, high]), limit, spec)
        if kind == "uniform":
            return rng.integers(low, high + 1, n)
        if kind == "loguniform":
            return np.clip(np.exp(rng.uniform(np.log(low), np.log(high + 1), n)).astype(np.int64), low, high)
        raise ValueError(f"context {spec!r}: unknown mix {kind!r}. Known: uniform, loguniform")
    given = np.atleast_1d(np.asarray(spec, dtype=np.int64))
    _check_lengths(given, limit, spec)
    return np.resize(given, n)


def parse_context(text: str) -> str | tuple[int, ...]:
    """A ``--context`` item: ``8192``, ``uniform:1:8192``, ``loguniform:1:131072`` or ``1+63+64`` (a list)."""
    return tuple(int(x) for x in text.split("+")) if "+" in text else text


def _check_lengths(lengths: np.ndarray, limit: int, spec: object) -> None:
    if lengths.size == 0 or lengths.min() < 1 or lengths.max() > limit:
        raise ValueError(f"context {spec!r}: lengths must be within 1..{limit} (max context less the tokens added)")


def live_batch(
    mode: ForwardMode,
    lengths: Sequence[int] | np.ndarray,
    rows: Sequence[int] | np.ndarray,
    pools: Pools,
    tokens_per_req: int,
    rng: np.random.Generator,
    *,
    topk: int = 0,
    draft_steps: int = 0,
    page_size: int = 1,
) -> LiveBatch:
    """A batch over given rows, with write slots taken from the table where the mode writes its tokens.

    `lengths` follow the mode's own meaning of seq_lens: decode includes the token being decoded, draft decode and
    verify do not include the draft tokens, draft extend includes them. Verify with topk > 1 gets a random tree. Draft
    decode with `draft_steps` gets the slots of all of them, as engines pass them: [b, K, S], steps innermost.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    rows = np.asarray(rows, dtype=np.int64)
    if mode is ForwardMode.DRAFT_DECODE and draft_steps:
        topk = max(topk, 1)
        columns = draft_columns(lengths, topk, draft_steps, page_size)
        there = pools.req_to_token.device
        slots = pools.req_to_token[
            torch.from_numpy(np.repeat(rows, topk * draft_steps)).to(there), torch.from_numpy(columns.ravel()).to(there)
        ]
        return LiveBatch(mode, rows, lengths, slots.cpu().numpy().astype(np.int64), np.repeat(lengths, topk))
    first = lengths.copy()
    if mode is ForwardMode.DECODE:
        first -= 1
    elif mode in (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2):
        first = np.maximum(first - tokens_per_req, 0)
    positions = (first[:, None] + np.arange(tokens_per_req)).reshape(-1)
    table = pools.req_to_token
    at_rows = torch.from_numpy(np.repeat(rows, tokens_per_req)).to(table.device)
    loc = table[at_rows, torch.from_numpy(positions).to(table.device)].cpu().numpy().astype(np.int64)
    live = LiveBatch(mode, rows, lengths, loc, positions)
    if mode in (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2):
        accepted = rng.integers(1, tokens_per_req + 1, len(lengths)).astype(np.int32)
        return replace(live, num_accept_tokens=accepted)
    if mode is ForwardMode.TARGET_VERIFY:
        return _with_tree(live, tokens_per_req, max(topk, 1), rng)
    return live


def draft_columns(lengths: np.ndarray, topk: int, draft_steps: int, page_size: int) -> np.ndarray:
    """[b, K, S] columns of req_to_token that hold the draft tokens of each branch and step.

    With pages, a branch owns whole pages behind the prefix, whose first slots repeat the prefix's partial page.
    """
    branch, step = np.arange(topk)[:, None], np.arange(draft_steps)
    partial = lengths % page_size
    stride = np.full_like(lengths, draft_steps)
    if page_size > 1:
        stride = -(-(partial + draft_steps) // page_size) * page_size
    return lengths[:, None, None] + branch * stride[:, None, None] + step


def draft_room(topk: int, draft_steps: int, page_size: int) -> int:
    """Columns behind the longest prefix that `draft_columns` may reach."""
    worst = np.arange(page_size)
    return int((draft_columns(worst, topk, draft_steps, page_size) - worst[:, None, None]).max()) + 1


def _with_tree(live: LiveBatch, n: int, topk: int, rng: np.random.Generator) -> LiveBatch:
    """Random draft trees of n tokens a request: parents, depths as positions, the mask and the child links."""
    b = live.batch_size
    parents = np.zeros((b, n), dtype=np.int64)
    for i in range(1, n):  # topk 1 is a chain; wider trees attach anywhere above
        parents[:, i] = i - 1 if topk == 1 else rng.integers(0, i, b)
    sees = np.zeros((b, n, n), dtype=bool)
    next_token = np.full((b, n), -1, dtype=np.int64)
    next_sibling = np.full((b, n), -1, dtype=np.int64)
    for r in range(b):
        for i in range(n):
            sees[r, i, i] = True
            if i:
                sees[r, i] |= sees[r, parents[r, i]]
        for i in range(n - 1, 0, -1):  # children in reverse, so that the first child heads the chain
            next_sibling[r, i] = next_token[r, parents[r, i]]
            next_token[r, parents[r, i]] = i
    rows = [np.hstack([np.ones((n, int(length)), dtype=bool), sees[r]]) for r, length in enumerate(live.seq_lens)]
    mask = np.concatenate([m.ravel() for m in rows]) if rows else np.zeros(0, dtype=bool)
    depth = sees.sum(axis=2) - 1
    return replace(
        live,
        positions=(live.seq_lens[:, None] + depth).reshape(-1),
        custom_mask=mask if topk > 1 else None,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
    )


def idle_batch() -> LiveBatch:
    """No requests at all: what a data-parallel rank without work replays."""
    empty = np.zeros(0, dtype=np.int64)
    return LiveBatch(ForwardMode.IDLE, empty, empty, empty, empty, np.zeros(0, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a generator of live batches needs to know.

    Attributes:
        mode: live mode.
        bucket: captured batch size.
        page_size, max_context: in tokens.
        tokens_per_req: written tokens per request and step.
        reserve: tokens the mode adds on top of seq_lens; lengths stay within max_context - reserve.
        minimum: smallest legal seq_lens (draft extend counts its own tokens).
        topk: branches of the draft tree, for verify and draft decode.
        draft_steps: steps whose slots a draft decode brings, all at once; 0 where it brings those of its own step.
    """

    mode: ForwardMode
    bucket: int
    page_size: int
    max_context: int
    tokens_per_req: int = 1
    reserve: int = 0
    minimum: int = 1
    topk: int = 0
    draft_steps: int = 0

    @property
    def limit(self) -> int:
        return self.max_context - self.reserve


def edge_lengths(shape: BatchShape) -> list[int]:
    """Lengths at which a metadata kernel can go wrong: page edges and the context limit."""
    page, top = shape.page_size, shape.limit
    wanted = (1, page - 1, page, page + 1, 2 * page - 1, 2 * page, top - page, top - 1, top)
    return sorted({x for x in wanted if shape.minimum <= x <= top} or {top})


def batch_sequence(shape: BatchShape, pools: Pools, seed: int) -> Iterator[LiveBatch]:
    """The sequence every conformance check replays: grow, shrink, pad, repeat rows, hit the limit, idle, again.

    Each batch fits `shape.bucket`. The order matters: long before short leaves stale columns behind, a padded batch
    after a full one leaves stale rows.
    """
    rng = np.random.default_rng(seed)
    rows_of = lambda n: 1 + rng.permutation(pools.req_to_token.shape[0] - 1)[:n]  # noqa: E731
    edges = np.array(edge_lengths(shape))

    def make(lengths: np.ndarray, rows: np.ndarray | None = None) -> LiveBatch:
        rows = np.resize(rows_of(len(lengths)), len(lengths)) if rows is None else rows
        return live_batch(
            shape.mode,
            lengths,
            rows,
            pools,
            shape.tokens_per_req,
            rng,
            topk=shape.topk,
            draft_steps=shape.draft_steps,
            page_size=shape.page_size,
        )

    full, short = shape.bucket, max(shape.minimum, min(shape.limit, shape.page_size))
    yield make(np.resize(edges, full))
    yield make(np.full(full, shape.limit))  # grow to the limit
    yield make(np.full(full, short))  # shrink: everything right of one page is stale now
    for live in sorted({max(full - 1, 1), 1}):
        yield make(rng.integers(shape.minimum, shape.limit + 1, live))  # pad to the bucket
    one = rows_of(1)
    yield make(rng.integers(shape.minimum, shape.limit + 1, full), np.resize(one, full))  # repeated pool row
    if shape.mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        yield idle_batch()
    yield make(np.resize(edges[::-1], full))
    growing = rng.integers(shape.minimum, max(shape.minimum, shape.limit - 3) + 1, full)
    rows = np.resize(rows_of(full), full)
    for step in range(3):  # a decode that walks over page edges, row for row
        yield make(np.minimum(growing + step, shape.limit), rows)


def with_unassigned_slots(pools: Pools, seed: int, share: float = 0.1) -> Pools:
    """The same tables with some slots of live rows set to -1, as an engine does for tokens with no KV slot."""
    table = pools.req_to_token.clone()
    generator = torch.Generator().manual_seed(seed)
    holes = (torch.rand(table.shape, generator=generator) < share).to(table.device)
    holes[PADDING_ROW] = False
    table[holes] = -1
    return replace(pools, req_to_token=table)
