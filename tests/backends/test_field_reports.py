"""Rows of the field reports that concern every backend of page tables or index lists, with the numbers of the row."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionConfig, tensors_of
from attn_graph.backends.batch import Pools, live_batch, make_pools
from attn_graph.backends.modes import ForwardMode
from attn_graph.backends.registry import lookup
from golden_replays import DEVICE
from rebuilds import ARMS, Replayer

Mode = ForwardMode
N, STEPS = 4, 3
WIDE = (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2)
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; Python has the name from 3.13 on


@dataclass(frozen=True)
class Kind:
    """A backend with one set of options; `table` is the page table among its fields, '' where it has lists."""

    backend: str
    page_size: int
    table: str = ""
    extra: dict = field(default_factory=dict)
    heads: int = 32

    @property
    def modes(self) -> list[Mode]:
        known = self.cls.modes & {Mode.DECODE, *WIDE}
        return sorted(known)

    @property
    def cls(self):
        return lookup(self.backend).load()

    def config(self, mode: Mode, max_context: int, n: int = N, topk: int = 1) -> AttentionConfig:
        spec = {} if mode is Mode.DECODE else {"draft_tokens": n, "topk": topk, "draft_steps": STEPS}
        extra = {"num_sms": 8, **self.extra}
        return AttentionConfig(self.page_size, max_context, num_heads=self.heads, extra=extra, **spec)

    def replayer(self, mode, arm, bucket, pools=None, *, max_context=150, n=N, topk=1) -> Replayer:
        c = self.config(mode, max_context, n, topk)
        backend = self.cls(c, pools or self.pools(max_context), arm.implementation, recorded=arm.placement != "eager")
        tokens = n if mode in WIDE or mode is Mode.DRAFT_EXTEND else 1
        return Replayer.capture(
            backend, mode, bucket, arm.placement, tokens_per_req=tokens, mask_context=max_context if topk > 1 else 0
        )

    def pools(self, max_context=150, rows=6) -> Pools:
        width = max_context + 16
        return make_pools(rows=rows, width=width, page_size=self.page_size, swa=False, seed=0, device=DEVICE)


KINDS = {
    "trtllm_mla": Kind("trtllm_mla", 64, "block_kv_indices"),
    "flashattention": Kind("flashattention", 64, "page_table"),
    "flashinfer": Kind("flashinfer", 16),
    "flashinfer_mla": Kind("flashinfer_mla", 16),
    "triton": Kind("triton", 16),
    "flashmla": Kind("flashmla", 64, "block_kv_indices"),
    "cutlass_mla": Kind("cutlass_mla", 128, "block_kv_indices"),
    "aiter": Kind("aiter", 16),
    "aiter unified": Kind("aiter", 64, "kv_indices", {"unified": True}),
    "aiter mla": Kind("aiter", 16, extra={"mla": True, "fp8": True}, heads=16),
    "wave": Kind("wave", 16),
}
EVERY = [(kind, mode) for kind in KINDS.values() for mode in kind.modes]
every_mode = pytest.mark.parametrize(
    ("kind", "mode"), EVERY, ids=[f"{name}-{mode}" for name, kind in KINDS.items() for mode in kind.modes]
)
PAGED = {name: kind for name, kind in KINDS.items() if kind.table}
DRAFTING = {name: kind for name, kind in PAGED.items() if Mode.TARGET_VERIFY in kind.modes}
EAGER = [ARMS[0], ARMS[2]]


def batch_of(mode, lengths, pools, n=N, topk=1):
    tokens = n if mode in WIDE or mode is Mode.DRAFT_EXTEND else 1
    return live_batch(mode, lengths, 1 + np.arange(len(lengths)), pools, tokens, np.random.default_rng(0), topk=topk)


@every_mode
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_changed_row_is_read_again_at_the_captured_addresses(kind, mode, arm):
    """A01, A26."""
    pools = kind.pools()
    own = kind.replayer(mode, arm, 3, pools)
    live = batch_of(mode, [129, 64, 5], pools)
    before = None
    for seed in range(2):
        assert own.differences(live, seed) == []
        now = {p: t.clone() for p, t in tensors_of(own.backend.metadata[mode, 3]).items()}
        changed = [] if before is None else [p for p in now if not torch.equal(now[p], before[p])]
        before = now
        pools.req_to_token[1:] = pools.req_to_token[1:].flip(0)
    assert changed


@every_mode
def test_fifty_replays_with_memory_coming_and_going_move_nothing(kind, mode):
    """A02."""
    pools, rng = kind.pools(), np.random.default_rng(0)
    own = kind.replayer(mode, ARMS[3], 4, pools)
    addresses = {p: t.data_ptr() for p, t in tensors_of(own.backend.metadata[mode, 4]).items()}
    for i in range(50):
        live = batch_of(mode, rng.integers(N, 140, rng.integers(3, 5)), pools)
        passing = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
        if i % 10 == 0:
            assert own.differences(live, i) == []
        else:
            own.load(live)
            with own.stream():
                own.runner.replay()
        del passing
    assert {p: t.data_ptr() for p, t in tensors_of(own.backend.metadata[mode, 4]).items()} == addresses


@every_mode
@pytest.mark.parametrize("arm", EAGER, ids=str)
def test_rows_of_the_table_may_lie_two_to_the_thirty_one_elements_apart(kind, mode, arm):
    """A15: with 32-bit offsets the third row wraps to a place before the table."""
    near, stride = kind.pools(rows=3), 2**30
    if near.req_to_token.is_cuda:
        memory = torch.empty(2 * stride + near.req_to_token.shape[1], dtype=torch.int32, device=DEVICE)
    else:  # address space only: pages that nobody touches are never backed
        size = (2 * stride + near.req_to_token.shape[1]) * 4
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        memory = torch.frombuffer(room, dtype=torch.int32)
    far = memory.as_strided(near.req_to_token.shape, (stride, 1))
    far.copy_(near.req_to_token)
    pools = replace(near, req_to_token=far)
    own = kind.replayer(mode, arm, 2, pools)
    assert own.differences(batch_of(mode, [70, 64], pools)) == []


@pytest.mark.parametrize("kind", DRAFTING.values(), ids=DRAFTING)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_drafts_past_the_last_page_of_the_context_have_a_column(kind, arm):
    """A10: at 126 of 128 tokens four drafts need a third column of 64."""
    own = kind.replayer(Mode.TARGET_VERIFY, arm, 2, max_context=128)
    assert own.differences(batch_of(Mode.TARGET_VERIFY, [124, 126], own.backend.pools)) == []
    table = getattr(own.backend.metadata[Mode.TARGET_VERIFY, 2], kind.table)
    assert table.shape[1] >= 3 and table[1, 2] == own.backend.pools.req_to_token[2, 128] // 64


@pytest.mark.parametrize("kind", PAGED.values(), ids=PAGED)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_long_prompt_behind_a_short_one_has_all_of_its_pages(kind, arm):
    """A27, A14: 2,400 tokens are 38 pages of 64, of 128 half as many; then one page again."""
    own = kind.replayer(Mode.DECODE, arm, 1, max_context=2400)
    for seed, length in enumerate((35, 2400, 35)):
        assert own.differences(batch_of(Mode.DECODE, [length], own.backend.pools), seed) == []
        pages = -(-length // kind.page_size)
        table = getattr(own.backend.metadata[Mode.DECODE, 1], kind.table)[0, :pages]
        first = own.backend.pools.req_to_token[1, : length : kind.page_size]
        assert table.tolist() == (first // kind.page_size).tolist()


@every_mode
@pytest.mark.parametrize("arm", EAGER, ids=str)
def test_padding_has_the_backends_length_and_reads_the_padding_row(kind, mode, arm):
    """A16: three requests in a bucket of four. Lists say where they begin; tables have page 0."""
    own = kind.replayer(mode, arm, 4)
    fill = N if kind.backend == "aiter" and mode is not Mode.DECODE else 1
    assert own.backend.seq_len_fill_value == fill
    live = batch_of(mode, [130, 64, N], own.backend.pools)
    assert own.differences(live) == [] and own.load(live).seq_lens.tolist() == [130, 64, N, fill]
    md = own.backend.metadata[mode, 4]
    if kind.table and getattr(md, kind.table).ndim == 2:  # unified attention extends by lists
        assert getattr(md, kind.table)[3, 0] == 0
        return
    lists = md.wrappers[0] if kind.backend == "flashinfer" else md
    added = N if mode is Mode.TARGET_VERIFY and (kind.backend.startswith("flashinfer") or kind.extra.get("mla")) else 0
    if kind.backend == "triton" and mode is Mode.DRAFT_EXTEND_V2:
        added, fill = -N, N  # an empty prefix, never a negative one
    lengths = [130 + added, 64 + added, N + added, fill + added]
    assert lists.kv_indptr.tolist() == [0, *np.cumsum(lengths)]
    begin, end = lists.kv_indptr[3:5].tolist()
    assert not lists.kv_indices[begin:end].any()


@pytest.mark.parametrize("backend", ["flashattention", "flashinfer", "triton", "aiter"])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_write_slots_are_those_of_the_map_at_the_rebuild(backend, arm):
    """A05."""
    pools = make_pools(rows=6, width=166, page_size=16, swa=True, seed=0, device=DEVICE)
    pools.full_to_swa[11], pools.full_to_swa[4] = 40, 9
    own = Kind(backend, 16).replayer(Mode.DECODE, arm, 2, pools)
    own.load(replace(batch_of(Mode.DECODE, [33, 64], pools), out_cache_loc=np.array([11, 4])))
    with own.stream():
        own.runner.replay()
    pools.full_to_swa[[11, 4]] = 0
    assert own.backend.metadata[Mode.DECODE, 2].swa_out_cache_loc.tolist() == [40, 9]


STARTS = {"trtllm_mla": "cu_seqlens_q", "flashattention": "cu_seqlens_q"}


def starts_of(name, md) -> list[int]:
    return getattr(md, STARTS.get(name, "qo_indptr")).tolist()


V2 = ["trtllm_mla", "flashattention", "flashinfer", "triton", "aiter", "aiter mla"]


@pytest.mark.parametrize("name", V2)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_extends_of_fixed_width_do_not_follow_what_was_accepted(name, arm):
    """A06, A24: three requests of four drafts; lengths hold prefix and drafts."""
    own = KINDS[name].replayer(Mode.DRAFT_EXTEND_V2, arm, 3)
    live = batch_of(Mode.DRAFT_EXTEND_V2, [44, 11, 9], own.backend.pools)
    live = replace(live, num_accept_tokens=np.array([1, 3, 2], dtype=np.int32))
    assert own.differences(live) == []
    md = own.backend.metadata[Mode.DRAFT_EXTEND_V2, 3]
    assert starts_of(name, md) == [0, 4, 8, 12]
    sums = {"flashattention": "cu_seqlens_k", "triton": "kv_indptr", "aiter": "kv_indptr", "aiter mla": "kv_indptr"}
    if name == "flashinfer":
        assert md.wrappers[0].kv_indptr.tolist() == [0, 44, 55, 64]
    elif name == "trtllm_mla":
        assert md.seq_lens_k.tolist() == [44, 11, 9]
    else:  # triton takes the drafts' keys apart
        assert getattr(md, sums[name]).tolist() == ([0, 40, 47, 52] if name == "triton" else [0, 44, 55, 64])


V1 = {
    "flashattention": [0, 1, 4, 6], "flashinfer": [0, 1, 4, 6], "flashinfer_mla": [0, 1, 4, 6], "aiter": [0, 1, 4, 6],
    "aiter mla": [0, 1, 4, 6], "triton": [0, 4, 8, 12], "trtllm_mla": [0, 4, 8, 12],
}  # fmt: skip


@pytest.mark.parametrize("name", V1)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_extends_of_the_older_mode_run_on_or_are_padded_as_their_kernel_wants(name, arm):
    """A06."""
    own = KINDS[name].replayer(Mode.DRAFT_EXTEND, arm, 3)
    live = batch_of(Mode.DRAFT_EXTEND, [44, 11, 9], own.backend.pools)
    assert own.differences(replace(live, num_accept_tokens=np.array([1, 3, 2], dtype=np.int32))) == []
    assert starts_of(name, own.backend.metadata[Mode.DRAFT_EXTEND, 3]) == V1[name]


@pytest.mark.parametrize("mode", WIDE, ids=str)
@pytest.mark.parametrize("name", ["flashattention", "flashinfer", "triton"])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_queries_of_trees_are_laid_out_by_draft_tokens(name, mode, arm):
    """A07: three steps, four branches, eight draft tokens."""
    own = KINDS[name].replayer(mode, arm, 2, n=8, topk=4)
    assert own.differences(batch_of(mode, [20, 30], own.backend.pools, 8, 4)) == []
    assert starts_of(name, own.backend.metadata[mode, 2]) == [0, 8, 16]
