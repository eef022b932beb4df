"""Exact counts of what one rebuild makes the host do: ATen dispatches, device launches, synchronisations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..backends.kernels.launch import observed

VIEW_OPS = frozenset(
    {"slice", "select", "view", "unsqueeze", "squeeze", "expand", "alias", "lift_fresh", "_unsafe_view"}
    | {"permute", "transpose", "t", "as_strided", "reshape", "split", "detach", "_reshape_alias", "unbind"}
)
SYNC_OPS = frozenset({"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "is_nonzero", "equal"})
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def base_name(func: Any) -> str:
    """``aten.copy_.default`` -> ``copy_``."""
    return func._schema.name.split("::")[-1]


@dataclass(frozen=True, slots=True)
class Counts:
    """One rebuild.

    Attributes:
        dispatches: leaf ATen calls, views included.
        views: those that only make a view.
        work: the rest, reads of a scalar excluded.
        launches: ATen calls, Triton and graph launches that put at least one kernel or copy on the device. Work on the
            host mirror, bare allocations and operations on no elements launch nothing.
        syncs: scalar reads and data-dependent shapes.
        triton: Triton launches.
        graphs: graph launches, one for each whatever the graph holds.
    """

    dispatches: int = 0
    views: int = 0
    work: int = 0
    launches: int = 0
    syncs: int = 0
    triton: int = 0
    graphs: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self, host: Iterable[torch.Tensor]) -> None:
        super().__init__()
        # On a CPU the mirror lies on the same device as everything else: tell it by its storage. Results of work
        # on it are host tensors too, and are kept so that their storage is not given to somebody else.
        self._host = {t.untyped_storage().data_ptr() for t in host}
        self._kept: list[torch.UntypedStorage] = []
        self.ops: list[str] = []
        self.views = self.syncs = self.launches = self.triton = self.graphs = 0
        self._inside_launch = False

    def on_launch(self, run: Callable[[], None], args: tuple[Any, ...] | None) -> None:
        # Triton's interpreter and a recorded graph run ATen calls of their own: a launch is one all the same.
        self.graphs += args is None
        self.triton += args is not None
        self._inside_launch = True
        try:
            run()
        finally:
            self._inside_launch = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self._inside_launch:
            return out
        name = base_name(func)
        self.ops.append(name)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if name in VIEW_OPS:
            self.views += 1
        elif name in SYNC_OPS:
            self.syncs += 1
        elif inputs and all(map(self._on_host, inputs)):
            # Storages, not tensors: a result that somebody else holds costs PyTorch a detach on the way back.
            kept = [t.untyped_storage() for t in outputs]
            self._host |= {storage.data_ptr() for storage in kept}
            self._kept += kept
        elif name not in ALLOCATIONS and any(t.numel() for t in outputs):
            self.launches += 1
        return out

    def _on_host(self, t: torch.Tensor) -> bool:
        return t.untyped_storage().data_ptr() in self._host


def count(body: Callable[[], None], host: Iterable[torch.Tensor] = ()) -> Counts:
    """Run `body` once and count.

    Args:
        host: tensors that live on the host by contract (``seq_lens_cpu``).
    """
    seen = _Counter(host)
    with observed(seen.on_launch), seen:
        body()
    return Counts(
        dispatches=len(seen.ops),
        views=seen.views,
        work=len(seen.ops) - seen.views - seen.syncs,
        launches=seen.launches + seen.triton + seen.graphs,
        syncs=seen.syncs,
        triton=seen.triton,
        graphs=seen.graphs,
    )
