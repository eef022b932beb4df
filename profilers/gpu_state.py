"""Clock and throttling of a GPU between the steps of a run, through NVML where it is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .clock import Clock, monotonic_ns
from .devices import nvml_gpus, nvml_session, physical_gpu, torch_runtime, visible_gpus
from .environment import throttle_reasons

EVERY_NS = 50_000_000
"""NVML takes up to milliseconds for an answer, and what it tells changes more slowly than that."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """Clock of the multiprocessors, and what holds clocks down; None and empty where the GPU does not say."""

    sm_clock_mhz: float | None
    throttles: tuple[str, ...] = ()


class GpuWatch:
    """Asks at most every `EVERY_NS`; in between the last answer holds.

    Args:
        ask: gives the state now.
    """

    def __init__(self, ask: Callable[[], GpuState], clock: Clock = monotonic_ns) -> None:
        self._ask, self._clock = ask, clock
        self._due = clock()
        self._last = GpuState(None)

    def read(self) -> tuple[GpuState, bool]:
        """The state, and whether it was asked for just now."""
        now = self._clock()
        if now < self._due:
            return self._last, False
        self._last = self._ask()
        self._due = now + EVERY_NS
        return self._last, True


@contextmanager
def watch_gpu(index: int) -> Iterator[GpuWatch | None]:
    """Watch the GPU with this CUDA index; None where NVML is not to be had or does not know it."""
    with nvml_session() as nvml:
        handle = None if nvml is None else _handle(nvml, index)
        yield None if handle is None else GpuWatch(lambda: _state(nvml, handle))


def _handle(nvml, index: int):
    gpus = nvml_gpus()
    shown = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    record = next((record for record in torch_runtime().devices if record.index == index), None)
    found = None if record is None else physical_gpu(record, gpus, shown)
    return None if found is None else nvml.nvmlDeviceGetHandleByIndex(found.gpu.index)


def _state(nvml, handle) -> GpuState:
    def ask(function: str, *arguments):
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # not supported here
            return None

    clock_mhz = ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
    reasons = throttle_reasons(nvml, ask("nvmlDeviceGetCurrentClocksThrottleReasons"))
    return GpuState(None if clock_mhz is None else float(clock_mhz), tuple(reasons or ()))
