"""Simulated tensor-parallel ranks: N processes that run one target from common starts.

Each rank is a spawned process (a forked one cannot use CUDA), pinned to cores of its own, with its own end of the
barrier. Whatever it reports reaches the parent at once, so nothing measured is lost when another rank dies later. A
rank that raises, dies or hangs ends the run within a time limit, named together with the case it was in.

The parent sleeps until a rank speaks: it must not take time from the cores it measures.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from typing import TYPE_CHECKING, Any

from . import barrier
from .barrier import BarrierAborted, BarrierMismatch, BarrierTimeout, DeadlineBarrier
from .clock import monotonic_ns

if TYPE_CHECKING:
    from .exchange import FirstAllReduce

LEAD_US = 40.0  # times the ranks per core where they share cores: that many must take a turn to notice

_LEAVE_S = 2.0  # for ranks to end by themselves: a CUDA context takes some tenths of a second to go
_TERMINATE_S = 1.0  # from SIGTERM to SIGKILL
_KILL_S = 5.0  # a process inside a driver call outlives even SIGKILL for a while


class RankFailure(RuntimeError):
    """One rank ended a run.

    Attributes:
        rank: which.
        case: what it announced last; empty if nothing.
        cause: what happened, in one line.
        partial: per rank, what it had reported; empty lists where `on_report` took it.
        traceback: text, where the rank raised.
    """

    def __init__(self, rank: int, case: str, cause: str, partial: list[list[Any]], traceback: str = "") -> None:
        super().__init__(f"rank {rank}{f' in case {case!r}' if case else ''}: {cause}")
        self.rank = rank
        self.case = case
        self.cause = cause
        self.partial = partial
        self.traceback = traceback


@dataclass(frozen=True, slots=True)
class AffinityPlan:
    """Which cores each rank runs on. Empty tuples: this system cannot pin.

    Attributes:
        cores: per rank, logical cores.
        shared: whether ranks share cores, i.e. there are more ranks than cores.
    """

    cores: tuple[tuple[int, ...], ...]
    shared: bool

    @property
    def note(self) -> str:
        """What a reader of the numbers must know; empty if nothing."""
        if not self.shared:
            return ""
        return (
            f"{len(self.cores)} ranks share {_count(self.cores[0])} cores: start lags and skews are mostly the "
            "scheduler's. Use fewer ranks or more cores."
        )


def available_cores() -> tuple[int, ...]:
    """Logical cores this process may use; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def physical_core(cpu: int) -> tuple[int, ...]:
    """What tells physical cores apart: (package, core). A logical core counts as its own where Linux does not say."""
    try:
        topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        return tuple(
            int(_read(f"{topology}/{name}")) for name in ("physical_package_id", "core_id")
        )  # fmt: skip
    except (OSError, ValueError):
        return (0, cpu)


