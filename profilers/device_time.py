"""Device time of a rebuild. GPU only: a CPU has none, and says so.

What a rebuild costs inside a graph is what one more of it adds: graphs of few and of many identical rebuilds are
replayed and the difference is divided, so that the launch's own constant drops out (one graph's time over its count
overstates a 1 us kernel by half). Hot: the rebuilds follow each other on the same buffers. Cold: caches are flushed
before each, and the time of the flushes alone is taken off.

Samples of different bodies are taken in turns, so that clocks that drift do so for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from .devices import DeviceError
from .graphs import CudaGraph

Body = Callable[[], None]

COUNTS = (40, 120)
COLD_COUNTS = (10, 30)  # a flush takes 50 us and more
EAGER_COUNTS = (1, 5)
REPEATS = 20
LAP_US = 2000.0
"""Length of a timed stretch: long beside the half microsecond that events resolve."""
MOST_REPLAYS = 10

_FIRST_LEAD_US = 300.0
_LONGEST_LEAD_US = 100_000.0
_LEAD_FACTOR = 3.0
"""Of the host's time for queueing the laps before."""


@dataclass(frozen=True, slots=True)
class Laps:
    """Device time of consecutive stretches of work, in us. `gapless`: the queue never ran dry, so no host time."""

    us: tuple[float, ...]
    gapless: bool


class Timer(Protocol):
    """What the arithmetic below needs of a device."""

    def captured(self, body: Body, n: int) -> Body:
        """A call that replays a graph of `n` bodies."""
        ...

    def flush(self) -> None:
        """Device work, fit for a graph, that leaves nothing of earlier work in the caches."""
        ...

    def laps(self, *stretches: Body) -> Laps:
        """Queue the stretches one behind the other and time each."""
        ...


