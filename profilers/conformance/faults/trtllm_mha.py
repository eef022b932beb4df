"""Faults of page-table metadata: what engines have shipped, and what breaks each rule of capture and replay.

Labels like A03 are rows of the project's list of field reports.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from ....backends.base import AttentionConfig
from ....backends.modes import Arm, ForwardMode, TailPolicy
from ....backends.runners.decode import DecodeRunner
from ....backends.trtllm_mha import TrtllmMhaBackend
from ..matrix import Sizes
from ..subject import Subject
from . import Fault
from .variants import title_of

Mode = ForwardMode
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; Python has the name from 3.13 on
SMALL = Sizes(16, 116, (2, 4), steps=5)
WINDOWED = replace(SMALL, swa=True)
ATEN_EAGER, ATEN_GRAPH, FUSED_EAGER = map(Arm.parse, ("aten-eager", "aten-graph", "fused-eager"))

_found: list[Fault] = []


def fault(
    name: str,
    *caught_by: str,
    mode: ForwardMode = Mode.DECODE,
    sizes: Sizes = SMALL,
    arm: Arm = ATEN_GRAPH,
    also: tuple[Arm, ...] = (),
    on: Callable[[Subject], Subject] = lambda subject: subject,
) -> Callable[[type], type]:
    """Register a broken backend or runner; its docstring says what is wrong with it."""

    def register(broken: type) -> type:
        attribute = "runner_class" if issubclass(broken, DecodeRunner) else "backend_class"
        breaks = partial(Subject.but, **{attribute: broken})
        _found.append(Fault(name, title_of(broken), caught_by, mode, sizes, (arm, *also), breaks, on))
        return broken

    return register


# Wrong values.


@fault("truncated-page", "C3", sizes=replace(SMALL, holes=True))
class TruncatedPage(TrtllmMhaBackend):
    """Division that rounds toward zero: a slot of -1 becomes page 0, which belongs to somebody."""

    def _aten_pages(self, md, slots, columns):
        md.page_table[:, :columns].copy_(torch.div(slots, self.config.page_size, rounding_mode="trunc"))


@fault("window-by-page", "C3", sizes=WINDOWED)
class WindowByPage(TrtllmMhaBackend):
    """A03: page ids looked up in the token-slot map; page size 1 hides it."""

    def _aten_pages(self, md, slots, columns):
        super()._aten_pages(md, slots, columns)
        md.swa_page_table[:, :columns].copy_(self.pools.full_to_swa[slots // self.config.page_size])


@fault("running-sum-queries", "C3", mode=Mode.DRAFT_EXTEND_V2)
class RunningSumQueries(TrtllmMhaBackend):
    """A06: capture laid queries out with a fixed stride, replay sums the accepted lengths."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        md.cu_seqlens_q[1:].copy_(torch.cumsum(fb.spec_info.num_accept_tokens, 0))


@fault("prefix-only-length", "C3", mode=Mode.DRAFT_EXTEND_V2)
class PrefixOnlyLength(TrtllmMhaBackend):
    """A24: the new tokens are left out of cache_seqlens."""

    def _length_offset(self, mode, md):
        return -self.config.draft_tokens


