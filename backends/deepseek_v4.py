"""DeepSeek-V4: sliding-window, 4-fold and 128-fold compressed attention over one request table. Pages of 256 tokens.

A request has N query rows, row t = b * N + j; L is the context of a row, itself included, q its row of req_to_token.

| mode                          | N | L                | compressed fields | write location          |
|-------------------------------|---|------------------|-------------------|-------------------------|
| decode, idle, draft_decode    | 1 | len              | yes               | out_cache_loc, then 0   |
| target_verify                 | t | len + 1 + j      | yes               | the same                |
| draft_extend, draft_extend_v2 | t | len - N + 1 + j  | no                | the same                |

swa_page_indices[t, k] = full_to_swa[req_to_token[q, L - 1 - k]], newest first, -1 before the first token;
page_table[t, c] = floor(req_to_token[q, 256 c] / 256). A token that ends a block of 4 (128) writes a compressed entry.
The indexer gets a paged-MQA schedule and a top-k plan of L // 4, each compressor a plan (`kernels/compress_plan`).

Upstream builds a small raw struct before replay and upgrades it to fresh tensors inside the graph, where they live in
the graph's pool and are out of Python's reach. Here everything is allocated once, at the largest size, and rebuilt in
place, so there is nothing to upgrade and the struct that Python holds is the one the graph writes. The option
`two_stage` keeps upstream's first stage for the recorded classic chain, to measure what it leaves on the host.
Source: specs of SGLang's deepseek_v4 backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from .base import Allowances, AttentionBackend, ConfigError
from .batch import ForwardBatch
from .kernels.compress_plan import build_decode_plan, build_verify_plan
from .kernels.compressed_fields import build_compressed_fields
from .kernels.deepseek_v4_metadata import launch_deepseek_v4_metadata
from .kernels.paged_mqa_schedule import paged_mqa_schedule
from .kernels.topk_plan import topk_v2_plan
from .modes import ForwardMode, Implementation, TailPolicy
from .oracle import Expected, HostBatch, HostPools, deepseek_v4
from .schedules import multiprocessors

Mode = ForwardMode

PAGE = 256
WINDOW = 128
ALIGNMENT = 64
"""Index lists are padded to multiples of this."""
MAX_REQUESTS, MAX_TOKENS = 1024, 65535
"""Limits of the compressor plans: request ids are scanned at once, token ids are 16 bits wide."""
EXTEND = (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)


def copy_fields(
    dst,
    src,
    *,
    equal: Sequence[str] = (),
    copy: Sequence[str] = (),
    assign: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> None:
    """Refill a captured struct from one that was built for this batch; every field is listed exactly once.

    Args:
        equal: constants of the captured shape; a difference is an error.
        copy: tensors and structs that are refilled in place, absent in both or in neither.
        assign: Python values that no captured kernel reads.
        keep: what somebody else rebuilds.

    Raises:
        AssertionError: a field is listed twice or not at all, a constant differs, or a field is absent on one side.
    """
    listed, names = sorted([*equal, *copy, *assign, *keep]), sorted(f.name for f in fields(dst))
    assert listed == names, f"{type(dst).__name__} lists {listed}, its fields are {names}"
    for name in equal:
        a, b = getattr(dst, name), getattr(src, name)
        assert a == b, f"{name} was {a} at capture, is {b}"
    for name in copy:
        a, b = getattr(dst, name), getattr(src, name)
        assert (a is None) == (b is None), f"{name} is {'absent' if a is None else 'present'} at capture only"
        if a is not None:
            a.copy_(b)
    for name in assign:
        setattr(dst, name, getattr(src, name))


@dataclass(slots=True)
class RawMetadata:
    """What upstream puts together before a replay: the batch's own vectors, padded. Buffers of this backend, never
    the runner's, so that what stands in for an idle batch is not written into the runner's slots."""

    req_pool_indices: torch.Tensor  # [B] int32 or int64, device
    seq_lens: torch.Tensor  # [B] int32 or int64, device
    out_cache_loc: torch.Tensor  # [T] int64, device
    extend_seq_lens: torch.Tensor | None = None  # [B] int64, device, constant; verify only

    def copy_(self, src: RawMetadata) -> None:
        copy_fields(self, src, copy=("req_pool_indices", "seq_lens", "out_cache_loc"), assign=("extend_seq_lens",))


@dataclass(slots=True)
class IndexerMetadata:
    """The ratio-4 indexer's view; the first two are the metadata's own tensors."""

    page_table: torch.Tensor  # [T, pages] int32, device
    c4_seq_lens: torch.Tensor  # [T] int32, device
    schedule: torch.Tensor  # [num_sms + 1, 2] int32, device
    topk_plan: torch.Tensor  # [T + 1, 2] int32, device, defined up to its count

    def copy_(self, src: IndexerMetadata) -> None:
        copy_fields(self, src, copy=("page_table", "c4_seq_lens", "schedule", "topk_plan"))


@dataclass(slots=True)
class DecodePlan:
    """A compressor's plan in decode, bytes as in `kernels/compress_plan`."""

    ratio: int
    plan_d: torch.Tensor  # [B, 16] uint8, device

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.plan_d,)

    def copy_(self, src: DecodePlan) -> None:
        copy_fields(self, src, equal=("ratio",), copy=("plan_d",))


