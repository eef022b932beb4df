"""Every conformance check passes on a sound backend and fails on a broken twin; the machinery under them is exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_graph.backends.base import Allowances, ConfigError
from attn_graph.backends.modes import Arm, ForwardMode
from attn_graph.backends.oracle import Expected
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from attn_graph.backends.wrappers.forwarding import Forwarding
from attn_graph.backends.wrappers.multi_step_draft import FAMILIES, MultiStepDraft
from attn_graph.profilers.conformance import CHECKS, Note, Skip, Subject, judge, verify
from attn_graph.profilers.conformance.device import next_tables
from attn_graph.profilers.conformance.faults import known_faults
from attn_graph.profilers.conformance.findings import Check
from attn_graph.profilers.conformance.hooks import children_of, hook_names
from attn_graph.profilers.conformance.lint import inspect_hook
from attn_graph.profilers.conformance.matrix import Sizes
from attn_graph.profilers.conformance.pointers import overlap
from attn_graph.profilers.conformance.poison import OnDevice, Poisoned, poison_bits, unfit
from attn_graph.profilers.conformance.run import caught
from attn_graph.profilers.conformance.trace import trace
from conftest import HAS_GPU

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FAULTS = known_faults("trtllm_mha")
ATEN = (Arm.parse("aten-eager"), Arm.parse("aten-graph"))
SMALL = Sizes(16, 116, (2, 3), swa=True, steps=4, thin=2)


def subject(sizes=SMALL, mode=ForwardMode.DECODE, arms=ATEN, **changes) -> Subject:
    return sizes.subject("trtllm_mha", mode, DEVICE, arms, seed=0).but(**changes)


def status(check: str, on: Subject) -> str:
    return judge(CHECKS[check], on)[0].status


# Checks and their broken twins.


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_known_fault_is_noticed_by_each_check_that_should_and_only_with_the_fault(fault):
    found = caught(fault, "trtllm_mha", DEVICE)
    assert found.status == "pass", found.detail
    assert fault.title in found.detail and found.check == f"fault:{fault.name}"


TWINS_HERE = {"C13", "C23"}
TWINS_ON_A_GPU = {"C7", "C18", "C19"}


def test_every_check_has_a_broken_twin():
    """Those of runners and vendors are in test_runner_checks.py and test_vendors.py."""
    elsewhere = {"V1", *(check.id for check in CHECKS.values() if check.of == "runner")}
    here = {check for fault in FAULTS for check in fault.caught_by} | TWINS_HERE | TWINS_ON_A_GPU
    assert here == set(CHECKS) - elsewhere


@pytest.mark.parametrize("check", [check.id for check in CHECKS.values() if check.of == "rebuild"])
def test_a_sound_backend_passes(check):
    arms = (*ATEN, Arm.parse("fused-eager"), Arm.parse("fused-graph"))
    found = judge(CHECKS[check], subject(replace(SMALL, steps=2, thin=1), arms=arms))[0]
    skipped = {"C13", "C23", "V1"} if HAS_GPU else {"C7", "C13", "C18", "C19", "C23", "V1"}
    assert found.status == ("skip" if check in skipped else "pass"), found.detail


class Wrapper(TrtllmMhaBackend):
    """Hands every hook to one of two children."""

    def __init__(self, config, pools, implementation, *, recorded, tail=None):
        super().__init__(config, pools, implementation, recorded=recorded, tail=tail)
        make = lambda: TrtllmMhaBackend(config, pools, implementation, recorded=recorded, tail=tail)  # noqa: E731
        self.decode, self.others = make(), {"prefill": make()}

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        for child in (self.decode, *self.others.values()):
            child.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, fb, in_capture=False):
        self.decode.init_forward_metadata_out_graph(fb, in_capture)
        self.metadata, self.forward_metadata = self.decode.metadata, self.decode.forward_metadata

    def init_forward_metadata_in_graph(self, fb):
        self.decode.init_forward_metadata_in_graph(fb)

    def on_after_cuda_graph_warmup(self):
        self.decode.on_after_cuda_graph_warmup()


class ForgetsWarmUp(Wrapper):
    """A22: inherits a hook that does nothing instead of forwarding it."""

    on_after_cuda_graph_warmup = TrtllmMhaBackend.on_after_cuda_graph_warmup


class Misdirects(Wrapper):
    """The two hooks reach different children."""

    def init_forward_metadata_in_graph(self, fb):
        self.others["prefill"].metadata, self.others["prefill"].forward_metadata = self.metadata, self.forward_metadata
        self.others["prefill"].init_forward_metadata_in_graph(fb)


class WrongChild(Wrapper):
    """Consistent, but not what the wrapper's table says."""

    def forwarding(self, fb, hook):
        return {"others.prefill": 1}


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (Wrapper, None),
        (ForgetsWarmUp, "on_after_cuda_graph_warmup reached no child"),
        (Misdirects, "init_forward_metadata_in_graph reached ['others.prefill'], the out-of-graph hook ['decode']"),
        (WrongChild, "init_forward_metadata_out_graph reached {'decode': 1}, wanted {'others.prefill': 1}"),
    ],
)
def test_c13_every_hook_of_a_wrapper_reaches_the_right_child(wrapper, message):
    found = judge(CHECKS["C13"], subject(backend_class=wrapper))
    if message is None:
        assert found[0].status == "pass" and found[0].detail == "3 hooks, 2 children"
    else:
        assert found[0].status == "fail" and message in found[0].detail


