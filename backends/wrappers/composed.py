"""Wrappers without tables of their own: metadata, the oracle's word and allowances are their children's, by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..base import Allowances, AttentionBackend, NotCapturedError
from ..batch import ForwardBatch
from ..oracle import Expected, HostBatch, HostPools
from .forwarding import Forwarding


@dataclass(frozen=True, slots=True)
class Part:
    """A child that serves a batch, and the batch as it sees it: a ForwardBatch, or a HostBatch for the oracle."""

    name: str
    child: AttentionBackend
    seen: Any


class Composed(Forwarding):
    """Hooks that bring a batch go to the children that serve it, all other hooks to every child with graph state.

    `metadata` holds {name: the child's object} for each captured (mode, B).
    """

    @abstractmethod
    def parts(self, fb: ForwardBatch) -> list[Part]:
        """The children that serve `fb`, in the order in which their hooks run."""

    @abstractmethod
    def host_parts(self, batch: HostBatch) -> list[Part]:
        """The same on the host."""

    def forward_hook(self, name: str, *args, **kwargs) -> None:
        batch = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, ForwardBatch)), None)
        if batch is None:
            super().forward_hook(name, *args, **kwargs)
            return
        for part in self.parts(batch):
            seen = (part.seen if arg is batch else arg for arg in args)
            also = {key: part.seen if arg is batch else arg for key, arg in kwargs.items()}
            getattr(part.child, name)(*seen, **also)

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        key = fb.forward_mode, fb.batch_size
        if in_capture:
            self._check_mode(fb)
        elif key not in self.metadata:
            raise NotCapturedError(self._not_captured(*key))
        self.forward_hook("init_forward_metadata_out_graph", fb, in_capture=in_capture)
        if in_capture:
            self.metadata[key] = self.bind(fb)
        self.forward_metadata = self.metadata[key]

    def bind(self, fb: ForwardBatch) -> dict[str, Any]:
        return {part.name: _bound(part.child, part.seen) for part in self.parts(fb)}

    # The children's own hooks rebuild; these are for whoever asks the wrapper as if it were one of them.

    def rebuild_aten(self, fb: ForwardBatch, md: Mapping[str, Any]) -> None:
        for part in self.parts(fb):
            part.child.rebuild_aten(part.seen, md[part.name])

    def rebuild_aten_static(self, fb: ForwardBatch, md: Mapping[str, Any]) -> None:
        for part in self.parts(fb):
            part.child.rebuild_aten_static(part.seen, md[part.name])

    def rebuild_fused(self, fb: ForwardBatch, md: Mapping[str, Any]) -> None:
        for part in self.parts(fb):
            part.child.rebuild_fused(part.seen, md[part.name])

    def _choose_rebuild(self) -> None:
        """Nothing is rebuilt here, so there is nothing to compile either."""

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        return {
            f"{part.name}.{path}": want
            for part in self.host_parts(batch)
            for path, want in part.child.expected(part.seen, pools).items()
        }


def _bound(child: AttentionBackend, seen: ForwardBatch) -> Any:
    return child.metadata[seen.forward_mode, seen.batch_size]


def named(own: Allowances, name: str) -> Allowances:
    """A child's allowances, its fields under the child's name."""

    def under(paths: frozenset[str]) -> frozenset[str]:
        return frozenset(path if path.startswith(("slots.", "pools.")) else f"{name}.{path}" for path in paths)

    return replace(
        own,
        aliases=frozenset(map(under, own.aliases)),
        shared_between_modes=under(own.shared_between_modes),
        spills=under(own.spills),
        unordered=under(own.unordered),
    )


def joined(parts: Mapping[str, Allowances], fused_launches: int) -> Allowances:
    """Allowances of several children by name. fused_launches: of all that serve one batch."""
    all_named = [named(own, name) for name, own in parts.items()]
    return Allowances(
        aliases=frozenset().union(*(own.aliases for own in all_named)),
        shared_between_modes=frozenset().union(*(own.shared_between_modes for own in all_named)),
        spills=frozenset().union(*(own.spills for own in all_named)),
        unordered=frozenset().union(*(own.unordered for own in all_named)),
        fused_launches=fused_launches,
        advances=frozenset().union(*(own.advances for own in all_named)),
    )