@dataclass(slots=True)
class VerifyPlan:
    """A compressor's plan in verify."""

    ratio: int
    plan_c: torch.Tensor  # [T, 16] uint8, device
    plan_w: torch.Tensor  # [T, 8] uint8, device

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.plan_c, self.plan_w)

    def copy_(self, src: VerifyPlan) -> None:
        copy_fields(self, src, equal=("ratio",), copy=("plan_c", "plan_w"))


@dataclass(slots=True)
class FlashMLASchedule:
    """FlashMLA's own schedule: opaque, filled by the first attention call of a forward pass. A graph must capture the
    call that fills it, so each warm-up leaves a new one behind."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


@dataclass(slots=True)
class DeepseekV4Metadata:
    """Views into the instance's buffers, bound at capture. T = B * N query rows, pages = ceil(W / 256)."""

    raw_out_loc: torch.Tensor  # [T] device; int32 in verify, else the dtype of the runner's seq_lens
    seq_lens_casual: torch.Tensor  # [T] int32, device
    positions_casual: torch.Tensor  # [T] int32, device
    page_table: torch.Tensor  # [T, pages] int32, device
    swa_page_indices: torch.Tensor  # [T, 128] int32, device
    swa_topk_lengths: torch.Tensor  # [T] int32, device
    swa_out_cache_loc: torch.Tensor | None  # [T] int32, device
    c4_out_loc: torch.Tensor | None  # [T] int64, device
    c4_topk_lengths_raw: torch.Tensor | None  # [T] int32, device
    c4_topk_lengths_clamp1: torch.Tensor | None  # [T] int32, device
    c4_sparse_topk_lengths: torch.Tensor | None  # [T] int32, device
    c4_sparse_page_indices: torch.Tensor | None  # [T, topk] int32, device; the layers fill it behind the rebuild
    c128_out_loc: torch.Tensor | None  # [T] int64, device
    c128_page_indices: torch.Tensor | None  # [T, 2 * pages, aligned] int32, device
    c128_topk_lengths_clamp1: torch.Tensor | None  # [T] int32, device
    indexer: IndexerMetadata | None
    c4_plan: DecodePlan | VerifyPlan | None
    c128_plan: DecodePlan | VerifyPlan | None
    page_size: int = PAGE
    c4_sparse_topk: int = 512
    c1_flashmla_metadata: FlashMLASchedule = field(default_factory=FlashMLASchedule)
    c4_flashmla_metadata: FlashMLASchedule | None = None
    c128_flashmla_metadata: FlashMLASchedule | None = None

    equal: ClassVar[tuple[str, ...]] = ("page_size", "c4_sparse_topk")
    copied: ClassVar[tuple[str, ...]] = (
        "raw_out_loc",
        "seq_lens_casual",
        "positions_casual",
        "page_table",
        "swa_page_indices",
        "swa_topk_lengths",
        "c4_out_loc",
        "c4_topk_lengths_raw",
        "c4_topk_lengths_clamp1",
        "c4_sparse_topk_lengths",
        "c4_sparse_page_indices",
        "c128_out_loc",
        "c128_page_indices",
        "c128_topk_lengths_clamp1",
        "indexer",
        "c4_plan",
        "c128_plan",
    )
    kept: ClassVar[tuple[str, ...]] = (
        "swa_out_cache_loc",
        "c1_flashmla_metadata",
        "c4_flashmla_metadata",
        "c128_flashmla_metadata",
    )

    def copy_(self, src: DeepseekV4Metadata) -> None:
        """Refill from a struct of the same shape. The store locations are the in-graph hook's: upstream assigns them,
        which loses the pointer that its graph writes."""
        copy_fields(self, src, equal=self.equal, copy=self.copied, keep=self.kept)

    def renew_schedules(self) -> None:
        """Leave FlashMLA schedules that no attention call has filled yet."""
        for name in ("c1_flashmla_metadata", "c4_flashmla_metadata", "c128_flashmla_metadata"):
            if getattr(self, name) is not None:
                setattr(self, name, FlashMLASchedule())


