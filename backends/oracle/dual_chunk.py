"""What dual_chunk metadata must hold."""

from __future__ import annotations

import numpy as np

from . import Expected, HostBatch, HostPools, pages


def expected(
    batch: HostBatch, pools: HostPools, *, page_size: int, width: int, chunk: int, scale: np.ndarray | None
) -> dict[str, Expected]:
    """Every metadata field by name.

    Args:
        width: columns of the tables.
        chunk: tokens of a chunk, without its local part.
        scale: [>= longest length + 1] float32, scaling factor of each length, or None.
    """
    lengths = batch.seq_lens.astype(np.int32)
    whole = np.zeros((len(lengths), width), dtype=np.int32)
    intra, succ = np.zeros_like(whole), np.zeros_like(whole)
    intra_lens, succ_lens, inter_lens = (np.zeros_like(lengths) for _ in range(3))
    widest = pages(lengths.max(), page_size)
    for r, length in enumerate(lengths.tolist()):
        row = pools.req_to_token[batch.req_pool_indices[r]]
        whole[r, :widest] = row[: widest * page_size : page_size] // page_size
        own = pages(length, page_size)
        index = (length - 1) // chunk  # chunks before the last one
        first, before = index * chunk // page_size, max(index - 1, 0) * chunk // page_size
        intra_lens[r] = length - index * chunk
        intra[r, : own - first] = whole[r, first:own]
        succ_lens[r] = chunk if index else 0
        inter_lens[r] = max(index - 1, 0) * chunk
        until = min(before + chunk // page_size, own)
        succ[r, : until - before] = whole[r, before:until]
    fields = {
        "seq_lens_tensor": Expected.whole(lengths),
        "orig_seq_lens_tensor": Expected.whole(lengths),
        "block_tables": Expected.whole(whole),
        "seq_lens_intra": Expected.whole(intra_lens),
        "block_tables_intra": Expected.whole(intra),
        "seq_lens_succ": Expected.whole(succ_lens),
        # Left as it was while no row has a second chunk: every length into it is 0 then.
        "block_tables_succ": Expected.whole(succ) if succ_lens.any() else _untouched(succ),
        "seq_lens_inter": Expected.whole(inter_lens),
    }
    if scale is not None:
        fields["scaling_factor"] = Expected.whole(scale[lengths])
    return fields


def _untouched(values: np.ndarray) -> Expected:
    nowhere = np.zeros(values.shape, dtype=bool)
    return Expected(values, nowhere, nowhere)
