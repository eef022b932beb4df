"""The one place device work is launched from by hand, so that graphs can record launches and counters count them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from . import direct

Run = Callable[[], None]
Observer = Callable[[Run, tuple[Any, ...] | None], None]
"""Called instead of a launch, with the launch and its arguments (None for a graph); must run it exactly once."""

observers: list[Observer] = []

_direct = direct.DirectLauncher()
direct.forget_after_fork(_direct)


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


def foreign_launch(run: Run, args: tuple[Any, ...]) -> None:
    """A launch that somebody else's code makes: `run` makes exactly one, reading and writing the tensors in `args`."""
    if observers:
        through_observers(run, args)
    else:
        run()


class PreparedLaunch:
    """A launch that is repeated with few changes: bind it once, call it with what changes.

    Args:
        kernel, grid, args, options: as for `launch`.
        varying: positions of the arguments that a call replaces, in order.

    A call whose values need another compiled variant (type, alignment) goes the long way by itself.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        options: dict[str, Any],
        varying: tuple[int, ...],
    ) -> None:
        self._launch = (kernel, grid, args, options)
        self._varying = varying
        self._repeat: Callable[[tuple[Any, ...]], bool] = _not_bound
        self._binds = direct.supported(kernel) and 0 not in grid

    def __call__(self, *values: Any) -> None:
        self.repeat(values)

    def repeat(self, values: tuple[Any, ...]) -> None:
        """The same call, for callers that count every Python operation."""
        if observers or not self._repeat(values):
            self._launch_anew(values)

    def _launch_anew(self, values: tuple[Any, ...]) -> None:
        kernel, grid, _, options = self._launch
        now = self._arguments(values)
        if observers or not self._binds:
            launch(kernel, grid, now, options)
            return
        self._binds = False  # once: what it cannot repeat needs another variant
        compiled = kernel[grid](*now, **options)
        with suppress(ValueError):
            self._repeat = direct.bound_launch(compiled, grid, now, self._varying)

    def through_triton(self, *values: Any) -> None:
        """The same launch by Triton's own launcher, to compare with. Observers do not see it."""
        kernel, grid, _, options = self._launch
        kernel[grid](*self._arguments(values), **options)

    def _arguments(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        now = list(self._launch[2])
        for position, value in zip(self._varying, values, strict=True):
            now[position] = value
        return tuple(now)


def _not_bound(values: tuple[Any, ...]) -> bool:
    return False


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