class GpuTimer:
    """Times work on a stream of its own.

    Args:
        device: a CUDA or HIP device; the current one if None.

    Raises:
        DeviceError: it is no GPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device("cuda" if device is None else device)
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise DeviceError(f"device time needs a GPU, got device {self.device}")
        torch.cuda.synchronize(self.device)  # inputs may still be on their way on another stream
        self._lead_us = _FIRST_LEAD_US
        self._scratch: torch.Tensor | None = None
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream()
            self._cycles_per_us = self._calibrate()

    def captured(self, body: Body, n: int) -> Body:
        if self._scratch is None:
            self._scratch = self._allocate_scratch()
        graph = CudaGraph(self._stream)
        with torch.cuda.device(self.device):
            graph.capture(lambda: _repeat(body, n), warmups=1)

        def replay() -> None:
            graph.launch()  # through the object: the driver's handle alone would not keep the graph alive

        return replay

    def flush(self) -> None:
        self._scratch.fill_(1)

    def laps(self, *stretches: Body) -> Laps:
        """A sleeping kernel goes first, for as long as the host needs to queue everything behind it.

        A stretch that waits for the device outlasts any sleep; then `gapless` is false.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            lead_us = self._lead_us
            while True:
                laps, queueing_us = self._laps_behind(lead_us, stretches)
                if laps.gapless:  # a longer sleep after a hiccup of the host would make every lap after it as long
                    self._lead_us = min(lead_us, max(_FIRST_LEAD_US, _LEAD_FACTOR * queueing_us))
                if laps.gapless or lead_us >= _LONGEST_LEAD_US:
                    return laps
                lead_us = min(4 * lead_us, _LONGEST_LEAD_US)

    def _laps_behind(self, lead_us: float, stretches: Sequence[Body]) -> tuple[Laps, float]:
        """The laps, and how long the host took to queue them."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(stretches) + 1)]
        torch.cuda._sleep(int(lead_us * self._cycles_per_us))
        marks[0].record()
        started = time.perf_counter()
        for stretch, mark in zip(stretches, marks[1:], strict=True):
            stretch()
            mark.record()
        gapless = not marks[0].query()
        queueing_us = 1e6 * (time.perf_counter() - started)
        marks[-1].synchronize()
        us = (1e3 * before.elapsed_time(after) for before, after in pairwise(marks))
        return Laps(tuple(us), gapless), queueing_us

    def _calibrate(self, cycles: int = 1_000_000) -> float:
        """Cycles of the sleeping kernel in a microsecond."""
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # the first also loads the kernel
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                torch.cuda._sleep(cycles)
                after.record()
                after.synchronize()
        return cycles / (1e3 * before.elapsed_time(after))

    def _allocate_scratch(self) -> torch.Tensor:
        """Four times the last cache. AMD does not report its 256 MB memory-side cache."""
        level2 = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0)
        least = 2**30 if torch.version.hip else 2**27
        return torch.empty(max(4 * level2, least), dtype=torch.uint8, device=self.device)


def marginal_us(
    body: Body,
    *,
    device: torch.device | str | None = None,
    cold: bool = False,
    repeats: int = REPEATS,
    counts: tuple[int, int] | None = None,
    timer: Timer | None = None,
) -> list[float]:
    """Device time in us that one more `body` adds to a graph, once for each repeat.

    Args:
        body: device work on static buffers that a graph can hold.
        device: where; the current GPU if None.
        cold: flush the caches before each body.
        counts: bodies in the smaller and the larger graph; COUNTS or COLD_COUNTS if None.
        timer: what times; a `GpuTimer` of `device` if None.

    Raises:
        DeviceError: there is no GPU.
        CaptureError: the body does what a graph cannot hold.

    Values of zero and below are returned as they came: a difference of two noisy times can be negative.
    """
    options = {"device": device, "cold": cold, "repeats": repeats, "counts": counts, "timer": timer}
    return interleaved_us({"": body}, **options)[""]


def interleaved_us(
    bodies: Mapping[str, Body],
    *,
    device: torch.device | str | None = None,
    cold: bool = False,
    repeats: int = REPEATS,
    counts: tuple[int, int] | None = None,
    timer: Timer | None = None,
) -> dict[str, list[float]]:
    """`marginal_us` of several bodies, repeat by repeat in turns: value i of each was taken within the same moment.

    The order rotates from repeat to repeat, so that no body always follows the same one.
    """
    timer = timer or GpuTimer(device)
    counts = counts or (COLD_COUNTS if cold else COUNTS)
    probes = {name: _Marginal(timer, body, counts, cold) for name, body in bodies.items()}
    samples: dict[str, list[float]] = {name: [] for name in bodies}
    for repeat in range(repeats):
        for name in _rotated(list(bodies), repeat):
            samples[name].append(probes[name].sample(reverse=repeat % 2 == 1))
    return samples


class _Marginal:
    """Graphs of one body, and the sum that leaves what one body adds."""

    def __init__(self, timer: Timer, body: Body, counts: tuple[int, int], cold: bool) -> None:
        few, many = counts
        self._timer, self._difference = timer, many - few
        if cold:

            def flushed() -> None:
                timer.flush()
                body()

            parts = ((1, flushed, many), (-1, flushed, few), (-1, timer.flush, many), (1, timer.flush, few))
        else:
            parts = ((1, body, many), (-1, body, few))
        self._terms = [(sign, timer.captured(work, n)) for sign, work, n in parts]
        longest = max(timer.laps(*(graph for _, graph in self._terms)).us)
        self._replays = max(1, min(MOST_REPLAYS, int(LAP_US / max(longest, 1.0))))

    def sample(self, reverse: bool) -> float:
        """One value in us. `reverse` turns the order of the stretches, against drift within the sample."""
        terms = self._terms[::-1] if reverse else self._terms
        laps = self._timer.laps(*(_repeated(graph, self._replays) for _, graph in terms))
        if not laps.gapless:
            raise DeviceError(
                "graph launches did not reach the device in time, so host time would be counted as device time. "
                "A tracer slows launches down this much: measure in a process that has never been traced"
            )
        total = sum(sign * us for (sign, _), us in zip(terms, laps.us, strict=True))
        return total / (self._replays * self._difference)


@dataclass(frozen=True, slots=True)
class EagerTimes:
    """Device times of a dispatched body, in us; iterates over its values.

    Attributes:
        values: one a repeat; empty unless `status` is ok.
        status: ``ok``, or ``unsupported`` where host time cannot be told from device time.
        cause: why not.
    """

    values: tuple[float, ...] = ()
    status: str = "ok"
    cause: str = ""

    def __iter__(self) -> Iterator[float]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


def eager_device_us(
    body: Body,
    *,
    device: torch.device | str | None = None,
    repeats: int = REPEATS,
    timer: Timer | None = None,
) -> EagerTimes:
    """Device time in us of one `body` that is dispatched, kernel by kernel, to a device that never waits for the host.

    What a further body adds to the queue, as in `marginal_us`. The body must issue its work to the current stream.
    A body that waits for the device cannot be timed this way.

    Raises:
        DeviceError: there is no GPU.
    """
    timer = timer or GpuTimer(device)
    few, many = EAGER_COUNTS
    stretches = (_repeated(body, few), _repeated(body, many))
    timer.laps(*stretches)  # compiles, and finds how long the host needs
    values = []
    for _ in range(repeats):
        laps = timer.laps(*stretches)
        if not laps.gapless:
            return EagerTimes(status="unsupported", cause="the body waits for the device, or the host is too slow")
        values.append((laps.us[1] - laps.us[0]) / (many - few))
    return EagerTimes(tuple(values))


def _repeat(body: Body, n: int) -> None:
    for _ in range(n):
        body()


def _repeated(body: Body, n: int) -> Body:
    return lambda: _repeat(body, n)


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]