class ForgetsFollowers(MultiStepDraft):
    """Steps that read another's tensors are told nothing, although their own attention fills schedules of theirs."""

    forward_hook = Forwarding.forward_hook


def test_c13_a_step_that_reads_anothers_tensors_is_told_of_warm_ups_and_has_nothing_to_prepare():
    sizes = Sizes(256, 1300, (2,), swa=True, options=(("inner", "deepseek_v4"),))
    on = sizes.subject("multi_step_draft", ForwardMode.DRAFT_DECODE, DEVICE, ATEN, seed=0)
    assert status("C13", on) == "pass"
    (found,) = judge(CHECKS["C13"], on.but(backend_class=ForgetsFollowers))
    assert (
        "on_after_cuda_graph_warmup reached {'_inners.0': 1}, wanted {'_inners.0': 1, '_followers.0': 1}"
        in found.detail
    )


def test_c13_finds_hooks_and_children_by_inspection():
    assert hook_names() == {
        "init_forward_metadata_out_graph", "init_forward_metadata_in_graph", "on_after_cuda_graph_warmup",
    }  # fmt: skip
    rig = subject(backend_class=Wrapper).rig(ATEN[0])
    assert set(children_of(rig.backend)) == {"decode", "others.prefill"}


class WidthOfTheSum(TrtllmMhaBackend):
    """As wide as the sum of the lengths, a host number that a capture reads without being refused."""

    def rebuild_fused(self, fb, md):
        unseen = md.page_table[:, self._columns(min(fb.seq_lens_sum, self.config.max_context)) :]
        kept = unseen.clone()
        super().rebuild_fused(fb, md)
        unseen.copy_(kept)


def test_c20_a_width_that_a_glue_graph_freezes_shows_at_longer_lengths():
    eager = subject(arms=(Arm.parse("fused-eager"),))
    assert status("C20", eager) == "pass"
    assert status("C3", eager.but(backend_class=WidthOfTheSum)) == "pass", "eagerly it is right"
    (found,) = judge(CHECKS["C20"], eager.but(backend_class=WidthOfTheSum))
    assert found.status == "fail" and "not written" in found.detail


