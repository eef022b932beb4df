"""Both halves of a hybrid model are told everything, in order, and hold what they hold alone."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
from attn_graph.backends.base import AttentionBackend, ConfigError, NotCapturedError, tensors_of
from attn_graph.backends.batch import idle_batch
from attn_graph.backends.lightning import LightningBackend
from attn_graph.backends.mamba import VARIANTS
from attn_graph.backends.modes import ForwardMode
from attn_graph.backends.registry import lookup, registered
from attn_graph.backends.wrappers.forwarding import hooks
from attn_graph.backends.wrappers.hybrid_linear import LINEAR, HybridLinear
from attn_graph.profilers.conformance.faults.hybrid_linear import NoInGraphHook
from attn_graph.profilers.conformance.faults.mamba import CountsByValue
from golden_replays import FOLDER, Golden, cases
from linear_states import BUCKET, batches, capture, counted, requests
from rebuilds import ARMS, replayed

Mode = ForwardMode
MODES = sorted(HybridLinear.modes)
PAIRS = [("triton", "mamba"), ("trtllm_mha", "lightning"), ("flashattention", "mamba"), ("ascend", "ascend_gdn")]


class LightningCountsByValue(LightningBackend):
    """The same of lightning, which counted for longer."""

    def _padding(self, fb):
        return super()._padding(dataclasses.replace(fb, num_padding=None))


class CountingHybrid(HybridLinear):
    """Upstream: the full backend chose a fill that the linear one does not know."""

    @staticmethod
    def child_class(name):
        return {"mamba": CountsByValue, "lightning": LightningCountsByValue}.get(name) or lookup(name).load()


class NoWarmupHook(HybridLinear):
    """A22, most releases of upstream."""

    on_after_cuda_graph_warmup = AttentionBackend.on_after_cuda_graph_warmup


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_arm_leaves_both_halves_as_their_oracles_say(mode, pair, arm):
    own = capture(HybridLinear, mode, arm, full=pair[0], linear=pair[1])
    assert own.backend.metadata[mode, BUCKET].keys() == {"full", "linear"}
    assert [d for d in replayed(own, batches(mode, own.backend.pools)) if d] == []


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
def test_trees_reach_both_halves(arm):
    own = capture(HybridLinear, Mode.TARGET_VERIFY, arm, topk=4, variant="gdn")
    fields = tensors_of(own.backend.metadata[Mode.TARGET_VERIFY, BUCKET]).keys()
    assert {"full.custom_mask", "linear.retrieve_next_token", "linear.intermediate_state_indices"} <= fields
    assert [d for d in replayed(own, batches(Mode.TARGET_VERIFY, own.backend.pools, topk=4)) if d] == []


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_rings_of_the_linear_half_move_once_a_step(arm):
    own = capture(HybridLinear, Mode.DECODE, arm, variant="gdn", ring_interval=3)
    first = own.backend.pools.ring_cursors.clone()
    assert [d for d in replayed(own, batches(Mode.DECODE, own.backend.pools)) if d] == []
    assert not own.backend.pools.ring_cursors.equal(first)
    allowed = own.backend.allowances
    assert allowed.advances == {"ring_cursors"}
    assert frozenset({"linear.ring_cursors", "pools.ring_cursors"}) in allowed.aliases


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_wrapper_itself_costs_nothing(mode):
    classic, eager, graph = (capture(HybridLinear, mode, ARMS[i]) for i in (0, 2, 3))
    full, padded = requests(classic, [33, 64, 5, 7]), requests(classic, [33, 64])
    info, halves = lookup("hybrid_linear", "wrapper"), [lookup(name).dispatches[str(mode)][0] for name in PAIRS[0]]
    assert classic.counts(full).dispatches == sum(halves) and info.dispatches[str(mode)] == (0, 0)
    assert classic.counts(padded).dispatches == sum(halves) + 3
    assert classic.counts(idle_batch()).dispatches == sum(halves) + 1
    assert (eager.counts(padded).dispatches, eager.counts(padded).launches) == (
        0,
        eager.backend.allowances.fused_launches,
    )
    assert (graph.counts(padded).dispatches, graph.counts(padded).launches) == (0, 0)


def spied(cls, hook) -> list[tuple[str, str, object]]:
    """(child, hook, in_capture) of every hook that a call of `hook` reaches, in order."""
    own = capture(cls, Mode.DECODE, ARMS[3])
    wrapper, calls = own.backend, []
    for side in ("full", "linear"):
        child = getattr(wrapper, side)
        for name in hooks():
            original = getattr(child, name)

            def spy(*args, side=side, name=name, original=original, **kwargs):
                calls.append((side, name, kwargs.get("in_capture")))
                return original(*args, **kwargs)

            setattr(child, name, spy)
    takes = tuple(inspect.signature(getattr(AttentionBackend, hook)).parameters)[1:]
    batch, arguments = own.runner.capture_batch(BUCKET), {"in_capture": True} if "in_capture" in takes else {}
    getattr(wrapper, hook)(*{(): (), ("max_bs", "max_num_tokens"): (BUCKET, BUCKET)}.get(takes, (batch,)), **arguments)
    return calls


@pytest.mark.parametrize("hook", [name for name in hooks() if name != "init_forward_metadata"])
def test_every_hook_of_the_contract_reaches_both_children_once_the_full_one_first(hook):
    in_capture = True if hook == "init_forward_metadata_out_graph" else None
    assert spied(HybridLinear, hook) == [("full", hook, in_capture), ("linear", hook, in_capture)]


@pytest.mark.parametrize(
    ("fault", "hook"),
    [(NoInGraphHook, "init_forward_metadata_in_graph"), (NoWarmupHook, "on_after_cuda_graph_warmup")],
)
def test_a_hook_inherited_from_the_base_class_reaches_nobody(fault, hook):
    assert spied(fault, hook) == []


def test_a_recorded_rebuild_without_the_in_graph_hook_is_stale_on_every_replay():
    own = capture(NoInGraphHook, Mode.DECODE, ARMS[3])
    found = {d.split("[")[0] for d in own.differences(requests(own, [33, 64]))}
    assert {"full.kv_indptr", "linear.mamba_cache_indices", "linear.query_start_loc"} <= found


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_padding_has_no_state_although_the_full_backend_chose_another_fill(arm):
    own = capture(HybridLinear, Mode.DECODE, arm, full="ascend")
    assert own.backend.seq_len_fill_value == own.backend.full.seq_len_fill_value == 0
    assert own.differences(requests(own, [33, 64])) == []
    assert own.backend.linear.forward_metadata.mamba_cache_indices[2:].tolist() == [-1, -1]


def test_counting_by_value_gives_padding_a_state_where_the_fills_differ():
    own = capture(CountingHybrid, Mode.DECODE, ARMS[0], full="ascend")
    slot_of_row_0 = int(own.backend.pools.state_slots[0])
    found = own.differences(requests(own, [33, 64]))
    assert any(d.startswith(f"linear.mamba_cache_indices[2]: {slot_of_row_0}, expected -1") for d in found)


def test_a_layer_is_served_by_the_child_of_its_kind():
    wrapper = capture(HybridLinear, Mode.DECODE, ARMS[3], full_layers=(3, 7)).backend
    assert [wrapper.serving(layer) is wrapper.full for layer in range(8)] == [False, False, False, True] * 2


def test_what_children_do_on_purpose_is_known_by_its_path():
    wrapper = capture(HybridLinear, Mode.DECODE, ARMS[3]).backend
    shared = wrapper.allowances.shared_between_modes
    assert {"full.kv_indptr", "linear.query_start_loc"} <= shared
    assert len(shared) == sum(len(child.allowances.shared_between_modes) for child in wrapper.children)
    assert wrapper.allowances.fused_launches == 2


def test_what_cannot_work_is_refused_before_either_child_has_bound_anything():
    own = capture(HybridLinear, Mode.DECODE, ARMS[3])
    extend = dataclasses.replace(own.runner.capture_batch(BUCKET), forward_mode=Mode.DRAFT_EXTEND_V2)
    with pytest.raises(ConfigError, match=r"has no mode draft_extend_v2\. It has: decode, target_verify"):
        own.backend.init_forward_metadata_out_graph(extend, in_capture=True)
    assert all(mode is Mode.DECODE for child in own.backend.children for mode, _ in child.metadata)
    with pytest.raises(NotCapturedError, match="batch size 3 was not captured for mode decode; captured sizes: 4"):
        own.backend.init_forward_metadata_out_graph(own.runner.capture_batch(3))
    with pytest.raises(ConfigError, match="full half of hybrid_linear cannot be mamba, of family linear_state"):
        capture(HybridLinear, Mode.DECODE, ARMS[3], full="mamba")
    with pytest.raises(ConfigError, match="linear half of hybrid_linear cannot be triton, of family csr"):
        capture(HybridLinear, Mode.DECODE, ARMS[3], linear="triton")
    with pytest.raises(ConfigError, match="lightning has no draft trees"):
        capture(HybridLinear, Mode.TARGET_VERIFY, ARMS[3], topk=4, linear="lightning")


def halves_of(golden: Golden, stem: str) -> dict[str, str]:
    """Options of a recorded case, from its name: RELEASE_FULL_LINEAR_CASE."""
    backends = [info for info in registered().values() if info.kind == "backend"]
    full = {info.name: info.name for info in backends if info.family != LINEAR}
    full |= {"fa": "flashattention", "fa3": "flashattention"}
    linear = {info.name for info in backends if info.family == LINEAR} | set(VARIANTS)
    rest = stem.partition("_")[2]
    word = max((name for name in full if rest.startswith(f"{name}_")), key=len)
    kind = max((name for name in linear if rest.startswith(f"{word}_{name}_")), key=len)
    if "capture/out/linear.mamba_cache_indices_gdn" in golden.data:
        kind = "ascend_gdn"  # its name may be that of the layers
    options = {"variant": kind} if kind in VARIANTS else {}
    return options | {"full": full[word], "linear": "mamba" if options else kind}


def cells(replay, field) -> list[str]:
    if field == "full.seq_lens":  # ascend's is the runner's own buffer upstream, of the runner's dtype
        return [] if np.array_equal(replay.got[field], replay.golden[field]) else [field]
    # What a release makes anew at every call is recorded as it then was, beside what a graph would read.
    name = f"live/{field}" if f"live/{field}" in replay.golden else field
    if replay.golden[name].ndim == 1 and field.startswith("full."):
        return replay.flat_differences(field)
    return replay.differences(field, name)


def compare(golden: Golden, stem: str, arm, sides=frozenset({"full", "linear"})) -> None:
    options = golden.split_options() | halves_of(golden, stem)
    npu, b = options["linear"] == "ascend_gdn", golden.config["B"]
    counts = npu or counted(golden, options["linear"])
    for i, replay in enumerate(golden.replays(HybridLinear, arm, **options)):
        live, fill = replay.host["raw_bs"], 0 if npu else 1
        found = golden.data[f"r{i}/static/seq_lens"].tolist().count(fill)
        skipped = {"linear"} if counts and found != b - live else set()
        compared = {f for f in replay.expected.keys() & replay.golden.keys() if f.partition(".")[0] not in skipped}
        assert {f.partition(".")[0] for f in compared} == sides - skipped
        numbers = "linear.mamba_cache_indices_gdn"
        if numbers in compared and golden.config["release"].startswith("0.5.13"):
            compared.remove(numbers)  # upstream's padding points at the first token, somebody's
            tokens = live * golden.config["tokens_per_req"]
            theirs, ours = replay.golden[numbers], replay.got[numbers]
            if golden.mode is Mode.TARGET_VERIFY:
                assert (theirs[:tokens] == ours[:tokens]).all() and not theirs[tokens:].any()
        assert [d for field in sorted(compared) for d in cells(replay, field)] == []


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize("path", cases("hybrid_linear"), ids=lambda p: p.stem)
def test_recorded_cases_are_reproduced(path, arm):
    compare(Golden(path), path.stem, arm)


ALONE = [
    ("linear", "lightning", "r13_lightning_verify_k1", "triton_lightning"),
    ("linear", "mamba", "r13_mamba2_decode", "trtllm_mha_mamba2"),
    ("linear", "mamba", "r13_gdn_verify_k1", "fa3_gdn"),
    ("linear", "ascend_gdn", "r13_verify_k1", "ascend_gdn"),
    ("full", "ascend", "r13_p16_verify_k1", "ascend_ascend_gdn"),
]


@pytest.mark.parametrize("arm", [ARMS[0], ARMS[3]], ids=str)
@pytest.mark.parametrize(("side", "backend", "case", "pair"), ALONE, ids=lambda x: x)
def test_recorded_cases_of_one_backend_are_those_of_its_half_of_a_hybrid(side, backend, case, pair, arm):
    golden = Golden(FOLDER / backend / f"{case}.npz")
    for name in list(golden.data):
        folder, _, field = name.rpartition("/")
        if folder.endswith(("/out", "/live")):
            golden.data[f"{folder}/{side}.{field}"] = golden.data.pop(name)
    rows = len(golden.data["init/req_to_token"])
    golden.data.setdefault("init/mamba_index_mapping", np.arange(rows, dtype=np.int32))
    compare(golden, f"r13_{pair}_case", arm, {side})


@pytest.mark.parametrize("path", cases("hybrid_linear"), ids=lambda p: p.stem)
def test_the_classic_chains_of_the_recorded_release_leave_and_cost_what_was_recorded(path):
    golden = Golden(path)
    options = golden.split_options() | halves_of(golden, path.stem)
    cls = CountingHybrid if counted(golden, options["linear"]) else HybridLinear
    own = golden.captured(cls, ARMS[0], max_bs=golden.config["max_bs"], **options)
    for i in range(golden.config["replays"]):
        then, cost = golden.host(i)["dispatches_out_graph"], own.counts(golden.live(i))
        for name in ("mamba_cache_indices", "query_start_loc"):
            got = getattr(own.backend.linear.forward_metadata, name)
            np.testing.assert_array_equal(got, golden.data[f"r{i}/out/linear.{name}"])
        if options["full"] == "triton":  # other halves may be of another release's chain
            assert (cost.dispatches, cost.triton) == (then["aten"], then["triton"])
