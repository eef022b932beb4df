"""One choice for all ranks: made from all their times, and unlike ones noticed before anything is captured."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from attn_graph.profilers.sample import Case
from attn_graph.tuning import store
from attn_graph.tuning.decide import choose
from attn_graph.tuning.outcome import SKIPPED, Finals, Outcome
from attn_graph.tuning.ranks import RankBenches, together
from attn_graph.tuning.space import candidates, key_of
from attn_graph.tuning.store import Entry
from attn_graph.tuning.tuner import tune
from made_up_bench import MadeUpTimes, candidate

A, B, C = map(candidate, (1, 2, 3))


class OneRank(MadeUpTimes):
    """A rank with times of its own."""

    def __init__(self, times) -> None:
        super().__init__(times)
        self.prepared, self.closed = [], False

    def start(self) -> None:
        pass

    def prepare(self, case) -> None:
        self.prepared.append(case)

    def close(self) -> None:
        self.closed = True


def test_ranks_that_would_choose_unlike_get_one_choice_by_their_mean():
    """A 10.00 and 10.20, B 10.05 and 10.02: alone rank 0 takes A and rank 1 takes B."""
    times = ({1: 10.00, 2: 10.05, 3: 12.0}, {1: 10.20, 2: 10.02, 3: 12.1})
    alone = [min(own, key=own.__getitem__) for own in times]
    assert alone == [1, 2]
    ranks = [OneRank(own) for own in times]
    benches = RankBenches(ranks, at_once=True)
    benches.prepare("a case")
    tuned = tune([B, A, C], benches)
    benches.close()
    assert tuned.choice.winner == B
    assert tuned.choice.tied == (B, A)
    assert tuned.choice.medians_us == pytest.approx({B: 10.035, A: 10.10})
    assert all(rank.prepared == ["a case"] and rank.closed for rank in ranks)
    assert ranks[1].tried == [], "rough times come from one rank"


def test_value_i_of_all_ranks_is_one_value_and_the_slowest_rank_is_told():
    first, second = Finals({A: (1.0, 2.0)}, {A: (5.0,)}), Finals({A: (3.0, 4.0)}, {A: (7.0,)})
    found = together([first, second])
    assert (found.hot_us, found.cold_us, found.slowest_us) == ({A: (2.0, 3.0)}, {A: (6.0,)}, {A: (3.0, 4.0)})
    assert together([first]).slowest_us == {}


def test_what_makes_the_slowest_rank_slower_does_not_win_though_its_mean_is_better():
    default = (Finals({A: (10.0,) * 20, B: (4.0,) * 20}), Finals({A: (10.0,) * 20, B: (12.0,) * 20}))
    found = together(default)
    assert choose([A, B], A, found.hot_us).winner == B
    choice = choose([A, B], A, found.hot_us, {"slower_rank": found.slowest_us})
    assert choice.winner == A
    assert choice.rejected[B].cause == "slower_rank"
    assert "20.0% slower than the default on the slowest rank" in choice.rejected[B].reason


def test_a_rank_without_times_is_named_and_what_one_rank_rejects_all_reject():
    broken = Finals({}, note="the finalists could not be timed side by side (died)")
    found = together([Finals({A: (1.0,)}), broken])
    assert found.hot_us == {}
    assert found.note.startswith("rank 1: ")
    wrong = Outcome(B, SKIPPED, "wrong_values", "page_table[0, 3] is -7, wanted 9")
    found = together([Finals({A: (1.0,), B: (1.0,)}), Finals({A: (1.0,), B: (1.0,)}, rejected={B: wrong})])
    assert found.rejected == {B: wrong}


RANK = """
import sys
from pathlib import Path
from attn_graph.cli import plan
from attn_graph.cli.run import Run
from attn_graph.profilers.devices import Device
from attn_graph.profilers.sample import Case
from attn_graph.profilers.team import Team, place_of
case = Case("trtllm_mha", "decode", 8, 8, "1024", 64, 4096, False, tp=2)
place = place_of()
run = Run(plan.Plan([case], {}), ("fused-graph",), 1, 0, Device("cuda", 0, "NVIDIA H200"), Path("run"), place=place)
with Team(place, "cpu", "none", run._agreed(), 10.0):
    print("joined", flush=True)
"""


def two_hosts(tmp_path, *files: dict) -> tuple[list[int], list[str], float]:
    """Two ranks, each with a file of tuned block sizes of its own; exit codes, what they said, seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started, ranks = time.monotonic(), []
    for rank, config in enumerate(files):
        folder = tmp_path / f"host{rank}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(store.FOLDER_VARIABLE, str(folder))
            case = Case("trtllm_mha", "decode", 8, 8, "1024", 64, 4096, False)
            store.save([Entry(key_of(case, "NVIDIA H200"), config)])
        env = {
            **os.environ, store.FOLDER_VARIABLE: str(folder), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK], env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True,
            )
        )  # fmt: skip
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said, time.monotonic() - started


CONFIG = {"programs_per_row": 1, "block": 64, "num_warps": 1}


def test_ranks_with_unlike_choices_end_within_the_limit_and_say_which_rank_has_what(tmp_path):
    codes, said, seconds = two_hosts(tmp_path, CONFIG, {**CONFIG, "block": 128})
    assert 0 not in codes
    assert seconds < 45
    for words in ("choice of block sizes for trtllm_mha decode bs 8", "block=64", "block=128", "rank 1"):
        assert words in "".join(said), said
    assert "joined" not in "".join(said)


def test_ranks_with_the_same_choices_go_on(tmp_path):
    codes, said, _ = two_hosts(tmp_path, CONFIG, CONFIG)
    assert codes == [0, 0], said
    assert all("joined" in text for text in said)


def test_the_tuned_choice_of_several_ranks_is_one_entry_and_says_how_many_they_were(monkeypatch, tmp_path):
    from attn_graph.profilers.devices import Device
    from attn_graph.tuning import session
    from attn_graph.tuning.exhaustive import search
    from attn_graph.tuning.log import Log

    case = Case("trtllm_mha", "decode", 8, 8, "loguniform:1:65536", 64, 65536, swa=False)
    space, devices = candidates(case), []

    class Bench:
        def __init__(self, target, device, variables) -> None:
            devices.append(device)

        def start(self) -> None: ...
        def prepare(self, case) -> None: ...
        def close(self) -> None: ...

        def rough(self, candidate):
            return replace(Outcome(candidate), samples_us=(1.0 + space.index(candidate),) * 5)

        def finals(self, chosen):
            return Finals({c: (1.0 + space.index(c) + len(devices),) * 20 for c in chosen})

    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(session, "IsolatedBench", Bench)
    with Log(None) as log, session.Session(
        Device("cuda", 0, "NVIDIA H200"), log, search=search, ranks=["cuda:0", "cuda:1"]
    ) as s:  # fmt: skip
        (report,) = s.tune([case])
    assert devices == ["cuda:0", "cuda:1"]
    ((_, entry),) = store.saved_entries()[0]
    assert entry.config == report.tuned.choice.winner.as_dict()
    assert entry.facts["ranks"] == 2
