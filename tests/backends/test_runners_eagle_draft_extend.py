"""The EAGLE draft-extend runner: fixed width, unsliced slots, the last reader of an iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_graph.backends.base import AttentionConfig, ConfigError, tensors_of
from attn_graph.backends.batch import idle_batch, make_pools
from attn_graph.backends.modes import ForwardMode, ReadEnd
from attn_graph.backends.oracle import HostBatch
from attn_graph.backends.registry import registered
from attn_graph.backends.runners.decode import upload
from attn_graph.backends.runners.eagle_draft_extend import EagleDraftExtendRunner
from attn_graph.backends.runners.read_done import ReadDone
from attn_graph.backends.triton import TritonBackend
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.profilers.conformance.faults.eagle_draft_extend import WithoutInGraphHook
from attn_graph.profilers.counters import count
from rebuilds import ARMS, host_pools
from runner_cases import built, captured, wrong_fields
from runner_spies import DEVICE, GRAPHS, H, SpyBackend, a_step, on_device, placement, pools

pytestmark = pytest.mark.usefixtures("on_stream")
Mode = ForwardMode
N, CONTEXT = 4, 100
CONFIG = AttentionConfig(page_size=16, max_context=CONTEXT, draft_tokens=N, topk=1, draft_steps=3)
TABLES = pools(CONTEXT + N, 16)
LENGTHS = ((20, 99, 40, 17), (90, 8, 30), (9, 64), (33,))


def step_of(lengths, tables=TABLES, width=N, **also):
    b = len(lengths)
    step = a_step(
        Mode.DRAFT_EXTEND_V2, lengths, tables, width, extend_seq_lens=torch.full((b,), width, dtype=torch.int32),
        hidden_states=torch.arange(b * width * H, dtype=torch.float32).view(-1, H),
    )  # fmt: skip
    return on_device(replace(step, **also))


def real(cls, arm, buckets=(2, 4), runner=EagleDraftExtendRunner, config=CONFIG, lens=torch.int64):
    backend = cls(config, TABLES, arm.implementation, recorded=arm.placement.value != "eager")
    return captured(runner, backend, buckets, lens=lens)


def spied(log, buckets=(2, 4), recorded=True, cls=EagleDraftExtendRunner, backend=SpyBackend, **options):
    spy = backend(log, recorded=recorded, tables=TABLES, draft_tokens=N, topk=1, draft_steps=3)
    return built(cls, spy, buckets, log=log, **options)


@pytest.mark.parametrize("lens", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("cls", [TrtllmMhaBackend, TritonBackend])
def test_every_batch_is_the_oracles_though_slots_come_unsliced(cls, arm, lens):
    runner = real(cls, arm, lens=lens)
    for lengths in LENGTHS:
        step = step_of(lengths)
        runner.load_batch(step)
        assert runner.view.seq_lens.shape == runner.view.req_pool_indices.shape == (4,)
        runner.replay()
        assert wrong_fields(runner, TABLES) == []


SERVING = [info for info in registered().values() if "draft_extend_v2" in info.modes and info.kind == "backend"]


@pytest.mark.parametrize("info", SERVING, ids=lambda info: info.name)
def test_every_backend_with_this_mode_cuts_what_it_is_given(info):
    """Rows behind the captured size hold an earlier batch's; a list of all backends finds those written later too."""
    v4 = info.name.startswith("deepseek_v4")
    page = 256 if v4 else 64 if info.name in ("dsa", "flashmla", "trtllm_mla") else 16
    config = replace(CONFIG, page_size=page, max_context=128, window=128 if v4 else None, extra={"num_sms": 4})
    tables = make_pools(rows=9, width=192, page_size=page, swa=v4, seed=0, device=DEVICE)
    results = []
    for stale in (True, False):
        backend = info.load()(config, tables)
        slots = EagleDraftExtendRunner.new_slots(backend, 4, H)
        runner = EagleDraftExtendRunner(backend, [2, 4], slots, placement(backend), GRAPHS)
        runner.capture()
        if stale:
            runner.load_batch(step_of((20, 99, 120, 117), tables))
        runner.load_batch(step_of((33,), tables))
        runner.replay()
        batch = HostBatch(
            mode=str(runner.mode),
            req_pool_indices=slots.req_pool_indices[:2].cpu().numpy(),
            seq_lens=slots.seq_lens[:2].cpu().numpy(),
            out_cache_loc=slots.out_cache_loc[:N].cpu().numpy(),
            tokens_per_req=N,
            num_accept_tokens=slots.num_accept_tokens[:2].cpu().numpy(),
            positions=slots.positions[: 2 * N].cpu().numpy(),
            live_requests=1,
            seq_lens_fill=slots.fill_value,
            extend_seq_lens=slots.extend_seq_lens[:2].cpu().numpy(),
        )
        got = tensors_of(backend.metadata[runner.mode, 2])
        wanted = backend.expected(batch, host_pools(tables))
        results.append({path: got[path].cpu().numpy()[want.live].tolist() for path, want in wanted.items()})
    assert results[0] == results[1]


