"""Candidates and keys."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from attn_graph.backends.modes import Implementation
from attn_graph.backends.registry import lookup
from attn_graph.backends.tunable import KERNELS
from attn_graph.profilers.measure import attention_config, case_pools
from attn_graph.profilers.sample import Case
from attn_graph.tuning.measure import padding_runner
from attn_graph.tuning.space import (
    CONSTRAINTS,
    MOST_PROGRAMS,
    SPACES,
    NotTunable,
    candidates,
    columns_of,
    default,
    key_of,
    representatives,
    ruled_out,
)

CASE = Case("trtllm_mha", "decode", 64, 64, "loguniform:1:131072", 64, 131072, swa=True)


def settings(case: Case, warp_size: int = 32) -> list[dict[str, int]]:
    return [candidate.as_dict() for candidate in candidates(case, warp_size)]


@pytest.mark.parametrize("backend", representatives())
@pytest.mark.parametrize("bucket", [1, 12, 64, 512, 4096])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 2048, 131072])
@pytest.mark.parametrize("warp_size", [32, 64])
def test_the_default_comes_first_once_and_the_others_obey_every_rule(backend, bucket, columns, warp_size):
    default, *others = settings(
        replace(CASE, backend=backend, bucket=bucket, page_size=1, max_context=columns), warp_size
    )
    assert default not in others
    low, high = SPACES[KERNELS[backend].name].cells_per_lane
    for s in others:
        rows = s.get("rows", 1)
        assert s["programs_per_row"] <= -(-columns // s["block"])
        assert s["programs_per_row"] == 1 or s["programs_per_row"] * -(-bucket // rows) <= MOST_PROGRAMS
        assert rows <= bucket or "rows" not in SPACES[KERNELS[backend].name].values
        assert low <= s["block"] * rows / s["num_warps"] / warp_size <= high


def test_what_is_ruled_out_and_what_is_left_are_all_combinations_together():
    values = SPACES["decode_metadata"].values
    combinations = math.prod(len(values[name]) for name in settings(CASE)[0] if name in values)
    left = len(set(candidates(CASE)) - {default(CASE)})
    ruled = sum(ruled_out(CASE).values())
    assert ruled > 0
    assert combinations - ruled in (left, left + 1)  # the default may be on the grid


def test_a_rule_that_is_taken_out_lets_more_through(monkeypatch):
    before = set(candidates(CASE))
    for what in list(CONSTRAINTS):
        with monkeypatch.context() as patch:
            patch.delitem(CONSTRAINTS, what)
            assert set(candidates(CASE)) >= before
    monkeypatch.delitem(CONSTRAINTS, "too few or too many cells a lane")
    assert len(candidates(CASE)) > len(before)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("bucket", [1, 8, 64])
def test_the_default_is_what_the_backend_runs_untuned(backend, bucket):
    case = replace(CASE, backend=backend, bucket=bucket, max_context=4096, swa=False)
    backend = lookup(backend).load()(attention_config(case), case_pools(case, "cpu"), Implementation.FUSED)
    padding_runner(case, backend)
    assert backend.kernel_config(bucket).as_dict() == default(case).as_dict()


@pytest.mark.parametrize("backend", KERNELS)
def test_a_setting_reaches_the_kernels_own_config(backend):
    case = replace(CASE, backend=backend)
    setting = settings(case)[-1]
    assert attention_config(case, setting).extra["kernel_config"].as_dict() == setting


def test_long_tables_of_few_rows_have_more_to_try_than_short_ones_of_many():
    long, short = (settings(replace(CASE, bucket=b, page_size=1, max_context=c)) for b, c in ((1, 131072), (512, 512)))
    assert len(long) > 1.5 * len(short)
    assert {s["programs_per_row"] for s in short} <= {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("bucket", "columns", "best"),
    [(1, 16384, (64, 256, 4)), (8, 2048, (4, 128, 4)), (64, 2048, (8, 256, 4)), (256, 2048, (4, 128, 4)),
     (32, 32768, (16, 512, 4)), (512, 16384, (1, 64, 1))],
)  # fmt: skip
def test_settings_that_won_on_an_h200_are_in_the_space(bucket, columns, best):
    found = settings(replace(CASE, bucket=bucket, page_size=64, max_context=64 * columns))
    assert best in {(s["programs_per_row"], s["block"], s["num_warps"]) for s in found}


@pytest.mark.parametrize(
    ("page_size", "max_context", "drafts"), [(64, 131072, 0), (64, 128, 4), (1, 77, 3), (16, 1, 0)]
)
def test_columns_are_those_of_the_backends_buffers(page_size, max_context, drafts):
    case = replace(CASE, page_size=page_size, max_context=max_context, draft_tokens=drafts, draft_steps=drafts)
    assert columns_of(case) == attention_config(case).table_columns


def test_a_key_names_the_gpu_the_variant_and_the_shape():
    key = key_of(CASE, "NVIDIA H200")
    assert (key.device, key.kernel, key.page_size, key.swa) == ("NVIDIA H200", "decode_metadata", 64, True)
    assert (key.bucket, key.columns, key.mode, key.context) == (64, 2048, "decode", "loguniform:1:131072")


def test_a_backend_without_block_sizes_is_named_with_those_that_have():
    with pytest.raises(NotTunable, match=r"'no_such'\. Known: trtllm_mha"):
        candidates(replace(CASE, backend="no_such"))


@pytest.mark.parametrize("module", ["store", "space", "tuner", "child", "isolated", "session", "log", "static"])
def test_what_the_command_line_loads_first_is_light(module):
    code = f"import attn_graph.tuning.{module}, sys; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
