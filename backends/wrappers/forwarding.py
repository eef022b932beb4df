"""What wrappers share: every hook of the contract reaches the children, one that is added later too."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Sequence
from functools import wraps

from ..base import AttentionBackend, AttentionConfig
from ..batch import ForwardBatch
from ..modes import ForwardMode, ReadEnd

HOOK_PREFIXES = ("init_", "on_")
"""How the contract names its hooks. What a backend supplies (bind, rebuild_*, expected, plan) is called otherwise."""


def hooks() -> tuple[str, ...]:
    """The hooks of `AttentionBackend`, by inspection."""
    members = inspect.getmembers(AttentionBackend, inspect.isfunction)
    return tuple(name for name, _ in members if name.startswith(HOOK_PREFIXES))


def forwards_hooks(cls: type[AttentionBackend]) -> type[AttentionBackend]:
    """Class decorator: give `cls` every hook of the contract that it does not define itself.

    Inheriting a hook would silently drop it, since most of the contract's own do nothing for a backend without buffers
    of its own. Eager use (init_forward_metadata) is made of the other hooks, so it needs no forwarding.
    """
    for name in hooks():
        if name != "init_forward_metadata" and name not in vars(cls):
            setattr(cls, name, _forwarder(name))
    return abc.update_abstractmethods(cls)


def _forwarder(name: str) -> Callable[..., None]:
    @wraps(getattr(AttentionBackend, name), updated=())  # not its mark of being abstract
    def forward(self: Forwarding, *args, **kwargs) -> None:
        self.forward_hook(name, *args, **kwargs)

    return forward


@forwards_hooks
class Forwarding(AttentionBackend):
    """A backend made of others. A hook that a subclass does not define goes to each child, in order."""

    @property
    def children(self) -> Sequence[AttentionBackend]:
        """The wrapped backends, none twice."""
        raise NotImplementedError

    def new_child(self, made_of: type[AttentionBackend], config: AttentionConfig | None = None) -> AttentionBackend:
        """A backend over the same tables, with the implementation, placement and tail that this wrapper was given."""
        return made_of(
            config or self.config, self.pools, self.implementation, recorded=self.recorded, tail=self.asked_tail
        )

    def seen_by(self, child: int, fb: ForwardBatch) -> ForwardBatch:
        """The batch as child number `child` sees it."""
        return fb

    def shared_read_ends(self, mode: ForwardMode) -> ReadEnd:
        """The end of the child that reads longest."""
        return max((child.shared_read_ends(mode) for child in self.children), default=ReadEnd.PRE_REPLAY)

    def forward_hook(self, name: str, *args, **kwargs) -> None:
        """Call hook `name` of each child, each with its own view of the batch."""
        for i, child in enumerate(self.children):
            seen = (self.seen_by(i, arg) if isinstance(arg, ForwardBatch) else arg for arg in args)
            getattr(child, name)(*seen, **kwargs)
