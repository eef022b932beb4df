"""Ranks with a device each: processes that torchrun, or our own launcher, started as the same command.

All of them join, agree on what is to be measured, and then rank 0 leads: it writes the results and posts work, the
others take part until there is no more. Ranks of one host start steps from a deadline in shared memory; the leaders of
several hosts meet over the network first, so hosts start only about as close as a network round trip.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .barrier import BarrierMismatch, BarrierTimeout, DeadlineBarrier, mapped_barrier_memory
from .ranks import LEAD_US, AffinityPlan, Failure, RankContext, RankFailure, describe, die_with, plan_affinity
from .results import ResultsError

if TYPE_CHECKING:
    import torch.distributed as dist

NOTES = "ATTN_GRAPH_TEAM_NOTES"
"""Folder in which a rank leaves word for the launcher that started it; unset under torchrun."""

LAUNCHER = "ATTN_GRAPH_LAUNCHER_PID"

_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
_ECHO_S = 2.0  # a rank that only felt another's end leaves after it, so that the launcher sees the cause first
_TURN_S = 0.2


class TeamError(RuntimeError):
    """Ranks that cannot work together. `blames`: the rank whose fault it is, if one stands out."""

    def __init__(self, message: str, blames: int | None = None) -> None:
        super().__init__(message)
        self.blames = blames


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among the ranks, as torchrun says.

    Attributes:
        rank, size: among all hosts.
        local_rank, local_size: on this host; also the index of its GPU.
        host: which host, from 0.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: int = 0

    @property
    def hosts(self) -> int:
        """How many, if all hold equally many ranks."""
        return -(-self.size // self.local_size)


def place_of(variables: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place, or None where nobody started it as a rank.

    Raises:
        TeamError: a variable is missing or is no number.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(variables):
        return None
    try:
        rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        local_rank = int(variables.get("LOCAL_RANK", rank))
        local_size = int(variables.get("LOCAL_WORLD_SIZE", size))
        host = int(variables.get("GROUP_RANK", rank // local_size))
    except ValueError as error:
        raise TeamError(f"RANK, WORLD_SIZE and their like must be numbers: {error}. Start ranks by torchrun") from error
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise TeamError(f"rank {rank} of {size}, local rank {local_rank} of {local_size} cannot be")
    return Place(rank, size, local_rank, local_size, host)


class Team:
    """All ranks, as one of them sees it; a context manager.

    Args:
        place: this rank's.
        kind: ``cuda`` or ``cpu``.
        allreduce: how ranks meet in the first all-reduce; see `exchange.make_exchange`.
        agreed: what must be the same on every rank, by name; compared when joining.
        timeout_s: longest time for which one rank waits for another.
    """

    def __init__(self, place: Place, kind: str, allreduce: str, agreed: Mapping[str, str], timeout_s: float) -> None:
        self.place = place
        self._kind = kind
        self._allreduce = allreduce
        self._agreed = dict(agreed)
        self._timeout_s = timeout_s
        self._plan = AffinityPlan(((),) * place.local_size, shared=False)
        self._case = ""
        self._posted = 0
        self._barrier: DeadlineBarrier | None = None

    def __enter__(self) -> Team:
        if os.environ.get(LAUNCHER):
            die_with(int(os.environ[LAUNCHER]))
        signal.signal(signal.SIGTERM, _end)  # what a launcher sends; results must be closed first
        try:
            self._join()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        import torch.distributed as dist

        if error is None:
            if self.place.rank == 0:
                self._post(None)
            dist.barrier()  # rank 0 keeps the store: it may not leave first
            dist.destroy_process_group()
            return
        if self._barrier is not None:
            self._barrier.abort()
        if isinstance(error, (_Ended, KeyboardInterrupt)):
            return
        if isinstance(error, ResultsError):  # the user's to mend, not a rank's failure
            leave_note(self.place.rank, "", Failure(str(error)), usage=True)
            return
        failure = self._failure(error)
        leave_note(self.place.rank, self._case, failure)
        if failure.echo or failure.blames not in (None, self.place.rank):
            time.sleep(_ECHO_S)
        if self._kind == "cpu":  # gloo's threads may abort a process that ends around them; NCCL's may wait for peers
            with suppress(Exception):
                dist.destroy_process_group()
        if os.environ.get(NOTES):  # the launcher says it, once for all ranks
            raise SystemExit(1) from error
        who = self.place.rank if failure.blames is None else failure.blames
        raise RankFailure(who, self._case, failure.cause, [], failure.traceback) from error

    @property
    def note(self) -> str:
        """What a reader of the numbers must know; empty if nothing."""
        if self.place.hosts == 1:
            return self._plan.note
        return (
            f"{self.place.hosts} hosts: launch ends and their skew are per host, for hosts share no clock, and first "
            f"waits are not predicted; measured waits are across all hosts. {self._plan.note}"
        ).strip()

    def run(
        self,
        n: int,
        target: Callable[..., Any],
        args: tuple = (),
        *,
        timeout_s: float,
        on_report: Callable[[int, Any], None],
    ) -> None:
        """On rank 0, as `ranks.run_ranks`: the first n ranks run ``target(context, *args)``, the others wait."""
        self._timeout_s = timeout_s
        self._post((n, target, args, timeout_s))
        self._take_part(n, target, args, on_report)

    def serve(self) -> None:
        """On the other ranks: take part in all that rank 0 posts."""
        while (work := self._next()) is not None:
            n, target, args, self._timeout_s = work
            self._take_part(n, target, args, None)

    def _join(self) -> None:
        import torch
        import torch.distributed as dist

        os.environ.update({name: os.environ.get(name, value) for name, value in _NO_MULTICAST.items()})
        place, limit = self.place, timedelta(seconds=self._timeout_s)
        self._plan = plan_affinity(place.local_size)
        if self._plan.cores[place.local_rank]:
            os.sched_setaffinity(0, self._plan.cores[place.local_rank])
        if self._kind == "cuda":
            there = torch.cuda.device_count()
            if place.local_rank >= there:
                raise TeamError(f"there is no GPU for it: {place.local_size} ranks on a host with {there} GPUs")
            torch.cuda.set_device(place.local_rank)
        store = _store(place, limit)
        self._store = dist.PrefixStore("attn_graph", store)
        self._await_all(limit)
        # A group for both: reports are Python objects, which NCCL would have to move through the GPU.
        backend = "cpu:gloo,cuda:nccl" if self._kind == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=place.rank, world_size=place.size, timeout=limit
        )
        self._agree()

    def _await_all(self, limit: timedelta) -> None:
        """Whoever does not come is named, which a process group's own timeout does not do."""
        keys = [f"here/{rank}" for rank in range(self.place.size)]
        self._store.set(keys[self.place.rank], "1")
        try:
            self._store.wait(keys, limit)
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not absent:
                raise
            raise TeamError(f"hung: did not join within {limit.total_seconds():g} s", absent[0]) from error

    def _agree(self) -> None:
        import torch.distributed as dist

        everyone: list = [None] * self.place.size
        dist.all_gather_object(everyone, self._agreed)
        for name in self._agreed:
            found = [theirs.get(name, "") for theirs in everyone]
            usual = max(found, key=found.count)  # the first of equals, which is rank 0's
            odd = [rank for rank, value in enumerate(found) if value != usual]
            if odd:
                raise TeamError(
                    f"it has another {name} than the other ranks: {found[odd[0]]}, where they have {usual}. "
                    "Give every rank the same command and versions",
                    odd[0],
                )

    def _post(self, work: tuple | None) -> None:
        self._store.set(f"work/{self._posted}", pickle.dumps(work))
        self._posted += 1

    def _next(self) -> tuple | None:
        key = f"work/{self._posted}"
        while not self._store.check([key]):
            time.sleep(_TURN_S)  # not the store's own wait, in which no signal is handled
        self._posted += 1
        return pickle.loads(self._store.get(key))

    def _take_part(self, n: int, target: Callable, args: tuple, on_report: Callable[[int, Any], None] | None) -> None:
        import torch
        import torch.distributed as dist

        place, limit = self.place, timedelta(seconds=self._timeout_s)
        group = dist.new_group(list(range(n)), timeout=limit)
        hosts: list = [None] * place.size
        dist.all_gather_object(hosts, (place.host, place.rank))
        leaders = [min(r for h, r in hosts if h == host and r < n) for host in {h for h, r in hosts if r < n}]
        across = dist.new_group(sorted(leaders), timeout=limit) if len(leaders) > 1 else None
        if place.rank >= n:
            return
        mine = sorted(r for h, r in hosts if h == place.host and r < n)
        device = torch.device("cuda", place.local_rank) if self._kind == "cuda" else torch.device("cpu")
        self._barrier = self._new_barrier(group, mine, None if across is None else partial(_meet_leaders, across))

        def send(kind: str, value: Any) -> None:
            if kind == "announce":
                self._case = value
                return
            parts: list | None = [None] * n if place.rank == 0 else None
            dist.gather_object(value, parts, dst=0, group=group)
            for rank, part in enumerate(parts or ()):
                on_report(rank, part)

        def new_exchange(launches: int):
            from .exchange import make_exchange

            return make_exchange(self._allreduce, group, device, launches)

        context = RankContext(
            place.rank, n, self._plan.cores[place.local_rank], self._plan.shared, self._barrier, send,
            device=str(device), host=place.host, new_exchange=new_exchange if n > 1 else None,
        )  # fmt: skip
        try:
            target(context, *args)
        except BarrierTimeout as error:
            error.missing = [mine[i] for i in error.missing]
            raise
        except BarrierMismatch as error:
            error.odd = [mine[i] for i in error.odd]
            raise

    def _new_barrier(
        self, group: dist.ProcessGroup, mine: list[int], agree: Callable[[int], None] | None
    ) -> DeadlineBarrier:
        """Shared by the ranks `mine` of this host."""
        import torch.distributed as dist

        leads = self.place.rank == mine[0]
        path = _new_file() if leads else ""
        paths: list = [None] * group.size()
        dist.all_gather_object(paths, path, group=group)
        memory = mapped_barrier_memory(len(mine), paths[mine[0]])
        dist.barrier(group=group)
        if leads:
            os.unlink(path)  # all have it mapped: no crash can leave it behind
        cores = len(self._plan.cores[self.place.local_rank]) or os.cpu_count() or 1
        return DeadlineBarrier(
            memory,
            mine.index(self.place.rank),
            len(mine),
            lead_us=LEAD_US * (len(mine) / cores if self._plan.shared else 1),
            timeout_s=self._timeout_s,
            spin=not self._plan.shared,
            agree=agree,
        )

    def _failure(self, error: BaseException) -> Failure:
        found = describe(error)
        blames = getattr(error, "blames", found.blames)
        return Failure(found.cause, found.traceback, blames, found.echo or _felt_only(error))


