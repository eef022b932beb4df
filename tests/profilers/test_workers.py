"""Processes of `attn-graph verify`: each has a number, by which it chooses its GPU, and one that replaces another has
the other's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attn_graph.profilers.conformance.workers import Died, done_by


@dataclass(frozen=True)
class Fatal:
    """Ends its process, or leaves it unusable."""

    dies: bool

    def run(self) -> tuple[int, bool]:
        if self.dies:
            os._exit(9)
        return os.getpid(), False


def note(folder: Path, number: int) -> None:
    (folder / f"{number}.{os.getpid()}").touch()


def test_a_process_that_replaces_another_has_its_number(tmp_path):
    tasks = [Fatal(dies=False), Fatal(dies=True), Fatal(dies=False)]
    done = [result for _, result in done_by(1, lambda: tasks.pop() if tasks else None, prepare=partial(note, tmp_path))]
    assert [isinstance(result, Died) for result in done] == [False, True, False]
    numbers = [path.name.split(".")[0] for path in tmp_path.iterdir()]
    assert numbers == ["0"] * 3


def test_processes_are_numbered_from_0(tmp_path):
    tasks = [Fatal(dies=False)] * 2
    list(done_by(2, lambda: tasks.pop() if tasks else None, prepare=partial(note, tmp_path)))
    assert sorted(path.name.split(".")[0] for path in tmp_path.iterdir()) == ["0", "1"]
