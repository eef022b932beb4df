"""The comparison with triton.autotune, without a GPU: what each candidate launches, and what becomes of choices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
from attn_graph.profilers.devices import Device
from attn_graph.profilers.sample import Case
from attn_graph.tuning import against_autotune
from attn_graph.tuning.against_autotune import (
    COLUMNS,
    MOST_CANDIDATES,
    OURS,
    PROCESSES,
    TRITON,
    Row,
    Rows,
    agreeing,
    compare,
    some,
)
from attn_graph.tuning.outcome import Finals, timed
from attn_graph.tuning.space import candidates

CASE = Case("trtllm_mla", "decode", 8, 8, "loguniform:1:131072", 64, 131072, swa=False)
SPACE = candidates(CASE)

AUTOTUNED = """
import json, sys
import torch, triton
from attn_graph.profilers.sample import Case
from attn_graph.tuning.against_autotune import AutotuneProcess
from attn_graph.tuning.space import candidates

class Autotuner:
    '''Asks for every grid, as the real one does when it times, and likes the last configuration but one.'''
    def __init__(self, configs, kernel):
        self.configs, self.kernel = configs, kernel
    def __getitem__(self, grid):
        def call(*args):
            constants = self.kernel.arg_names[len(args):]
            assert all(set(config.kwargs) == set(constants) for config in self.configs)
            grids.extend(grid({**config.kwargs, "num_warps": config.num_warps}) for config in self.configs)
            self.best_config = self.configs[-2]
        return call

triton.autotune = lambda configs, key: lambda kernel: Autotuner(configs, kernel)
found = {}
for backend in sys.argv[1:]:
    grids = []
    case = Case(backend, "decode", 4, 4, "loguniform:1:4096", 64, 4096, False)
    space = candidates(case)
    process = AutotuneProcess.__new__(AutotuneProcess)  # there is no GPU to make current
    process._device = torch.device("cpu")
    chosen = process.tune(case, space)
    found[backend] = [chosen == space[-2], [grid[0] for grid in grids], [c.as_dict() for c in space]]
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_autotune_gets_every_candidate_with_its_own_grid_and_its_choice_is_told_apart():
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-c", AUTOTUNED, "trtllm_mha", "trtllm_mla"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    for chosen, grids, space in found.values():
        assert chosen
        assert len(grids) == len(space)
    _, grids, space = found["trtllm_mla"]
    assert grids == [4 * setting["programs_per_row"] for setting in space]
    _, grids, space = found["trtllm_mha"]
    assert grids == [1 + -(-4 // s["rows"]) * s["programs_per_row"] for s in space]


class Bench:
    """Candidate i takes 1 + i/100 us on the mix, and the other way round on other lengths."""

    def __init__(self, *arguments, **options) -> None: ...
    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def prepare(self, case) -> None:
        self._case = case

    def _us(self, candidate) -> float:
        i = SPACE.index(candidate)
        return 1 + (i if self._case.context == CASE.context else len(SPACE) - 1 - i) / 100

    def rough(self, candidate):
        return timed(candidate, [self._us(candidate)] * 5)

    def finals(self, chosen):
        return Finals({c: (self._us(c),) * 20 for c in chosen})


def test_choices_of_all_processes_are_timed_on_their_mix_and_on_held_out_lengths(monkeypatch, tmp_path):
    space, closed = some(SPACE, 0), []
    assert len(space) == MOST_CANDIDATES and space[0] == SPACE[0]
    picks = {TRITON: iter([(space[0], ()), (space[5], ()), (space[5], ()), (space[9], ())]),
             OURS: iter([(space[0], (space[0], space[1]))] * PROCESSES)}  # fmt: skip
    caches = {}

    def tuner(name):
        class MadeUp:
            def __init__(self, device, variables) -> None:
                caches.setdefault(name, set()).add(variables["TRITON_CACHE_DIR"])

            def tune(self, case, offered, seed):
                assert offered == space
                return next(picks[name])

            def close(self) -> None:
                closed.append(self)

        return MadeUp

    monkeypatch.setattr(against_autotune, "TUNERS", {name: tuner(name) for name in picks})
    monkeypatch.setattr(against_autotune, "IsolatedBench", Bench)
    rows = list(compare(CASE, Device("cuda", 0, "NVIDIA H200")))
    assert len(set(closed)) == 2 * PROCESSES, "all have ended"
    assert [len(folders) for folders in caches.values()] == [1, 1], "one kernel cache for each tuner"
    made, timed_on = rows[: 2 * PROCESSES], rows[2 * PROCESSES :]
    assert all(row.on == "" and row.p50_us is None and row.seconds >= 0 for row in made)
    mixes = [CASE.context, "uniform:1:2048", "uniform:1:131072"]
    assert [row.on for row in timed_on[:: 2 * PROCESSES]] == mixes
    assert {(row.tuner, row.process) for row in rows} == {(t, p) for t in (OURS, TRITON) for p in range(PROCESSES)}
    own = {(row.tuner, row.process): row.regret for row in rows if row.on == CASE.context}
    lost = [(SPACE.index(c) - SPACE.index(space[0])) / 100 for c in (space[0], space[5], space[5], space[9])]
    assert [own[TRITON, p] for p in range(4)] == pytest.approx(lost)
    assert [own[OURS, p] for p in range(4)] == [0] * 4
    elsewhere = {(row.tuner, row.process): row.regret for row in rows if row.on == mixes[1]}
    assert elsewhere[OURS, 0] > elsewhere[TRITON, 3] > 0, "the best of each mix is found on that mix"
    with Rows(tmp_path / "autotune.csv") as file:
        for row in rows:
            file.write(row)
    table = pd.read_csv(tmp_path / "autotune.csv")
    assert tuple(table.columns) == COLUMNS
    assert table.loc[table.tuner == TRITON].dropna(subset="on").groupby("on").candidate.nunique().tolist() == [3, 3, 3]


def test_a_choice_is_a_row_as_soon_as_it_is_made(monkeypatch):
    """Before the second process has begun to tune."""
    tunes = []

    class MadeUp:
        def __init__(self, device, variables) -> None: ...
        def tune(self, case, space, seed):
            tunes.append(self)
            return space[0], ()

        def close(self) -> None: ...

    monkeypatch.setattr(against_autotune, "TUNERS", {TRITON: MadeUp, OURS: MadeUp})
    rows = compare(CASE, Device("cuda", 0, "NVIDIA H200"))
    assert next(rows).candidate == str(SPACE[0])
    assert len(tunes) == 1
    rows.close()


def test_processes_agree_on_what_they_chose_or_said_to_be_as_good():
    def rows(*answers: tuple[str, str]) -> list[Row]:
        told = [Row(CASE, OURS, i, 1.0, *answer, "", None, None, None) for i, answer in enumerate(answers)]
        return told + [replace(row, on=CASE.context) for row in told]

    assert agreeing(rows(("a", "a"), ("b", "a | b"), ("a", "a | b"), ("b", "b"))) == 3
    assert agreeing(rows(("a", ""), ("b", ""), ("c", ""), ("c", ""))) == 2
    assert agreeing(rows(("b", "a | b"), ("a", "a"), ("b", "a | b"), ("a", "a"))) == 4