def plan_affinity(
    n: int, available: Iterable[int] | None = None, core_of: Callable[[int], tuple[int, ...]] = physical_core
) -> AffinityPlan:
    """Disjoint core sets of equal size for n ranks, or all cores for everyone where there are too few.

    Hyper-threads of one physical core go to one rank as long as there are enough physical cores: two ranks on one
    would slow each other down.

    Args:
        available: logical cores to use; None takes this process's affinity mask.
        core_of: logical core -> identity of its physical core; neighbours in sort order are near each other.

    Raises:
        ValueError: n below 1.
    """
    if n < 1:
        raise ValueError(f"there must be at least 1 rank, got {n}")
    cpus = available_cores() if available is None else tuple(sorted(set(available)))
    if not cpus:
        return AffinityPlan(((),) * n, shared=n > _count(()))
    siblings: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        siblings.setdefault(core_of(cpu), []).append(cpu)
    whole = [siblings[core] for core in sorted(siblings)]
    units = whole if len(whole) >= n else [[cpu] for core in whole for cpu in core]
    if len(units) < n:
        return AffinityPlan((cpus,) * n, shared=True)
    per_rank = len(units) // n
    return AffinityPlan(
        tuple(tuple(cpu for unit in units[r * per_rank : (r + 1) * per_rank] for cpu in unit) for r in range(n)),
        shared=False,
    )


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a target knows about its rank, and its line to the parent.

    Attributes:
        rank, size: this rank, of how many.
        cores: logical cores it is pinned to; empty where the system cannot pin.
        shared: whether other ranks run on the same cores.
        barrier: common starts; `barrier.wait(step)`.
        device: of its own, as torch spells it; None where ranks share one.
        host: which host it runs on; only ranks of one host share a clock.
        new_exchange: makes the first all-reduce among these ranks for so many launches, collectively; None where
            ranks share a device and cannot meet on it.
    """

    rank: int
    size: int
    cores: tuple[int, ...]
    shared: bool
    barrier: DeadlineBarrier
    _send: Callable[[str, Any], None] = field(repr=False)
    device: str | None = None
    host: int = 0
    new_exchange: Callable[[int], FirstAllReduce] | None = None

    def announce(self, case: str) -> None:
        """Say what comes next; a failure is reported under this name. Not inside a timed window: writes to a pipe."""
        self._send("announce", case)

    def report(self, payload: Any) -> None:
        """Hand a result to the parent now; plain data or NumPy. Not inside a timed window: writes to a pipe."""
        self._send("report", payload)


def run_ranks(
    n: int,
    target: Callable[..., Any],
    args: tuple = (),
    *,
    timeout_s: float,
    cores: Iterable[int] | None = None,
    on_report: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Run ``target(context, *args)`` in n processes and return what each returned, by rank.

    A process lives for the whole call, so a target that runs many cases loops over them itself (a CUDA context takes
    seconds to make), announces each, and reports as it goes. A rank's standard output goes to standard error, so that
    the caller's own stays clean.

    Args:
        n: ranks.
        target: importable by name; gets a `RankContext` first.
        args: picklable.
        timeout_s: longest time for which a rank may neither speak nor enter the barrier, and for which the others
            wait there. Above the longest single step of a target, start-up and compilation included.
        cores: logical cores to use; None takes this process's affinity mask.
        on_report: called in this process with (rank, payload), in each rank's order, as reports arrive. Without it
            reports only show up in `RankFailure.partial`.

    Raises:
        RankFailure: a rank raised, died, hung, or could not be reached by pickle.
        KeyboardInterrupt: all ranks are ended first; a second one cuts that short.
    """
    work = pickle.dumps((target, args))
    team = _Team(n, plan_affinity(n, cores), timeout_s, on_report)
    try:
        team.start(work)
        return team.collect()
    finally:
        team.end()


@dataclass(slots=True)
class _Rank:
    """One rank as the parent sees it."""

    process: multiprocessing.process.BaseProcess
    heard_ns: int
    case: str = ""
    reports: list[Any] = field(default_factory=list)
    result: Any = None
    done: bool = False
    gone: bool = False
    arrivals: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank failed. `blames`: the rank whose fault it is. `echo`: it only felt another rank's failure."""

    cause: str
    traceback: str = ""
    blames: int | None = None
    echo: bool = False


def culprit(failures: Iterable[tuple[int, Failure]]) -> tuple[int, Failure]:
    """Which rank is to blame, and the failure that explains the others: a rank's own, else one that blames another."""
    index, failure = min(failures, key=lambda found: (found[1].echo, found[1].blames is not None))
    return (index if failure.blames is None else failure.blames), failure


