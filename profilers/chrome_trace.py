"""Timelines as Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open. No torch.

Strict JSON: no NaN, no trailing comma, packed with gzip; the same rows give the same bytes.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from .results import read_environment, read_samples
from .timeline import Mark, Row, Slice, Timeline, timeline_of

TIMELINE = "timeline.json.gz"
ALL_RANKS = 1_000_000  # a process of its own for what concerns every rank; above any rank's number


def save_timeline(folder: Path) -> Timeline:
    """Write the timeline of a run into its folder, as `TIMELINE`, and return it.

    Raises:
        ResultsError: not a run.
    """
    environment = read_environment(folder)
    timeline = timeline_of(read_samples(folder))
    about = {"command": " ".join(environment.command), "device": environment.device, "host": environment.hostname}
    write_trace(Path(folder) / TIMELINE, timeline, about)
    return timeline


def write_trace(path: Path, timeline: Timeline, about: dict[str, str]) -> Path:
    """Write ``.json.gz``, whole or not at all. Returns `path`.

    Args:
        about: what stands beside the events under ``otherData``: the command, the machine.

    Raises:
        ValueError: a number in a row is not finite.
        OSError: cannot be written.
    """
    tracks = dict.fromkeys(row.track for row in timeline.rows if isinstance(row, Slice))
    threads = {track: number for number, track in enumerate(tracks, start=1)}
    events = [*_names(timeline.rows, threads), *(_event(row, threads) for row in timeline.rows)]
    other = about | {"note": timeline.note, "steps": str(timeline.steps), "steps_left_out": str(timeline.left_out)}
    document = {"displayTimeUnit": "ns", "otherData": other, "traceEvents": events}
    packed = gzip.compress(json.dumps(document, allow_nan=False, separators=(",", ":")).encode(), mtime=0)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(packed)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return path


def _names(rows: Iterable[Row], threads: dict[str, int]) -> Iterator[dict]:
    """Names of processes (ranks) and threads (tracks)."""
    tracks = dict.fromkeys((row.rank, row.track) for row in rows if isinstance(row, Slice))
    yield _name("process_name", ALL_RANKS, 0, "all ranks")
    for rank in sorted({rank for rank, _ in tracks}):
        yield _name("process_name", rank, 0, f"rank {rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for rank, track in tracks:
        yield _name("thread_name", rank, threads[track], track)


def _name(kind: str, pid: int, tid: int, name: str) -> dict:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(row: Row, threads: dict[str, int]) -> dict:
    if isinstance(row, Slice):
        start_ns, end_ns = _ns(row.start_us), _ns(row.start_us + row.duration_us)
        return {
            "ph": "X", "name": row.name, "cat": row.track, "pid": row.rank, "tid": threads[row.track],
            "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000, "args": row.args,
        }  # fmt: skip
    at = {"name": row.name, "pid": ALL_RANKS, "tid": 0, "ts": _ns(row.at_us) / 1000}
    if isinstance(row, Mark):
        return at | {"ph": "i", "s": "g", "args": row.args}
    return at | {"ph": "C", "args": {"value": row.value}}


def _ns(us: float) -> int:
    """Both ends of a slice are rounded alike, so that slices that nest or touch still do."""
    return round(us * 1000)
