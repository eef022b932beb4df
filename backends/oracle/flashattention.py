"""What flashattention metadata must hold, by mode: one page table, or a cascade of prefix and draft attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..modes import TailPolicy
from . import Expected, HostBatch, HostPools, page_table, swa_slot, write_slots

Fields = dict[str, Expected]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the backend was built for.

    Attributes:
        page_size, width: P, and columns of the page tables.
        topk, draft_steps, step_id: K, S, s.
        windowed: layers with a sliding window exist.
        local_chunk: tokens of a local-attention chunk, 0 without.
        encoder_columns: columns of the encoder table, 0 without an encoder.
        tail: what is written right of a row's live prefix.
    """

    page_size: int
    width: int
    topk: int
    draft_steps: int
    step_id: int
    windowed: bool
    local_chunk: int
    encoder_columns: int
    tail: TailPolicy


def expected(batch: HostBatch, pools: HostPools, sizes: Sizes) -> Fields:
    """Every metadata field by path."""
    cascade = sizes.topk > 1
    if batch.mode == "draft_decode" and cascade:
        return _draft_cascade(batch, pools, sizes)
    if batch.mode == "target_verify" and cascade:
        return _verify_cascade(batch, pools, sizes) | _write_slots(batch, pools)
    fields = _one_table(batch, pools, sizes)
    if batch.mode == "decode" and sizes.local_chunk:
        name = "page_table" if pools.full_to_swa is None else "swa_page_table"
        fields |= _local(fields["cache_seqlens_int32"].values, fields[name], batch, pools, sizes)
    if batch.mode == "decode" and sizes.encoder_columns:
        fields |= _encoder(batch, pools, sizes)
    return fields


def _one_table(batch: HostBatch, pools: HostPools, sizes: Sizes) -> Fields:
    b, tokens = len(batch.seq_lens), batch.tokens_per_req
    added = {"draft_decode": sizes.step_id + 1, "target_verify": tokens}.get(batch.mode, 0)
    lengths = (batch.seq_lens + added).astype(np.int32)
    table = (batch.req_pool_indices, lengths, pools, sizes.page_size, sizes.width, sizes.tail)
    running = Expected.prefix_sum(lengths)
    decodes = batch.mode in ("decode", "draft_decode")
    fields = {
        "cache_seqlens_int32": Expected.whole(lengths),
        "cu_seqlens_q": _queries(batch, b, tokens),
        # The decode builder writes index 0 too; elsewhere it is set once.
        "cu_seqlens_k": Expected.whole(running.values) if decodes else running,
        "page_table": page_table(*table),
    }
    if pools.full_to_swa is not None:
        fields["swa_page_table"] = page_table(*table, swa=True)
    return fields | _write_slots(batch, pools)


def _queries(batch: HostBatch, b: int, tokens: int) -> Expected:
    if batch.mode == "draft_extend":
        return Expected.prefix_sum(batch.num_accept_tokens)
    if batch.mode == "draft_extend_v2":
        new = np.full(b, tokens) if batch.extend_seq_lens is None else batch.extend_seq_lens
        return Expected.prefix_sum(new)
    return _constant([i * tokens for i in range(b + 1)])


def _write_slots(batch: HostBatch, pools: HostPools) -> Fields:
    if pools.full_to_swa is None or not pools.swa_write:
        return {}
    size = len(batch.seq_lens) * batch.tokens_per_req
    return {"swa_out_cache_loc": write_slots(batch.out_cache_loc, size, pools.full_to_swa)}


def _constant(values: list[int]) -> Expected:
    return Expected.preset(np.array(values, dtype=np.int32))