class _Team:
    """All ranks of one run."""

    def __init__(
        self, n: int, plan: AffinityPlan, timeout_s: float, on_report: Callable[[int, Any], None] | None
    ) -> None:
        self._plan = plan
        self._timeout_s = timeout_s
        self._tick_s = timeout_s / 10
        self._on_report = on_report
        self._context = multiprocessing.get_context("spawn")
        self._memory = barrier.barrier_memory(n, self._context)
        self._size = n
        self._ranks: list[_Rank] = []
        self._failures: list[tuple[int, Failure]] = []
        self._events: queue.SimpleQueue[tuple[int, bytes | None]] = queue.SimpleQueue()
        self._leave_s = 0.0

    def start(self, work: bytes) -> None:
        resource_tracker.ensure_running()  # it would unblock SIGINT if the first spawn below had to start it
        with _sigint_blocked():
            for rank in range(self._size):
                reader, writer = self._context.Pipe(duplex=False)
                setup = (rank, self._size, self._plan, self._memory, self._timeout_s)
                process = self._context.Process(
                    target=_rank_main, args=(setup, writer, work), name=f"attn-graph rank {rank}"
                )
                process.start()
                # Only the child may hold this end: its death must read as the end of the stream.
                writer.close()
                self._ranks.append(_Rank(process, heard_ns=monotonic_ns()))
                threading.Thread(
                    target=_forward, args=(rank, reader, process.sentinel, self._events), daemon=True
                ).start()

    def collect(self) -> list[Any]:
        """Handle events until every rank has returned.

        Raises:
            RankFailure: as soon as one cannot.
        """
        while not all(rank.done for rank in self._ranks):
            self._handle_next(self._tick_s)
            self._find_silent()
            if self._failures:
                self._hear_the_others_out()
                raise self._verdict()
        self._leave_s = _LEAVE_S
        return [rank.result for rank in self._ranks]

    def _handle_next(self, timeout_s: float) -> None:
        """Take in one event, or none within the time."""
        try:
            index, raw = self._events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return
        rank = self._ranks[index]
        rank.heard_ns = monotonic_ns()
        if raw is None:
            rank.gone = True
            if not rank.done and not any(index == failed for failed, _ in self._failures):
                self._failures.append((index, Failure(_exit_text(rank.process))))
            return
        kind, value = pickle.loads(raw)
        if kind == "announce":
            rank.case = value
        elif kind == "report":
            if self._on_report is None:
                rank.reports.append(value)
            else:
                self._on_report(index, value)
        elif kind == "result":
            rank.result, rank.done = value, True
        elif kind == "failed":
            self._failures.append((index, value))

    def _find_silent(self) -> None:
        """A rank that neither spoke nor entered the barrier for too long has failed."""
        now = monotonic_ns()
        for index, entered in enumerate(barrier.arrivals(self._memory)):
            rank = self._ranks[index]
            if entered != rank.arrivals:
                rank.arrivals, rank.heard_ns = entered, now
            # A little more than ranks wait at the barrier: one that waits there knows better who is missing.
            if not rank.done and now - rank.heard_ns > (self._timeout_s + 2 * self._tick_s) * 1e9:
                cause = f"hung: no sign of life for {self._timeout_s:g} s"
                self._failures.append((index, Failure(cause)))

    def _hear_the_others_out(self) -> None:
        """Give the ranks a moment to say what they have; also, the first to fail need not be the cause.

        A rank that another blames too: what it said last may still be on its way.
        """
        barrier.abort(self._memory)
        limit = monotonic_ns() + int(_LEAVE_S * 1e9)
        while monotonic_ns() < limit:
            failed = {index for index, _ in self._failures}
            if all(rank.gone or index in failed for index, rank in enumerate(self._ranks)):
                break
            self._handle_next((limit - monotonic_ns()) / 1e9)
        while not self._events.empty():
            self._handle_next(0)

    def _verdict(self) -> RankFailure:
        index, failure = culprit(self._failures)
        rank = self._ranks[index]
        cause = "returned while other ranks waited for it at the barrier" if rank.done else failure.cause
        return RankFailure(index, rank.case, cause, [r.reports for r in self._ranks], failure.traceback)

    def end(self) -> None:
        """Leave no process behind. Ranks that have returned get a moment to leave by themselves."""
        processes = [rank.process for rank in self._ranks]
        try:
            barrier.abort(self._memory)
            _join(processes, self._leave_s)
            children = _descendants(processes)
            for process in processes:
                process.terminate()
            _join(processes, _TERMINATE_S)
        finally:  # a second Ctrl-C lands here at once
            for process in processes:
                process.kill()
        for child in children:
            with contextlib.suppress(Exception):
                child.kill()
        _join(processes, _KILL_S)


