"""Every candidate as rows of a CSV, written as they come, and a measurer that reads them back instead of measuring."""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ..profilers.sample import CASE_COLUMNS, Case
from .outcome import NOT_TRIED, OK, Finals, Measurer, Outcome, timed
from .space import Candidate
from .static import Compiled

if TYPE_CHECKING:
    import pandas as pd

STATIC, ROUGH, HOT, COLD, SLOWEST = "static", "rough", "final_hot", "final_cold", "final_slowest_rank"
SHORT, LONG = "final_short", "final_long"
HELD_OUT_HOT, HELD_OUT_COLD = "held_out_hot", "held_out_cold"
"""Phases: compiled, timed alone, timed side by side with warm and with cold caches (means over ranks), on each
candidate's slowest rank, and on short and long requests only; the default beside the choice on shapes that were not
tuned."""

FINALS = {HOT: "hot_us", COLD: "cold_us", SLOWEST: "slowest_us", SHORT: "short_us", LONG: "long_us"}
"""Phase -> field of `Finals`."""

END = b"\r\n"
"""Of a row. Line breaks within a text are bare."""

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
        if path.suffix == ".gz":
            raise LogError(f"{path}: rows are appended as they come, which needs a plain CSV. Compress it afterwards")
        if path.exists() and path.stat().st_size:
            _check_columns(path)
            _cut_torn_row(path)
        self._file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115 (see close)
        self._writer = csv.writer(self._file)
        if not self._file.tell():
            self._writer.writerow(COLUMNS)

    def compiled(self, case: Case, found: Compiled) -> None:
        self._write(case, STATIC, found.outcome, astuple(found.resources) if found.resources else ())

    def outcome(self, case: Case, outcome: Outcome) -> None:
        self._write(case, ROUGH, outcome)

    def finals(self, case: Case, finals: Finals) -> None:
        self._side_by_side(case, finals, {phase: getattr(finals, name) for phase, name in FINALS.items()})

    def held_out(self, case: Case, finals: Finals, rule: str) -> None:
        """The default, then what the store gave by `rule`."""
        phases = {HELD_OUT_HOT: finals.hot_us, HELD_OUT_COLD: finals.cold_us}
        self._side_by_side(case, finals, phases, ("the default", f"stored, by the rule: {rule}"))

    def _side_by_side(
        self, case: Case, finals: Finals, phases: Mapping[str, Mapping], reasons: Sequence[str] = ()
    ) -> None:
        for phase, times in phases.items():
            for (candidate, samples), reason in zip(times.items(), chain(reasons, repeat("")), strict=False):
                outcome = finals.rejected.get(candidate) or timed(candidate, samples)
                self._write(case, phase, outcome if outcome.reason else replace(outcome, reason=reason))

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
        space: what was tried, the default first, then in the space's order, so that ties are broken as they were.
    """

    def __init__(self, case: Case, gpu: str, rows: pd.DataFrame) -> None:
        self.case, self.gpu = case, gpu
        self._outcomes: dict[Candidate, Outcome] = {}
        self._times: dict[str, dict[Candidate, tuple[float, ...]]] = {phase: {} for phase in FINALS}
        pruned: set[Candidate] = set()
        for row in rows.itertuples():
            candidate = _candidate(row.candidate)
            samples = tuple(float(value) for value in row.samples_us.split())
            if row.phase in self._times:
                self._times[row.phase][candidate] = samples
            elif row.phase == ROUGH or (row.phase == STATIC and row.status != OK):
                self._outcomes[candidate] = Outcome(candidate, row.status, row.cause, row.reason, samples)
                pruned |= {candidate} if row.phase == STATIC else set()
        default = next((c for c in self._outcomes if c not in pruned), None)  # every search begins with it
        self.space = sorted(self._outcomes, key=lambda c: (c != default, c.values))

    def __contains__(self, candidate: Candidate) -> bool:
        """Whether it was tried."""
        return candidate in self._outcomes and self._outcomes[candidate].status != NOT_TRIED

    def rough(self, candidate: Candidate) -> Outcome:
        return self._outcomes[candidate]

    def finals(self, finalists: Sequence[Candidate]) -> Finals:
        """Side by side only where all of them were; other finalists than the logged ones have their rough times."""
        if all(candidate in self._times[HOT] for candidate in finalists):
            return Finals(**{name: _only(self._times[phase], finalists) for phase, name in FINALS.items()})
        return Finals({}, note="not all finalists were timed side by side: decided by the logged rough times")


class Resumed:
    """A measurer that asks the log of an interrupted run first, and a device for what is not there."""

    def __init__(self, logged: Replay, measurer: Measurer) -> None:
        self._logged, self._measurer, self._asked = logged, measurer, False

    def rough(self, candidate: Candidate) -> Outcome:
        return (self._logged if candidate in self._logged else self._measurer).rough(candidate)

    def finals(self, finalists: Sequence[Candidate]) -> Finals:
        """The logged ones once: whoever asks again wants other values."""
        found = Finals({}) if self._asked else self._logged.finals(finalists)
        self._asked = True
        return found if found.hot_us else self._measurer.finals(finalists)


def read_log(path: Path) -> Iterator[Replay]:
    """Every case of a log of which something was tried, with its GPU. ``.csv`` or ``.csv.gz``.

    Held-out shapes, and cases that were compiled only, have nothing to choose from and are left out.

    Raises:
        LogError: not a log, or no rows.
    """
    import pandas as pd

    from ..profilers.results import cases_in

    _check_columns(path)
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    whole = content[: content.rfind(END) + len(END)] if END in content else content
    texts = {"context": str, "candidate": str, "samples_us": str, "reason": str, "cause": str, "gpu": str}
    frame = pd.read_csv(io.BytesIO(whole), keep_default_na=False, dtype=texts)
    if frame.empty:
        raise LogError(f"{path}: no rows")
    for gpu, rows in frame.groupby("gpu", sort=False):
        for case, own in cases_in(rows):
            replay = Replay(case, gpu, own)
            if replay.space:
                yield replay


def _check_columns(path: Path) -> None:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        found = next(csv.reader(file), [])
    if tuple(found) != COLUMNS:
        raise LogError(f"{path}: not a log of candidates of this version. Choose another file")


def _cut_torn_row(path: Path) -> None:
    """A kill in mid-write leaves a part of a row, to which the next one would be glued."""
    content = path.read_bytes()
    if not content.endswith(END):
        os.truncate(path, content.rfind(END) + len(END))


def _candidate(text: str) -> Candidate:
    return Candidate.of(**{name: int(value) for name, _, value in (item.partition("=") for item in text.split())})


def _only(times: Mapping[Candidate, tuple[float, ...]], chosen: Sequence[Candidate]) -> dict:
    return {candidate: times[candidate] for candidate in chosen if candidate in times}
