"""What FlashInfer's MLA wrapper must find on the device, by mode."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from . import Expected, HostBatch, HostPools, index_list
from .flashinfer import query_counts


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    shapes: Mapping[str, tuple[tuple[int, ...], type]],
    offset: int,
    queries: int,
) -> dict[str, Expected]:
    """Every tensor that a rebuild of this mode touches.

    Args:
        shapes: shape and dtype of each tensor that the metadata has.
        offset: tokens on top of seq_lens.
        queries: tokens per request of the captured shape.
    """
    b = len(batch.seq_lens)
    lengths = [int(n) + offset for n in batch.seq_lens]
    (size,), dtype = shapes["kv_indices"]
    fields = {
        "kv_indptr": Expected.prefix_sum(lengths),
        "kv_indices": index_list(batch.req_pool_indices, [0] * b, lengths, pools, size, dtype),
    }
    if "qo_indptr" in shapes:
        fields["qo_indptr"] = Expected.prefix_sum(query_counts(batch, queries))
        fields["kv_len"] = Expected.whole(np.array(lengths, dtype=np.int32))
    return fields