def _join(processes: Sequence[multiprocessing.process.BaseProcess], timeout_s: float) -> None:
    limit = monotonic_ns() + int(timeout_s * 1e9)
    for process in processes:
        process.join(max(0.0, (limit - monotonic_ns()) / 1e9))


def _descendants(processes: Sequence[multiprocessing.process.BaseProcess]) -> list:
    """What the still living ranks have started, compile workers for example."""
    import psutil

    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_alive():
                found += psutil.Process(process.pid).children(recursive=True)
    return found


def _exit_text(process: multiprocessing.process.BaseProcess) -> str:
    process.join(_KILL_S)
    return exit_text(process.exitcode)


def exit_text(code: int | None) -> str:
    """How a process ended that said nothing, by its exit code."""
    if code is None:
        return "closed its connection without returning"
    if code >= 0:
        return f"exited with status {code} before returning"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")


def _forward(rank: int, reader: connection.Connection, sentinel: int, events: queue.SimpleQueue) -> None:
    """Pass on everything one rank sends, then None once it is gone.

    A thread per rank: a large or half-sent message holds up nobody else, least of all Ctrl-C.
    """
    with contextlib.suppress(EOFError, OSError):
        # The sentinel too: something that the rank forked may still hold the pipe open.
        while reader in connection.wait([reader, sentinel]):
            events.put((rank, reader.recv_bytes()))
    connection.wait([sentinel])
    reader.close()
    events.put((rank, None))


@contextlib.contextmanager
def _sigint_blocked():
    """Started processes inherit the mask, so that no Ctrl-C hits them before they ignore it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rank_main(setup: tuple, writer: connection.Connection, work: bytes) -> None:
    """A rank's process."""
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with_parent()
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    rank, size, plan, memory, timeout_s = setup

    def send(kind: str, value: Any) -> None:
        # Not Connection.send: its pickler may pass tensors by file descriptor, which dies with this process.
        writer.send_bytes(pickle.dumps((kind, value), protocol=pickle.HIGHEST_PROTOCOL))

    try:
        cores = plan.cores[rank]
        if cores:
            os.sched_setaffinity(0, cores)  # before imports: thread pools are sized by it
        send("started", None)
        target, args = pickle.loads(work)
        lead_us = LEAD_US * (size / _count(cores) if plan.shared else 1)
        start = DeadlineBarrier(memory, rank, size, lead_us=lead_us, timeout_s=timeout_s, spin=not plan.shared)
        send("result", target(RankContext(rank, size, cores, plan.shared, start, send), *args))
    except BaseException as error:  # sys.exit too: whatever ends a rank early must reach the parent
        send("failed", describe(error))
        sys.exit(1)


def describe(error: BaseException) -> Failure:
    """What ended a rank, as the others and the user need to hear it."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, BarrierTimeout):
        cause = f"hung: did not reach the barrier within {error.timeout_s:g} s"
        return Failure(cause, blames=error.missing[0])
    if isinstance(error, BarrierMismatch):
        return Failure(str(error), text, blames=error.odd[0])
    cause = f"{type(error).__name__}: {error}".rstrip(": ")
    return Failure(cause, text, echo=isinstance(error, BarrierAborted))


def die_with(parent_pid: int) -> bool:
    """End this process when its parent dies, however it does; False where this system cannot."""
    if sys.platform != "linux":
        return False
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call
        os._exit(1)
    return True


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if die_with(parent.pid):
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _count(cores: Sequence[int]) -> int:
    """How many cores that is; no cores means not pinned."""
    return len(cores) or os.cpu_count() or 1


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
