"""Compiling candidates for GPUs that are not there."""

from __future__ import annotations

import sys
import threading

import pytest
from attn_graph.profilers.sample import Case
from attn_graph.tuning import static
from attn_graph.tuning.outcome import Outcome
from attn_graph.tuning.space import Candidate, candidates
from attn_graph.tuning.static import SPILL_LIMIT_BYTES, Compiled, Compilers, Target, TargetError, parse_target

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")

CASE = Case("trtllm_mha", "decode", 64, 64, "loguniform:1:131072", 64, 131072, swa=True)
HUGE = Candidate.of(programs_per_row=1, block=4096, num_warps=1)
NO_POWER = Candidate.of(programs_per_row=1, block=100, num_warps=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_a_candidate_that_spills_and_one_that_does_not_compile_are_out_with_numbers_and_reasons():
    default = candidates(CASE)[0]
    with Compilers(parse_target("sm_90"), jobs=2) as compilers:
        found = {c.outcome.candidate: c for c in compilers.survey(CASE, [default, HUGE, NO_POWER])}
    assert list(found) == [default, HUGE, NO_POWER]
    good, huge, wrong = found.values()
    assert (good.outcome.status, good.resources.spill_bytes) == ("ok", 0)
    assert 8 < good.resources.registers < 128
    assert huge.outcome.cause == "spills"
    assert huge.resources.registers == 255
    assert huge.resources.spill_bytes > SPILL_LIMIT_BYTES
    assert f"{huge.resources.spill_bytes} bytes a lane" in huge.outcome.reason
    assert wrong.outcome.cause == "compile_error"
    assert "power of 2" in wrong.outcome.reason
    assert wrong.resources is None


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_other_targets_tell_registers_and_spills_too(target):
    with Compilers(parse_target(target)) as compilers:
        (found,) = compilers.survey(CASE, candidates(CASE)[:1])
    assert found.outcome.reason == ""
    assert found.resources.registers > 8
    assert found.resources.spill_bytes == 0
    assert found.resources.code_bytes > 1000


def test_what_is_urgent_is_compiled_before_what_was_submitted_earlier(monkeypatch):
    """One compiler, busy with the first candidate while the others are submitted and one of them is dropped."""
    done, busy, free = [], threading.Event(), threading.Event()

    class MadeUp:
        def __init__(self, target) -> None: ...
        def kill(self) -> None: ...
        def close(self) -> None: ...

        def compile(self, case, candidate):
            busy.set()
            assert free.wait(10)
            done.append(candidate)
            if candidate == HUGE:
                raise RuntimeError("no compiler")
            return Compiled(Outcome(candidate))

    monkeypatch.setattr(static, "_Worker", MadeUp)
    first, likely, next_case, dropped, now = candidates(CASE)[:5]
    with Compilers(parse_target("sm_90")) as compilers:
        futures = compilers.submit(CASE, [first], (0, 0))
        assert busy.wait(10)
        futures += compilers.submit(CASE, [next_case, HUGE], (1, 0))
        futures += compilers.submit(CASE, [likely, dropped], (0, 1))
        futures[-1].cancel()
        futures += compilers.submit(CASE, [now], (0, 0))
        free.set()
        assert futures[1].result(10).outcome.candidate == next_case
        with pytest.raises(RuntimeError, match="no compiler"):
            futures[2].result(10)
    assert done == [first, now, likely, next_case, HUGE]


@pytest.mark.parametrize(
    ("text", "target"),
    [("sm_90", Target("cuda", 90, 32)), ("sm_90a", Target("cuda", 90, 32)), ("sm100", Target("cuda", 100, 32)),
     ("gfx942", Target("hip", "gfx942", 64)), ("gfx1100", Target("hip", "gfx1100", 32))],
)  # fmt: skip
def test_targets_are_read_as_compilers_spell_them(text, target):
    assert parse_target(text) == target


@pytest.mark.parametrize("text", ["", "90", "h200", "sm_", "cuda:90"])
def test_an_unknown_target_is_refused_with_examples(text):
    with pytest.raises(TargetError, match=r"Known: sm_NN \(sm_80, sm_90, sm_100\) and gfxNNN"):
        parse_target(text)
