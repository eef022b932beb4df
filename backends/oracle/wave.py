"""What Wave's metadata must hold where it is not the Triton backend's: index lists that the engine made."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from . import Expected, HostBatch
from .triton import front, split_counts


def given_lists(batch: HostBatch, *, capacity: int, split_size: int, splits: Mapping[str, int]) -> dict[str, Expected]:
    """Draft decode: copies of the given lists, and split counts of each branch.

    Args:
        capacity, split_size: entries of kv_indices and of num_kv_splits.
        splits: arguments of `split_counts` but the lengths.
    """
    lengths = [int(n) for n in batch.seq_lens]
    branches = (len(batch.kv_indptr) - 1) // len(lengths)
    return {
        "kv_indptr": Expected.whole(batch.kv_indptr.astype(np.int32)),
        "kv_indices": front(batch.kv_indices[: batch.kv_indptr[-1]], capacity, np.int32),
        "num_kv_splits": front(split_counts(lengths, branches=branches, **splits), split_size, np.int32),
    }
