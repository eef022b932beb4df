"""EAGLE draft decoding: one inner backend for each of S - 1 steps, so that one graph can run them all.

| family       | inner backends            | replay                                        | step i has          |
|--------------|---------------------------|-----------------------------------------------|---------------------|
| shared table | triton                    | one rebuild fills all steps, inners untouched | positions + i + 1   |
| planned      | flashinfer, _mla, aiter   | the same, then every inner's own hook: a plan | positions + i + 1   |
| per step     | trtllm_mha, flashattention| every inner's own hook                        | seq_lens + i + 1    |
| page table   | trtllm_mla, flashmla      | every inner's own hook                        | the inner's rule    |
| one for all  | dsa                       | one inner, whose metadata every step reads    | seq_lens            |
| slots only   | deepseek_v4, _hip_radix   | inner 0 rebuilds, the rest get write slots    | seq_lens            |

Upstream copies or upgrades a struct of its own for each step of DeepSeek-V4, and in that every step has the first B of
all write slots. Here steps share inner 0's tensors, but for the locations they write to.

Step 0's tokens come from draft extend, hence S - 1. Write slots come as one flat [B, K, S] vector, and a step writes
its own column of it. Source: specs of SGLang's multi-step draft backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ..aiter import AiterDraftStep
from ..base import Allowances, AttentionBackend, AttentionConfig, ConfigError, NotCapturedError, tensors_of
from ..batch import ForwardBatch, Pools
from ..deepseek_v4 import DeepseekV4Backend, DeepseekV4Metadata
from ..flashinfer import FlashInferDraftStep
from ..flashinfer_mla import FlashInferMlaDraftStep
from ..kernels.csr_metadata import CsrConfig, default_config
from ..kernels.device import floor_div, swa_slot
from ..kernels.draft_kv_indices import launch_draft_kv_indices
from ..kernels.draft_metadata import DraftMetadata
from ..kernels.kv_splits import launch_kv_splits
from ..kernels.launch import launch
from ..modes import ForwardMode
from ..oracle import Expected, HostBatch, HostPools, multi_step_draft
from ..registry import lookup
from ..triton import TritonDraftStep, check_index_space, numpy_type, split_rule
from .composed import joined
from .forwarding import Forwarding

Mode = ForwardMode


@dataclass(frozen=True, slots=True)
class Family:
    """How a kind of inner backend is used.

    Attributes:
        step: class of an inner backend whose tables the wrapper owns and fills, for all steps at once. None: the
            registered backend, which has tables of its own.
        index: dtype of the shared index lists.
        splits: the shared tables include split counts.
        plans: inner backends still do their own work at replay, on the shared tables.
        one_for_all: the steps do not differ, one inner serves them.
        slots_only: the steps differ in where they write; inner 0 rebuilds the rest for all.
    """

    step: type[AttentionBackend] | None = None
    index: torch.dtype = torch.int32
    splits: bool = False
    plans: bool = False
    one_for_all: bool = False
    slots_only: bool = False

    @property
    def shares_tables(self) -> bool:
        return self.step is not None


FAMILIES = {
    "triton": Family(TritonDraftStep, torch.int64, splits=True),
    "flashinfer": Family(FlashInferDraftStep, plans=True),
    "flashinfer_mla": Family(FlashInferMlaDraftStep, plans=True),
    "aiter": Family(AiterDraftStep, plans=True),
    "trtllm_mha": Family(),
    "flashattention": Family(),
    "trtllm_mla": Family(),
    "flashmla": Family(),
    "dsa": Family(one_for_all=True),
    "deepseek_v4": Family(slots_only=True),
    "deepseek_v4_hip_radix": Family(slots_only=True),
}


class MultiStepDraft(Forwarding):
    """Draft decode over an inner backend, config.extra["inner"] (triton). Other options are the inner backend's.

    `metadata` holds {"step0": ..., "step1": ...}, each the object of that step's inner.
    """

    modes = frozenset({Mode.DRAFT_DECODE})
    _followers: Sequence[AttentionBackend] = ()
    allowances = Allowances(
        aliases=frozenset({frozenset(f"step{i}.num_kv_splits" for i in range(16))}),  # one vector serves every step
    )

    def take_options(self) -> None:
        config = self.config
        name = config.extra.get("inner", "triton")
        if name not in FAMILIES:
            raise ConfigError(f"multi_step_draft has no inner backend {name!r}. It has: {', '.join(FAMILIES)}")
        self.family, steps = FAMILIES[name], config.draft_steps
        if steps < 1:
            raise ConfigError(f"multi_step_draft needs draft_steps of at least 1, got {steps}")
        inner = self.family.step or lookup(name).load()
        alone = self.family.one_for_all or self.family.slots_only
        served = min(steps - 1, 1) if alone else steps - 1
        self._inners = [self.new_child(inner, replace(config, step_id=i)) for i in range(served)]
        if self.family.shares_tables:  # upstream's launch fills a row for step S - 1 too, which nobody serves
            shared = ("kv_indptr", "kv_indices", "wrappers.0.kv_indptr", "wrappers.0.kv_indices")
            spills = frozenset(f"step{i}.{name}" for i in range(served) for name in shared)
            derived = sum(own.allowances.fused_launches for own in self._inners)
            self.allowances = replace(self.allowances, spills=spills, fused_launches=1 + derived)
        elif self._inners:  # every inner backend does what it does alone
            named = {f"step{i}": inner.allowances for i, inner in enumerate(self._inners)}
            self.allowances = joined(named, fused_launches=sum(own.fused_launches for own in named.values()))
        if self._inners:
            self.tail = self._inners[0].tail
        self.tables: DraftTables | None = None
        self.slots: DraftWriteSlots | None = None

    @property
    def children(self) -> Sequence[AttentionBackend]:
        return self._inners

    @property
    def seq_len_fill_value(self) -> int:
        """seq_lens of padding rows: the inner backend's. One step has no inner, and no use for it."""
        return self._inners[0].seq_len_fill_value if self._inners else 1

    def inner(self, step: int) -> AttentionBackend:
        """The backend that attention layers of draft step `step` use."""
        return self._inners[0] if self.family.one_for_all else [*self._inners, *self._followers][step]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.max_bs = max_bs
        if self.family.shares_tables:
            self.tables = DraftTables(self.config, self.pools, max_bs, self.family)
        if self.family.splits:
            for inner in self._inners:
                inner.adopt(self.tables.num_kv_splits)
        self.forward_hook("init_cuda_graph_state", max_bs, max_num_tokens)
        if self.family.slots_only and self.config.draft_steps > 2:
            self.slots = DraftWriteSlots(self._inners[0], max_bs, self.config.draft_steps)
            self._followers = [self._follower(i) for i in range(1, self.config.draft_steps - 1)]

    def _follower(self, step: int) -> AttentionBackend:
        """Inner 0 with metadata of its own; the buffers behind it are the same."""
        follower = copy(self._inners[0])
        follower.config, follower.metadata = replace(self.config, step_id=step), {}
        return follower

    def forward_hook(self, name: str, *args, **kwargs) -> None:
        """Hooks that prepare or rebuild metadata are inner 0's alone where the others read its tensors."""
        super().forward_hook(name, *args, **kwargs)
        if not name.startswith("init_"):
            for follower in self._followers:
                getattr(follower, name)(*args, **kwargs)

    def forwarding(self, fb: ForwardBatch, hook: str) -> dict[str, int]:
        """How often each child must see a hook at capture, by attribute. A follower has nothing to prepare, its tensors
        are inner 0's; but what its own attention calls fill in a warm-up it must forget."""
        told = {f"_inners.{i}": 1 for i in range(len(self._inners))}
        if hook == "on_after_cuda_graph_warmup":
            told |= {f"_followers.{i}": 1 for i in range(len(self._followers))}
        return told

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        key = (fb.forward_mode, fb.batch_size)
        if in_capture:
            self._check_mode(fb)
            for own in (self.tables, self.slots):
                if own is not None:
                    own.bind(fb)
        elif key not in self.metadata:
            raise NotCapturedError(self._not_captured(*key))
        if not self.recorded:  # first, as inner backends may read the tables
            self._rebuild(fb, self.metadata.get(key, {}))
        if in_capture or not self.family.shares_tables or self.family.plans:
            # A recorded rebuild reads no slots here: no view of each step's column, which is work of the host.
            viewed = self.recorded and not in_capture and self.pools.writes_swa
            seen = replace(fb, out_cache_loc=None) if viewed else fb
            self.forward_hook("init_forward_metadata_out_graph", seen, in_capture=in_capture)
        if in_capture:
            self.metadata[key] = self.bind(fb)
        self.forward_metadata = self.metadata[key]
        for i, follower in enumerate(self._followers, 1):
            follower.metadata[key] = follower.forward_metadata = self.forward_metadata[f"step{i}"]

    def init_forward_metadata_in_graph(self, fb: ForwardBatch) -> None:
        if self.recorded:
            self._rebuild(fb, self.forward_metadata)
        self.forward_hook("init_forward_metadata_in_graph", fb)

    def seen_by(self, child: int, fb: ForwardBatch) -> ForwardBatch:
        """The batch of one step: its own column of the write slots and, with shared tables, its own rows."""
        slots, spec = fb.out_cache_loc, fb.spec_info
        if slots is not None and self.pools.writes_swa:
            slots = slots_of_step(slots, child, fb, self.config)
        if self.tables is not None:
            indptr, indices = self.tables.views[fb.batch_size][child]
            spec = replace(spec, kv_indptr=indptr, kv_indices=indices)
        return replace(fb, out_cache_loc=slots, spec_info=spec, encoder_lens=None)

    def bind(self, fb: ForwardBatch) -> dict[str, object]:
        steps = {f"step{i}": inner.metadata[fb.forward_mode, fb.batch_size] for i, inner in enumerate(self._inners)}
        if self.slots is not None:
            first = steps["step0"]
            self.allowances = self.slots.allowances(first)
            steps |= {f"step{i}": self.slots.step(first, fb.batch_size, i) for i in range(1, self.slots.steps - 1)}
        return steps

    # Only what steps share is rebuilt here; other families do it in their inner backends' hooks.

    def rebuild_aten(self, fb: ForwardBatch, md: dict[str, object]) -> None:
        if self.tables is not None:
            self.tables.classic(fb)
        if self.slots is not None:
            self.slots.classic(fb)

    rebuild_aten_static = rebuild_aten
    """The classic chain reads nothing on the host: a graph records it as it is."""

    def rebuild_fused(self, fb: ForwardBatch, md: dict[str, object]) -> None:
        if self.tables is not None:
            self.tables.fused[fb.batch_size](fb.req_pool_indices, fb.seq_lens, fb.positions)
        if self.slots is not None:
            self.slots.fused(fb)

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        fields = {}
        for i, inner in enumerate([*self._inners, *self._followers]):
            seen = batch
            if self.pools.writes_swa and self.config.topk <= 1:
                seen = multi_step_draft.batch_of_step(batch, i, self.config.draft_steps)
            step = inner.expected(seen, pools) if self.tables is None else self._expected_of_tables(i, seen, pools)
            fields |= {f"step{i}.{name}": want for name, want in step.items()}
        return fields

    def _expected_of_tables(self, step: int, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        """The shared tables, and what aiter makes of them: the metadata of a decode step of that length."""
        inner, derived = self._inners[step], {}
        if isinstance(inner, AiterDraftStep):
            lens = batch.positions[:: self.tables.topk] + step + 1
            derived = inner.expected(replace(batch, seq_lens=lens), pools)
        md = inner.metadata[Mode(batch.mode), len(batch.seq_lens)]
        shapes = {path: (tuple(x.shape), numpy_type(x.dtype)) for path, x in tensors_of(md).items()}
        return derived | self.tables.expected(step, batch, pools, shapes)


class DraftTables:
    """The tables of all draft steps: row i of each belongs to step i. S rows, as upstream has, of which S - 1 are read.

    Raises:
        ConfigError: int32 offsets cannot address a row, or req_to_token has no room for the draft slots.
    """

    def __init__(self, config: AttentionConfig, pools: Pools, max_bs: int, family: Family) -> None:
        self.config, self.pools = config, pools
        self.topk, self.steps = max(config.topk, 1), config.draft_steps
        self.longest = config.max_context + self.steps  # a branch's prefix and its draft tokens
        check_index_space("cuda_graph_kv_indices", max_bs * self.topk, self.longest)
        width, needed = pools.req_to_token.shape[1], last_draft_column(config) + 1
        if width < needed:
            raise ConfigError(
                f"req_to_token is {width} tokens wide, but draft slots of {self.topk} branches and {self.steps} steps "
                f"at max_context {config.max_context} reach column {needed}"
            )
        device, branches = pools.req_to_token.device, max_bs * self.topk
        self.max_bs = max_bs
        self.splits = self.num_kv_splits = None
        if family.splits:
            self.splits = split_rule(config, device)
            self.num_kv_splits = torch.full((branches,), self.splits.max_splits, dtype=torch.int32, device=device)
        self.kv_indptr = torch.zeros(self.steps, branches + 1, dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(self.steps, branches * self.longest, dtype=family.index, device=device)
        self.fused: dict[int, DraftMetadata] = {}
        self.views: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """By captured size: indptr and index list of each step, as long as that size can need in any batch."""

    def bind(self, fb: ForwardBatch) -> None:
        """Prepare the launch of one captured size.

        Raises:
            ConfigError: the size, or the positions it brings, do not fit.
        """
        b, served = fb.batch_size, self.steps - 1
        if b > self.max_bs:
            raise ConfigError(f"batch size {b} exceeds the buffers' {self.max_bs} rows")
        if fb.positions is None or fb.positions.shape[0] < b * self.topk:
            found = 0 if fb.positions is None else fb.positions.shape[0]
            raise ConfigError(
                f"positions has {found} entries, {b} requests of {self.topk} branches need {b * self.topk}"
            )
        branches = b * self.topk
        self.views[b] = [
            (self.kv_indptr[i, : branches + 1], self.kv_indices[i, : branches * self.longest]) for i in range(served)
        ]
        self.fused[b] = DraftMetadata(
            self.kernel_config(b), self.pools.req_to_token, self.kv_indices[:served], self.kv_indptr[:served], b,
            self.topk, self.config.page_size, self.steps, self.num_kv_splits, self.splits,
        )  # fmt: skip

    def kernel_config(self, bs: int) -> CsrConfig:
        """Block sizes for a captured batch size; the tuner's choice if one was given, else the default."""
        return self.config.extra.get("kernel_config") or default_config(bs, self.config.max_context)

    def classic(self, fb: ForwardBatch) -> None:
        """Upstream's launches: the lists of all S steps, and the split counts, if any, that all steps share."""
        b, rule = fb.batch_size, self.splits
        launch_draft_kv_indices(
            fb.req_pool_indices, self.pools.req_to_token, fb.seq_lens, fb.positions, self.kv_indices, self.kv_indptr,
            self.topk, self.config.page_size, b,
        )  # fmt: skip
        if rule is None:
            return
        splits, lens = self.num_kv_splits[: b * self.topk], fb.seq_lens[:b]
        if rule.tile:
            counts = (lens + rule.tile - 1) // rule.tile
            splits.copy_(counts.repeat_interleave(self.topk) if self.topk > 1 else counts)
        elif rule.cores > 0:
            launch_kv_splits(lens, splits, rule.cores, rule.head_programs, rule.max_splits)
        else:
            splits.fill_(rule.max_splits)

    def expected(self, step: int, batch: HostBatch, pools: HostPools, shapes) -> dict[str, Expected]:
        """The oracle's word on one step's fields."""
        c, rule, splits = self.config, self.splits, None
        if rule is not None:
            splits = dict(
                max_splits=rule.max_splits,
                cores=rule.cores,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                tile=rule.tile,
            )
        return multi_step_draft.expected(
            batch,
            pools,
            shapes=shapes,
            step=step,
            topk=self.topk,
            steps=self.steps,
            page_size=c.page_size,
            splits=splits,
        )


WRITTEN = ("raw_out_loc", "swa_out_cache_loc", "c4_out_loc", "c128_out_loc")
"""Where a step of DeepSeek-V4 writes; the last two also in a unified buffer."""


class DraftWriteSlots:
    """Write locations of steps 1..S-2 of DeepSeek-V4; those of step 0 are inner 0's."""

    def __init__(self, leader: DeepseekV4Backend, max_bs: int, steps: int) -> None:
        self.leader, self.steps = leader, steps
        unified = getattr(leader, "unified_kv", False)
        dtypes = (torch.int64, torch.int32, *(torch.int64,) * (4 if unified else 2))
        rows = [torch.zeros(steps - 2, max_bs, dtype=dtype, device=leader.device) for dtype in dtypes]
        self.whole: list[torch.Tensor] = rows
        self.bound: dict[int, list[torch.Tensor]] = {}

    def bind(self, fb: ForwardBatch) -> None:
        """Views for one captured size; raw_out_loc has the dtype of seq_lens, as inner 0's."""
        raw, *others = self.whole
        self.bound[fb.batch_size] = [t[:, : fb.batch_size] for t in (raw.view(fb.seq_lens.dtype), *others)]

    def step(self, first: DeepseekV4Metadata, bs: int, i: int) -> DeepseekV4Metadata:
        """The metadata of step i: step 0's tensors but for its own locations, and schedules to be filled by its own
        attention calls."""
        own = [t[i - 1] for t in self.bound[bs]]
        step = replace(first, **dict(zip(WRITTEN, own[:4], strict=True)))
        if len(own) > 4:
            step.unified = replace(first.unified, c4_out_loc=own[4], c128_out_loc=own[5])
        step.renew_schedules()
        return step

    def allowances(self, first: DeepseekV4Metadata) -> Allowances:
        """Steps share what does not say where they write. Two launches: inner 0's and that of the other locations."""
        own = {*WRITTEN, *(f"unified.{name}" for name in WRITTEN[2:])}
        known = self.leader.allowances.aliases
        alone = set(tensors_of(first)) - own - {name for names in known for name in names}
        groups = [*known, *(frozenset({name}) for name in alone)]
        served = range(self.steps - 1)
        return Allowances(
            aliases=frozenset(frozenset(f"step{i}.{name}" for i in served for name in names) for names in groups),
            fused_launches=2,
        )

    def classic(self, fb: ForwardBatch) -> None:
        """Step after step, in the order of inner 0's chain. Nothing is read on the host."""
        lens, mapping = fb.seq_lens[: fb.batch_size], self.leader.pools.full_to_swa
        for i, own in enumerate(zip(*self.bound[fb.batch_size], strict=True), 1):
            (raw, swa, *compressed) = own
            slots = slots_of_step(fb.out_cache_loc, i, fb, self.leader.config)
            raw[: slots.shape[0]].copy_(slots)
            raw[slots.shape[0] :].zero_()
            swa.copy_(mapping[raw])
            for ratio, out in zip((4, 128), compressed[:2], strict=True):
                out.copy_((raw // ratio).masked_fill_(lens % ratio != 0, 0))
            for out, unified in zip(compressed[:2], compressed[2:], strict=False):
                unified.copy_(out + self.leader.swa_pages)

    def fused(self, fb: ForwardBatch) -> None:
        """One launch for all of them."""
        bs, slots, own = fb.batch_size, fb.out_cache_loc, self.bound[fb.batch_size]
        every = has_all_steps(slots, fb, self.leader.config)
        unified = len(own) > 4
        launch(
            _write_slots_kernel,
            (self.steps - 2, triton.cdiv(bs, SLOT_BLOCK)),
            (
                slots, fb.seq_lens, self.leader.pools.full_to_swa, *own[:4], *(own[4:] if unified else own[2:4]),
                bs, slots.shape[0] // self.steps if every else slots.shape[0],
                self.leader.swa_pages if unified else 0,
                slots.stride(0) * (self.steps if every else 1), slots.stride(0) * every,
                own[0].stride(0), own[1].stride(0),
            ),
            {"UNIFIED": unified, "BLOCK": SLOT_BLOCK, "num_warps": 4},
        )  # fmt: skip


SLOT_BLOCK = 128


@triton.jit(do_not_specialize=["bs", "n_live", "swa_pages", "loc_stride", "step_stride"])
def _write_slots_kernel(
    out_cache_loc, seq_lens, mapping,
    raw_out_loc, swa_out_cache_loc, c4_out_loc, c128_out_loc, unified_c4, unified_c128,
    bs, n_live, swa_pages, loc_stride, step_stride, raw_stride, stride, UNIFIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # that of step row + 1
    b = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = b < bs
    slot = tl.load(out_cache_loc + b * loc_stride + (row + 1) * step_stride, mask=b < n_live, other=0).to(tl.int64)
    context = tl.load(seq_lens + b, mask=inside, other=1).to(tl.int32)
    at = row * stride + b
    c4 = tl.where(floor_div(context, 4) * 4 == context, floor_div(slot, 4), 0)
    c128 = tl.where(floor_div(context, 128) * 128 == context, floor_div(slot, 128), 0)
    tl.store(raw_out_loc + row * raw_stride + b, slot, mask=inside)
    tl.store(swa_out_cache_loc + at, swa_slot(mapping, slot, inside).to(tl.int32), mask=inside)
    tl.store(c4_out_loc + at, c4, mask=inside)
    tl.store(c128_out_loc + at, c128, mask=inside)
    if UNIFIED:
        tl.store(unified_c4 + at, c4 + swa_pages, mask=inside)
        tl.store(unified_c128 + at, c128 + swa_pages, mask=inside)


def has_all_steps(slots: torch.Tensor, fb: ForwardBatch, config: AttentionConfig) -> bool:
    """Whether a chain's write slots are those of all steps, [B or live, S] flat, or of one, [B or live]."""
    live = fb.batch_size - (fb.num_padding or 0)
    return config.topk <= 1 and slots.shape[0] in (fb.batch_size * config.draft_steps, live * config.draft_steps)


def slots_of_step(slots: torch.Tensor, step: int, fb: ForwardBatch, config: AttentionConfig) -> torch.Tensor:
    """What one step writes, of the slots of all; those of one step are taken as they are."""
    return slots[step :: config.draft_steps] if has_all_steps(slots, fb, config) else slots


def last_draft_column(config: AttentionConfig) -> int:
    """The last column of req_to_token that a draft slot can lie in, over every prefix up to the context limit."""
    topk, steps, page = max(config.topk, 1), config.draft_steps, config.page_size
    if page == 1 or topk == 1:
        return config.max_context + topk * steps - 1
    lengths = range(max(config.max_context - page, 0), config.max_context + 1)
    return max(n + (topk - 1) * -(-(n % page + steps) // page) * page + steps - 1 for n in lengths)
