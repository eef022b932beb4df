"""The first all-reduce of a captured forward pass, and how long each launch of it waited for the other ranks.

Three of them behind one interface: flags in symmetric memory (`SymmetricExchange`), NCCL's all-reduce where GPUs cannot
write each other's memory (`NcclExchange`), and gloo's for machines without a GPU (`GlooExchange`). Each times itself on
the clock of the device it runs on, so waits need no clock that ranks share.

An exchange takes no part in a launch until it is armed: capturing, warming up, checking and counting replay the graph
on one rank alone, where there is nobody to meet. NCCL cannot be told to stay out, so with it every rank must replay
alike; `lockstep` says so.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..backends.kernels.launch import foreign_launch
from .clock import monotonic_ns

if TYPE_CHECKING:
    from .graphs import GraphFactory

KINDS = ("symm", "nccl", "gloo")

PATIENCE_S = 10.0
"""A launch that waits longer for a peer gives up, so that a device is never left spinning for a dead one."""

NO_SKEW_REPEATS = 200

_ELEMENTS = 8192  # one token of a large model's hidden state, as NCCL and gloo reduce it


class ExchangeError(RuntimeError):
    """Ranks that cannot meet, or did not; says which and why."""


class FirstAllReduce(Protocol):
    """Callable that issues the all-reduce; record it with a graph.

    Attributes:
        kind: one of `KINDS`.
        lockstep: every rank must replay graphs that hold it equally often, armed or not.
    """

    kind: str
    lockstep: bool

    def __call__(self) -> None: ...

    def arm(self) -> None:
        """From now on launches take part and are timed, from number 0. All ranks must meet between this and the
        first launch."""

    def read_us(self, launches: int) -> np.ndarray:
        """[launches] float64, microseconds each launch since `arm` took; then disarmed. The device must be idle.

        Raises:
            ExchangeError: a launch gave up on a peer.
        """


def make_exchange(kind: str, group: dist.ProcessGroup, device: torch.device, capacity: int) -> FirstAllReduce:
    """An exchange among the ranks of `group`; collective.

    Args:
        kind: one of `KINDS`, or ``auto``: flags where all GPUs can write each other's memory, else NCCL; gloo on CPUs.
        capacity: most launches between `arm` and `read_us`.

    Raises:
        ExchangeError: this machine has no such exchange.
    """
    if kind == "auto":
        kind = _best_kind(group, device)
    if (kind == "gloo") != (device.type == "cpu"):
        raise ExchangeError(f"--allreduce {kind} does not run on {device.type}. Use auto")
    if kind == "symm":
        return SymmetricExchange(group, device, capacity)
    return NcclExchange(group, device, capacity) if kind == "nccl" else GlooExchange(group)


def _best_kind(group: dist.ProcessGroup, device: torch.device) -> str:
    """The same on every rank: one that cannot reach a peer decides for all."""
    if device.type == "cpu":
        return "gloo"
    here = (os.environ.get("GROUP_RANK", "0"), device.index)
    everyone: list = [None] * group.size()
    dist.all_gather_object(everyone, here, group=group)
    reachable = all(
        host == here[0] and (index == device.index or torch.cuda.can_device_access_peer(device.index, index))
        for host, index in everyone
    )
    votes: list = [None] * group.size()
    dist.all_gather_object(votes, reachable, group=group)
    return "symm" if all(votes) else "nccl"


class _DeviceClocked:
    """Launch numbers and times kept on the device: what flags and NCCL share."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        from . import flags

        self._flags = flags
        self._capacity = max(capacity, NO_SKEW_REPEATS)
        self._control = torch.zeros(3, dtype=torch.int64, device=device)
        self._waits = torch.zeros(self._capacity, dtype=torch.int64, device=device)
        self._device = device

    def arm(self) -> None:
        self._control.copy_(torch.tensor([0, 1, 0]))
        torch.cuda.synchronize(self._device)

    def read_us(self, launches: int) -> np.ndarray:
        if launches > self._capacity:
            raise ValueError(f"{launches} launches, but times are kept of the last {self._capacity}")
        torch.cuda.synchronize(self._device)
        counted = int(self._control[self._flags.EPOCH])
        self._control.zero_()
        if counted != launches:
            raise ExchangeError(f"the device counted {counted} exchanges where {launches} were launched")
        ticks = self._waits[:launches].cpu().numpy()
        if (ticks < 0).any():
            raise ExchangeError(
                f"{self._missing(launches)} did not come to all-reduce {int(np.argmax(ticks < 0))} "
                f"within {PATIENCE_S:g} s"
            )
        return ticks * (self._flags.TICK_NS / 1e3)

    def _missing(self, launches: int) -> str:
        return "a peer"


