"""Observed processes on the CPU, a CUPTI made for the test, and what is made of known numbers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import replace

import pytest
from attn_graph.profilers import observers
from attn_graph.profilers.environment import TEARDOWN
from attn_graph.profilers.observers import (
    AFTER,
    BARE,
    BODY,
    DURING,
    OBSERVERS,
    PHASES,
    RECAPTURED,
    CuptiError,
    Observation,
    ObserverPlan,
    body_table,
    cupti_library,
    fit_line,
    kernel_activity,
    launch_fits,
    observations,
    observe_all,
    observer_rows,
)
from attn_graph.profilers.results import RunWriter, read_samples
from attn_graph.profilers.sample import Case, Sample
from made_up_runs import environment

CASE = Case(
    backend="trtllm_mha", mode="decode", bs=2, bucket=2, context="64", page_size=16, max_context=128, swa=False,
    graph_nodes=5, device="cpu",
)  # fmt: skip
PLAN = ObserverPlan((CASE,), ("aten-eager", "fused-graph"), (CASE, replace(CASE, graph_nodes=1)), "cpu", rounds=3)


def run_with(tmp_path, samples: dict[Case, list[Sample]]):
    with RunWriter(tmp_path / "run", environment()) as writer:
        for case, of_case in samples.items():
            writer.write_case(case, of_case)
    return read_samples(tmp_path / "run")


def test_each_observer_that_uses_cupti_is_measured_with_and_without_teardown_and_the_control_comes_first():
    found = observations(["cupti", "nvtx", "none"])
    assert found == [
        Observation("none"), Observation("nvtx"), Observation("cupti"), Observation("cupti", teardown=True),
    ]  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("who", observations(list(OBSERVERS)))
def test_a_label_says_who_observed_and_when(who, phase):
    assert Observation.parse(who.label(phase)) == (who, phase)


def test_only_a_bare_step_of_the_control_counts_as_unobserved():
    plain = [(who, p) for who in observations(list(OBSERVERS)) for p in PHASES if who.label(p) == "none"]
    assert plain == [(Observation("none"), BARE)]


def test_the_table_has_every_node_count_and_topology_and_one_node_has_no_branches():
    table = body_table(replace(CASE, device="cuda"))
    assert {(c.graph_nodes, c.graph_branches) for c in table} == {
        (n, b) for n in (1, 100, 500, 1000, 2876) for b in (1, 2, 4)
    } - {(1, 2), (1, 4)}
    assert max(c.graph_nodes for c in body_table(CASE)) == 500


@pytest.fixture(scope="module")
def observed() -> dict[Observation, dict[Case, list[Sample]]]:
    return dict(observe_all(PLAN, observations(["none", "nvtx", "torch-profiler-cpu", "torch-profiler"]), 120))


@pytest.mark.parametrize("name", ["none", "nvtx", "torch-profiler-cpu"])
def test_prep_step_and_replay_have_every_phase_in_every_round(observed, name):
    who = Observation(name)
    of_case = observed[who][CASE]
    for phase in (BARE, DURING, AFTER):
        for arm, metrics in (("aten-eager", {"prep_host_us", "step_host_us", "replay_host_us"}),
                             (BODY, {"replay_host_us"})):  # fmt: skip
            seen = [s for s in of_case if s.arm == arm and s.observer == who.label(phase)]
            assert {s.metric for s in seen} == metrics and {s.step for s in seen} == {0, 1, 2}
            assert all(s.value > 0 for s in seen)
    assert {s.arm for s in of_case if s.observer == who.label(RECAPTURED)} == {BODY}


def test_watching_every_operation_costs_and_shows(observed):
    def best_us(who: Observation, phase: str) -> float:
        return min(
            s.value for s in observed[who][CASE] if s.metric == "prep_host_us" and s.observer == who.label(phase)
        )

    profiled = Observation("torch-profiler-cpu")
    assert best_us(profiled, DURING) > best_us(profiled, BARE)


def test_ranges_say_whether_a_tool_received_them(observed):
    causes = {s.cause for s in observed[Observation("nvtx")][CASE] if s.observer == "nvtx during" and s.value}
    assert causes == {"ranges are idle"}


def test_what_a_cpu_cannot_show_is_blank_with_the_reason(observed):
    for who, status in (
        (Observation("torch-profiler"), "no_device"),
        (Observation("torch-profiler", True), "no_device"),
        (Observation("torch-profiler-cpu", True), "not_applicable"),
    ):
        samples = [s for of_case in observed[who].values() for s in of_case]
        assert samples and {(s.value, s.status) for s in samples} == {(None, status)}
    interpreted = [s for s in observed[Observation("none")][CASE] if s.arm == "fused-graph"]
    assert [(s.value, s.status) for s in interpreted] == [(None, "no_device")]


def test_a_process_that_cannot_measure_is_a_failed_row_and_the_next_one_runs():
    nowhere = replace(PLAN, device="cuda:77", arms=(), rounds=1)
    found = list(observe_all(nowhere, observations(["none", "nvtx"]), 60))
    for _, samples in found:
        statuses = {s.status for of_case in samples.values() for s in of_case}
        assert statuses == {"failed"}
    assert len(found) == 2


def test_the_variable_is_what_the_child_finds_and_the_parent_keeps_its_own(monkeypatch):
    monkeypatch.setenv(TEARDOWN, "0")
    read = ["sh", "-c", f"echo ${{{TEARDOWN}-unset}}"]
    for value, seen in (("1", "1"), (None, "unset")):
        with observers._variable(TEARDOWN, value):
            assert subprocess.run(read, capture_output=True, text=True, check=True).stdout.strip() == seen
    assert os.environ[TEARDOWN] == "0"


# --- CUPTI ------------------------------------------------------------------------------------------------------

FAKE_CUPTI = """
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
static void (*requested)(uint8_t **, size_t *, size_t *);
static void (*completed)(void *, uint32_t, uint8_t *, size_t, size_t);
static uint8_t *buffer; static size_t size; static int bad_buffer, log_at; static char calls[64];
const char *fake_calls(void) { return calls; }
int fake_bad_buffer(void) { return bad_buffer; }
int cuptiActivityRegisterCallbacks(void *r, void *c) { requested = r; completed = c; calls[log_at++] = 'r'; return 0; }
int cuptiActivityEnable(int kind) {
    calls[log_at++] = kind == 10 ? 'e' : '?';
    size_t most = 7; requested(&buffer, &size, &most);
    bad_buffer = (uintptr_t)buffer % 8 != 0 || size < 1 << 20 || most != 0;
    buffer[0] = buffer[size - 1] = 1;
    return atoi(getenv("FAKE_ENABLE"));
}
int cuptiActivityFlushAll(uint32_t flag) {
    calls[log_at++] = 'f';
    completed(0, 0, buffer, size, atoi(getenv("FAKE_BYTES")));
    return 0;
}
int cuptiActivityDisable(int kind) { calls[log_at++] = kind == 10 ? 'd' : '?'; return 0; }
int cuptiFinalize(void) { calls[log_at++] = 'x'; return 0; }
"""


@pytest.fixture
def fake_cupti(tmp_path, monkeypatch):
    """A library with the calls we make; gives the calls it saw."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, path = tmp_path / "fake.c", tmp_path / "libcupti.so"
    source.write_text(FAKE_CUPTI)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    monkeypatch.setattr(observers, "cupti_library", lambda: path)
    monkeypatch.setenv("FAKE_BYTES", "4096")
    monkeypatch.setenv("FAKE_ENABLE", "0")
    library = ctypes.CDLL(str(path))
    library.fake_calls.restype = ctypes.c_char_p
    return library


