"""The folder of a run: written case by case, so that whatever ends a run leaves what it measured. Imports no torch.

``progress.json`` names the finished cases and how long the two tables were after the last of them. It is replaced in
one step once both tables are on disk: rows beyond those lengths are of a case that never finished, are not read, and
are cut off before the next write.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from .environment import differences
from .sample import (
    CASE_COLUMNS,
    SAMPLE_COLUMNS,
    SUMMARY_COLUMNS,
    UNITS,
    Case,
    Environment,
    ResultRow,
    Sample,
)
from .stats import summarise

if TYPE_CHECKING:
    import pandas as pd

SAMPLES, SUMMARY, ENVIRONMENT, PROGRESS = "samples.csv.gz", "summary.csv", "environment.json", "progress.json"
LOCK = ".lock"
ACROSS_RANKS = -1  # a sample's rank where the number is of all ranks together, as a skew is
POOLED = "all"


class ResultsError(Exception):
    """A folder that cannot be written, read or gone on with; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The commit record of a run: keys of the finished cases, and the tables' lengths in bytes."""

    cases: tuple[str, ...] = ()
    samples_bytes: int = 0
    summary_bytes: int = 0


class RunWriter:
    """Writes one run. A context manager: leaving it by an exception marks the run interrupted or failed.

    Creating it makes and locks the folder, so that a folder that cannot be used stops a run before it measures.

    Raises:
        ResultsError: the folder cannot be written, is in use, holds a run and `resume` is off, or holds a run of
            another machine.
    """

    def __init__(self, folder: Path, environment: Environment, resume: bool = False) -> None:
        self.folder = Path(folder)
        _make_writable(self.folder)
        self._lock = _locked(self.folder)
        try:
            self.environment = self._start(environment, resume)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.finish("done")
        else:
            self.finish("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def done_cases(self) -> frozenset[str]:
        """`Case.key` of every case that is wholly on disk."""
        return frozenset(self._progress.cases)

    def write_case(self, case: Case, samples: Iterable[Sample], tuned: str = "") -> list[ResultRow]:
        """Append a case's samples and its summary; on disk when this returns, or not at all.

        `samples` may be a generator that measures: if it raises, nothing of the case stays. `tuned` says where the
        kernel's block sizes came from. Returns the rows that were added to the summary.
        """
        if case.key in self._progress.cases:
            raise ValueError(f"case is already written: {case.key}")
        constants = astuple(case)
        try:
            with self._appending(SAMPLES) as write:
                groups = _grouped(write, constants, samples)
            rows = list(_summary_rows(groups, tuned))
            with self._appending(SUMMARY) as write:
                for row in rows:
                    write((*constants, *astuple(row)))
            self._commit((*self._progress.cases, case.key))
        except OSError as error:
            self._cut_back()
            kept = len(self._progress.cases)
            raise ResultsError(
                f"cannot write to {self.folder}: {error.strerror}. {kept} finished cases are kept; "
                "make room and go on with --resume"
            ) from error
        except BaseException:
            self._cut_back()
            raise
        return rows

    def warn(self, warning: str) -> None:
        """Record something that may have spoiled the measurement. Once each."""
        if warning not in self.environment.warnings:
            self._save(replace(self.environment, warnings=[*self.environment.warnings, warning]))

    def finish(self, status: str) -> None:
        """Mark the run ``done``, ``interrupted`` or ``failed`` and let go of the folder."""
        self._cut_back()
        self._save(replace(self.environment, status=status, finished_at=_now()))
        self._lock.release()

    def _start(self, environment: Environment, resume: bool) -> Environment:
        if not (self.folder / PROGRESS).exists():
            return self._start_anew(environment)
        self._progress = read_progress(self.folder)
        if not resume:
            raise ResultsError(
                f"{self.folder} already holds a run of {len(self._progress.cases)} cases. "
                "Go on with it by --resume, or choose another folder with --out"
            )
        before = read_environment(self.folder)
        _refuse_another_machine(self.folder, before, environment)
        self._cut_back()
        resumed = replace(
            environment,
            command=before.command,
            started_at=before.started_at,
            warnings=_merged(before.warnings, _resume_notes(before, environment), environment.warnings),
        )
        self._save(resumed)
        return resumed

    def _start_anew(self, environment: Environment) -> Environment:
        there = [name for name in (SAMPLES, SUMMARY, ENVIRONMENT) if (self.folder / name).exists()]
        if there:
            raise ResultsError(
                f"{self.folder} holds {', '.join(there)} but no {PROGRESS}, so it cannot be gone on with. "
                "Choose another folder with --out"
            )
        for name, header in ((SAMPLES, SAMPLE_COLUMNS), (SUMMARY, SUMMARY_COLUMNS)):
            with self._appending(name) as write:
                write(header)
        self._save(environment)
        self._commit(())
        return environment

    @contextmanager
    def _appending(self, name: str) -> Iterator:
        """A CSV row writer at the end of a table, its rows on disk on leaving. A gzip table gets a new member."""
        path, how = self.folder / name, {"encoding": "utf-8", "newline": ""}
        # Level 4: raw samples are repetitive, and the ranks stand idle while this packs.
        with gzip.open(path, "at", compresslevel=4, **how) if name == SAMPLES else open(path, "a", **how) as text:
            yield csv.writer(text, lineterminator="\n").writerow
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def _commit(self, cases: tuple[str, ...]) -> None:
        progress = Progress(cases, *((self.folder / name).stat().st_size for name in (SAMPLES, SUMMARY)))
        _replace_json(self.folder / PROGRESS, asdict(progress))
        self._progress = progress

    def _cut_back(self) -> None:
        """Drop rows of an unfinished case. What is on disk decides: Ctrl-C may fall anywhere, also in `_commit`."""
        self._progress = read_progress(self.folder)
        for name, size in _committed(self._progress).items():
            os.truncate(self.folder / name, size)

    def _save(self, environment: Environment) -> None:
        _replace_json(self.folder / ENVIRONMENT, asdict(environment))
        self.environment = environment


def close_abandoned(folder: Path, status: str, warning: str = "") -> None:
    """Mark a run whose writer was killed as ended; nothing where the writer did it, or never began."""
    if not is_run(folder):
        return
    found = read_environment(folder)
    warnings = _merged(found.warnings, [warning] if warning else [])
    ended = found if found.status != "running" else replace(found, status=status, finished_at=_now())
    _replace_json(Path(folder) / ENVIRONMENT, asdict(replace(ended, warnings=warnings)))


def read_environment(folder: Path) -> Environment:
    """The environment of a run; fields of later versions are left out.

    Raises:
        ResultsError: not a run, or unreadable.
    """
    path = _file_of_run(folder, ENVIRONMENT)
    known = {f.name for f in fields(Environment)}
    try:
        saved = {k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if k in known}
        return Environment(**saved)
    except (ValueError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} is not an environment record: {error}") from error


def read_summary(folder: Path) -> pd.DataFrame:
    """summary.csv as written: numbers are numbers, a blank number is NaN, text is text.

    Raises:
        ResultsError: not a run, or a table that this version cannot read.
    """
    return _read(folder, SUMMARY, SUMMARY_COLUMNS, _dtypes(Case, ResultRow, text="str"))


def read_samples(folder: Path) -> pd.DataFrame:
    """samples.csv.gz, like `read_summary`; text columns are categories, for they repeat on every row."""
    return _read(folder, SAMPLES, SAMPLE_COLUMNS, _dtypes(Case, Sample, text="category"))


def read_progress(folder: Path) -> Progress:
    """The commit record.

    Raises:
        ResultsError: unreadable, or a table is shorter than recorded.
    """
    path = Path(folder) / PROGRESS
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        progress = Progress(tuple(saved["cases"]), saved["samples_bytes"], saved["summary_bytes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"cannot read {path}: {error}. Choose another folder with --out") from error
    for name, size in _committed(progress).items():
        found = os.path.getsize(path.parent / name) if (path.parent / name).exists() else 0
        if found < size:
            raise ResultsError(
                f"{path.parent / name} has {found} bytes where {PROGRESS} records {size}: it was changed after the "
                "run. Restore it, or choose another folder with --out"
            )
    return progress


def is_run(folder: Path) -> bool:
    return (Path(folder) / ENVIRONMENT).is_file()


def runs_in(path: Path) -> list[Path]:
    """`path` itself where it is a run, else the runs directly under it, by name.

    Raises:
        ResultsError: neither.
    """
    if is_run(path):
        return [Path(path)]
    found = [p for p in sorted(Path(path).iterdir()) if is_run(p)] if Path(path).is_dir() else []
    if not found:
        _file_of_run(path, ENVIRONMENT)
    return found


def cases_in(frame: pd.DataFrame) -> Iterator[tuple[Case, pd.DataFrame]]:
    """Each case of a summary or of samples with its rows, in the order of writing."""
    for values, rows in frame.groupby(list(CASE_COLUMNS), sort=False, observed=True):
        named = {f.name: _PYTHON[f.type](v) for f, v in zip(fields(Case), values, strict=True)}
        yield Case(**named), rows


_PYTHON = {"int": int, "bool": bool, "str": str}

ANOTHER_MACHINE = ("cpu", "GPUs", "driver", "torch", "triton", "cuda", "hip")
"""Checks of `environment.differences` that make two runs different measurements; the others may explain a number."""


def machine_differences(a: Environment, b: Environment) -> tuple[list[str], list[str]]:
    """What differs: what makes it another machine, and under which other conditions it ran. Each with both values."""
    found = [check for check in differences(a, b) if check.name != "tp"]  # a case says how many ranks it has
    texts = [(check.name in ANOTHER_MACHINE, f"{check.name}: {check.found}") for check in found]
    return [text for other, text in texts if other], [text for other, text in texts if not other]


def _refuse_another_machine(folder: Path, before: Environment, now: Environment) -> None:
    different, _ = machine_differences(before, now)
    if different:
        raise ResultsError(
            f"{folder} was measured on another machine than this, and one run holds one machine: "
            f"{'; '.join(different)}. Choose another folder with --out"
        )


def _resume_notes(before: Environment, now: Environment) -> list[str]:
    notes = [f"resumed at {now.started_at}: {' '.join(now.command)}"]
    for name in sorted(before.options.keys() & now.options.keys() - {"out", "resume", "json"}):
        if before.options[name] != now.options[name]:
            notes.append(f"resumed with another {name}: {before.options[name]}, then {now.options[name]}")
    _, conditions = machine_differences(before, now)
    return notes + [f"resumed under other conditions: {text}" for text in conditions]


def _merged(*lists: list[str]) -> list[str]:
    return list(dict.fromkeys(text for texts in lists for text in texts))


def _grouped(write, constants: tuple, samples: Iterable[Sample]) -> dict[tuple, list[float]]:
    """Write every sample; collect the numbers by (arm, metric, source, observer, status) and rank."""
    groups: dict[tuple, dict[int, list[float]]] = {}
    for s in samples:
        value, status, cause = s.value, s.status, s.cause
        if value is not None:
            # 0.1 ns: finer than any clock here, and a summary can be recomputed from the samples to the digit.
            value = round(float(value), 4)
            if not math.isfinite(value):
                value, status, cause = None, "failed", f"the measured value was {s.value}"
        write((*constants, s.arm, s.rank, s.step, s.metric, s.unit, value, status, cause, s.source, s.observer))
        ranks = groups.setdefault((s.arm, s.metric, s.source, s.observer, status), {})
        numbers = ranks.setdefault(s.rank, [])
        if value is not None:
            numbers.append(value)
    return groups


def _summary_rows(groups: dict[tuple, dict[int, list[float]]], tuned: str) -> Iterator[ResultRow]:
    """Pooled row first, then one a rank. A status other than ok has a row of its own, without numbers."""
    for (arm, metric, source, observer, status), ranks in groups.items():
        pooled = [value for numbers in ranks.values() for value in numbers]
        single = [(str(rank), ranks[rank]) for rank in sorted(ranks) if rank != ACROSS_RANKS]
        for rank, numbers in [(POOLED, pooled), *single]:
            figures = asdict(summarise(numbers))
            del figures["missing"]
            rounded = {k: v if v is None else round(v, 4) for k, v in figures.items()}
            yield ResultRow(
                arm=arm, rank=rank, metric=metric, unit=UNITS[metric], **rounded,
                status=status, source=source, observer=observer, tuned=tuned,
            )  # fmt: skip


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ResultsError(
            f"cannot write results to {folder}: {error.strerror}. Choose another folder with --out"
        ) from error


def _locked(folder: Path):
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ResultsError(
            f"another run is writing to {folder}. Wait for it, or choose another folder with --out"
        ) from None
    return lock


def _committed(progress: Progress) -> dict[str, int]:
    return {SAMPLES: progress.samples_bytes, SUMMARY: progress.summary_bytes}


def _replace_json(path: Path, content: dict) -> None:
    """Readers see the old file or the new one, never a part."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        try:
            json.dump(content, file, indent=2, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)  # gone already, if Ctrl-C came right behind the replacement
            raise


def _file_of_run(folder: Path, name: str) -> Path:
    """Path of a file of a run, with a hint where `folder` is none."""
    folder = Path(folder)
    path = folder / name
    if path.is_file():
        return path
    if not folder.exists():
        raise ResultsError(f"no such run: {folder}")
    if is_run(folder.parent) and folder.is_file():
        raise ResultsError(f"{folder} is a file of a run. Give its folder: {folder.parent}")
    inside = [p.name for p in sorted(folder.iterdir()) if is_run(p)] if folder.is_dir() else []
    hint = f"It holds runs: {', '.join(inside)}" if inside else "A run is a folder that 'attn-graph bench' wrote"
    raise ResultsError(f"{folder} is not a run: it has no {name}. {hint}")


def _read(folder: Path, name: str, columns: tuple[str, ...], dtypes: dict[str, str]) -> pd.DataFrame:
    import pandas as pd

    path = _file_of_run(folder, name)
    content = path.read_bytes()
    if (path.parent / PROGRESS).exists():
        content = content[: _committed(read_progress(path.parent))[name]]
    numbers = [column for column, dtype in dtypes.items() if dtype == "float64"]
    try:
        frame = pd.read_csv(
            io.BytesIO(content),
            compression="gzip" if name == SAMPLES else None,
            dtype=dtypes,
            keep_default_na=False,
            na_values={column: [""] for column in numbers},
        )
    except (ValueError, OSError, EOFError) as error:
        raise ResultsError(f"cannot read {path}: {error}") from error
    absent = [column for column in columns if column not in frame.columns]
    if absent:
        raise ResultsError(f"{path} lacks columns: {', '.join(absent)}")
    return frame


def _dtypes(*records: type, text: str) -> dict[str, str]:
    """Column -> dtype, from the annotations of the schema."""
    kinds = {"int": "int64", "float | None": "float64", "bool": "bool", "str": text}
    return {f.name: kinds[f.type] for record in records for f in fields(record)} | {"unit": text}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