class ReadsPastTheBatch(TrtllmMhaBackend):
    """The width of the page table from all rows of the slot, stale ones behind the captured size included."""

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        md.max_seq_len_k = int(fb.seq_lens_cpu.max())
        self._aten_pages(
            md, self.pools.req_to_token[fb.req_pool_indices[: fb.batch_size, None], self.strided_indices], 7
        )


@pytest.mark.parametrize(("cls", "longest"), [(TrtllmMhaBackend, 33), (ReadsPastTheBatch, 99)])
def test_a_hook_that_does_not_cut_sees_an_earlier_batch(cls, longest):
    runner = real(cls, ARMS[0])
    runner.load_batch(step_of((20, 99, 40, 99)))
    runner.load_batch(step_of((33,)))
    runner.replay()
    assert runner.backend.forward_metadata.max_seq_len_k == longest


# Order.


def test_hooks_run_in_order_and_the_in_graph_hook_is_in_the_body():
    """R13 and R14 left it out of this body: whatever was recorded nowhere stayed as at capture."""
    log = []
    runner = spied(log, forward=lambda step: log.append("forward"))
    runner.capture()
    one_size = ["out_capture", "capture", "in", "forward", "warm", "in", "forward", "warm", "in", "forward"]
    assert log == [("state", 4, 16), *one_size, *one_size]
    del log[:]
    runner.load_batch(step_of((20, 30, 40)))
    runner.replay()
    assert log == ["out", "launch"]


@pytest.mark.parametrize(("cls", "stale"), [(EagleDraftExtendRunner, False), (WithoutInGraphHook, True)])
def test_r13_without_the_in_graph_hook_tables_are_stale(cls, stale):
    runner = real(TrtllmMhaBackend, ARMS[3], runner=cls)
    step = step_of((20, 99, 40, 17))
    runner.load_batch(step)
    runner.replay()
    assert bool(wrong_fields(runner, TABLES)) is stale


# Width.


class WidthFromSteps(EagleDraftExtendRunner):
    """A07: num_steps + 1 tokens per request, where the runner lays out num_draft_tokens."""

    @staticmethod
    def new_slots(backend, *args, **options):
        wide, backend.config = backend.config, replace(backend.config, draft_tokens=backend.config.draft_steps + 1)
        slots = EagleDraftExtendRunner.new_slots(backend, *args, **options)
        backend.config = wide
        return slots


@pytest.mark.parametrize(("cls", "queries"), [(EagleDraftExtendRunner, [0, 8, 16]), (WidthFromSteps, [0, 4, 8])])
def test_queries_stand_at_the_width_of_the_layout(cls, queries):
    """A07: 3 steps, topk 4, 8 draft tokens, bs 2."""
    config = replace(CONFIG, draft_tokens=8, topk=1, draft_steps=3)
    runner = real(TrtllmMhaBackend, ARMS[3], (2,), cls, config)
    runner.load_batch(step_of((20, 40), width=runner.slots.tokens_per_req))
    runner.replay()
    assert runner.backend.forward_metadata.cu_seqlens_q.tolist() == queries


def test_the_width_is_of_the_shape_and_no_accepted_count_changes_it_or_is_read():
    runner = real(TrtllmMhaBackend, ARMS[3], (2,))
    for accepted in ((1, 4), (3, 2)):
        counts = torch.tensor(accepted, dtype=torch.int32)
        runner.load_batch(step_of((20, 40), num_accept_tokens=counts, num_accept_tokens_cpu=accepted))
        assert count(runner.rebuild, [runner.slots.seq_lens_cpu]).syncs == 0
        runner.launch()
        md = runner.backend.forward_metadata
        assert (md.cu_seqlens_q.tolist(), md.max_seq_len_q) == ([0, N, 2 * N], N)
        assert md.cache_seqlens_int32.tolist() == [20, 40]  # A24: prefix and new tokens
    assert runner.capture_batch(2).spec_info.num_tokens_per_req == N