@pytest.mark.parametrize(("teardown", "calls"), [(False, b"refd"), (True, b"refdx")])
def test_records_are_taken_from_buffers_of_ours_and_cupti_is_finalised_only_if_asked(fake_cupti, teardown, calls):
    with kernel_activity(teardown=teardown) as delivered:
        assert delivered() == 0
    assert delivered() == 4096
    assert fake_cupti.fake_calls() == calls and not fake_cupti.fake_bad_buffer()


def test_a_cupti_that_records_nothing_or_refuses_is_an_error(fake_cupti, monkeypatch):
    monkeypatch.setenv("FAKE_BYTES", "0")
    with pytest.raises(CuptiError, match="delivered no record"), kernel_activity(teardown=False):
        pass
    monkeypatch.setenv("FAKE_ENABLE", "39")
    with pytest.raises(CuptiError, match="cuptiActivityEnable failed with code 39"), kernel_activity(teardown=False):
        pytest.fail("nothing may be measured under a CUPTI that is off")


def test_cupti_is_the_one_that_the_process_has_loaded_else_an_installed_one(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 00:00 1   /opt/[x] y/libcupti.so.13\n7f02-7f03 r-xp 0 00:00 2   /lib/libc.so.6\n")
    assert str(cupti_library(maps)) == "/opt/[x] y/libcupti.so.13"
    monkeypatch.setattr(observers.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    maps.write_text("")
    assert cupti_library(maps) is None
    for at in ("cuda/extras/CUPTI/lib64/libcupti.so", "nvidia/cuda_cupti/lib/libcupti.so.12"):
        (tmp_path / at).parent.mkdir(parents=True)
        (tmp_path / at).touch()
        assert cupti_library(maps) == tmp_path / at


# --- figures ----------------------------------------------------------------------------------------------------


def launches(who: Observation, phase: str, us: list[float]) -> list[Sample]:
    return [Sample(BODY, 0, i, "launch_host_us", v, observer=who.label(phase)) for i, v in enumerate(us)]


def test_factors_are_over_the_bare_median_of_the_same_process(tmp_path):
    traced, control = Observation("torch-profiler", True), Observation("none")
    samples = [
        *launches(control, BARE, [100.0] * 3), *launches(traced, BARE, [5.0, 4.0, 90.0]),
        *launches(traced, DURING, [400.0, 500.0, 600.0]), *launches(traced, AFTER, [10.0] * 3),
    ]  # fmt: skip
    control_row, row = observer_rows(run_with(tmp_path, {replace(CASE, device="cuda"): samples}))
    assert (row.observer, row.teardown, row.graph, row.n) == ("torch-profiler", True, "cuda", 3)
    assert (row.bare_us, row.during_us, row.after_us, row.recaptured_us) == (5.0, 500.0, 10.0, None)
    assert (row.during_factor, row.after_factor) == (100.0, 2.0)
    assert (control_row.bare_us, control_row.during_factor) == (100.0, None)


def test_a_failed_process_is_a_row_that_says_why(tmp_path):
    blank = Sample(BODY, 0, -1, "launch_host_us", None, "failed", "killed by SIGSEGV", observer="cupti during")
    (row,) = observer_rows(run_with(tmp_path, {CASE: [blank]}))
    assert (row.observer, row.status, row.cause, row.bare_us) == ("cupti", "failed", "killed by SIGSEGV", None)


def test_fixed_and_per_node_cost_are_found_again_with_their_errors(tmp_path):
    who = Observation("cupti")
    cost = {BARE: (3.0, 0.002), DURING: (20.0, 0.7), AFTER: (4.0, 0.2)}
    samples = {
        replace(CASE, device="cuda", graph_nodes=n): [
            s for phase, (fixed, per_node) in cost.items() for s in launches(who, phase, [fixed + per_node * n] * 3)
        ]
        for n in (1, 500, 1000, 2876)
    }
    fits = launch_fits(observer_rows(run_with(tmp_path, samples)))
    assert {f.phase: (round(f.fixed_us, 1), round(f.per_node_us, 4)) for f in fits} == cost
    assert all(f.points == 4 and f.per_node_stderr_us < 1e-5 and f.r_squared > 0.999 for f in fits)


def test_an_error_needs_more_than_two_points_and_grows_with_the_scatter():
    assert fit_line({1: 4.0, 101: 5.0})[2:5] == (None, pytest.approx(0.01), None)
    _, _, fixed_error, _, error, r_squared = fit_line({1: 4.0, 101: 7.0, 201: 6.0, 301: 9.0})
    assert error > 0.003 and fixed_error > 0.5 and r_squared < 0.95


@pytest.mark.gpu
def test_a_launch_in_a_process_that_nothing_looked_at_costs_next_to_nothing_per_node():
    fixed_us, per_node_us = observers.launch_cost()
    assert 0.5 < fixed_us < 50 and per_node_us < 0.05