def _local(lengths: np.ndarray, table: Expected, batch: HostBatch, pools: HostPools, sizes: Sizes) -> Fields:
    """One virtual request per request: the chunk that holds its last token."""
    chunk, page = sizes.local_chunk, sizes.page_size
    columns = chunk // page
    used = np.array([n % chunk or chunk for n in lengths.tolist()], dtype=np.int32)
    values = np.zeros((len(used), columns), dtype=np.int32)
    live = np.zeros(values.shape, dtype=bool)
    for r, (length, n) in enumerate(zip(lengths.tolist(), used.tolist(), strict=True)):
        last = int(table.written[r].sum()) - 1
        for j in range(columns):
            live[r, j] = j * page < n
            if live[r, j] or sizes.tail is not TailPolicy.LIVE_ONLY:
                values[r, j] = table.values[r, min((length - n) // page + j, last)]
    written = live if sizes.tail is TailPolicy.LIVE_ONLY else np.ones_like(live)
    return {
        "local_attn_metadata.local_query_start_loc": _constant(list(range(len(used) + 1))),
        "local_attn_metadata.local_seqused_k": Expected.whole(used),
        "local_attn_metadata.local_block_table": Expected(values, written, live),
    }


def _encoder(batch: HostBatch, pools: HostPools, sizes: Sizes) -> Fields:
    """Encoder tokens lie at the front of a row, the text behind them; one token to a page."""
    lens = batch.encoder_lens.astype(np.int32)
    rows, width = batch.req_pool_indices, pools.req_to_token.shape[1]
    behind = np.minimum(lens[:, None] + np.arange(width), width - 1)
    text = HostPools(np.take_along_axis(pools.req_to_token[rows], behind, axis=1))
    own_rows, lengths = np.arange(len(lens)), batch.seq_lens.astype(np.int32)
    return {
        "page_table": page_table(own_rows, lengths, text, 1, sizes.width, sizes.tail),
        "encoder_lens_int32": Expected.whole(lens),
        "encoder_cu_seqlens_k": Expected.prefix_sum(lens),
        "encoder_page_table": page_table(rows, lens, pools, 1, sizes.encoder_columns, sizes.tail),
    }


def _draft_cascade(batch: HostBatch, pools: HostPools, sizes: Sizes) -> Fields:
    """Whole prefix pages for all branches together; the partial page and the draft tokens for each branch."""
    b, k, drafts, page = len(batch.seq_lens), sizes.topk, sizes.step_id + 1, sizes.page_size
    lengths = batch.seq_lens.astype(np.int32)
    partial = lengths % page
    table = page_table(batch.req_pool_indices, lengths, pools, page, sizes.width, sizes.tail)
    whole_pages = np.arange(sizes.width) < ((lengths - partial) // page)[:, None]
    slots = np.zeros(b * k * sizes.draft_steps, dtype=np.int64)
    slots[: len(batch.out_cache_loc)] = batch.out_cache_loc
    slots = slots.reshape(b * k, sizes.draft_steps)
    values = np.zeros((b * k, drafts + 1), dtype=np.int32)
    written = np.zeros(values.shape, dtype=bool)
    # The eager chain leaves the rows of padding as they are, the others point them at the padding page.
    live_rows = batch.live_requests * k
    for row in range(live_rows if sizes.tail is TailPolicy.BATCH_MAX else b * k):
        ids = (slots[row, :drafts] // page).tolist()
        runs = ids if page == 1 else [p for j, p in enumerate(ids) if j == 0 or p != ids[j - 1]]
        values[row, : len(runs)] = runs
        written[row, : len(runs)] = True
    draft_lens = np.repeat(partial + drafts, k).astype(np.int32)
    return {
        "cache_seqlens_int32": Expected.whole(lengths - partial),
        "cu_seqlens_q": _constant([i * k for i in range(b + 1)]),
        "cu_seqlens_k": _constant([0] * (b + 1)),
        "page_table": replace(table, live=table.live & whole_pages),
        "expand.cache_seqlens_int32": Expected.whole(draft_lens) if page > 1 else Expected.preset(draft_lens),
        "expand.cu_seqlens_q": _constant(list(range(b * k + 1))),
        "expand.cu_seqlens_k": _constant([i * drafts for i in range(b * k + 1)]),
        "expand.page_table": Expected(values, written, written & (np.arange(b * k) < live_rows)[:, None]),
    }


def _verify_cascade(batch: HostBatch, pools: HostPools, sizes: Sizes) -> Fields:
    """The prefix for all draft tokens together; the draft tokens that each one sees, by its row of the tree mask."""
    b, n = len(batch.seq_lens), batch.tokens_per_req
    lengths = batch.seq_lens.astype(np.int32)
    rows = batch.req_pool_indices
    prefix = page_table(rows, lengths, pools, sizes.page_size, sizes.width, sizes.tail)
    draft = np.zeros((b * n, n), dtype=np.int32)
    counts = np.zeros(b * n, dtype=np.int32)
    for r in range(b):
        slots = pools.req_to_token[rows[r], lengths[r] : lengths[r] + n].tolist()
        for i in range(n):
            sees = _tree_row(batch, r, i, n)
            order = [j for j in range(n) if sees[j]] + [j for j in range(n) if not sees[j]]
            draft[r * n + i] = [slots[j] for j in order]
            counts[r * n + i] = sum(sees)
    seen = np.arange(n) < counts[:, None]
    fields = {
        "cache_seqlens_int32": Expected.whole(lengths),
        "cu_seqlens_q": _constant([i * n for i in range(b + 1)]),
        "cu_seqlens_k": Expected.prefix_sum(lengths),
        "page_table": prefix,
        "expand.cache_seqlens_int32": Expected.whole(counts),
        "expand.cu_seqlens_q": _constant(list(range(b * n + 1))),
        "expand.cu_seqlens_k": Expected.prefix_sum(counts),
        "expand.page_table": Expected(draft, np.ones_like(seen), seen),
    }
    return fields | (_merged(batch, pools, sizes, draft, counts) if sizes.windowed else {})


def _tree_row(batch: HostBatch, r: int, i: int, n: int) -> list[bool]:
    """Which draft tokens row i of request r sees. Padding repeats the mask's very first cell, which is true."""
    if r >= batch.live_requests:
        return [True] * n
    start = sum(n * (int(length) + n) for length in batch.seq_lens[:r])
    length = int(batch.seq_lens[r])
    first = start + i * (length + n) + length
    return batch.custom_mask[first : first + n].tolist()


def _merged(batch: HostBatch, pools: HostPools, sizes: Sizes, draft: np.ndarray, counts: np.ndarray) -> Fields:
    """Layers with a window cannot cascade: one row per query, prefix and visible draft tokens behind each other."""
    n = batch.tokens_per_req
    values = np.zeros((len(counts), sizes.width), dtype=np.int32)
    written = np.zeros(values.shape, dtype=bool)
    lengths = np.repeat(batch.seq_lens, n) + counts
    for row, count in enumerate(counts):
        r = row // n
        prefix = pools.req_to_token[batch.req_pool_indices[r], : batch.seq_lens[r]]
        slots = np.concatenate([prefix, draft[row, :count]]).astype(np.int64)
        values[row, : len(slots)] = slots if pools.full_to_swa is None else swa_slot(slots, pools.full_to_swa)
        written[row, : len(slots)] = True
    lengths = lengths.astype(np.int32)
    return {
        "swa_spec_metadata.cache_seqlens_int32": Expected.whole(lengths),
        "swa_spec_metadata.cu_seqlens_q": _constant(list(range(len(counts) + 1))),
        "swa_spec_metadata.cu_seqlens_k": Expected.whole(Expected.prefix_sum(lengths).values),
        "swa_spec_metadata.page_table": Expected(values, written, written),
    }
