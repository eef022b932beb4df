"""Options become cases: sweeps, names that are almost right, sizes that cannot work."""

from __future__ import annotations

import pytest
from attn_graph.cli import plan
from attn_graph.cli.errors import CliError

ONE = dict(
    backend="trtllm_mha", mode="decode", bs="2", context="64", page_size="16", max_context="256", swa=False, topk="1",
    draft_tokens="4", tp="1", graph_nodes="3", graph_branches="1", allreduce_at=10, device="cpu", seed=0,
)  # fmt: skip


def cases(**changes):
    return plan.sweep(**(ONE | changes)).cases


def test_comma_lists_multiply():
    found = cases(bs="1,8", context="64,loguniform:1:200", page_size="16,64", tp="1,2")
    assert len(found) == 16
    assert len({case.key for case in found}) == 16
    assert [case.tp for case in found] == [1] * 8 + [2] * 8


def test_a_batch_is_padded_to_the_next_captured_size():
    assert [(case.bs, case.bucket) for case in cases(bs="1,3,12,13,300")] == [
        (1, 1), (3, 4), (12, 12), (13, 16), (300, 304),
    ]  # fmt: skip


def test_idle_has_no_requests_and_one_captured_row():
    (case,) = cases(mode="idle")
    assert (case.bs, case.bucket) == (0, 1)


def test_presets_of_graph_sizes_have_names():
    assert [case.graph_nodes for case in cases(graph_nodes="typical,large,7")] == [500, 2876, 7]


def test_draft_options_only_matter_to_speculative_modes():
    (plain,), (verify,) = cases(draft_tokens="8"), cases(mode="target_verify", draft_tokens="8")
    assert (plain.draft_tokens, plain.topk) == (0, 0)
    assert (verify.draft_tokens, verify.topk) == (8, 1)


def test_both_windows_where_nothing_is_said_and_the_backend_has_both():
    assert [case.swa for case in cases(swa=None)] == [False, True]
    assert [case.swa for case in cases(swa=None, backend="cutlass_mla", page_size=None)] == [False]


def test_another_page_size_is_taken_where_the_usual_one_is_refused():
    (case,) = cases(backend="cutlass_mla", page_size=None)
    assert case.page_size == 128


def test_a_mode_that_a_backend_lacks_is_left_out_of_a_sweep_over_several():
    found = cases(backend="trtllm_mha,cutlass_mla", mode="target_verify", page_size=None)
    assert [case.backend for case in found] == ["trtllm_mha"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"backend": "trtlm_mha"}, "Did you mean 'trtllm_mha'"),
        ({"mode": "decod"}, "Did you mean 'decode'"),
        ({"bs": "1,,2"}, "an item is empty"),
        ({"bs": "0"}, "at least 1 request"),
        ({"bs": "5000"}, "largest captured batch size is 4096"),
        ({"bs": "x"}, "--bs: 'x' is not a whole number"),
        ({"context": "300"}, "--context 300 does not fit"),
        ({"context": "300"}, "1 to 256 tokens"),
        ({"mode": "target_verify", "context": "254"}, "1 to 252 tokens"),
        ({"mode": "target_verify", "draft_tokens": "0"}, "needs at least 1"),
        ({"bs": "4096", "max_context": "1048576"}, "KV slots"),
        ({"topk": "2", "mode": "target_verify"}, "topk of at most 1, got 2"),
    ],
)
def test_what_cannot_work_is_refused_with_its_numbers(changes, said):
    with pytest.raises((CliError, LookupError)) as refused:
        cases(**changes)
    assert said in str(refused.value)


def test_one_refused_case_of_a_sweep_keeps_its_reason():
    planned = plan.sweep(**(ONE | {"mode": "target_verify", "topk": "1,2"}))
    assert [case.topk for case in planned.cases] == [1]
    ((case, reason),) = planned.refused.items()
    assert case.topk == 2 and "topk of at most 1" in reason


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("fused", ("fused-eager", "fused-glue", "fused-graph")),
        ("aten-eager,fused-graph", ("aten-eager", "fused-graph")),
        ("graph", ("aten-graph", "fused-graph")),
        ("sglang", ("sglang-eager", "sglang-glue", "sglang-graph")),
    ],
)
def test_arms_by_name_or_by_part_of_one(text, names):
    assert plan.arms(text) == names


def test_all_arms_are_ours():
    assert len(plan.arms("all")) == 7 and not any("sglang" in arm for arm in plan.arms("all"))


@pytest.mark.parametrize(
    ("arm", "impl", "names"),
    [
        ("all", "sglang", ("fused-eager", "fused-glue", "fused-graph", "sglang-eager", "sglang-glue", "sglang-graph")),
        ("graph", "sglang", ("fused-graph", "sglang-graph")),
        ("eager", "aten,sglang", ("aten-eager", "sglang-eager")),
        ("all", "fused", ("fused-eager", "fused-glue", "fused-graph")),
        ("fused-graph,aten-eager", "aten", ("aten-eager",)),
    ],
)
def test_implementations_leave_their_arms_and_an_engine_is_shown_beside_ours(arm, impl, names):
    assert plan.arms(arm, impl) == names


def test_implementations_that_are_unknown_or_leave_nothing_are_said_so():
    with pytest.raises(CliError, match="Did you mean 'sglang'"):
        plan.arms("all", "sglan")
    with pytest.raises(CliError, match="no arm in common"):
        plan.arms("fused", "aten")


def test_without_an_engine_its_arms_are_left_out_with_one_line(monkeypatch):
    from attn_graph.backends import peers

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    names, line = plan.without_missing_engines(("fused-graph", "sglang-graph"))
    assert names == ("fused-graph",) and line == "sglang is not installed here: its arms are left out"
    with pytest.raises(CliError, match="not installed here"):
        plan.without_missing_engines(("sglang-graph",))
    assert plan.without_missing_engines(("fused-graph",)) == (("fused-graph",), "")


def test_an_unknown_arm_is_answered_with_the_nearest():
    with pytest.raises(CliError, match="Did you mean 'fused-graph'"):
        plan.arms("fused-grap")
