"""What a hook makes the host do: every operation with its shapes and host numbers, and the tensors it got from outside.

Unlike a capture it refuses nothing, and unlike a count it keeps what it saw, so that two runs can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...backends.kernels.launch import observed
from ..counters import VIEW_OPS, base_name
from ..recorded import HOST_READS

Operation = tuple[str, tuple[Any, ...]]
"""Name; then shape and dtype of each tensor, and each host number, in argument order."""


class Trace(TorchDispatchMode):
    """Recorded by `trace`.

    Attributes:
        ops: operations in order; launches are called ``launch``.
        outside: tensors that were read or written and not made by the hook.
        host_reads: names of calls that hand a value to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Operation] = []
        self.outside: list[torch.Tensor] = []
        self.host_reads: list[str] = []
        self._kept: list[Any] = []  # a freed address may be given to the next tensor
        self._made: set[int] = set()
        self._paused = False

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ops]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        name, leaves = base_name(func), tree_leaves((args, kwargs))
        self._saw(name, leaves)
        if name not in VIEW_OPS:
            given = {t.untyped_storage().data_ptr() for t in leaves if isinstance(t, torch.Tensor)}
            results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            self._made |= {t.untyped_storage().data_ptr() for t in results} - given
        self._kept.append(out)
        return out

    def on_launch(self, run: Callable[[], None], args: tuple[Any, ...] | None) -> None:
        self._saw("launch", list(args or ()))
        self._paused = True
        try:
            run()
        finally:
            self._paused = False

    def _saw(self, name: str, leaves: list[Any]) -> None:
        told = tuple(
            (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x
            for x in leaves
            if isinstance(x, torch.Tensor | int | float | torch.dtype)
        )
        self.ops.append((name, told))
        for x in leaves:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._made:
                self.outside.append(x)


class _HostReads(TorchFunctionMode):
    """Reads that never reach the dispatcher where device and host memory are one."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in HOST_READS and not self._trace._paused:
            self._trace.host_reads.append(name)
        return func(*args, **(kwargs or {}))


def trace(body: Callable[[], None], *more: Any) -> Trace:
    """Run `body(*more)` once and tell what it did."""
    seen = Trace()
    with ExitStack() as stack:
        stack.enter_context(observed(seen.on_launch))
        stack.enter_context(_HostReads(seen))
        stack.enter_context(seen)
        partial(body, *more)()
    return seen