# Slots and the view.


def test_padding_is_reset_and_write_slots_begin_as_ones():
    runner = spied([], (4,), recorded=False)
    slots = runner.slots
    assert slots.out_cache_loc.tolist() == [1] * 16
    runner.capture()
    assert runner.backend.captured_batches[0].out_cache_loc.tolist() == [1] * 16
    runner.load_batch(step_of((20, 99, 40, 17)))
    step = step_of((9,), num_accept_tokens=torch.tensor([2], dtype=torch.int32))
    runner.load_batch(step)
    assert slots.out_cache_loc.tolist() == [*step.out_cache_loc.tolist(), *[0] * 12]
    assert slots.seq_lens.tolist() == [9, 1, 1, 1] and slots.req_pool_indices.tolist() == [1, 0, 0, 0]
    assert slots.num_accept_tokens.tolist() == [2, N, N, N] and slots.extend_seq_lens.tolist() == [N] * 4
    assert slots.hidden_states[N:].eq(0).all() and slots.positions[N:].eq(0).all()


def test_write_slots_of_the_view_are_the_live_tokens_static_ones():
    runner = spied([], (4,), recorded=False)
    runner.capture()
    step = step_of((20, 99, 40))
    runner.load_batch(step)
    view = runner.view
    assert view.out_cache_loc.data_ptr() == runner.slots.out_cache_loc.data_ptr()
    assert view.out_cache_loc.tolist() == step.out_cache_loc.tolist()
    assert (view.batch_size, view.num_padding, view.seq_lens_sum) == (4, 1, 160)
    spec = view.spec_info
    assert spec.extend_seq_lens.tolist() == [N] * 4 and spec.positions.numel() == 4 * N
    assert spec.num_accept_tokens_cpu == (*step.num_accept_tokens_cpu, N)


def test_hidden_states_are_handed_out_as_copies_and_other_outputs_are_cut():
    logits = torch.zeros(2 * N, 2, device=DEVICE)

    def forward(step):
        logits.add_(1)
        return {"hidden_states": step.slots["hidden_states"] * 2, "logits": logits}

    runner = spied([], (2,), forward=forward)
    runner.capture()
    runner.load_batch(step_of((20,)))
    first = runner.replay()
    kept = first["hidden_states"].clone()
    assert first["logits"].shape == (N, 2) and first["logits"].data_ptr() == logits.data_ptr()
    runner.load_batch(step_of((20,), hidden_states=torch.full((N, H), 7.0)))
    second = runner.replay()
    assert torch.equal(first["hidden_states"], kept) and second["hidden_states"].eq(14).all()


def test_an_idle_rank_replays_padding():
    runner = real(TrtllmMhaBackend, ARMS[3])
    runner.load_batch(step_of((90, 91)))
    runner.replay()
    runner.load_batch(upload(idle_batch(), DEVICE))
    runner.replay()
    assert runner.backend.forward_metadata.cache_seqlens_int32.tolist() == [1, 1]
    assert runner.slots.num_accept_tokens[:2].tolist() == [N, N]


def test_what_a_step_lacks_is_named():
    runner = spied([])
    runner.capture()
    with pytest.raises(ConfigError, match="EagleDraftExtendRunner needs extend_seq_lens"):
        runner.load_batch(replace(step_of((20,)), extend_seq_lens=None))


# The last reader.


class Events:
    def external(self):
        return self

    def recorded(self):
        return "fresh"

    def record(self):
        raise AssertionError("this graph has no marker")


class ReadsInGraph(SpyBackend):
    def shared_read_ends(self, mode):
        return ReadEnd.IN_REPLAY


@pytest.mark.parametrize(("backend", "published"), [(SpyBackend, None), (ReadsInGraph, "fresh")])
def test_an_earlier_phases_event_is_cleared_and_ours_comes_after_the_replay(backend, published):
    read_done = ReadDone(Events())
    runner = spied([], (2,), backend=backend, read_done=read_done)
    runner.capture()
    read_done.after_launch(ReadEnd.POST_REPLAY, marked=True)  # verify's
    runner.load_batch(step_of((20,)))
    assert read_done._event is None  # whoever asks now waits for the whole stream
    runner.replay()
    assert read_done.take() == published