def leave_note(rank: int, case: str, failure: Failure, usage: bool = False) -> None:
    """Tell the launcher why this rank ends; nothing under torchrun, where the error on stderr has to do."""
    if os.environ.get(NOTES):
        text = json.dumps({"case": case, "failure": asdict(failure), "usage": usage})
        Path(os.environ[NOTES], f"rank{rank}.json").write_text(text, encoding="utf-8")


class _Ended(SystemExit):
    """The launcher told this rank to end."""


def _end(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_DFL)
    raise _Ended(128 + signum)


def _felt_only(error: BaseException) -> bool:
    """Whether it says no more than that a peer is gone, or that one did not come."""
    import torch.distributed as dist

    words = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "Timed out")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _meet_leaders(group: dist.ProcessGroup, step: int) -> None:
    """Leaders of several hosts meet, at the same step."""
    import torch
    import torch.distributed as dist

    ends = torch.tensor([step, -step])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if ends[0] != -ends[1]:
        raise TeamError(f"hosts are not at the same step: this one is at {step}, another at {int(ends[0])}")


def _store(place: Place, limit: timedelta) -> dist.Store:
    """Where ranks leave word for each other: the launcher's, or one that rank 0 opens. Does not wait for all of them.

    Raises:
        TeamError: rank 0 did not open it.
    """
    import torch.distributed as dist

    variables = os.environ
    opened = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = variables["MASTER_ADDR"], int(variables.get("MASTER_PORT", "29500"))
    try:
        store = dist.TCPStore(
            host, port, place.size, place.rank == 0 and not opened, timeout=limit, wait_for_workers=False
        )
    except RuntimeError as error:
        raise TeamError(f"did not answer at {host}:{port} within {limit.total_seconds():g} s: {error}", 0) from error
    return dist.PrefixStore(f"attempt{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _new_file() -> str:
    handle, path = tempfile.mkstemp(prefix="attn_graph-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.close(handle)
    return path
