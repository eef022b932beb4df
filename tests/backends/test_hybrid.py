"""Every call goes to one of two backends, and both hooks of a batch to the same one."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import AttentionBackend, AttentionConfig, ConfigError, NotCapturedError
from attn_graph.backends.batch import BatchShape, batch_sequence, live_batch, make_pools
from attn_graph.backends.modes import ForwardMode, Placement
from attn_graph.backends.registry import lookup
from attn_graph.backends.wrappers.forwarding import Forwarding, forwards_hooks, hooks
from attn_graph.backends.wrappers.hybrid import Hybrid
from attn_graph.profilers.conformance.faults.hybrid import InGraphDropped, VerifyByCurrentMode, WarmupDropped
from golden_replays import DEVICE, FOLDER, Golden, cases
from rebuilds import ARMS, Replayer, replayed

Mode = ForwardMode
BUCKET, N = 3, 4
SPEC = {"draft_tokens": N, "topk": 1, "draft_steps": 3}
NAMES = {"decode": "triton", "prefill": "flashattention"}


def config(spec=True, **extra) -> AttentionConfig:
    return AttentionConfig(16, 100, extra=NAMES | extra, **(SPEC if spec else {}))


def pools():
    return make_pools(rows=9, width=110, page_size=16, swa=False, seed=0, device=DEVICE)


def tokens_of(mode) -> int:
    return 1 if mode in (Mode.DECODE, Mode.DRAFT_DECODE) else N


def wrapper(arm=ARMS[2], c=None, cls=Hybrid) -> Hybrid:
    return cls(c or config(), pools(), arm.implementation, recorded=arm.placement is not Placement.EAGER)


def replayer(mode, arm, c=None, cls=Hybrid, **kwargs) -> Replayer:
    return Replayer.capture(wrapper(arm, c, cls), mode, BUCKET, arm.placement, tokens_per_req=tokens_of(mode), **kwargs)


def spies(own: Hybrid) -> Counter:
    """Counts every hook that a child gets from now on, by child, name and in_capture."""
    seen: Counter = Counter()
    for name in ("decode", "prefill"):
        for hook in hooks():

            def spy(*args, name=name, hook=hook, **kwargs):
                seen[name, hook, kwargs.get("in_capture")] += 1

            setattr(getattr(own, name), hook, spy)
        getattr(own, name).metadata = {(mode, 1): name for mode in Mode}
    return seen


SELECTED = [
    (Mode.DECODE, "prefill", "decode"),
    (Mode.DRAFT_DECODE, "prefill", "decode"),
    (Mode.TARGET_VERIFY, "prefill", "prefill"),
    (Mode.TARGET_VERIFY, "decode", "decode"),
    (Mode.DRAFT_EXTEND, "prefill", "prefill"),
    (Mode.DRAFT_EXTEND, "decode", "decode"),
    (Mode.DRAFT_EXTEND_V2, "prefill", "prefill"),
]


@pytest.mark.parametrize(("mode", "speculative", "child"), SELECTED, ids=str)
def test_both_hooks_of_a_batch_reach_the_one_child_that_its_captured_mode_asks_for(mode, speculative, child):
    own = wrapper(c=config(speculative_attention_mode=speculative))
    batch = replace(replayer(Mode.DECODE, ARMS[2]).runner.capture_batch(1), forward_mode=mode)
    idle = replace(batch, actual_forward_mode=Mode.IDLE)
    seen = spies(own)
    own.init_forward_metadata_out_graph(batch, in_capture=True)
    own.init_forward_metadata_in_graph(batch)
    own.init_forward_metadata_out_graph(idle)
    out = "init_forward_metadata_out_graph"
    assert seen == {(child, out, True): 1, (child, "init_forward_metadata_in_graph", None): 1, (child, out, False): 1}
    assert own.forward_metadata == {child: child}
    assert own.selected(Mode.IDLE) == "decode" and own.forwarding(batch, out) == {child: 1}


@pytest.mark.parametrize("speculative", ["prefill", "decode"])
def test_every_hook_of_the_contract_reaches_every_child_that_has_graph_state(speculative):
    own = wrapper(c=config(speculative_attention_mode=speculative))
    batch = replayer(Mode.DECODE, ARMS[2]).runner.capture_batch(1)
    own.metadata[batch.forward_mode, 1] = None
    for name in hooks():
        seen = spies(own)
        takes = tuple(inspect.signature(getattr(AttentionBackend, name)).parameters)[1:]
        args = {(): (), ("max_bs", "max_num_tokens"): (1, 1)}.get(takes, (batch,))
        getattr(own, name)(*args)
        children = ["decode", "prefill"] if speculative == "prefill" and batch not in args else ["decode"]
        wanted = {"init_forward_metadata": ["init_forward_metadata_out_graph", "init_forward_metadata_in_graph"]}
        assert {(child, hook) for child, hook, _ in seen} == {
            (child, hook) for child in children for hook in wanted.get(name, [name])
        }


def test_a_hook_added_to_the_contract_later_is_forwarded_without_anybody_writing_it(monkeypatch):
    monkeypatch.setattr(AttentionBackend, "on_tomorrow", lambda self, fb: None, raising=False)

    @forwards_hooks
    class Tomorrow(Forwarding):
        """The base as it will be made then."""

    own = wrapper()
    seen = spies(own)
    Tomorrow.on_tomorrow(own, replayer(Mode.TARGET_VERIFY, ARMS[2]).runner.capture_batch(1))
    assert seen == {("prefill", "on_tomorrow", None): 1}


@pytest.mark.parametrize(
    ("c", "prefill"),
    [
        (config(spec=False), False),
        (config(spec=False, dllm=True), True),
        (config(), True),
        (config(speculative_attention_mode="decode"), False),
    ],
)
def test_prefill_has_graph_state_only_where_a_captured_mode_reaches_it(c, prefill):
    own = wrapper(c=c)
    own.init_cuda_graph_state(2, 8)
    assert (own.decode.max_bs, own.prefill.max_bs) == (2, 2 if prefill else 0)
    assert len(own.children) == 1 + prefill


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2], ids=str)
def test_every_arm_writes_what_the_selected_childs_oracle_says(mode, arm):
    own = replayer(mode, arm)
    extend = mode is Mode.DRAFT_EXTEND_V2
    shape = BatchShape(mode, BUCKET, 16, 100, tokens_of(mode), 0 if extend else N, N if extend else 1)
    assert [d for d in replayed(own, batch_sequence(shape, own.backend.pools, 1)) if d] == []


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.TARGET_VERIFY], ids=str)
def test_the_wrapper_adds_nothing_to_what_the_child_does(mode):
    live = live_batch(mode, [33, 64], [2, 3], pools(), tokens_of(mode), np.random.default_rng(0))
    for arm in ARMS:
        own = replayer(mode, arm, lens=torch.int32)
        child = getattr(own.backend, own.backend.selected(mode))
        alone = Replayer.capture(
            type(child)(child.config, pools(), arm.implementation, recorded=child.recorded), mode, BUCKET,
            arm.placement, tokens_per_req=tokens_of(mode), lens=torch.int32,
        )  # fmt: skip
        assert own.counts(live) == alone.counts(live)
    assert lookup("hybrid", "wrapper").dispatches[str(mode)] == (0, 0)


def test_whoever_asks_the_wrapper_to_rebuild_gets_the_childs_rebuild():
    own = replayer(Mode.TARGET_VERIFY, ARMS[2])
    batch, backend = own.runner.capture_batch(BUCKET), own.backend
    md = backend.metadata[Mode.TARGET_VERIFY, BUCKET]
    for rebuild in (backend.rebuild_aten, backend.rebuild_aten_static, backend.rebuild_fused):
        with own.stream():
            md["prefill"].cache_seqlens_int32.fill_(-7)
        with own.stream():
            rebuild(batch, md)
        assert md["prefill"].cache_seqlens_int32.tolist() == [1 + N] * BUCKET


# Faults of upstream: hooks that the class inherits instead of forwarding.


def test_a_dropped_in_graph_hook_leaves_stale_metadata_and_is_noticed():
    own = replayer(Mode.DECODE, ARMS[3], cls=InGraphDropped)
    live = live_batch(Mode.DECODE, [33, 64], [2, 3], own.backend.pools, 1, np.random.default_rng(0))
    assert own.differences(live) != []


def test_a_dropped_warmup_hook_is_noticed_by_counting():
    own = wrapper(cls=WarmupDropped)
    seen = spies(own)
    own.on_after_cuda_graph_warmup()
    assert sum(seen.values()) == 0 != len(own.forwarding(None, "on_after_cuda_graph_warmup"))


def test_selection_by_the_live_mode_finds_nothing_captured():
    own = replayer(Mode.TARGET_VERIFY, ARMS[2], cls=VerifyByCurrentMode)
    view = replace(own.runner.capture_batch(BUCKET), actual_forward_mode=Mode.IDLE)
    with pytest.raises(NotCapturedError, match="for mode decode"):
        own.backend.init_forward_metadata_out_graph(view)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="must be prefill or decode, got 'both'"):
        wrapper(c=config(speculative_attention_mode="both"))
    own = wrapper(c=config(speculative_attention_mode="decode"))
    batch = replayer(Mode.DRAFT_EXTEND_V2, ARMS[2]).runner.capture_batch(BUCKET)
    own.init_cuda_graph_state(BUCKET, BUCKET * N)
    with pytest.raises(ConfigError, match="draft_extend_v2 goes to the prefill backend, which has no graph state"):
        own.init_forward_metadata_out_graph(batch, in_capture=True)
    own = wrapper()
    own.prefill.seq_len_fill_value = 0
    with pytest.raises(ConfigError, match="decode's is 1 and prefill's 0"):
        own.init_cuda_graph_state(2, 8)
    captured = replayer(Mode.DECODE, ARMS[2])
    with pytest.raises(NotCapturedError, match=f"batch size 2 was not captured for mode decode; .*: {BUCKET}"):
        captured.backend.init_forward_metadata_out_graph(replace(batch, forward_mode=Mode.DECODE, batch_size=2))


PREFILLS = {"kv_indptr": "triton", "page_table": "flashattention", "block_kv_indices": "trtllm_mla"}
"""Which backend can be the prefill one of a recorded case, by a field that it has."""


PLANNED = re.compile(r"(?:live/)?prefill\.prefill_wrappers\[(\d+)\]\.plan\.(kv_indptr|kv_indices)")
"""What flashinfer was told, in the file's words."""


