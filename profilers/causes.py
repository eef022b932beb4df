"""Why was that step slow: what the system, the interpreter and the GPU's governor did during each step.

Counters are read right before and right after a step, outside the timed window. A slow step is given the events of
which it saw more than a usual step of its kind did; that is a suspicion with evidence, and where there is none the
answer is ``unknown``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from .environment import node_of_core

if TYPE_CHECKING:
    from .gpu_state import GpuState, GpuWatch

CAUSES = (
    "involuntary_switch",  # another thread got the core
    "voluntary_switch",  # this thread blocked: a lock, a sleep, a wait for the device
    "migration",
    "major_fault",  # waited for storage
    "minor_fault",
    "gc",
    "numa_move",  # ended on a core of another memory node
)
GPU_CAUSES = (
    "gpu_throttle",  # power or heat held the clocks down
    "gpu_clock",  # the clock was well below its usual
)
LOW_CLOCK = 0.95

UNKNOWN = "unknown"

SLOW_SCORE = 3.5
"""A step is slow when 0.6745 * (value - median) / MAD exceeds this.

The score and the constant are those of Iglewicz and Hoaglin, How to Detect and Handle Outliers (ASQC, 1993). Both
parts are robust: half of the steps may be slow without moving what counts as usual. Only the upper side counts.
"""

# The thread's own counters where the system keeps them (Linux), else the process's.
_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class StepCauses:
    """Counts of `CAUSES` for each step of one thread.

    Use one per arm, entered as a context manager for the time of the run::

        with StepCauses() as causes:
            for step in range(steps):
                barrier.wait(step, in_lead=causes.mark)
                ...            # the timed window
                causes.mark()
        counts = causes.counts()

    A mark costs about 0.7 us, half of it in getrusage. Migrations that were undone within the step go unseen.

    Args:
        gpu: where the state of the GPU is to be read too; then call `read_gpu` once a step, outside everything timed.
    """

    def __init__(self, gpu: GpuWatch | None = None) -> None:
        self._gpu = gpu
        self._states: list[tuple[GpuState, bool]] = []
        self._marks: list[tuple[resource.struct_rusage, int, int]] = []
        self._gc_runs = 0
        self._usage = resource.getrusage
        self._core = _core_reader()

    def __enter__(self) -> StepCauses:
        # The collector calls back; reading gc.get_stats() at each mark would cost as much as the rest of it.
        gc.callbacks.append(self._count_gc)
        return self

    def __exit__(self, *exc_info: object) -> None:
        gc.callbacks.remove(self._count_gc)

    def mark(self) -> None:
        """Read the counters; call alternately right before and right after a step."""
        self._marks.append((self._usage(_WHO), self._core(), self._gc_runs))

    def read_gpu(self) -> None:
        """Take down clock and throttling after a step; nothing without a GPU to watch."""
        if self._gpu is not None:
            self._states.append(self._gpu.read())

    def gpu_states(self) -> list[GpuState | None]:
        """By step, what the GPU was asked at its end; None where it was not asked. Empty without a GPU to watch."""
        return [state if fresh else None for state, fresh in self._states]

    def counts(self) -> dict[str, np.ndarray]:
        """Events per step by cause, each [steps] int64. A step that was not finished is left out.

        Causes of the GPU are there where it was read, as 0 or 1.
        """
        return self._of_thread() | self._of_gpu()

    def _of_gpu(self) -> dict[str, np.ndarray]:
        if not self._states:
            return {}
        clocks = np.array([np.nan if s.sm_clock_mhz is None else s.sm_clock_mhz for s, _ in self._states])
        usual = np.nanmedian(clocks) if np.isfinite(clocks).any() else np.nan
        low = clocks < LOW_CLOCK * usual  # a clock that is not told is not low
        throttled = [bool(state.throttles) for state, _ in self._states]
        return dict(zip(GPU_CAUSES, (np.array(throttled, dtype=np.int64), low.astype(np.int64)), strict=True))

    def _of_thread(self) -> dict[str, np.ndarray]:
        node_of = cached_nodes()
        pairs = list(zip(self._marks[0::2], self._marks[1::2], strict=False))
        steps = [
            (
                after.ru_nivcsw - before.ru_nivcsw,
                after.ru_nvcsw - before.ru_nvcsw,
                int(core_after != core_before),
                after.ru_majflt - before.ru_majflt,
                after.ru_minflt - before.ru_minflt,
                gc_after - gc_before,
                int(node_of.get(core_after) != node_of.get(core_before)),
            )
            for (before, core_before, gc_before), (after, core_after, gc_after) in pairs
        ]
        columns = np.array(steps, dtype=np.int64).reshape(len(steps), len(CAUSES)).T
        return dict(zip(CAUSES, columns, strict=True))

    def _count_gc(self, phase: str, info: dict) -> None:
        self._gc_runs += phase == "start"


@cache
def cached_nodes() -> dict[int, int]:
    """Logical core -> memory node; empty where Linux does not say, so that nothing counts as a move."""
    return node_of_core()


def slow_steps(values_us: np.ndarray) -> np.ndarray:
    """Which steps are slow by `SLOW_SCORE`; [steps] bool.

    Where more than half of the values are equal the MAD is 0 and says nothing; the mean absolute deviation takes its
    place, as Iglewicz and Hoaglin propose (1.2533 times it estimates a standard deviation).
    """
    from scipy.stats import median_abs_deviation

    values_us = np.asarray(values_us, dtype=np.float64)
    if not values_us.size:
        return np.zeros(0, dtype=bool)
    above = values_us - np.median(values_us)
    deviation = median_abs_deviation(values_us) / 0.6745 or np.mean(np.abs(above)) * 1.2533
    return above > SLOW_SCORE * deviation


def attribute(values_us: np.ndarray, counts: Mapping[str, np.ndarray]) -> list[str]:
    """The cause of each slow step; empty for all others.

    A step is blamed on the causes of which it counted more than the median of the steps that are not slow: a rebuild
    that always blocks once is not slow because it blocked. Several are joined by ``+``, in the order of `CAUSES`.

    Args:
        values_us: [steps], one metric of one arm and rank.
        counts: cause -> [steps] events, as from `StepCauses.counts` of the same steps.

    Raises:
        ValueError: lengths differ.
    """
    values_us = np.asarray(values_us, dtype=np.float64)
    for cause, events in counts.items():
        if len(events) != len(values_us):
            raise ValueError(f"{cause} has {len(events)} steps, the values have {len(values_us)}")
    slow = slow_steps(values_us)
    if not slow.any():
        return [""] * len(values_us)
    unusual = {cause: events > np.median(events[~slow]) for cause, events in counts.items()}
    return [
        ("+".join(cause for cause in unusual if unusual[cause][step]) or UNKNOWN) if slow[step] else ""
        for step in range(len(values_us))
    ]


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """No garbage collection inside, and what lives already is not looked at again; restored at the end."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _core_reader():
    """A function that returns the logical core it runs on; always -1 where the C library cannot say."""
    try:
        return ctypes.CDLL(None).sched_getcpu
    except (AttributeError, OSError):
        return lambda: -1
