"""The one place device work is launched from by hand, so that graphs can record launches and counters count them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from . import direct

Run = Callable[[], None]
Observer = Callable[[Run, tuple[Any, ...] | None], None]
"""Called instead of a launch, with the launch and its arguments (None for a graph); must run it exactly once."""

observers: list[Observer] = []

_direct = direct.DirectLauncher()


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch `kernel` on `grid`.

    Args:
        kernel: a triton.jit function.
        grid: programs per axis, host ints; a zero axis launches nothing.
        args: positional arguments. Tensors are passed as they are, so an observer can tell which storage is read.
        options: constexprs, num_warps, num_stages.
    """
    if 0 in grid:
        return
    if observers:
        through_observers(partial(kernel[grid], *args, **options), args)
    elif direct.supported(kernel):
        _direct.launch(kernel, grid, args, options)
    else:
        kernel[grid](*args, **options)


def through_observers(run: Run, args: tuple[Any, ...] | None) -> None:
    """Do one launch with every observer around it."""
    for observer in observers:
        run = partial(observer, run, args)
    run()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Hand every launch within to `observer`."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)