class AnyOrder(TrtllmMhaBackend):
    """Writes each row's live pages from last to first."""

    allowances = replace(TrtllmMhaBackend.allowances, unordered=frozenset({"page_table"}))
    twice = False

    def rebuild_aten(self, fb, md):
        super().rebuild_aten(fb, md)
        for row, length in zip(md.page_table, md.cache_seqlens_int32.tolist(), strict=True):
            live = row[: max(-(-length // self.config.page_size), 1)]
            live.copy_(live.flip(0))
            if self.twice:
                live[0] = live[-1]


class Twice(AnyOrder):
    """One page is lost and another is there twice."""

    twice = True


def test_c23_an_order_that_is_free_may_be_any_but_the_cells_must_be_all_there():
    eager = {"arms": ATEN[:1], "pools": subject().pools}
    assert status("C23", subject(backend_class=AnyOrder, **eager)) == "pass"
    assert status("C3", subject(backend_class=AnyOrder, **eager)) == "pass"
    assert status("C23", subject(backend_class=Twice, **eager)) == "fail"
    ordered = type("Ordered", (AnyOrder,), {"allowances": TrtllmMhaBackend.allowances})
    assert status("C3", subject(backend_class=ordered, **eager)) == "fail"


class Hoards(TrtllmMhaBackend):
    """Keeps memory from every call of the hook."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        if not torch.cuda.is_current_stream_capturing():
            self.__dict__.setdefault("hoard", []).append(torch.zeros(1 << 20, device=self.device))


@pytest.mark.gpu
def test_c7_memory_that_the_hook_keeps_is_noticed():
    assert status("C7", subject(backend_class=Hoards)) == "fail"


@pytest.mark.parametrize("backend", ["trtllm_mha", "mamba", "lightning", "ascend_gdn"])
def test_c18_what_the_scheduler_rewrites_is_what_each_kind_of_backend_reads(backend):
    on = SMALL.subject(backend, ForwardMode.DECODE, DEVICE, ATEN[1:], seed=0)
    rig = on.rig(ATEN[1])
    with rig.on_stream():
        poisoned = rig.poison(rig.expect(on.some_batch(3)), 0)
        rig.runner.rebuild()
        for table, following in next_tables(on.pools):
            assert table.sort(dim=0).values.equal(following.sort(dim=0).values), "nothing that was not there"
            table.copy_(following)
        rig.runner.launch()
        assert poisoned.mismatches()


@pytest.mark.gpu
def test_c18_reads_behind_the_marker_are_noticed():
    from attn_graph.profilers.conformance import device

    def marker_first(backend_class, marker):
        class Early(backend_class):
            def init_forward_metadata_in_graph(self, fb):
                if marker is not None:
                    marker.record()
                torch.cuda._sleep(device.DELAY_CYCLES)
                super().init_forward_metadata_in_graph(fb)

        return Early

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_delayed", marker_first)
        found = judge(CHECKS["C18"], subject())
    assert found[0].status == "fail" and "rewritten in-replay" in found[0].detail


class OwnStream(TrtllmMhaBackend):
    """Does its work on a stream that nobody waits for."""

    def init_forward_metadata_in_graph(self, fb):
        self.__dict__.setdefault("side", torch.cuda.Stream())
        if torch.cuda.is_current_stream_capturing():
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            super().init_forward_metadata_in_graph(fb)


@pytest.mark.gpu
def test_c19_work_that_is_not_joined_is_noticed():
    assert status("C19", subject(backend_class=OwnStream)) == "fail"


# What a check says.


def test_problems_are_failures_with_the_subject_named_and_at_most_three():
    many = Check("X", "always wrong", lambda s: (f"problem {i}" for i in range(9)))
    found = judge(many, subject())
    assert [f.status for f in found] == ["fail"] * 3
    assert found[0].detail == "problem 0 [P=16 C=116 B=2/3 swa int64 lens, int64 rows, seed 0]"


def raising(error: Exception):
    def run(subject):
        raise error
        yield

    return Check("X", "raises", run)


def test_an_error_inside_a_check_is_a_failure_that_says_where():
    (found,) = judge(raising(KeyError("B")), subject())
    assert found.status == "fail" and "KeyError: 'B' (at test_conformance.py:" in found.detail


def test_a_check_that_does_not_apply_is_skipped_with_its_reason():
    (found,) = judge(raising(Skip("no such thing here")), subject())
    assert (found.status, found.detail) == ("skip", "no such thing here")


def test_notes_are_told_when_nothing_is_wrong():
    (found,) = judge(Check("X", "notes", lambda s: iter([Note("7 seen")])), subject())
    assert (found.status, found.detail) == ("pass", "7 seen")


# Poison.


def expected(values, written=None, live=None) -> Expected:
    values = np.asarray(values)
    every = np.ones(values.shape, dtype=bool)
    written = every if written is None else np.asarray(written, dtype=bool)
    return Expected(values, written, written if live is None else np.asarray(live, dtype=bool))


def poisoned(bound: dict, words: dict, salt=0, **options) -> Poisoned:
    return Poisoned(bound, {p: OnDevice.of(e, torch.device("cpu")) for p, e in words.items()}, salt, **options)


def kinds(found) -> list[tuple[str, str, tuple]]:
    return [(m.kind, m.path, m.index) for m in found]


def test_poison_is_told_from_values_stores_elsewhere_and_spoiled_presets():
    buffer = torch.zeros(10, dtype=torch.int32)
    view, word = buffer[2:6], expected([0, 5, 6, 7], [0, 1, 1, 0], [1, 1, 1, 0])
    for change, wanted in (
        ({}, [("stale", "t", (1,))]),
        ({1: 5, 2: 6}, []),
        ({1: 5, 2: 8}, [("value", "t", (2,))]),
        ({0: 1, 1: 5, 2: 6}, [("constant", "t", (0,))]),
        ({1: 5, 2: 6, 3: 7}, [("extra", "t", (3,))]),
        ({1: 5, 2: 6, 4: 9}, [("outside", "t", (6,))]),
        ({1: 5, 2: 6, -1: 9}, [("outside", "t", (1,))]),
    ):
        buffer.zero_()
        p = poisoned({"t": view}, {"t": word})
        for cell, value in change.items():
            buffer[2 + cell] = value
        assert kinds(p.mismatches()) == wanted, change
        assert buffer[[0, 1, 6, 7, 8, 9]].tolist() == [0] * 6, "cells outside the view get back what they held"


def test_poison_changes_with_the_salt_and_is_nothing_a_field_holds():
    values = {poison_bits(4, salt) for salt in range(1000)}
    assert len(values) == 1000 and max(values) < -(10**8)


def test_a_copy_of_an_older_poison_is_not_taken_for_untouched():
    t = torch.zeros(2, dtype=torch.int32)
    word = {"t": expected([0, 0], [0, 0], [0, 0])}
    first = poisoned({"t": t.clone()}, {"t": expected([1, 1])}, salt=1)
    old = next(iter(first.bound.values())).clone()
    p = poisoned({"t": t}, word | {"t": expected([0, 4], [0, 1], [0, 1])}, salt=2)
    t.copy_(old)
    assert kinds(p.mismatches()) == [("extra", "t", (0,))]


def test_bytes_and_booleans_are_poisoned_with_what_they_must_not_become():
    for dtype, values in ((torch.bool, [True, False, True]), (torch.uint8, [1, 2 + 37, 255])):
        t = torch.zeros(3, dtype=dtype)
        word = {"t": expected(np.array(values, dtype=str(dtype)[6:]))}
        p = poisoned({"t": t}, word, salt=1)
        assert kinds(p.mismatches()) == [("stale", "t", (0,))]
        p = poisoned({"t": t}, word, salt=1)
        t.copy_(torch.tensor(values, dtype=dtype))
        assert p.mismatches() == []


def test_two_views_of_one_buffer_are_compared_together():
    table = torch.zeros(3, 4, dtype=torch.int32)
    words = {"a": expected(np.full((3, 2), 1, np.int32)), "b": expected(np.full((2, 2), 2, np.int32))}
    p = poisoned({"a": table[:, :2], "b": table[:2, 2:]}, words)
    table[:, :2] = 1
    table[:2, 2:] = 2
    assert p.mismatches() == []
    p = poisoned({"a": table[:, :2], "b": table[:2, 2:]}, words)
    table.fill_(1)
    assert kinds(p.mismatches()) == [("value", "b", (0, 0)), ("outside", "a+b", (10,))]


def test_a_buffer_of_presets_is_not_poisoned_and_every_change_of_it_is_told():
    buffer = torch.arange(6, dtype=torch.int32)
    word = {"t": Expected.preset(np.arange(3, dtype=np.int32))}
    p = poisoned({"t": buffer[:3]}, word)
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5]
    buffer[5] = 9
    assert kinds(p.mismatches()) == [("outside", "t", (5,))]
    buffer[1] = 7
    assert kinds(poisoned({"t": buffer[:3]}, word).mismatches()) == [("constant", "t", (1,))]


def test_fields_that_may_spill_and_memory_of_others_are_left_alone():
    buffer = torch.zeros(4, dtype=torch.int32)
    p = poisoned({"t": buffer[:2]}, {"t": expected(np.int32([3, 4]))}, spills={"t"})
    buffer.copy_(torch.tensor([3, 4, 5, 6]))
    assert p.mismatches() == []
    p = poisoned({"t": buffer[:2]}, {"t": expected(np.int32([3, 4]))}, spare={buffer.untyped_storage().data_ptr()})
    assert buffer[:2].tolist() == [3, 4]
    assert p.mismatches() == []


def test_a_missing_word_another_shape_or_dtype_and_a_table_too_narrow_are_told():
    t = torch.zeros(2, dtype=torch.int32)
    words = {
        "dtype": expected(np.zeros(2, np.int64)),
        "shape": expected(np.zeros(3, np.int32)),
        "narrow": replace(expected(np.zeros(2, np.int32)), overflow="needs 3 columns"),
        "absent": expected(np.zeros(2, np.int32)),
    }
    found = unfit({"dtype": t, "shape": t, "narrow": t, "silent": t}, words)
    assert [str(m) for m in found] == [
        "absent: wanted a bound tensor, found none",
        "dtype: wanted int64 [2], found int32 [2]",
        "narrow: needs 3 columns",
        "shape: wanted int32 [3], found int32 [2]",
        "silent: wanted a word of the oracle, found none",
    ]


# Traces, aliases, the reader of sources.


def test_a_trace_tells_operations_host_numbers_outside_memory_and_host_reads():
    x, y = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    seen = trace(lambda k: y[1:].copy_((x + k)[1:]).sum().item(), 5)
    assert seen.names == ["add", "slice", "slice", "copy_", "sum", "_local_scalar_dense"] or seen.names == [
        "slice", "add", "slice", "copy_", "sum", "_local_scalar_dense",
    ]  # fmt: skip
    assert ("add", (((4,), torch.int64), 5)) in seen.ops
    assert {t.untyped_storage().data_ptr() for t in seen.outside} == {t.data_ptr() for t in (x, y)}
    assert seen.host_reads == ["item"]
    assert trace(lambda: x.numpy()).host_reads == ["numpy"]


def test_overlap_is_about_bytes_not_about_storages():
    buffer = torch.zeros(10)
    assert overlap(buffer[:5], buffer[4:])
    assert not overlap(buffer[:5], buffer[5:])
    assert not overlap(buffer[:5], torch.zeros(5))
    assert not overlap(buffer[:0], buffer)


class Harmless(TrtllmMhaBackend):
    """Reads like a fault, and is none: neither line runs on what a graph would record."""

    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        if self.config.page_size == 0:
            md.cache_seqlens_int32.max().item()
        if self.config.page_size == 0 and fb.seq_lens_sum:
            self.kept = md.cache_seqlens_int32 + 1


def test_what_only_looks_wrong_is_a_note_because_running_decides():
    on = subject(backend_class=Harmless, arms=ATEN[1:])
    report = inspect_hook(on, ATEN[1])
    assert {"L1", "L4", "L5", "L6"} <= report.read.keys() and not report.seen
    (found,) = judge(CHECKS["L1"], on)
    assert found.status == "pass" and "item() in Harmless.rebuild_aten_static" in found.detail


def test_the_reader_follows_calls_into_helpers_and_resolves_what_is_a_tensor():
    report = inspect_hook(subject(backend_class=Deep, arms=ATEN[1:]), ATEN[1])
    assert [what.split(" in ")[0] for what in report.read["L1"]] == ["int()", "branches on the tensor lengths > 1"]
    assert all("_helper" in what for what in report.read["L1"])


def _helper(lengths, width):
    if width < 0:
        int(lengths.max())
        if lengths > 1:
            return int(width)
    return 0


class Deep(TrtllmMhaBackend):
    def rebuild_aten_static(self, fb, md):
        super().rebuild_aten_static(fb, md)
        _helper(md.cache_seqlens_int32, md.page_table.shape[1])


# Subjects and the run over them.


def test_the_sequence_mixes_sizes_and_an_idle_subject_idles_every_other_step():
    sizes = [live.batch_size for live in subject().batches()]
    assert sizes[:4] == [3, 2, 3, 2] and 1 in sizes
    idle = [live.batch_size for live in subject(mode=ForwardMode.IDLE).batches()]
    assert idle[1::2] == [0] * (len(idle) // 2) and all(idle[::2])


@pytest.mark.parametrize("inner", sorted(FAMILIES))
def test_a_multi_step_draft_brings_the_write_slots_of_all_steps_of_a_chain_too(inner):
    """As its runner hands them over: [B, K, S] flat, a step's own column in each request's part."""
    page = 256 if inner.startswith("deepseek") else 64
    sizes = Sizes(page, 300, (2, 5), swa=True, steps=4, draft_steps=4, options=(("inner", inner),))
    on = sizes.subject("multi_step_draft", ForwardMode.DRAFT_DECODE, DEVICE, ATEN[:1], seed=0)
    table = on.pools.req_to_token.cpu().numpy()
    for live in on.batches():
        columns = live.seq_lens[:, None] + np.arange(4)
        np.testing.assert_array_equal(live.out_cache_loc, table[live.req_pool_indices[:, None], columns].ravel())
    rig = on.rig(ATEN[0])
    assert rig.slots.slots_per_req == 4 and rig.slots.tokens_per_req == 1
    alone = SMALL.subject("trtllm_mha", ForwardMode.DRAFT_DECODE, DEVICE, ATEN[:1], seed=0)
    assert {len(live.out_cache_loc) // live.batch_size for live in alone.batches()} == {1}


def test_lengths_reach_the_whole_context_although_drafts_come_on_top():
    on = subject(Sizes(64, 128, (2,)), ForwardMode.TARGET_VERIFY)
    assert max(int(live.seq_lens.max()) for live in on.batches() if live.batch_size) == 128


def test_interpreted_arms_beside_fused_graph_are_thinned_and_others_are_not():
    arms = (*ATEN, Arm.parse("fused-eager"), Arm.parse("fused-graph"))
    counts = {str(arm): 0 for arm in arms}
    for replay in subject(replace(SMALL, thin=3), arms=arms).history:
        counts[str(replay.arm)] += 1
    assert counts["aten-eager"] == counts["aten-graph"] == counts["fused-graph"] == 8
    assert counts["fused-eager"] == 3


def test_what_a_backend_refuses_is_told_and_a_mode_that_it_refuses_altogether_fails(monkeypatch):
    found = list(verify(["trtllm_mha"], [ForwardMode.TARGET_VERIFY], checks=["C22"], arms=ATEN))
    sizes = found[0]
    assert (sizes.check, sizes.status) == ("sizes", "pass")
    assert "2 refused: trtllm_mha supports topk of at most 1" in sizes.detail
    assert [(f.check, f.status) for f in found[1:]] == [("C22", "pass")]

    def refuse(*args):
        raise ConfigError("not today")

    monkeypatch.setattr(TrtllmMhaBackend, "init_cuda_graph_state", refuse)
    (nothing,) = verify(["trtllm_mha"], [ForwardMode.DECODE], checks=["C22"], arms=ATEN)
    assert nothing.status == "fail" and "not today" in nothing.detail


def test_failures_of_a_mode_are_told_and_passes_are_one_row(monkeypatch):
    monkeypatch.setattr(TrtllmMhaBackend, "allowances", Allowances())
    sizes, *found = verify(["trtllm_mha"], [ForwardMode.DECODE], checks=["C16", "C17"], arms=ATEN)
    assert sizes.status == "pass"
    assert {f.check for f in found if f.status == "fail"} == {"C16"}, "writing behind the view is allowed by name only"
    assert [f.status for f in found if f.check == "C17"] == ["pass"]
    assert all("outside the bound view" in f.detail for f in found if f.check == "C16")


def test_what_breaks_down_before_any_check_is_a_failure_and_others_go_on(monkeypatch):
    def fall(*args):
        raise ZeroDivisionError("no state")

    monkeypatch.setattr(TrtllmMhaBackend, "init_cuda_graph_state", fall)
    found = list(verify(["trtllm_mha", "mamba"], [ForwardMode.DECODE], checks=["C22"], arms=ATEN))
    assert [(f.backend, f.check, f.status) for f in found] == [
        ("trtllm_mha", "sizes", "fail"), ("mamba", "sizes", "pass"), ("mamba", "C22", "pass"),
    ]  # fmt: skip
    assert "ZeroDivisionError: no state" in found[0].detail
