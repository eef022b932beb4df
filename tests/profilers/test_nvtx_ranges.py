"""The ranges as a tool sees them: a small one of our own, loaded by NVTX the way ncu and nsys are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attn_graph.profilers.nvtx_ranges import range_message

# Writes one line per event. Table 5 of NVTX's callbacks holds the functions with a domain; the indices are those of
# NVTX_CBID_CORE2 in nvtxTypes.h, the attributes' layout that of nvtxEventAttributes_v2.
TOOL = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef void (*function)(void);
typedef struct { size_t size; int (*table)(int module, function ***out, unsigned *n); } callbacks;
typedef struct {
    unsigned short version, size; unsigned category; int color_type; unsigned color; int payload_type;
    int reserved; unsigned long long payload; int message_type; const char *message;
} attributes;
static FILE *out;
static int push(const char *domain, const attributes *a)
{ fprintf(out, "push\t%s\t%d\t%s\n", domain, a->message_type, a->message); fflush(out); return 0; }
static int pop(const char *domain) { fprintf(out, "pop\t%s\n", domain); fflush(out); return 0; }
static const char *name(const char *text) { return strdup(text); }
static const char *registered(const char *domain, const char *text)
{ fprintf(out, "register\t%s\t%s\n", domain, text); fflush(out); return strdup(text); }
int InitializeInjectionNvtx2(const void *(*export)(unsigned))
{
    const callbacks *found = export(1);
    function **table; unsigned n;
    out = fopen(getenv("NVTX_TEST_LOG"), "w");
    if (!out || !found || !found->table(5, &table, &n) || n < 13) return 0;
    *table[4] = (function)push; *table[5] = (function)pop;
    *table[10] = (function)registered; *table[12] = (function)name;
    return 1;
}
"""

STEP = """
from attn_graph.profilers.nvtx_ranges import StepRanges, range_cost_ns, range_state
ranges = StepRanges("trtllm_mha", "decode", "fused-eager", enabled={enabled})
for _ in range(2):
    ranges.push_step(); ranges.push_prep(); ranges.pop(); ranges.push_launch(); ranges.pop(); ranges.pop()
print(range_state(), {cost})
"""

REGISTERED = 3  # NVTX_MESSAGE_TYPE_REGISTERED


def run_step(*, enabled: bool = True, cost: str = "''", **env: str) -> list[str]:
    code = STEP.format(enabled=enabled, cost=cost)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvtx")
    (folder / "tool.c").write_text(TOOL)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "tool.so", folder / "tool.c"], check=True, cwd=folder)
    return folder / "tool.so"


def events(tool: Path, log: Path, **options) -> tuple[list[str], list[list[str]]]:
    said = run_step(NVTX_INJECTION64_PATH=str(tool), NVTX_TEST_LOG=str(log), **options)
    return said, [line.split("\t") for line in log.read_text().splitlines()] if log.exists() else []


def test_a_tool_sees_step_around_prep_and_launch_in_our_domain_with_backend_mode_and_arm(tool: Path, tmp_path: Path):
    said, seen = events(tool, tmp_path / "log")
    assert said == ["traced"]
    message = {what: f"{what} trtllm_mha decode fused-eager" for what in ("prep", "launch", "step")}
    step = [
        ["push", "attn_graph", str(REGISTERED), message["step"]],
        ["push", "attn_graph", str(REGISTERED), message["prep"]],
        ["pop", "attn_graph"],
        ["push", "attn_graph", str(REGISTERED), message["launch"]],
        ["pop", "attn_graph"],
        ["pop", "attn_graph"],
    ]
    assert [event for event in seen if event[0] != "register"] == step * 2
    # Registered before the first range, and once: nothing is looked up while time is taken.
    assert seen[:3] == [["register", "attn_graph", message[what]] for what in ("prep", "launch", "step")]


@pytest.mark.parametrize("off", [{"enabled": False}, {"NVTX_DISABLE": "1"}])
def test_switched_off_ranges_are_called_alike_and_a_tool_sees_none(tool: Path, tmp_path: Path, off: dict):
    _, seen = events(tool, tmp_path / "log", **off)
    assert seen == []


@pytest.mark.alone
def test_a_range_costs_less_than_a_tenth_of_a_graph_launch_of_3_us_and_the_state_is_told(tool: Path, tmp_path: Path):
    (idle, idle_ns), (off, off_ns) = (
        run_step(cost="range_cost_ns()"),
        run_step(cost="range_cost_ns()", NVTX_DISABLE="1"),
    )
    (traced, traced_ns), _ = events(tool, tmp_path / "log", cost="range_cost_ns()")
    assert (idle, off, traced) == ("idle", "disabled", "traced")
    assert 1 < float(off_ns) < 300 and 1 < float(idle_ns) < 300
    assert float(traced_ns) > 2 * float(idle_ns)  # this tool writes to a file


def test_messages_hold_nothing_that_a_filter_would_read_as_syntax():
    assert not set(range_message("prep", "trtllm_mha", "draft_extend_v2", "compile-eager")) & set("@/[]*,+")
