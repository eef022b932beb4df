"""Checking and timing candidates of a real backend, in Triton's interpreter, with made-up times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_graph.backends.base import tensors_of
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.profilers.device_time import Laps
from attn_graph.profilers.sample import Case
from attn_graph.tuning.decide import GUARDS
from attn_graph.tuning.measure import DRAWS, FINAL_BUILDS, CaseMeasurer
from attn_graph.tuning.space import Candidate, candidates
from attn_graph.tuning.tuner import tune

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASE = Case("trtllm_mha", "decode", 2, 2, "loguniform:1:4096", 4, 4096, swa=True)  # 1,024 columns


def block(size: int, programs: int = 1) -> Candidate:
    return Candidate.of(programs_per_row=programs, block=size, num_warps=4)


GOOD, OTHER = block(1024), block(256, 2)


class CountingTimer:
    """Made-up device time: each rebuild adds its block size's cost, each flush 60 us, each launch 7."""

    now_us = 0.0

    def captured(self, body, n):
        before = CountingTimer.now_us
        for _ in range(2):  # two bodies stand for all: the interpreter takes its time
            body()
        us = (CountingTimer.now_us - before) / 2

        def replay() -> None:
            CountingTimer.now_us += 7.0 + n * us

        return replay

    def flush(self) -> None:
        CountingTimer.now_us += 60.0

    def laps(self, *stretches) -> Laps:
        us = []
        for stretch in stretches:
            before = CountingTimer.now_us
            stretch()
            us.append(CountingTimer.now_us - before)
        return Laps(tuple(us), gapless=True)


class Half(TrtllmMhaBackend):
    """Block size 512 fills columns 0 to 511 only; whatever an earlier candidate left stays in the others."""

    def rebuild_fused(self, fb, md):
        kept = md.page_table[:, 512:].clone()
        super().rebuild_fused(fb, md)
        if md.kernel_config.block == 512:
            md.page_table[:, 512:] = kept