def prefill_of(golden: Golden) -> str:
    names = [name.removeprefix("capture/out/") for name in golden.data if name.startswith("capture/out/prefill.")]
    if any(PLANNED.fullmatch(name) for name in names):
        return "flashinfer"
    given = {name.rsplit(".", 1)[-1] for name in names}
    return next((backend for field, backend in PREFILLS.items() if field in given), NAMES["prefill"])


def compare(golden: Golden, arm) -> None:
    c = golden.config
    speculative = c["extra"].get("server_args", {}).get("speculative_attention_mode", "prefill")
    verify = golden.mode is Mode.TARGET_VERIFY
    own_child = "decode" if golden.mode is Mode.DECODE or (verify and speculative == "decode") else "prefill"
    children = {name.split(".")[0] for name in golden.data if name.startswith("capture/out/")}
    assert children == {f"capture/out/{own_child}"}
    options = golden.split_options() | {"decode": "triton", "prefill": prefill_of(golden)}
    for replay in golden.replays(Hybrid, arm, speculative_attention_mode=speculative, **options):
        fields = [name for name in replay.expected if name in replay.golden]
        planned = list(filter(None, map(PLANNED.fullmatch, replay.golden)))
        assert planned or {name.rsplit(".", 1)[-1] for name in fields} & PREFILLS.keys()
        for found in planned:
            ours = f"prefill.wrappers.{found[1]}.{found[2]}"
            n = int(replay.expected[ours].live.sum())
            np.testing.assert_array_equal(replay.got[ours][:n], replay.golden[found[0]][:n], found[0])
        for name in fields:
            flat = replay.golden[name].ndim == 1
            assert (replay.flat_differences(name) if flat else replay.differences(name)) == []


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[2]], ids=str)
@pytest.mark.parametrize("path", cases("hybrid"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    compare(Golden(path), arm)


VERIFIES = {
    "triton": "r13_verify_k1_mask",
    "flashattention": "r13_p16_verify_k1",
    "trtllm_mha": "r13_p16_verify_k1",
    "trtllm_mla": "r13_p32_verify",
    "flashinfer": "r13_p1_verify_k1",
}


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[2]], ids=str)
@pytest.mark.parametrize("backend", VERIFIES)
def test_recorded_verifies_of_a_backend_are_those_of_the_hybrid_that_sends_them_there(backend, arm):
    """The wrapper adds nothing, so a recorded verify of its prefill backend alone is one of the wrapper's."""
    golden = Golden(FOLDER / backend / f"{VERIFIES[backend]}.npz")
    for name in list(golden.data):
        folder, _, field = name.rpartition("/")
        if folder.endswith(("/out", "/live")):
            golden.data[f"{folder}/prefill.{field}"] = golden.data.pop(name)
    compare(golden, arm)
