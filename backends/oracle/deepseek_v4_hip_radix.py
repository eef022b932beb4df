"""What DeepSeek-V4 metadata must hold on HIP: the CUDA backend's, unclamped lengths, unified-KV streams."""

from __future__ import annotations

import numpy as np

from . import Expected, HostBatch, HostPools, deepseek_v4

WINDOW = deepseek_v4.SWA_WINDOW


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    topk: int,
    num_sms: int,
    rings: tuple[int, int],
    unified: tuple[int, int] | None = None,
) -> dict[str, Expected]:
    """Every metadata field by name. unified: rows of a request's ring and rows before the compressed region."""
    fields = deepseek_v4.expected(batch, pools, topk=topk, num_sms=num_sms, rings=rings, keep_draft=False)
    context, rows = deepseek_v4.contexts(batch)
    if "indexer.schedule" in fields:
        fields["c4_sparse_topk_lengths_raw"] = _vector([min(n // 4, topk) for n in context])
        fields["c128_topk_lengths_raw"] = _vector([n // 128 for n in context])
    if unified is None:
        return fields
    ring, swa_pages = unified
    if batch.mode in ("decode", "draft_decode"):
        more = streams(context, rows, fields["c128_page_indices"].values, topk, ring, swa_pages)
    else:
        more = chunks(batch)
    if "c4_out_loc" in fields:
        more["c4_out_loc"] = Expected.whole(fields["c4_out_loc"].values + swa_pages)
        more["c128_out_loc"] = Expected.whole(fields["c128_out_loc"].values + swa_pages)
    return fields | {f"unified.{name}": field for name, field in more.items()}


def _vector(values, dtype=np.int32) -> Expected:
    return Expected.whole(np.array(values, dtype=dtype))


def streams(
    context: list[int], rows: list[int], c128_pages: np.ndarray, topk: int, ring: int, swa_pages: int
) -> dict[str, Expected]:
    """Three ragged lists, each row's window oldest first; the layers write the compressed part of the last one."""
    t, width = len(context), c128_pages.shape[1]
    windows = [[r * ring + p % ring for p in range(max(n - WINDOW, 0), n)] for n, r in zip(context, rows, strict=True)]
    c128 = [[e if e == -1 else int(e) + swa_pages for e in c128_pages[i, : n // 128]] for i, n in enumerate(context)]
    c4 = [[None] * min(n // 4, topk) for n in context]
    fields = {"swa_loc": _vector([r * ring + (n - 1) % ring for n, r in zip(context, rows, strict=True)])}
    for name, tails, columns in (("swa", [[]] * t, 0), ("hca", c128, width), ("csa", c4, -(-topk // 64) * 64)):
        segments = [window + tail for window, tail in zip(windows, tails, strict=True)]
        fields[f"{name}_indptr"] = Expected.prefix_sum(np.array([len(s) for s in segments]))
        cells = [cell for segment in segments for cell in segment]
        values = np.zeros(t * (WINDOW + columns), dtype=np.int32)
        written = np.zeros(values.shape, dtype=bool)
        for i, cell in enumerate(cells):
            if cell is not None:
                values[i], written[i] = cell, True
        fields[f"{name}_indices"] = Expected(values, written, written)
    return fields


def chunks(batch: HostBatch) -> dict[str, Expected]:
    """Of each query row's request: its state slot, tokens before the chunk, first query row and last position."""
    n = batch.tokens_per_req
    added = n if batch.mode == "target_verify" else 0
    per_request = [
        (int(r), int(s) + added - n, b * n, int(s) + added - 1)
        for b, (r, s) in enumerate(zip(batch.req_pool_indices, batch.seq_lens, strict=True))
    ]
    columns = zip(*(entry for entry in per_request for _ in range(n)), strict=True)
    names = ("pf_state_slot", "pf_chunk_start", "pf_cu_q", "pf_final_pos")
    return {name: _vector(column, np.int64) for name, column in zip(names, columns, strict=True)}
