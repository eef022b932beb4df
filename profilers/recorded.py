"""A CUDA graph for machines without a GPU: records operations and storages at capture, replays them in place.

It refuses what a CUDA graph refuses, so that capture and replay rules can be tested on a laptop: reading a value on
the host, data-dependent shapes, allocating inside the capture. A tensor that is rebound after capture is not read,
because the recorded operations hold the storages they saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

from ..backends.kernels.launch import observed, observers, through_observers
from .counters import SYNC_OPS, VIEW_OPS, base_name

ALLOCATING = frozenset(
    {
        "empty",
        "zeros",
        "ones",
        "full",
        "arange",
        "linspace",
        "eye",
        "rand",
        "randn",
        "randint",
        "scalar_tensor",
    }
    | {
        "empty_strided",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "empty_like",
        "zeros_like",
        "ones_like",
    }
    | {"full_like", "tensor", "lift_fresh", "randperm", "new_empty_strided"}
)
HOST_READS = frozenset(
    {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}
    | {"is_nonzero", "__contains__"}
)


class CaptureError(RuntimeError):
    """Something inside the capture that a graph cannot hold; names the operation and its kind."""


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    """One storage that a recorded operation reads or writes from outside the graph."""

    data_ptr: int
    storage_ptr: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _Op:
    run: Callable[[], Any]
    outputs: dict[int, torch.Tensor]  # position in the flattened result -> memory made at capture


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self.inputs: list[torch.Tensor] = []
        self._made: set[int] = set()
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = base_name(func)
        if name in SYNC_OPS:
            kind = "a host read" if name == "_local_scalar_dense" else "a data-dependent shape"
            raise CaptureError(f"{name}: {kind} is not permitted while a graph is being captured")
        if name in ALLOCATING:
            raise CaptureError(f"{name}: allocates inside the capture; allocate in init_cuda_graph_state")
        if name == "index" and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise CaptureError("index: a boolean index has a data-dependent shape")
        self.saw(tree_leaves((args, kwargs)))
        out = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if name in VIEW_OPS:
            # The view itself is host bookkeeping; but a view of memory made inside stays inside.
            return out
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        fresh = {i: t for i, t in enumerate(outputs) if t.untyped_storage().data_ptr() not in before}
        self._made |= {t.untyped_storage().data_ptr() for t in fresh.values()}
        # Arguments are held as plain aliases, so that a later in-place metadata change of the caller's object
        # (resize, set_) does not change what was recorded.
        held_args, held_kwargs = tree_map(_alias, (args, kwargs))
        self.ops.append(_Op(lambda: func(*held_args, **held_kwargs), fresh))
        return out

    def saw(self, leaves: list[Any]) -> None:
        for t in leaves:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self._made:
                self.inputs.append(t)

    def on_launch(self, run: Callable[[], None], args: tuple[Any, ...] | None) -> None:
        if args is None:
            raise CaptureError("graph launch: not permitted while another graph is being captured")
        self.saw(list(args))
        self.ops.append(_Op(run, {}))
        self.paused = True  # Triton's interpreter moves tensors with ATen calls of its own; they are the launch
        try:
            run()
        finally:
            self.paused = False


def recording() -> bool:
    """Whether a `RecordedGraph` is being captured in this thread."""
    return isinstance(_get_current_dispatch_mode(), _Recorder)


class _HostReadGuard(TorchFunctionMode):
    """Host reads that never reach the dispatcher on a CPU, where ``.cpu()`` and ``.numpy()`` are free."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if not self._recorder.paused and name in HOST_READS:
            raise CaptureError(f"{name}: a host read is not permitted while a graph is being captured")
        return func(*args, **(kwargs or {}))


def _alias(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


class RecordedGraph:
    """Same interface as `CudaGraph`; host times of it mean nothing and are never reported."""

    kind = "recorded"

    def __init__(self) -> None:
        self._ops: list[_Op] = []
        self._inputs: list[torch.Tensor] = []
        self.captured = False

    def capture(
        self, body: Callable[[], None], *, warmups: int = 2, after_warmup: Callable[[], None] | None = None
    ) -> None:
        """Run `body` `warmups` times, then once more while recording.

        Raises:
            CaptureError: the body reads a value on the host, allocates, or has a data-dependent shape.
        """
        for _ in range(warmups):
            body()
            if after_warmup:
                after_warmup()
        recorder = _Recorder()
        with observed(recorder.on_launch), _HostReadGuard(recorder), recorder:
            body()
        self._ops, self._inputs, self.captured = recorder.ops, recorder.inputs, True

    def launch(self) -> None:
        """Replay: run the recorded operations on the storages they were recorded with."""
        if not self.captured:
            raise CaptureError("launch before capture")
        if observers:
            through_observers(self._run, None)
        else:
            self._run()

    def _run(self) -> None:
        for op in self._ops:
            out = op.run()
            if op.outputs:
                made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
                for i, kept in op.outputs.items():
                    kept.copy_(made[i])

    replay = launch

    @property
    def nodes(self) -> int:
        """Recorded operations that do device work."""
        return len(self._ops)

    def pointers(self) -> list[CapturedTensor]:
        """Every tensor from outside that the graph reads or writes, each address once."""
        seen = {}
        for t in self._inputs:
            seen[t.data_ptr(), tuple(t.shape)] = CapturedTensor(
                t.data_ptr(), t.untyped_storage().data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype
            )
        return list(seen.values())
