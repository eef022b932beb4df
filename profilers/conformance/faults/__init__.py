"""Faults from the field as small variants of a backend, each with the checks that must catch it.

One file a backend, named like it, with a tuple ``FAULTS``; a backend without a file has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ....backends.modes import Arm, ForwardMode

if TYPE_CHECKING:
    from ..matrix import Sizes
    from ..subject import Subject


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

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


def known_faults(backend: str) -> tuple[Fault, ...]:
    """The faults of a backend; none where nobody wrote any down."""
    name = f"{__name__}.{backend}"
    try:
        return import_module(name).FAULTS
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return ()