class SymmetricExchange(_DeviceClocked):
    """Flags in symmetric memory, over NVLink or whatever else lets GPUs of one host write each other's memory.

    The memory's multicast mapping is not used; `TORCH_SYMM_MEM_DISABLE_MULTICAST` keeps it from being made.
    """

    kind = "symm"
    lockstep = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, capacity: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        super().__init__(device, capacity)
        self._rank, self._size = group.rank(), group.size()
        self._slots = symmetric_memory.empty(max(self._size, 32), dtype=torch.int32, device=device)
        self._slots.zero_()
        torch.cuda.synchronize(device)
        # Newer releases find the group by themselves and call this deprecated.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            symmetric_memory.enable_symm_mem_for_group(group.group_name)
        self._handle = symmetric_memory.rendezvous(self._slots, group.group_name)
        self._peers = torch.tensor(list(self._handle.buffer_ptrs), dtype=torch.int64, device=device)
        self._limit = int(PATIENCE_S * 1e9 / self._flags.TICK_NS)
        self._lanes = max(32, 1 << (self._size - 1).bit_length())

    def __call__(self) -> None:
        self._flags.flag_exchange[(1,)](
            self._control, self._waits, self._peers, self._rank, self._capacity, self._limit,
            SIZE=self._size, LANES=self._lanes, num_warps=1,
        )  # fmt: skip

    def arm(self) -> None:
        # No peer writes here now: each has seen this rank's last flag, and launches again only after all have met.
        self._slots.zero_()
        super().arm()

    def _missing(self, launches: int) -> str:
        late = [rank for rank, flag in enumerate(self._slots[: self._size].tolist()) if flag < launches]
        return f"rank {', '.join(map(str, late))}" if late else "a peer"


class NcclExchange(_DeviceClocked):
    """NCCL's all-reduce between two readings of the device's clock; the time includes NCCL's own kernel."""

    kind = "nccl"
    lockstep = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, capacity: int) -> None:
        super().__init__(device, capacity)
        self._group = group
        self._buffer = torch.zeros(_ELEMENTS, dtype=torch.bfloat16, device=device)
        dist.all_reduce(self._buffer, group=group)  # makes the communicator, which no capture may hold
        torch.cuda.synchronize(device)

    def __call__(self) -> None:
        stamp = self._flags.stamp
        stamp[(1,)](self._control, self._waits, self._capacity, AFTER=False, num_warps=1)
        dist.all_reduce(self._buffer, group=self._group)
        stamp[(1,)](self._control, self._waits, self._capacity, AFTER=True, num_warps=1)


class GlooExchange:
    """gloo's all-reduce in a recorded graph, timed by the host, which is the device here."""

    kind = "gloo"
    lockstep = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._buffer = torch.zeros(_ELEMENTS)
        self._armed = False
        self._waits_ns: list[int] = []

    def __call__(self) -> None:
        foreign_launch(self._meet, (self._buffer,))

    def arm(self) -> None:
        self._armed, self._waits_ns = True, []

    def read_us(self, launches: int) -> np.ndarray:
        self._armed = False
        if len(self._waits_ns) != launches:
            raise ExchangeError(f"{len(self._waits_ns)} exchanges were counted where {launches} were launched")
        return np.array(self._waits_ns) / 1e3

    def _meet(self) -> None:
        if self._armed:
            began = monotonic_ns()
            dist.all_reduce(self._buffer, group=self._group)
            self._waits_ns.append(monotonic_ns() - began)


def no_skew_us(exchange: FirstAllReduce, factory: GraphFactory, meet: Callable[[], object]) -> np.ndarray:
    """What the exchange takes when nobody is late: [repeats] us, on this rank; collective.

    A graph of nothing but exchanges: each one leaves all ranks together for the next, so only the first can wait.

    Args:
        meet: returns when all ranks have called it.
    """

    def body() -> None:
        for _ in range(NO_SKEW_REPEATS):
            exchange()

    graph = factory()
    graph.capture(body, warmups=1)
    exchange.arm()
    meet()
    graph.launch()
    return exchange.read_us(NO_SKEW_REPEATS)[NO_SKEW_REPEATS // 10 :]
