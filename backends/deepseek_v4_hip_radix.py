"""DeepSeek-V4 on HIP (radix backend): the fields of deepseek_v4, unclamped lengths, and streams over one KV buffer.

What differs from deepseek_v4: verify is always built outside the graph upstream, by a loop over requests and a planner
on the host that keeps only the states of open blocks; there are no FlashMLA schedules; two lengths also come without
the clamp to 1. With the option `unified_kv` the sliding window and the compressed entries live in one buffer:

| field                          | modes                | content                                                     |
|--------------------------------|----------------------|-------------------------------------------------------------|
| swa_, hca_, csa_indptr         | decode, draft_decode | running sums of min(L, 128), + L // 128, + min(L // 4, K)   |
| swa_, hca_, csa_indices        | the same             | row * ring + p % ring of the window, oldest first; hca then |
|                                |                      | c128 pages + swa_pages; csa is finished by the layers       |
| swa_loc                        | the same             | row * ring + (L - 1) % ring                                 |
| c4_out_loc, c128_out_loc       | where compressed     | the pool's location + swa_pages                             |
| pf_state_slot, pf_chunk_start, | verify, draft extend | row; tokens before the chunk; first query row;              |
| pf_cu_q, pf_final_pos          |                      | last position: of each query row's request                  |

Everything here has a static shape, so every mode can be recorded. Source: specs of SGLang's HIP radix backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from .base import ConfigError
from .batch import ForwardBatch
from .deepseek_v4 import (
    EXTEND,
    WINDOW,
    DeepseekV4Backend,
    DeepseekV4Metadata,
    IndexerMetadata,
    Mode,
    RawMetadata,
    copy_fields,
)
from .kernels.unified_streams import append_compressed, build_window_indices, launch_unified_metadata
from .oracle import Expected, HostBatch, HostPools, deepseek_v4_hip_radix

STREAMS = ("swa_indptr", "hca_indptr", "csa_indptr", "swa_indices", "hca_indices", "csa_indices", "swa_loc")
CHUNKS = ("pf_state_slot", "pf_chunk_start", "pf_cu_q", "pf_final_pos")


@dataclass(slots=True)
class UnifiedKVMetadata:
    """Streams in decode, chunks in verify and draft extend. T query rows."""

    swa_indptr: torch.Tensor | None = None  # [T + 1] int32, device
    hca_indptr: torch.Tensor | None = None  # [T + 1] int32, device
    csa_indptr: torch.Tensor | None = None  # [T + 1] int32, device
    swa_indices: torch.Tensor | None = None  # [T * 128] int32, device, defined up to the last indptr
    hca_indices: torch.Tensor | None = None  # [T * (128 + c128 columns)] int32, device, likewise
    csa_indices: torch.Tensor | None = None  # [T * (128 + c4 columns)] int32, device; windows only
    swa_loc: torch.Tensor | None = None  # [T] int32, device
    c4_out_loc: torch.Tensor | None = None  # [T] int64, device
    c128_out_loc: torch.Tensor | None = None  # [T] int64, device
    pf_state_slot: torch.Tensor | None = None  # [T] int64, device
    pf_chunk_start: torch.Tensor | None = None  # [T] int64, device
    pf_cu_q: torch.Tensor | None = None  # [T] int64, device
    pf_final_pos: torch.Tensor | None = None  # [T] int64, device

    def copy_(self, src: UnifiedKVMetadata) -> None:
        copy_fields(self, src, copy=(*STREAMS, *CHUNKS, "c4_out_loc", "c128_out_loc"))

    def first_rows(self, rows: int, whole_rows: int) -> UnifiedKVMetadata:
        """The same over the first `rows` of `whole_rows` query rows."""
        sizes = {name: rows * (getattr(self, name).shape[0] // whole_rows) for name in self._present("_indices")}
        sizes |= {name: rows + 1 for name in self._present("_indptr")}
        return replace(self, **{name: getattr(self, name)[: sizes.get(name, rows)] for name in self._present("")})

    def _present(self, suffix: str) -> list[str]:
        return [name for name in self.__slots__ if name.endswith(suffix) and getattr(self, name) is not None]


@dataclass(slots=True)
class HipIndexerMetadata(IndexerMetadata):
    """Upstream assigns the schedule, which leaves the captured kernel the old one; here it is planned in place."""

    def copy_(self, src: IndexerMetadata) -> None:
        copy_fields(self, src, copy=("page_table", "c4_seq_lens", "topk_plan"), keep=("schedule",))


@dataclass(slots=True)
class HipRadixMetadata(DeepseekV4Metadata):
    """Adds to the CUDA backend's metadata."""

    c4_sparse_topk_lengths_raw: torch.Tensor | None = None  # [T] int32, device
    c128_topk_lengths_raw: torch.Tensor | None = None  # [T] int32, device
    unified: UnifiedKVMetadata | None = None

    copied: ClassVar[tuple[str, ...]] = (
        *DeepseekV4Metadata.copied,
        "c4_sparse_topk_lengths_raw",
        "c128_topk_lengths_raw",
        "unified",
    )


