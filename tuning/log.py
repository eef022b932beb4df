"""Every candidate as rows of a CSV, written as they come, and a measurer that reads them back instead of measuring."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ..profilers.sample import CASE_COLUMNS, Case
from .outcome import OK, Finals, Outcome, timed
from .space import Candidate, candidates
from .static import Compiled

if TYPE_CHECKING:
    import pandas as pd

STATIC, ROUGH, HOT, COLD = "static", "rough", "final_hot", "final_cold"
"""Phases: compiled, timed alone, timed side by side with warm and with cold caches."""

COLUMNS = (
    *CASE_COLUMNS, "gpu", "candidate", "phase", "status", "cause", "reason", "p50_us", "n", "samples_us",
    "registers", "spill_bytes", "shared_bytes", "code_bytes",
)  # fmt: skip


class LogError(Exception):
    """A file that is no log of candidates; names it and what is wrong."""


class Log:
    """Appends to a CSV. Opened before anything is measured, flushed after every row.

    Args:
        path: the file; None writes nothing.
        gpu: name of the device.

    Raises:
        LogError: the file has other columns.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path | None, gpu: str = "") -> None:
        self._gpu = gpu
        self._file = None
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            _check_columns(path)
        self._file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115 (see close)
        self._writer = csv.writer(self._file)
        if not self._file.tell():
            self._writer.writerow(COLUMNS)

    def compiled(self, case: Case, found: Compiled) -> None:
        self._write(case, STATIC, found.outcome, astuple(found.resources) if found.resources else ())

    def outcome(self, case: Case, outcome: Outcome) -> None:
        self._write(case, ROUGH, outcome)

    def finals(self, case: Case, finals: Finals) -> None:
        for phase, times in ((HOT, finals.hot_us), (COLD, finals.cold_us)):
            for candidate, samples in times.items():
                self._write(case, phase, finals.rejected.get(candidate) or timed(candidate, samples))

    def _write(self, case: Case, phase: str, outcome: Outcome, resources: Sequence[int | None] = ()) -> None:
        if self._file is None:
            return
        samples = outcome.samples_us
        figures = (round(median(samples), 4), len(samples)) if samples else ("", 0)
        row = (
            *astuple(case), self._gpu, outcome.candidate, phase, outcome.status, outcome.cause, outcome.reason,
            *figures, " ".join(f"{value:.4f}" for value in samples), *resources,
        )  # fmt: skip
        self._writer.writerow(row + ("",) * (len(COLUMNS) - len(row)))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Replay:
    """The measurer of one logged case: the same outcomes and times, and no device.

    Attributes:
        space: what was tried, in the space's order, so that ties are broken as they were.
    """

    def __init__(self, case: Case, gpu: str, rows: pd.DataFrame) -> None:
        self.case, self.gpu = case, gpu
        self._outcomes: dict[Candidate, Outcome] = {}
        self._times: dict[str, dict[Candidate, tuple[float, ...]]] = {HOT: {}, COLD: {}}
        for row in rows.itertuples():
            candidate = _candidate(row.candidate)
            samples = tuple(float(value) for value in row.samples_us.split())
            if row.phase in self._times:
                self._times[row.phase][candidate] = samples
            elif row.phase == ROUGH or row.status != OK:
                self._outcomes[candidate] = Outcome(candidate, row.status, row.cause, row.reason, samples)
        self.space = [c for c in candidates(case) if c in self._outcomes]

    def rough(self, candidate: Candidate) -> Outcome:
        return self._outcomes[candidate]

    def finals(self, finalists: Sequence[Candidate]) -> Finals:
        """Side by side only where all of them were; other finalists than the logged ones have their rough times."""
        if all(candidate in self._times[HOT] for candidate in finalists):
            return Finals(*(_only(self._times[phase], finalists) for phase in (HOT, COLD)))
        return Finals({}, note="not all finalists were timed side by side: decided by the logged rough times")


def read_log(path: Path) -> Iterator[Replay]:
    """Every case of a log, with its GPU.

    Raises:
        LogError: not a log, or no rows.
    """
    import pandas as pd

    from ..profilers.results import cases_in

    _check_columns(path)
    texts = {"context": str, "candidate": str, "samples_us": str, "reason": str, "cause": str, "gpu": str}
    frame = pd.read_csv(path, keep_default_na=False, dtype=texts)
    if frame.empty:
        raise LogError(f"{path}: no rows")
    for gpu, rows in frame.groupby("gpu", sort=False):
        for case, own in cases_in(rows):
            yield Replay(case, gpu, own)


def _check_columns(path: Path) -> None:
    with open(path, encoding="utf-8", newline="") as file:
        found = next(csv.reader(file), [])
    if tuple(found) != COLUMNS:
        raise LogError(f"{path}: not a log of candidates of this version. Choose another file")


def _candidate(text: str) -> Candidate:
    return Candidate.of(**{name: int(value) for name, _, value in (item.partition("=") for item in text.split())})


def _only(times: Mapping[Candidate, tuple[float, ...]], chosen: Sequence[Candidate]) -> dict:
    return {candidate: times[candidate] for candidate in chosen if candidate in times}
