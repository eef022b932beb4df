"""A fault as a subclass: what is wrong with it stands in its docstring."""

from __future__ import annotations

import re
from typing import Any

from ....backends.base import AttentionBackend
from ....backends.modes import Arm, ForwardMode
from ....backends.runners.graph_runner import GraphRunner
from ..matrix import Sizes
from . import Fault, RunnerFault

CLASSIC, FUSED = Arm.parse("aten-eager"), Arm.parse("fused-eager")


def variant(
    broken: type[AttentionBackend],
    *caught_by: str,
    sizes: Sizes,
    mode: ForwardMode = ForwardMode.DECODE,
    arm: Arm = CLASSIC,
    extra: dict[str, Any] | None = None,
    over: str = "",
) -> Fault:
    """The fault that is `broken` instead of the backend it derives from; ``WrongThing`` is called ``wrong-thing``.

    extra: options of the backend under which it shows.
    over: of a wrapper, the backend inside, where the fault is shown with several; part of the name.
    """
    return Fault(
        name=name_of(broken) + (f"-{over}" if over else ""),
        title=title_of(broken) + (f" ({over})" if over else ""),
        caught_by=caught_by,
        mode=mode,
        sizes=sizes,
        arms=(arm,),
        broken=lambda subject: subject.but(backend_class=broken),
        on=lambda subject: subject.but(extra=extra) if extra else subject,
    )


def runner_variant(broken: type[GraphRunner], *caught_by: str, mode: ForwardMode) -> RunnerFault:
    """The fault that is `broken` instead of the runner it derives from, named likewise."""
    return RunnerFault(name_of(broken), title_of(broken), caught_by, mode, broken)


class PoolRowsKept:
    """To put before a runner: padding rows keep the pool rows of the last batch."""

    def load_batch(self, step):
        rows, live = self.slots.req_pool_indices, step.batch_size
        kept = rows[live:].clone()
        super().load_batch(step)
        rows[live:] = kept


def name_of(broken: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", broken.__name__).lower()


def title_of(broken: type) -> str:
    return " ".join(broken.__doc__.split()).rstrip(".")