class DeepseekV4HipRadixBackend(DeepseekV4Backend):
    """DeepSeek-V4 metadata as the HIP kernels read it.

    Further options in `AttentionConfig.extra`: unified_kv, unified_ring (rows a request owns; 128 plus pending drafts),
    swa_pages (rows before the compressed region; all rings).
    """

    keep_draft = False
    staged_modes = frozenset({Mode.DECODE, Mode.DRAFT_DECODE})
    tbo_supports_cuda_graph = False
    """Two-batch overlap must leave its children alone in graphs: rebuilding their metadata at every replay leaks."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        extra = self.config.extra
        self.unified_kv = extra.get("unified_kv", False)
        self.ring = extra.get("unified_ring", WINDOW + self.config.headroom)
        self.swa_pages = extra.get("swa_pages", self.pools.req_to_token.shape[0] * self.ring)
        if self.unified_kv and self.ring < WINDOW:
            raise ConfigError(f"unified_ring must hold the window of {WINDOW} tokens, got {self.ring}")
        if self.unified_kv and self.pools.req_to_token.shape[0] * self.ring > self.swa_pages:
            raise ConfigError(
                f"swa_pages is {self.swa_pages}, the rings of {self.pools.req_to_token.shape[0]} requests need "
                f"{self.pools.req_to_token.shape[0] * self.ring} rows"
            )
        super().init_cuda_graph_state(max_bs, max_num_tokens)

    def _allocate(self, mode: Mode) -> HipRadixMetadata:
        own = super()._allocate(mode)
        compressed = own.indexer is not None
        names = DeepseekV4Metadata.__slots__
        return HipRadixMetadata(
            **{name: getattr(own, name) for name in names if not name.endswith("flashmla_metadata")},
            c1_flashmla_metadata=None,
            c4_sparse_topk_lengths_raw=self._int32(self.max_tokens) if compressed else None,
            c128_topk_lengths_raw=self._int32(self.max_tokens) if compressed else None,
            unified=self._allocate_unified(own, mode) if self.unified_kv else None,
        )

    def _allocate_unified(self, own: DeepseekV4Metadata, mode: Mode) -> UnifiedKVMetadata:
        t, int32 = self.max_tokens, self._int32
        long = lambda: torch.zeros(t, dtype=torch.int64, device=self.device)  # noqa: E731
        if mode in EXTEND:
            return UnifiedKVMetadata(**{name: long() for name in CHUNKS})
        if mode is Mode.TARGET_VERIFY:
            return UnifiedKVMetadata(c4_out_loc=long(), c128_out_loc=long(), **{name: long() for name in CHUNKS})
        return UnifiedKVMetadata(
            *(int32(t + 1) for _ in range(3)),
            swa_indices=int32(t * WINDOW),
            hca_indices=int32(t * (WINDOW + own.c128_page_indices.shape[1])),
            csa_indices=int32(t * (WINDOW + own.c4_sparse_page_indices.shape[1])),
            swa_loc=int32(t),
            c4_out_loc=long(),
            c128_out_loc=long(),
        )

    def bind(self, fb: ForwardBatch) -> HipRadixMetadata:
        md = super().bind(fb)
        if md.indexer is not None:
            md.indexer = HipIndexerMetadata(*(getattr(md.indexer, name) for name in IndexerMetadata.__slots__))
        if self.unified_kv:
            rows = md.seq_lens_casual.shape[0]
            md.unified = self.buffers[fb.forward_mode].unified.first_rows(rows, self.max_tokens)
        return md

    def swa_store_rows(
        self, fb: ForwardBatch, md: HipRadixMetadata, pool: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Rows of the unified buffer that a layer stores its tokens in.

        Args:
            pool, positions: [n] row of req_to_token and position of each token that is stored now.
        """
        cached = None if md.unified is None else md.unified.swa_loc
        live = fb.actual_forward_mode is not Mode.IDLE and self.config.draft_steps <= 1
        if cached is not None and live and cached.shape == positions.shape:
            return cached
        # The metadata of every draft step holds the committed position; the layers know the step's own.
        return (pool * self.ring + positions % self.ring).to(torch.int32)

    # The classic chain.

    def _new_schedule(self, md: HipRadixMetadata) -> torch.Tensor:
        return md.indexer.schedule.detach()

    def _aten_raw_lengths(self, built: HipRadixMetadata, c128_lengths: torch.Tensor) -> None:
        built.c4_sparse_topk_lengths_raw = torch.clamp(built.c4_topk_lengths_raw, max=self.topk)
        built.c128_topk_lengths_raw = c128_lengths

    def _aten_more(self, built: HipRadixMetadata, fb: ForwardBatch, raw: RawMetadata, pool: torch.Tensor) -> None:
        if not self.unified_kv:
            return
        if fb.forward_mode in (Mode.DECODE, Mode.DRAFT_DECODE):
            built.unified = self._aten_streams(built, pool)
        else:
            built.unified = UnifiedKVMetadata(**self._aten_chunks(fb, raw))
        if built.c4_out_loc is not None:
            built.unified.c4_out_loc = built.c4_out_loc + self.swa_pages
            built.unified.c128_out_loc = built.c128_out_loc + self.swa_pages

    def _aten_streams(self, built: HipRadixMetadata, pool: torch.Tensor) -> UnifiedKVMetadata:
        bound = built.unified  # `built` starts out as a copy of the captured struct
        slot, windows = pool.to(torch.int32), built.swa_topk_lengths
        counts = (windows, windows + built.c128_topk_lengths_raw, windows + built.c4_sparse_topk_lengths_raw)
        indptrs = tuple(F.pad(torch.cumsum(n, dim=0, dtype=torch.int32), (1, 0)) for n in counts)
        # Streams are defined up to their last indptr only, so the rest keeps what it held.
        indices = tuple(t.clone() for t in (bound.swa_indices, bound.hca_indices, bound.csa_indices))
        requests = torch.arange(slot.shape[0], device=self.device)
        build_window_indices(slot, built.seq_lens_casual, requests, indptrs, indices, self.ring)
        pages, lengths = built.c128_page_indices.view(-1), built.c128_topk_lengths_raw.view(-1)
        width = built.c128_page_indices.shape[1]
        append_compressed(pages, lengths, windows, indptrs[1], indices[1], self.swa_pages, width)
        ring_rows = slot.to(torch.int64) * self.ring + built.positions_casual.to(torch.int64) % self.ring
        return UnifiedKVMetadata(*indptrs, *indices, swa_loc=ring_rows.to(torch.int32))

    def _aten_chunks(self, fb: ForwardBatch, raw: RawMetadata) -> dict[str, torch.Tensor]:
        n, b = self._queries(fb), fb.batch_size
        widths = torch.full((b,), n, dtype=torch.int64, device=self.device)
        if fb.forward_mode is Mode.TARGET_VERIFY:
            start, total = raw.seq_lens, raw.seq_lens + n
        else:
            start, total = raw.seq_lens - widths, raw.seq_lens
        request = torch.arange(b, device=self.device).repeat_interleave(widths)
        return {
            "pf_state_slot": raw.req_pool_indices[request],
            "pf_chunk_start": start[request],
            "pf_cu_q": (torch.cumsum(widths, dim=0) - widths)[request],
            "pf_final_pos": (total - 1)[request],
        }

    # The same without allocations, for graphs.

    def _static_compressed(self, md: HipRadixMetadata, context: torch.Tensor) -> None:
        super()._static_compressed(md, context)
        md.c4_sparse_topk_lengths_raw.copy_((context // 4).clamp(max=self.topk))
        md.c128_topk_lengths_raw.copy_(context // 128)

    def _static_more(self, fb: ForwardBatch, md: HipRadixMetadata) -> None:
        u = md.unified
        if u is None:
            return
        if u.c4_out_loc is not None:
            u.c4_out_loc.copy_(md.c4_out_loc + self.swa_pages)
            u.c128_out_loc.copy_(md.c128_out_loc + self.swa_pages)
        b, n, pool = fb.batch_size, self._queries(fb), fb.req_pool_indices[: fb.batch_size]
        if u.swa_indptr is None:
            total = md.seq_lens_casual.view(b, n)[:, -1:]
            u.pf_state_slot.view(b, n).copy_(pool[:, None])
            u.pf_chunk_start.view(b, n).copy_(total - n)
            u.pf_cu_q.view(b, n).copy_(self.row_offsets[:b, None] * n)
            u.pf_final_pos.view(b, n).copy_(total - 1)
            return
        windows = md.swa_topk_lengths
        u.swa_indptr[1:].copy_(torch.cumsum(windows, 0))
        u.hca_indptr[1:].copy_(torch.cumsum(windows + md.c128_topk_lengths_raw, 0))
        u.csa_indptr[1:].copy_(torch.cumsum(windows + md.c4_sparse_topk_lengths_raw, 0))
        build_window_indices(
            pool,
            md.seq_lens_casual,
            self.row_offsets[:b],
            (u.swa_indptr, u.hca_indptr, u.csa_indptr),
            (u.swa_indices, u.hca_indices, u.csa_indices),
            self.ring,
        )
        pages = md.c128_page_indices
        append_compressed(
            pages, md.c128_topk_lengths_raw, windows, u.hca_indptr, u.hca_indices, self.swa_pages, pages.shape[1]
        )
        u.swa_loc.copy_(pool * self.ring + md.positions_casual % self.ring)

    def rebuild_fused(self, fb: ForwardBatch, md: HipRadixMetadata) -> None:
        if md.unified is None:
            super().rebuild_fused(fb, md)
            return
        self._checked_slots(fb.out_cache_loc, md.raw_out_loc.shape[0])
        launch_unified_metadata(md, *self._launch_arguments(fb), ring=self.ring, swa_pages=self.swa_pages)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        return deepseek_v4_hip_radix.expected(
            batch,
            pools,
            topk=self.topk,
            num_sms=self.num_sms,
            rings=self.rings,
            unified=(self.ring, self.swa_pages) if self.unified_kv else None,
        )