class _NarrowConfig(AttentionConfig):
    @property
    def table_columns(self) -> int:
        return -(-self.max_context // self.page_size)


@fault("narrow-table", "C3", mode=Mode.TARGET_VERIFY, sizes=Sizes(64, 128, (2,)))
class NarrowTable(TrtllmMhaBackend):
    """A10: the table is as wide as the context, without room for draft tokens."""

    def __init__(self, config, *args: Any, **kwargs: Any) -> None:
        narrow = _NarrowConfig(**{f.name: getattr(config, f.name) for f in fields(config)})
        super().__init__(narrow, *args, **kwargs)


@fault("fixed-page-count", "C4", sizes=Sizes(32, 500, (2,)))
class FixedPageCount(TrtllmMhaBackend):
    """A14: the page loop counts tokens in steps of 64 whatever the page size."""

    def _aten_pages(self, md, slots, columns):
        turns = -(-columns * self.config.page_size // 64)
        super()._aten_pages(md, slots[:, :turns], min(turns, columns))


def _far_rows(subject: Subject) -> Subject:
    """The same tables with so much room between rows that the third starts 2^31 elements behind the first."""
    table, stride = subject.pools.req_to_token, 2**30
    elements = (table.shape[0] - 1) * stride + table.shape[1]
    if table.is_cuda:
        memory = torch.empty(elements, dtype=torch.int32, device=table.device)
    else:  # address space only: pages that nobody touches are never backed
        room = mmap.mmap(-1, elements * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        memory = torch.frombuffer(room, dtype=torch.int32)
    far = memory.as_strided(table.shape, (stride, 1))
    far.copy_(table)
    return subject.but(pools=replace(subject.pools, req_to_token=far))


@fault("wrapped-offset", "C3", sizes=Sizes(16, 116, (2,), steps=5), on=_far_rows)
class WrappedOffset(TrtllmMhaBackend):
    """A15: row times stride in 32 bits: past 2^31 elements the read lands below the table, here on zeros."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        lost = fb.req_pool_indices[: fb.batch_size] * self.pools.req_to_token.stride(0) >= 2**31
        md.page_table.masked_fill_(lost[:, None], 0)


# Stale or misplaced memory.


@fault("not-refilled", "C3", "C4")
class NotRefilled(TrtllmMhaBackend):
    """A01: replay binds the table and does not fill it."""

    def _aten_pages(self, md, slots, columns):
        pass


@fault("rebound", "C1", "C3", "C4", arm=ATEN_EAGER)
class Rebound(TrtllmMhaBackend):
    """A01, A02, A26: replay builds new tensors; the graph reads the old ones."""

    def rebuild_aten(self, fb, md):
        self.forward_metadata = replace(md, page_table=md.page_table.clone(), cu_seqlens_k=md.cu_seqlens_k.clone())
        super().rebuild_aten(fb, self.forward_metadata)


@fault("frozen-width", "C3", "C4")
class FrozenWidth(TrtllmMhaBackend):
    """A27: the classic body recorded with its column count as a host constant: the one page that padding needs."""

    def _aten_pages(self, md, slots, columns):
        columns = self._columns(self.seq_len_fill_value)
        super()._aten_pages(md, slots[:, :columns], columns)


@fault("baked-query-length", "C1", mode=Mode.DRAFT_EXTEND)
class BakedQueryLength(TrtllmMhaBackend):
    """A27: a host constant that the graph baked is set from the live batch."""

    def init_forward_metadata_out_graph(self, fb, in_capture=False):
        super().init_forward_metadata_out_graph(fb, in_capture)
        if not in_capture:
            self.forward_metadata.max_seq_len_q = 1 + self.config.draft_tokens


@fault("grows-only", "C4", "C5", arm=ATEN_EAGER)
class GrowsOnly(TrtllmMhaBackend):
    """Pages are rewritten only when the batch is wider than any before."""

    widest = 0

    def _aten_pages(self, md, slots, columns):
        if columns > self.widest:
            self.widest = columns
            super()._aten_pages(md, slots, columns)


@fault("unpadded-write-slots", "C4", "C6", sizes=WINDOWED, arm=ATEN_EAGER)
class UnpaddedWriteSlots(TrtllmMhaBackend):
    """Write slots behind the live tokens keep those of an older batch."""

    def rebuild_aten(self, fb, md):
        old = md.swa_out_cache_loc[fb.out_cache_loc.shape[0] :].clone()
        super().rebuild_aten(fb, md)
        md.swa_out_cache_loc[fb.out_cache_loc.shape[0] :].copy_(old)


@fault("stale-mirror", "C4", "C6", arm=ATEN_EAGER)
class StaleMirror(DecodeRunner):
    """The host copy of the lengths is not refreshed, so tables are sized for an older batch."""

    def load_batch(self, step):
        super().load_batch(step)
        self.slots.seq_lens_cpu.fill_(self.slots.fill_value)


@fault("unpadded-slots", "C6")
class UnpaddedSlots(DecodeRunner):
    """Padding rows keep the requests of an older batch."""

    def load_batch(self, step):
        rows = self.slots.req_pool_indices.clone()
        super().load_batch(step)
        self.slots.req_pool_indices[step.batch_size :].copy_(rows[step.batch_size :])


@fault("whole-buffer", "C16")
class WholeBuffer(TrtllmMhaBackend):
    """A small batch clears the rows of larger ones."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        self.buffers[fb.forward_mode].page_table[fb.batch_size :].zero_()


@fault("step-tensors", "C2", "C21", "L9", sizes=WINDOWED)
class StepTensors(DecodeRunner):
    """The graph records tensors that live for one step instead of static slots."""

    def capture_batch(self, bucket):
        batch = super().capture_batch(bucket)
        batch = replace(batch, out_cache_loc=batch.out_cache_loc.clone(), seq_lens=batch.seq_lens.clone())
        # Kept here, so that the fault is a wrong value and not an index out of bounds, which ends a CUDA process.
        self.__dict__.setdefault("steps", []).append(batch)
        return batch


@fault("aliased-lengths", "C17", "C22", mode=Mode.TARGET_VERIFY, sizes=replace(SMALL, lens=torch.int32))
class AliasedLengths(TrtllmMhaBackend):
    """The cast of int32 lengths is the runner's own slot, and offsets are added into it."""

    def bind(self, fb):
        return replace(super().bind(fb), cache_seqlens_int32=fb.seq_lens[: fb.batch_size])


@fault("shared-between-modes", "C15", mode=Mode.TARGET_VERIFY)
class SharedBetweenModes(TrtllmMhaBackend):
    """Verify borrows decode's page table, and nothing says so."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        verify, decode = self.buffers[Mode.TARGET_VERIFY], self.buffers[Mode.DECODE]
        self.buffers[Mode.TARGET_VERIFY] = replace(verify, page_table=decode.page_table)


@fault("built-on-miss", "C14")
class BuiltOnMiss(TrtllmMhaBackend):
    """A21: a size that was never captured gets metadata on the way, and no graph."""

    def init_forward_metadata_out_graph(self, fb, in_capture=False):
        key = fb.forward_mode, fb.batch_size
        self.metadata.setdefault(key, self.metadata.get(key) or next(iter(self.metadata.values()), None))
        super().init_forward_metadata_out_graph(fb, in_capture)


@fault("new-on-recapture", "C11")
class NewOnRecapture(TrtllmMhaBackend):
    """A second capture of a size binds new memory under graphs that are still in use."""

    def bind(self, fb):
        self.prefix_sums.pop(fb.batch_size, None)
        return super().bind(fb)


# Hooks that do what they may not.


@fault("recorded-as-is", "C8", "C9", "L1")
class RecordedAsIs(TrtllmMhaBackend):
    """The classic body inside the graph: it reads the longest length on the host."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten(fb, md)


@fault("host-maximum", "C8", "C24")
class HostMaximum(TrtllmMhaBackend):
    """B03: the longest length is read on the host before each replay."""

    def init_forward_metadata_out_graph(self, fb, in_capture=False):
        super().init_forward_metadata_out_graph(fb, in_capture)
        self.longest = int(fb.seq_lens.max())


@fault("host-list", "L2")
class HostList(TrtllmMhaBackend):
    """B02: a tensor is made from a Python list in the hook."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        md.cu_seqlens_k[:1].copy_(torch.tensor([0], dtype=torch.int32, device=self.device))


@fault("boolean-index", "L3", "C9")
class BooleanIndex(TrtllmMhaBackend):
    """A shape that depends on data."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        md.cache_seqlens_int32[md.cache_seqlens_int32 > 1].sum()


@fault("live-number", "C10", "L4")
class LiveNumber(TrtllmMhaBackend):
    """A number of the live batch becomes an argument of a recorded operation."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        md.cache_seqlens_int32.clamp_(max=fb.seq_lens_sum)


@fault("kept-tensor", "L5")
class KeptTensor(TrtllmMhaBackend):
    """The hook keeps memory of the graph's pool, which other graphs may reuse."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        self.last_lengths = md.cache_seqlens_int32 + 0


@fault("live-branch", "C10", "L6")
class LiveBranch(TrtllmMhaBackend):
    """A branch on padding: what is recorded is the capture's way, for ever."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        if fb.num_padding:
            md.cache_seqlens_int32.clamp_(min=0)


@fault("waits-in-hook", "L7")
class WaitsInHook(TrtllmMhaBackend):
    """The hook waits for the device."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()


@fault("compiles-in-hook", "L8")
class CompilesInHook(TrtllmMhaBackend):
    """First use compiles; under capture that stalls or fails."""

    def rebuild_aten_static(self, fb, md):
        if self.config.extra.get("fast"):
            torch.compile(super().rebuild_aten_static)(fb, md)
        else:
            super().rebuild_aten_static(fb, md)


@fault("fallback", "L10")
class Fallback(TrtllmMhaBackend):
    """An exception chooses the path; under capture it invalidates the stream first."""

    def rebuild_aten_static(self, fb, md):
        try:
            super().rebuild_aten_static(fb, md)
        except RuntimeError:
            super().rebuild_aten(fb, md)


@fault("warm-up-counts", "C12")
class WarmUpCounts(TrtllmMhaBackend):
    """Warm-ups leave a trace in Python state that their hook does not undo."""

    runs = 0

    def init_forward_metadata_in_graph(self, fb):
        self.runs += 1
        super().init_forward_metadata_in_graph(fb)


@fault("host-width", "C8", "C20", arm=FUSED_EAGER)
class HostWidth(TrtllmMhaBackend):
    """The fused rebuild is as wide as the host mirror says, so that a glue graph freezes the width of its capture."""

    def rebuild_fused(self, fb, md):
        unseen = md.page_table[:, self._columns(int(fb.seq_lens_cpu.max())) :]
        kept = unseen.clone()
        super().rebuild_fused(fb, md)
        unseen.copy_(kept)


@fault("one-more-dispatch", "C24", arm=ATEN_EAGER)
class OneMoreDispatch(TrtllmMhaBackend):
    """One operation more than the chain has."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        md.cache_seqlens_int32.clamp_(min=0)


@fault("own-tail", "C25", arm=ATEN_EAGER, also=(FUSED_EAGER,))
class OwnTail(TrtllmMhaBackend):
    """The fused kernel leaves other tails than it was asked for."""

    def rebuild_fused(self, fb, md):
        asked, self.tail = self.tail, TailPolicy.LIVE_ONLY
        super().rebuild_fused(fb, md)
        self.tail = asked


FAULTS = tuple(_found)
