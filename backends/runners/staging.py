"""Early staging: verify's inputs and metadata on a side stream, beside the draft's graph that still runs.

The side stream starts behind an event (the draft's head is done, so lengths and rows are final). Whoever takes the
staged step waits for it, whether it is used or not, and does the work anew where the step turned out another one.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from ..base import ConfigError
from .decode import DecodeRunner
from .inputs import StepInputs


class EarlyStage:
    """Loads and rebuilds a step ahead of time.

    Attributes:
        taken, refilled: staged steps that were used, and that were done again.

    Args:
        runner: whose slots nobody else uses: the draft's graph runs meanwhile.
        side: stream to stage on; None on a CPU, where it happens in line.

    Raises:
        ConfigError: the runner's slots are from a shared pool.
    """

    def __init__(self, runner: DecodeRunner, side: torch.cuda.Stream | None = None) -> None:
        if runner.slots.pooled:
            raise ConfigError("early staging needs slots of its own: the graph that still runs may use the pool's")
        self._runner, self._side = runner, side
        self._done = None if side is None else torch.cuda.Event()
        self._staged: StepInputs | None = None
        self.taken = self.refilled = 0

    def stage(self, step: StepInputs, after: torch.cuda.Event | None = None) -> None:
        """Load `step` and rebuild its metadata, behind `after`."""
        if self._side is None:
            self._load(step)
        else:
            if after is not None:
                self._side.wait_event(after)
            with torch.cuda.stream(self._side):
                self._load(step)
                self._done.record()
        self._staged = step

    def take(self, step: StepInputs) -> None:
        """Make `step` the runner's loaded and rebuilt one: launch is next."""
        staged, self._staged = self._staged, None
        if staged is not None and self._done is not None:
            torch.cuda.current_stream(self._side.device).wait_event(self._done)
        if staged is not None and same_sources(staged, step):
            self.taken += 1
            return
        self.refilled += 1
        self._load(step)

    def _load(self, step: StepInputs) -> None:
        self._runner.load_batch(step)
        self._runner.rebuild()


def same_sources(a: StepInputs, b: StepInputs) -> bool:
    """Whether two steps are read from the same memory, in the same mode."""
    return all(_source(getattr(a, f.name)) == _source(getattr(b, f.name)) for f in fields(a))


def _source(x: Any) -> Any:
    return (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
