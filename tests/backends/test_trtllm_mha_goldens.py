"""trtllm_mha against what the engine's own methods left: every recorded case, each release's tails, exact counts.

Upstream's known faults are excepted by name, and each exception is checked to be that fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from attn_graph.backends.base import tensors_of
from attn_graph.backends.batch import LiveBatch, Pools
from attn_graph.backends.modes import Arm, ForwardMode, Implementation, Placement, TailPolicy
from attn_graph.backends.oracle import Expected
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend
from golden_replays import Golden, cases
from rebuilds import ARMS, Replayer, host_pools

POISON = -7
FIELDS = (
    "cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "page_table", "swa_page_table", "swa_out_cache_loc",
)  # fmt: skip
TABLES = ("page_table", "swa_page_table")
LIVE_COLUMNS = "rows 0..bs-1, columns p < ceil(cache_seqlens_int32[r] / P)"

every_case = pytest.mark.parametrize("path", cases("trtllm_mha"), ids=lambda path: path.stem)
every_arm = pytest.mark.parametrize("arm", ARMS, ids=str)


@dataclass(frozen=True)
class Case:
    """One recorded file. `step` is the draft step, or None outside draft decode."""

    golden: Golden
    name: str

    @staticmethod
    def load(path: Path) -> Case:
        return Case(Golden(path), path.stem)

    @property
    def config(self) -> dict:
        return self.golden.config

    @cached_property
    def release(self) -> int:
        """13, 14, 15, 23."""
        return int(self.config["release"].split(".")[2])

    @property
    def tail(self) -> TailPolicy:
        return TailPolicy(self.config["regions"]["tail_policy"].split(":")[0])

    @property
    def steps(self) -> list[int | None]:
        draft = self.golden.mode is ForwardMode.DRAFT_DECODE
        return list(range(self.config["S"] - 1)) if draft else [None]

    def recorded(self, prefix: str, step: int | None) -> dict[str, np.ndarray]:
        """The engine's tensors under a prefix of the file, without the step in their names."""
        prefix += "" if step is None else f"step{step}."
        return {f: self.golden.data[prefix + f] for f in FIELDS if prefix + f in self.golden.data}

    def pools(self, step: int | None) -> Pools:
        """The engine's tables, with the sliding-window parts that its metadata had."""
        captured, pools = self.recorded("capture/out/", step), self.golden.pools()
        mapping = pools.full_to_swa if "swa_page_table" in captured else None
        return replace(pools, full_to_swa=mapping, swa_write="swa_out_cache_loc" in captured)

    def live(self, i: int, step: int | None) -> LiveBatch:
        live = self.golden.live(i, step or 0)
        if step is not None and "swa_out_cache_loc" in self.recorded("capture/out/", step):
            # Upstream maps the first entries of all steps' slots, whichever step it is.
            return replace(live, out_cache_loc=self.golden.data[f"r{i}/in/out_cache_loc"][: self.config["B"]])
        return live

    def captured(self, arm: Arm, step: int | None, tail: TailPolicy | None = None) -> Replayer:
        c, recorded = self.config, arm.placement is not Placement.EAGER
        config, pools = self.golden.attention_config(step or 0), self.pools(step)
        backend = TrtllmMhaBackend(config, pools, arm.implementation, recorded=recorded, tail=tail)
        return Replayer.capture(
            backend, self.golden.mode, c["B"], arm.placement,
            tokens_per_req=c["tokens_per_req"], fill=c["fill"], lens=self.lens, max_bs=c["max_bs"],
        )  # fmt: skip

    @property
    def lens(self):
        import torch

        return getattr(torch, self.config["seq_lens_static_dtype"].removeprefix("torch."))

    def truncated(self, i: int, shape: tuple[int, int]) -> np.ndarray:
        """Cells of page_table where releases with a fused kernel turn slot -1 into page 0, known from the table."""
        page, data = self.config["P"], self.golden.data
        if page == 1 or self.release < 15:
            return np.zeros(shape, dtype=bool)
        rows, columns = data[f"r{i}/static/req_pool_indices"][: shape[0]], np.arange(shape[1]) * page
        return data["init/req_to_token"][rows[:, None], columns] == -1


@dataclass(frozen=True)
class Compared:
    """One field of one replay, over the columns that upstream's table and ours have in common."""

    field: str
    got: np.ndarray
    wanted: np.ndarray
    expected: Expected
    upstream_wrong: np.ndarray  # cells where upstream's listed fault shows

    def check(self, cells: np.ndarray) -> None:
        """Ours and the oracle's equal upstream's in `cells`; where upstream is wrong, ours is page -1 and theirs 0."""
        sound = cells & ~self.upstream_wrong
        np.testing.assert_array_equal(self.got[sound], self.wanted[sound], self.field)
        np.testing.assert_array_equal(self.expected.values[sound], self.wanted[sound], f"oracle, {self.field}")
        faulty = cells & self.upstream_wrong
        assert (self.wanted[faulty] == 0).all() and (self.got[faulty] == -1).all()


def compared(case: Case, arm: Arm, step: int | None, tail: TailPolicy | None = None) -> Iterator[list[Compared]]:
    """Every replay of the file on upstream's poison, field by field."""
    own = case.captured(arm, step, tail)
    backend = own.backend
    for i in range(case.config["replays"]):
        batch = own.load(case.live(i, step))
        bound = tensors_of(backend.metadata[case.golden.mode, case.config["B"]])
        expected = backend.expected(batch, host_pools(backend.pools))
        upstream = case.recorded(f"r{i}/out/", step)
        assert upstream.keys() == expected.keys() == bound.keys()
        prefix = "" if step is None else f"step{step}."
        with own.stream():
            for name, value in case.config["poison"].items():
                if name.startswith(prefix):
                    assert value == POISON
                    bound[name.removeprefix(prefix)].fill_(POISON)
            for name in case.config["poison_from_index_1"]:
                if name.startswith(prefix):
                    bound[name.removeprefix(prefix)][1:].fill_(POISON)
            own.runner.replay()
        yield [_compared(case, i, f, bound[f].cpu().numpy(), upstream[f], expected[f]) for f in upstream]