class WritesItsInput(TrtllmMhaBackend):
    """Block size 512 changes a table that it may only read; the values come out right."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        if md.kernel_config.block == 512:
            self.pools.req_to_token[1, 0] += 4


class Accumulates(TrtllmMhaBackend):
    """The first call is right, the second adds to it."""

    def rebuild_fused(self, fb, md):
        before = md.cache_seqlens_int32.clone()
        super().rebuild_fused(fb, md)
        if md.kernel_config.block == 512 and (before > 0).all():
            md.cache_seqlens_int32 += before


class Timed(Accumulates):
    """Smaller blocks are faster on this made-up device."""

    def rebuild_fused(self, fb, md):
        super().rebuild_fused(fb, md)
        CountingTimer.now_us += md.kernel_config.block / 100


class Raises(TrtllmMhaBackend):
    """Block sizes 512, 256 and 128 fail as a compiler, a device and anything else would."""

    def rebuild_fused(self, fb, md):
        from triton.runtime.errors import OutOfResources

        errors = {
            512: type("CompilationError", (Exception,), {})("at 3:5:\n    x = y\n    ^\nrange must be a power of 2"),
            256: OutOfResources(300_000, 232_448, "shared memory"),
            128: RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging consider ..."),
        }
        if md.kernel_config.block in errors:
            raise errors[md.kernel_config.block]
        super().rebuild_fused(fb, md)


@pytest.mark.parametrize("mode", ["decode", "target_verify", "draft_extend", "draft_extend_v2"])
@pytest.mark.parametrize("swa", [False, True])
def test_every_setting_of_the_real_kernel_is_right(mode, swa):
    drafts = 0 if mode == "decode" else 3
    case = Case("trtllm_mha", mode, 2, 2, "uniform:4:200", 16, 256, swa, topk=min(drafts, 1), draft_tokens=drafts)
    measurer = CaseMeasurer(case, DEVICE)
    for candidate in (block(64), block(64, 2), block(128)):
        assert measurer.rough(candidate).reason == ""


def test_a_setting_that_fills_half_is_rejected_also_after_one_that_fills_all():
    measurer = CaseMeasurer(CASE, DEVICE, Half)
    assert measurer.rough(GOOD).status == "ok"
    found = measurer.rough(block(512))
    assert (found.status, found.cause) == ("skipped", "wrong_values")
    assert found.reason.startswith("page_table[")
    assert ", 512] is -" in found.reason, "the poison is still there"
    assert measurer.rough(GOOD).status == "ok"


def test_on_the_buffers_of_another_and_without_poison_the_half_would_look_whole():
    measurer = CaseMeasurer(CASE, DEVICE, Half)
    check, backend = measurer._checks[0], measurer._built(GOOD)
    metadata = backend.forward_metadata
    check.poison(tensors_of(metadata))
    backend.init_forward_metadata_in_graph(check.batch)
    metadata.kernel_config = replace(metadata.kernel_config, block=512)
    backend.init_forward_metadata_in_graph(check.batch)
    assert check.first_wrong(tensors_of(metadata)) == ""


def test_inputs_that_change_are_named_and_put_back():
    measurer = CaseMeasurer(CASE, DEVICE, WritesItsInput)
    before = measurer._pools.req_to_token.clone()
    found = measurer.rough(block(512))
    assert (found.cause, found.reason) == ("changed_inputs", "it wrote to inputs.0.req_to_token")
    assert torch.equal(measurer._pools.req_to_token, before)
    assert measurer.rough(GOOD).status == "ok"


def test_errors_are_told_apart_and_none_gets_out():
    measurer = CaseMeasurer(CASE, DEVICE, Raises)
    found = {size: measurer.rough(block(size)) for size in (1024, 512, 256, 128)}
    assert {size: o.cause for size, o in found.items()} == {
        1024: "", 512: "compile_error", 256: "out_of_resources", 128: "failed",
    }  # fmt: skip
    assert "range must be a power of 2" in found[512].reason
    assert "shared memory" in found[256].reason
    assert found[128].reason == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_without_a_gpu_values_are_checked_and_nothing_is_timed():
    if DEVICE == "cuda":
        pytest.skip("there is a GPU")
    assert CaseMeasurer(CASE, DEVICE).rough(GOOD).samples_us == ()


def test_the_fastest_right_setting_is_chosen_and_one_that_spoils_later_calls_is_not(monkeypatch):
    monkeypatch.setattr("attn_graph.tuning.measure.CALLS_AGAIN", 2)  # interpreted
    measurer = CaseMeasurer(CASE, DEVICE, Timed, CountingTimer())
    assert measurer.rough(block(512)).median_us == pytest.approx(5.12), "the first call is right"
    tuned = tune([block(1024), block(512)], measurer)
    assert tuned.choice.winner == block(1024), "the only one that stays right"
    assert {o.candidate: o.cause for o in tuned.outcomes}[block(512)] == "wrong_values"
    tuned = tune([block(1024), block(256, 2)], measurer)
    assert tuned.choice.winner == block(256, 2)
    assert tuned.finals.cold_us[block(1024)] == pytest.approx([10.24] * FINAL_BUILDS)


def test_every_batch_of_the_mix_is_timed():
    measurer = CaseMeasurer(CASE, DEVICE, timer=CountingTimer())
    seen = []
    backend = measurer._built(GOOD)
    backend.init_forward_metadata_in_graph = lambda batch: seen.append(batch)
    body = measurer._body(backend)
    for _ in range(2 * DRAWS):
        body()
    assert len({id(batch) for batch in seen}) == DRAWS
    assert len({tuple(batch.seq_lens.tolist()) for batch in seen}) == DRAWS
    assert max(int(batch.seq_lens.max()) for batch in seen) > 4 * min(int(batch.seq_lens.min()) for batch in seen)


def test_finalists_are_timed_on_short_and_on_long_requests_too():
    measurer = CaseMeasurer(CASE, DEVICE, timer=CountingTimer())
    lengths = {name: [int(n) for b in getattr(measurer, name) for n in b.seq_lens] for name in ("_short", "_long")}
    assert max(lengths["_short"]) <= CASE.max_context // 64 < CASE.max_context // 2 <= min(lengths["_long"])
    assert [len(v) for v in lengths.values()] == [DRAWS * CASE.bucket] * 2
    finals = measurer.finals([GOOD, OTHER])
    assert set(finals.short_us) == set(finals.long_us) == {GOOD, OTHER}


def test_after_tuning_the_inputs_are_what_they_were_byte_for_byte():
    measurer = CaseMeasurer(CASE, DEVICE, timer=CountingTimer())
    before = {path: tensor.cpu().numpy().tobytes() for path, tensor in measurer._inputs.items()}
    tune([GOOD, OTHER], measurer)
    assert {path: tensor.cpu().numpy().tobytes() for path, tensor in measurer._inputs.items()} == before
    assert any(path.endswith("req_to_token") for path in before)
    assert any(path.endswith("seq_lens") for path in before)


@pytest.mark.gpu
def test_a_case_is_tuned_on_a_gpu():
    case = Case("trtllm_mha", "decode", 64, 64, "loguniform:1:131072", 64, 131072, swa=True)
    space = candidates(case)[:8]
    tuned = tune(space, CaseMeasurer(case, "cuda"))
    # A GPU that others use too gives impossible or cold-disturbed times now and then; values are right on any.
    assert {o.cause for o in tuned.outcomes} <= {"", "bad_timer", *GUARDS}, [o.reason for o in tuned.outcomes]
    assert tuned.choice is not None
    assert all(0.3 < us < 100 for us in tuned.choice.medians_us.values())
