"""Faults from the field as small variants of a backend or runner, each with the checks that must catch it.

One file for each, named like it, with a tuple ``FAULTS``; what has no file has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from ....backends.modes import Arm, ForwardMode

if TYPE_CHECKING:
    from ....backends.runners.graph_runner import GraphRunner
    from ..matrix import Sizes
    from ..runners import RunnerSubject
    from ..subject import Subject


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a backend or wrapper.

    Attributes:
        name: short, stable; the row is called ``fault:NAME``.
        title: what is done wrong.
        caught_by: ids of checks, each of which must fail on the fault and pass without it.
        mode, sizes, arms: where it shows.
        broken: the subject with the fault in.
        on: what the subject needs for the fault to show.
    """

    name: str
    title: str
    caught_by: tuple[str, ...]
    mode: ForwardMode
    sizes: Sizes
    arms: tuple[Arm, ...]
    broken: Callable[[Subject], Subject]
    on: Callable[[Subject], Subject]

    def sound(self, backend: str, device: torch.device) -> Subject:
        """What it shows on, without it."""
        return self.on(self.sizes.subject(backend, self.mode, device, self.arms, seed=0))


@dataclass(frozen=True, slots=True)
class RunnerFault:
    """One fault of a runner: see `Fault`.

    Attributes:
        cls: the runner's class with the fault in.
    """

    name: str
    title: str
    caught_by: tuple[str, ...]
    mode: ForwardMode
    cls: type[GraphRunner]

    def sound(self, runner: str, device: torch.device) -> RunnerSubject:
        from ..runners import RunnerSubject

        return RunnerSubject.of(runner, self.mode, device)

    def broken(self, subject: RunnerSubject) -> RunnerSubject:
        return subject.but(cls=self.cls)


def known_faults(name: str) -> tuple[Fault | RunnerFault, ...]:
    """The faults of a backend, wrapper or runner; none where nobody wrote any down."""
    name = f"{__name__}.{name}"
    try:
        return import_module(name).FAULTS
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return ()