def _compared(case: Case, i: int, field: str, got: np.ndarray, wanted: np.ndarray, expected: Expected) -> Compared:
    assert got.dtype == wanted.dtype and got.shape[0] == wanted.shape[0]
    upstream_wrong = np.zeros(wanted.shape, dtype=bool)
    if field in TABLES:
        assert got.shape[1] >= wanted.shape[1]
        common = np.s_[:, : wanted.shape[1]]
        got = got[common]
        expected = Expected(expected.values[common], expected.written[common], expected.live[common])
        if field == "page_table":
            upstream_wrong = case.truncated(i, wanted.shape) & (wanted != POISON)
    return Compared(field, got, wanted, expected, upstream_wrong)


def region(case: Case, i: int, step: int | None, c: Compared) -> np.ndarray:
    """The meaningful cells, as the file says."""
    said = case.config["regions"][c.field]
    if said == "all":
        return np.ones(c.wanted.shape, dtype=bool)
    assert said == LIVE_COLUMNS, f"{c.field}: a region that this test does not know: {said}"
    lengths = case.recorded(f"r{i}/out/", step)["cache_seqlens_int32"]
    return np.arange(c.wanted.shape[1]) < -(-lengths[:, None] // case.config["P"])


def test_there_are_recorded_cases_of_every_mode():
    modes = {Golden(path).mode for path in cases("trtllm_mha")}
    assert modes == TrtllmMhaBackend.modes


def test_more_cases_are_found_in_the_folder_that_the_environment_names(tmp_path, monkeypatch):
    (tmp_path / "trtllm_mha").mkdir()
    extra = tmp_path / "trtllm_mha" / "r99_extra.npz"
    extra.write_bytes(b"")
    monkeypatch.setenv("ATTN_GRAPH_GOLDENS", str(tmp_path))
    assert extra in cases("trtllm_mha")


@every_arm
@every_case
def test_recorded_values_are_reproduced_where_a_kernel_reads(path, arm):
    case = Case.load(path)
    for step in case.steps:
        for i, fields in enumerate(compared(case, arm, step)):
            for c in fields:
                c.check(region(case, i, step, c))


@every_case
def test_the_releases_tail_is_reproduced_cell_by_cell(path):
    """What upstream left alone still holds its poison, so poison tells what it wrote."""
    case, checked = Case.load(path), 0
    for arm in ARMS:
        classic = arm.implementation is Implementation.ATEN
        natural = TrtllmMhaBackend.default_tail(arm.implementation, arm.placement is not Placement.EAGER)
        if classic and natural is not case.tail:
            continue  # the chain has the one tail that its operations leave
        for step in case.steps:
            for fields in compared(case, arm, step, tail=case.tail):
                for c in fields:
                    everywhere = np.ones(c.wanted.shape, dtype=bool)
                    written = np.where(c.expected.written | c.expected.live, c.expected.values, POISON)
                    replace(c, expected=replace(c.expected, values=written)).check(everywhere)
                    checked += 1
    assert checked


@every_case
def test_the_classic_chain_dispatches_what_release_13_dispatched(path):
    case = Case.load(path)
    if case.release != 13:
        pytest.skip("later releases have another chain")
    for i in range(case.config["replays"]):
        counts = [case.captured(ARMS[0], step).counts(case.live(i, step)) for step in case.steps]
        recorded = case.golden.host(i)["dispatches_out_graph"]
        assert sum(c.dispatches for c in counts) == recorded["aten"]
        assert sum(c.views for c in counts) == recorded["view"]
        assert sum(c.syncs for c in counts) == recorded["sync"]
        assert sum(c.triton for c in counts) == recorded["triton"] == 0


@every_case
def test_host_lengths_of_an_eager_rebuild_are_those_of_release_13(path):
    case = Case.load(path)
    if case.release != 13:
        pytest.skip("later releases hand no host lengths on")
    for step in case.steps:
        own = case.captured(ARMS[0], step)
        for i in range(case.config["replays"]):
            live, prefix = case.live(i, step), "" if step is None else f"step{step}."
            own.load(live)
            own.runner.replay()
            md, host = own.backend.forward_metadata, case.golden.host(i)
            assert md.max_seq_len_k == host[f"{prefix}max_seq_len_k"]
            # Upstream's longest query leaves padding rows out, although they have queries too.
            padded = live.batch_size < case.config["B"] and case.golden.mode is ForwardMode.DRAFT_EXTEND
            widest = case.config["tokens_per_req"] if padded else 0
            assert md.max_seq_len_q == max(host[f"{prefix}max_seq_len_q"], widest)


def test_the_truncation_of_later_releases_would_be_noticed():
    """No recorded case with -1 slots is here; make one, upstream's fault included, and break our side of it."""
    wanted = np.array([[0, 5], [0, -7]], dtype=np.int32)
    expected = Expected(np.array([[-1, 5], [0, 0]], np.int32), np.ones((2, 2), bool), np.ones((2, 2), bool))
    wrong = np.array([[True, False], [False, False]])
    cells = np.array([[True, True], [True, False]])
    good = Compared("page_table", np.array([[-1, 5], [0, 9]], np.int32), wanted, expected, wrong)
    good.check(cells)
    for got in ([[0, 5], [0, 9]], [[-1, 6], [0, 9]]):
        with pytest.raises(AssertionError):
            replace(good, got=np.array(got, np.int32)).check(cells)
