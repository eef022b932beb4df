"""What AITER metadata must hold, by mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..modes import TailPolicy
from ..schedules import mla_work_even, mla_work_filling
from . import Expected, HostBatch, HostPools, index_list, page_table, write_slots
from .flashinfer import query_counts


def expected(
    batch: HostBatch,
    pools: HostPools,
    *,
    shapes: Mapping[str, tuple[tuple[int, ...], type]],
    offset: int,
    queries: int,
    page_size: int,
    tail: TailPolicy,
    preset_queries: bool,
    work: Mapping[str, int | bool] | None,
) -> dict[str, Expected]:
    """Every field that a rebuild of this mode touches, by path.

    Args:
        shapes: shape and dtype of each tensor that the metadata has.
        offset: tokens on top of seq_lens.
        queries: tokens per request of the captured shape.
        tail: of page tables.
        preset_queries: qo_indptr is a constant.
        work: options of the schedule, None without one.
    """
    rows, b = batch.req_pool_indices, len(batch.seq_lens)
    lengths = np.array([int(n) + offset for n in batch.seq_lens], dtype=np.int64)
    fields = {}
    if "kv_indptr" in shapes:
        (size,), dtype = shapes["kv_indices"]
        fields["kv_indptr"] = Expected.prefix_sum(lengths)
        fields["kv_indices"] = index_list(rows, [0] * b, lengths, pools, size, dtype)
    else:
        (size, width), _ = shapes["kv_indices"]
        table = page_table(rows, lengths, pools, page_size, width, tail)
        fields["kv_indices"] = _more_rows(table, size)
        if "swa_page_table" in shapes:
            table = page_table(rows, lengths, pools, page_size, width, tail, swa=True)
            fields["swa_page_table"] = _more_rows(table, size)
    if "qo_indptr" in shapes:
        starts = Expected.prefix_sum(query_counts(batch, queries))
        fields["qo_indptr"] = Expected.preset(starts.values) if preset_queries else starts
    if "kv_last_page_len" in shapes:
        fields["kv_last_page_len"] = Expected.preset(np.ones(b, dtype=np.int32))
    if "mask_indptr" in shapes:
        fields["mask_indptr"] = Expected.prefix_sum([queries * (int(n) + queries) for n in batch.seq_lens], np.int64)
    if "custom_mask" in shapes:
        mask = batch.custom_mask
        if batch.live_requests == 0:
            mask = np.ones(b * queries * (batch.seq_lens_fill + queries), dtype=bool)  # padding may see everything
        fields["custom_mask"] = _front(np.asarray(mask, dtype=np.uint8), shapes["custom_mask"][0])
    if "swa_out_cache_loc" in shapes:
        (size,), _ = shapes["swa_out_cache_loc"]
        fields["swa_out_cache_loc"] = write_slots(batch.out_cache_loc, size, pools.full_to_swa)
    if work is not None:
        fields |= _schedule(lengths.tolist(), shapes, **work)
    return fields


def _schedule(lengths: list[int], shapes, *, filling: bool, fixed_splits: int, **options) -> dict[str, Expected]:
    if filling:
        plan = mla_work_filling(lengths, **options)
    else:
        plan = mla_work_even(lengths, fixed_splits=fixed_splits, **options)
    (reduce_size,), _ = shapes["work.reduce_indptr"]
    tail = [plan.reduce_indptr[-1]] * (reduce_size - len(plan.reduce_indptr))
    found = {
        "work_indptr": plan.indptr,
        "work_info_set": plan.info,
        "reduce_indptr": plan.reduce_indptr + tail,
        "reduce_final_map": plan.reduce_final or np.zeros((0, 2)),
        "reduce_partial_map": plan.reduce_partial,
    }
    fields = {
        f"work.{name}": _front(np.array(values, dtype=np.int32), shapes[f"work.{name}"][0])
        for name, values in found.items()
    }
    # Behind the tiles the total is repeated, for as many as the largest batch has.
    ends = fields["work.reduce_indptr"]
    fields["work.reduce_indptr"] = replace(ends, live=np.arange(reduce_size) < len(plan.reduce_indptr))
    return fields


def _front(values: np.ndarray, shape: tuple[int, ...]) -> Expected:
    """`values` at the front, the rest untouched."""
    cells, written = np.zeros(shape, dtype=values.dtype), np.zeros(shape, dtype=bool)
    cells[: len(values)] = values
    written[: len(values)] = True
    return Expected(cells, written, written)


def _more_rows(table: Expected, size: int) -> Expected:
    """The table of a batch, within one of `size` rows that other batches use too."""
    grown = [np.zeros((size, table.values.shape[1]), dtype=x.dtype) for x in (table.values, table.written, table.live)]
    for whole, part in zip(grown, (table.values, table.written, table.live), strict=True):
        whole[: len(part)] = part
    return Expected(*grown, table.overflow)