class DeepseekV4Backend(AttentionBackend):
    """Metadata of DeepSeek-V4. Pattern B upstream (a raw struct that the graph upgrades); static buffers here.

    Options in `AttentionConfig.extra`: index_topk (512 or 1024), num_sms (of the indexer's schedule), two_stage (see
    above; recorded classic chain only), host_expansion (False: the eager chain expands lengths on the device in verify
    and draft extend, as later releases do, instead of in a loop over requests; without host lengths it always does).
    """

    modes = frozenset({Mode.DECODE, Mode.DRAFT_DECODE, Mode.TARGET_VERIFY, *EXTEND})
    staged_modes = frozenset({Mode.DECODE, Mode.DRAFT_DECODE, Mode.TARGET_VERIFY})
    """Modes for which upstream has a raw struct."""
    keep_draft = True
    """Verify keeps the compressor states of the last 4 tokens, so that rejected drafts can be undone."""
    allowances = Allowances(
        aliases=frozenset(
            {
                frozenset({"page_table", "indexer.page_table"}),
                frozenset({"c4_topk_lengths_raw", "indexer.c4_seq_lens"}),
            }
        ),
        dispatches_per_request={"target_verify": 4, "draft_extend": 4, "draft_extend_v2": 4},
    )

    @staticmethod
    def default_tail(implementation: Implementation, recorded: bool) -> TailPolicy:
        """Page lists hold one id for 256 tokens: every rebuild writes them whole."""
        return TailPolicy.STATIC_FULL

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._check_sizes(max_bs, max_num_tokens)
        extra = self.config.extra
        self.max_bs, self.max_tokens = max_bs, max(max_num_tokens, max_bs)
        self.topk = extra.get("index_topk", 512)
        self.num_sms = extra.get("num_sms") or multiprocessors(self.device)
        self.two_stage = extra.get("two_stage", False) and self.recorded and self.implementation is Implementation.ATEN
        speculative = self.config.draft_tokens > 0
        self.rings = (16, 256) if speculative else (8, 128)
        modes = self.modes if speculative else frozenset({Mode.DECODE})
        self.buffers = {mode: self._allocate(mode) for mode in modes}
        self.planned = {mode: self._plans(mode) for mode in modes - set(EXTEND)}
        self.planned_rows: dict[tuple[Mode, int], tuple[DecodePlan | VerifyPlan, ...]] = {}
        self.plan_numbers = self._int32(2, self.max_tokens + 1)
        width = -(-2 * self.pages // ALIGNMENT) * ALIGNMENT
        self.window_offsets = torch.arange(WINDOW, dtype=torch.int64, device=self.device)
        self.row_offsets = torch.arange(self.max_tokens, dtype=torch.int64, device=self.device)
        self.c128_columns = torch.arange(width, dtype=torch.int64, device=self.device)
        self.c128_source = (self.c128_columns // 2).clamp(max=self.pages - 1)
        self.verify_widths = torch.full((max_bs,), self.config.draft_tokens, dtype=torch.int64, device=self.device)
        self.raw_buffers: dict[Mode, tuple[torch.Tensor, ...]] = {}
        self.raw: dict[tuple[Mode, int], RawMetadata] = {}
        if self.two_stage:
            long = lambda n: torch.zeros(n, dtype=torch.int64, device=self.device)  # noqa: E731
            self.raw_buffers = {mode: (long(max_bs), long(max_bs), long(self.max_tokens)) for mode in modes}

    def _check_sizes(self, max_bs: int, max_num_tokens: int) -> None:
        c, name = self.config, type(self).__name__
        width = self.pools.req_to_token.shape[1]
        self.pages = -(-width // PAGE)
        topk = c.extra.get("index_topk", 512)
        if c.page_size != PAGE:
            raise ConfigError(f"{name} has pages of {PAGE} tokens, got page_size {c.page_size}")
        if c.window not in (None, WINDOW):
            raise ConfigError(f"{name} has a window of {WINDOW} tokens, got {c.window}")
        if self.pools.full_to_swa is None:
            raise ConfigError(f"{name} needs a sliding-window pool: full_to_swa is None")
        if c.topk > 1:
            raise ConfigError(f"{name} supports topk of at most 1, got {c.topk}")
        if topk not in (512, 1024):
            raise ConfigError(f"{name} keeps 512 or 1024 compressed tokens, got index_topk {topk}")
        if self.tail is not TailPolicy.STATIC_FULL:
            raise ConfigError(f"{name} writes whole page lists, got tail {self.tail}: leave it out")
        if width < c.max_context + c.headroom:
            raise ConfigError(
                f"page_table covers req_to_token, {width} tokens wide, but lengths reach {c.max_context + c.headroom} "
                f"(max_context {c.max_context} and {c.headroom} draft tokens)"
            )
        if max_bs > MAX_REQUESTS or max_num_tokens > MAX_TOKENS:
            raise ConfigError(
                f"compressor plans hold at most {MAX_REQUESTS} requests and {MAX_TOKENS} tokens, got {max_bs} and "
                f"{max_num_tokens}"
            )

    def _allocate(self, mode: Mode) -> DeepseekV4Metadata:
        """The metadata of the largest batch. Modes share nothing: their structs differ in what is absent."""
        t, int32 = self.max_tokens, self._int32
        locations = lambda: torch.zeros(t, dtype=torch.int64, device=self.device)  # noqa: E731
        compressed = mode not in EXTEND
        width = -(-2 * self.pages // ALIGNMENT) * ALIGNMENT
        only = lambda make: make() if compressed else None  # noqa: E731
        page_table, c4_lengths = int32(t, self.pages), only(lambda: int32(t))
        plans = self._plans(mode)
        return DeepseekV4Metadata(
            raw_out_loc=int32(t) if mode is Mode.TARGET_VERIFY else locations(),
            seq_lens_casual=int32(t),
            positions_casual=int32(t),
            page_table=page_table,
            swa_page_indices=int32(t, WINDOW),
            swa_topk_lengths=int32(t),
            swa_out_cache_loc=int32(t),
            c4_out_loc=only(locations),
            c4_topk_lengths_raw=c4_lengths,
            c4_topk_lengths_clamp1=only(lambda: int32(t)),
            c4_sparse_topk_lengths=only(lambda: int32(t)),
            c4_sparse_page_indices=only(lambda: int32(t, self.topk)),
            c128_out_loc=only(locations),
            c128_page_indices=only(lambda: int32(t, width)),
            c128_topk_lengths_clamp1=only(lambda: int32(t)),
            indexer=only(lambda: IndexerMetadata(page_table, c4_lengths, int32(self.num_sms + 1, 2), int32(t + 1, 2))),
            c4_plan=plans and plans[0],
            c128_plan=plans and plans[1],
            c4_sparse_topk=self.topk,
            c4_flashmla_metadata=only(FlashMLASchedule),
            c128_flashmla_metadata=only(FlashMLASchedule),
        )

    def _plans(self, mode: Mode) -> tuple[DecodePlan | VerifyPlan, ...] | None:
        rows = lambda width: torch.zeros(self.max_tokens, width, dtype=torch.uint8, device=self.device)  # noqa: E731
        if mode in EXTEND:
            return None
        if mode is Mode.TARGET_VERIFY:
            return tuple(VerifyPlan(ratio, rows(16), rows(8)) for ratio in (4, 128))
        return tuple(DecodePlan(ratio, rows(16)) for ratio in (4, 128))

    def bind(self, fb: ForwardBatch) -> DeepseekV4Metadata:
        b, mode = fb.batch_size, fb.forward_mode
        if mode not in self.buffers:
            raise ConfigError(f"mode {mode} needs draft_tokens > 0, got {self.config.draft_tokens}")
        if b > self.max_bs:
            raise ConfigError(f"batch size {b} exceeds the buffers' {self.max_bs} requests")
        rows = b * self._queries(fb)
        if rows > self.max_tokens:
            raise ConfigError(f"seq_lens_casual holds {self.max_tokens} rows, {b} requests need {rows}")
        whole = self.buffers[mode]
        md = first_rows(whole, rows)
        if mode is not Mode.TARGET_VERIFY:
            md.raw_out_loc = whole.raw_out_loc.view(fb.seq_lens.dtype)[:rows]
        if md.indexer is not None:
            md.indexer = IndexerMetadata(
                md.page_table, md.c4_topk_lengths_raw, whole.indexer.schedule, whole.indexer.topk_plan[: rows + 1]
            )
            self.planned_rows[mode, b] = tuple(first_rows(plan, rows) for plan in self.planned[mode])
        return md

    # Hooks.

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(fb, in_capture)
        if self.two_stage and fb.forward_mode in self.staged_modes:
            self._install_raw(fb)

    def init_forward_metadata_in_graph(self, fb: ForwardBatch) -> None:
        md = self.forward_metadata
        if self.two_stage and fb.forward_mode in self.staged_modes:
            raw = self.raw[fb.forward_mode, fb.batch_size]
            fb = replace(
                fb, seq_lens=raw.seq_lens, req_pool_indices=raw.req_pool_indices, out_cache_loc=raw.out_cache_loc
            )
        if not self.recorded and self.implementation is Implementation.ATEN:
            self._store_locations(fb, md)  # in the graph even where the rest is not, from the static slots
        super().init_forward_metadata_in_graph(fb)

    def on_after_cuda_graph_warmup(self) -> None:
        self.forward_metadata.renew_schedules()

    def _install_raw(self, fb: ForwardBatch) -> None:
        """Upstream's first stage. A size that is seen first gets buffers; from then on they are refilled."""
        key, rows = (fb.forward_mode, fb.batch_size), self.forward_metadata.seq_lens_casual.shape[0]
        raw = self._raw_of(fb, rows)
        if fb.forward_mode is Mode.TARGET_VERIFY:
            raw.extend_seq_lens = self.verify_widths[: fb.batch_size]
        if key not in self.raw:
            pool, lens, slots = self.raw_buffers[fb.forward_mode]
            own = [t.view(u.dtype)[: u.shape[0]] for t, u in ((pool, raw.req_pool_indices), (lens, raw.seq_lens))]
            self.raw[key] = RawMetadata(*own, slots[:rows])
        self.raw[key].copy_(raw)

    def _raw_of(self, fb: ForwardBatch, rows: int) -> RawMetadata:
        """This batch's vectors, checked and padded; an idle rank gets one token of the padding row per request."""
        b = fb.batch_size
        seq_lens, pool, slots = fb.seq_lens[:b], fb.req_pool_indices[:b], fb.out_cache_loc
        mirror = None if fb.seq_lens_cpu is None else fb.seq_lens_cpu[:b]
        if fb.actual_forward_mode is Mode.IDLE:
            seq_lens, pool = torch.ones_like(seq_lens), torch.zeros_like(pool)
            mirror = None if mirror is None else torch.ones_like(mirror)
            slots = torch.zeros(b, dtype=torch.int64, device=self.device)
        if mirror is not None:
            self._check_longest(int(mirror.max().item()))
        return RawMetadata(pool, seq_lens, F.pad(slots, (0, rows - self._checked_slots(slots, rows))))

    def _check_longest(self, tokens: int) -> None:
        width = self.pools.req_to_token.shape[1]
        if tokens > width:
            raise ConfigError(f"seq_lens of {tokens} tokens exceed req_to_token, which is {width} tokens wide")

    # The classic chain, op for op: a full struct of fresh tensors, copied field by field into the captured one.

    def rebuild_aten(self, fb: ForwardBatch, md: DeepseekV4Metadata) -> None:
        raw = self._raw_of(fb, md.seq_lens_casual.shape[0])
        on_host = self.config.extra.get("host_expansion", True) and fb.seq_lens_cpu is not None
        md.copy_(self.upgrade(fb, raw, md, on_host=on_host))

    def upgrade(
        self, fb: ForwardBatch, raw: RawMetadata, md: DeepseekV4Metadata, on_host: bool = False
    ) -> DeepseekV4Metadata:
        """The full struct of a batch, without its store locations.

        Args:
            md: the captured struct, for shapes.
            on_host: expand draft rows and plan the compressors from host lengths, as upstream does outside of graphs.
        """
        lengths = None
        if fb.forward_mode in (Mode.DECODE, Mode.DRAFT_DECODE):
            context, pool = raw.seq_lens.to(torch.int32), raw.req_pool_indices
        elif on_host:
            lengths = self._host_lengths(fb)
            context, pool = self._expand_on_host(fb, raw, lengths)
        else:
            context, pool = self._expand(fb, raw)
        window = self._aten_window(context, pool)
        positions = context - 1
        swa_lengths = torch.clamp(context, max=WINDOW)
        pages = self.pools.req_to_token[:, ::PAGE][pool] // PAGE
        built = replace(
            md,
            raw_out_loc=raw.out_cache_loc,
            seq_lens_casual=context,
            positions_casual=positions,
            page_table=pages,
            swa_page_indices=window,
            swa_topk_lengths=swa_lengths,
        )
        if md.indexer is not None:
            self._aten_compressed(built, md)
            self._aten_plans(built, fb, raw, lengths)
        self._aten_more(built, fb, raw, pool)
        return built

    def _aten_more(self, built: DeepseekV4Metadata, fb: ForwardBatch, raw: RawMetadata, pool: torch.Tensor) -> None:
        """What a variant of this backend adds. pool: row of req_to_token of every query row."""

    def _expand(self, fb: ForwardBatch, raw: RawMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Context and pool row of every draft row, on the device."""
        b, n, device = fb.batch_size, self._queries(fb), self.device
        lens = raw.seq_lens + n if fb.forward_mode is Mode.TARGET_VERIFY else raw.seq_lens
        steps = torch.arange(1 - n, 1, dtype=torch.int32, device=device)
        context = (lens.unsqueeze(1) + steps).flatten()
        pool = raw.req_pool_indices[torch.arange(b, device=device).repeat_interleave(n)]
        return context.to(torch.int32), pool

    def _host_lengths(self, fb: ForwardBatch) -> list[int]:
        if fb.actual_forward_mode is Mode.IDLE:
            return [1] * fb.batch_size
        return fb.seq_lens_cpu.tolist()[: fb.batch_size]

    def _expand_on_host(
        self, fb: ForwardBatch, raw: RawMetadata, lengths: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in a loop over requests: four dispatches each."""
        b, n, device = fb.batch_size, self._queries(fb), self.device
        lens = raw.seq_lens
        added = 0
        if fb.forward_mode is Mode.TARGET_VERIFY:
            lens, added = lens + n, n
        torch.tensor([n] * b, dtype=torch.int32)  # query widths: upstream uploads them, nothing here reads them
        context = torch.empty(b * n, dtype=torch.int32, device=device)
        request = torch.empty(b * n, dtype=torch.int32, device=device)
        for i, length in enumerate(lengths):
            last = length + added
            torch.arange(last - n + 1, last + 1, out=context[i * n : (i + 1) * n])
            request[i * n : (i + 1) * n].fill_(i)
        return context, raw.req_pool_indices[request]

    def _aten_window(self, context: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        newest = (context - 1).unsqueeze(1)
        back = torch.arange(WINDOW, device=self.device).unsqueeze(0)
        positions = newest - back
        before = positions < 0
        slots = self.pools.req_to_token[pool.unsqueeze(1), positions.masked_fill(before, 0)]
        window = self.pools.full_to_swa[slots.masked_fill(before, -1)].to(torch.int32)
        return F.pad(window, (0, 0))

    def _aten_compressed(self, built: DeepseekV4Metadata, md: DeepseekV4Metadata) -> None:
        """Fields of both compressed pools and of the indexer."""
        t, device = built.seq_lens_casual.shape[0], self.device
        pool = lambda: (  # noqa: E731
            torch.empty(t, dtype=torch.int64, device=device),
            *(torch.empty(t, dtype=torch.int32, device=device) for _ in range(3)),
        )
        c4, c128 = pool(), pool()
        c128_pages = torch.empty(t, 2 * self.pages, dtype=torch.int32, device=device)
        build_compressed_fields(built.seq_lens_casual, built.raw_out_loc, built.page_table, c4, c128, c128_pages)
        built.c4_out_loc, _, built.c4_topk_lengths_raw, built.c4_topk_lengths_clamp1 = c4
        built.c128_out_loc, _, c128_lengths, built.c128_topk_lengths_clamp1 = c128
        wide = md.c128_page_indices.shape[1] - 2 * self.pages
        built.c128_page_indices = F.pad(c128_pages, (0, wide), value=-1)
        built.swa_page_indices = F.pad(built.swa_page_indices, (0, 0), value=-1)
        built.c4_sparse_topk_lengths = torch.clamp(built.c4_topk_lengths_clamp1, max=self.topk)
        self._aten_raw_lengths(built, c128_lengths)
        sparse = torch.full((t, self.topk), -1, dtype=torch.int32, device=device)
        built.c4_sparse_page_indices = F.pad(sparse, (0, -self.topk % ALIGNMENT), value=-1)
        contexts = built.c4_topk_lengths_raw.unsqueeze(-1)
        schedule = self._new_schedule(md)
        paged_mqa_schedule(contexts.view(-1), schedule)
        plan = md.indexer.topk_plan.clone()  # a plan is defined up to its count only
        topk_v2_plan(built.c4_topk_lengths_raw, plan)
        built.indexer = IndexerMetadata(built.page_table, built.c4_topk_lengths_raw, schedule, plan)

    def _aten_raw_lengths(self, built: DeepseekV4Metadata, c128_lengths: torch.Tensor) -> None:
        """Lengths that only other kernels read; none here."""

    def _new_schedule(self, md: DeepseekV4Metadata) -> torch.Tensor:
        return torch.empty(self.num_sms + 1, 2, dtype=torch.int32, device=self.device)

    def _aten_plans(
        self, built: DeepseekV4Metadata, fb: ForwardBatch, raw: RawMetadata, lengths: list[int] | None
    ) -> None:
        """Compressor plans into this instance's second set of plan buffers, as the planner returns its own."""
        n, rows = self._queries(fb), built.seq_lens_casual.shape[0]
        plans = self.planned_rows[fb.forward_mode, fb.batch_size]
        for name, ring, plan in zip(("c4_plan", "c128_plan"), self.rings, plans, strict=True):
            seq_lens = raw.seq_lens
            if lengths is None:
                seq_lens = seq_lens.to(torch.int64)
            else:  # upstream's planner takes both as host tensors; the lengths on the device are the same
                torch.tensor(lengths)
                torch.tensor([n] * len(lengths))
            inputs = (
                raw.req_pool_indices,
                seq_lens,
                self.pools.req_to_token,
                self.pools.full_to_swa.detach(),
            )
            if fb.forward_mode is Mode.TARGET_VERIFY:
                numbers = torch.empty(2, rows + 1, dtype=torch.int32, device=self.device)
                build_verify_plan(*inputs, numbers, plan.plan_c, plan.plan_w, n, plan.ratio, ring, self.keep_draft)
            else:
                build_decode_plan(*inputs, plan.plan_d, plan.ratio, ring)
            setattr(built, name, plan)

    def _store_locations(self, fb: ForwardBatch, md: DeepseekV4Metadata) -> None:
        slots, out = fb.out_cache_loc, md.swa_out_cache_loc
        n = self._checked_slots(slots, out.shape[0])
        if n < out.shape[0]:
            out[n:].copy_(self.pools.full_to_swa[:1])
            out = out[:n]
        out.copy_(self.pools.full_to_swa[slots])

    # The same without allocations, for graphs.

    def rebuild_aten_static(self, fb: ForwardBatch, md: DeepseekV4Metadata) -> None:
        b, n, mode = fb.batch_size, self._queries(fb), fb.forward_mode
        table, mapping = self.pools.req_to_token, self.pools.full_to_swa
        context, pool = md.seq_lens_casual, fb.req_pool_indices[:b]
        first = 1 if mode is Mode.TARGET_VERIFY else 1 - n
        context.view(b, n).copy_(fb.seq_lens[:b, None] + (self.row_offsets[:n] + first))
        md.positions_casual.copy_(context - 1)
        md.swa_topk_lengths.copy_(context.clamp(max=WINDOW))
        given = self._checked_slots(fb.out_cache_loc, md.raw_out_loc.shape[0])
        md.raw_out_loc[:given].copy_(fb.out_cache_loc)
        md.raw_out_loc[given:].zero_()
        self._store_locations(fb, md)
        positions = md.positions_casual.view(b, n, 1) - self.window_offsets
        slots = table[pool[:, None, None], positions.clamp(min=0)]
        window = mapping[slots].masked_fill_(positions < 0, -1)
        md.swa_page_indices.view(b, n, WINDOW).copy_(window)
        md.page_table.view(b, n, -1).copy_((table[:, ::PAGE][pool] // PAGE)[:, None])
        if md.indexer is not None:
            self._static_compressed(md, context)
            self._static_plans(fb, md)
        self._static_more(fb, md)

    def _static_more(self, fb: ForwardBatch, md: DeepseekV4Metadata) -> None:
        """What a variant adds."""

    def _static_compressed(self, md: DeepseekV4Metadata, context: torch.Tensor) -> None:
        slots = md.raw_out_loc
        c4, c128 = context // 4, context // 128
        md.c4_topk_lengths_raw.copy_(c4)
        md.c4_topk_lengths_clamp1.copy_(c4.clamp(min=1))
        md.c4_sparse_topk_lengths.copy_(c4.clamp(min=1, max=self.topk))
        md.c128_topk_lengths_clamp1.copy_(c128.clamp(min=1))
        md.c4_out_loc.copy_((slots // 4).masked_fill_(context % 4 != 0, 0))
        md.c128_out_loc.copy_((slots // 128).masked_fill_(context % 128 != 0, 0))
        md.c4_sparse_page_indices.fill_(-1)
        pages = md.page_table[:, self.c128_source] * 2 + self.c128_columns % 2
        md.c128_page_indices.copy_(pages.masked_fill_(self.c128_columns >= c128[:, None], -1))

    def _static_plans(self, fb: ForwardBatch, md: DeepseekV4Metadata) -> None:
        paged_mqa_schedule(md.c4_topk_lengths_raw, md.indexer.schedule)
        topk_v2_plan(md.c4_topk_lengths_raw, md.indexer.topk_plan)
        b, n = fb.batch_size, self._queries(fb)
        inputs = (fb.req_pool_indices[:b], fb.seq_lens[:b], self.pools.req_to_token, self.pools.full_to_swa)
        for plan, ring in zip((md.c4_plan, md.c128_plan), self.rings, strict=True):
            if fb.forward_mode is Mode.TARGET_VERIFY:
                build_verify_plan(
                    *inputs, self.plan_numbers, plan.plan_c, plan.plan_w, n, plan.ratio, ring, self.keep_draft
                )
            else:
                build_decode_plan(*inputs, plan.plan_d, plan.ratio, ring)

    def rebuild_fused(self, fb: ForwardBatch, md: DeepseekV4Metadata) -> None:
        self._checked_slots(fb.out_cache_loc, md.raw_out_loc.shape[0])
        launch_deepseek_v4_metadata(md, *self._launch_arguments(fb))

    def _launch_arguments(self, fb: ForwardBatch) -> tuple:
        n = self._queries(fb)
        added = 1 if fb.forward_mode is Mode.TARGET_VERIFY else 1 - n
        tables = (fb.req_pool_indices, fb.seq_lens, self.pools.req_to_token, self.pools.full_to_swa, fb.out_cache_loc)
        return (*tables, fb.batch_size, added, n, self.rings, self.keep_draft)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        return deepseek_v4.expected(
            batch, pools, topk=self.topk, num_sms=self.num_sms, rings=self.rings, keep_draft=self.keep_draft
        )

    def _queries(self, fb: ForwardBatch) -> int:
        """N, a property of the captured shape, never of the accepted counts."""
        if fb.forward_mode in (Mode.DECODE, Mode.DRAFT_DECODE):
            return 1
        return fb.positions.shape[0] // fb.batch_size

    def _checked_slots(self, slots: torch.Tensor, rows: int) -> int:
        """Upstream pads by the difference, and a negative one silently drops slots."""
        if slots.shape[0] > rows:
            raise ConfigError(
                f"out_cache_loc has {slots.shape[0]} slots, the captured batch writes {rows}: pass the slots of this "
                "step only"
            )
        return slots.shape[0]

    def _int32(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)


def first_rows(struct, rows: int):
    """A struct of the same kind over the first `rows` rows of every tensor; nested plans included."""
    changes = {}
    for f in fields(struct):
        value = getattr(struct, f.name)
        if isinstance(value, torch.Tensor):
            changes[f.name] = value[:rows]
        elif isinstance(value, FlashMLASchedule):
            changes[f.name] = FlashMLASchedule()
        elif is_dataclass(value):
            changes[f.name] = first_rows(value, rows)
    return replace(struct, **changes)
