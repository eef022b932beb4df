"""NVTX ranges around a step, under one domain, with attributes registered before anything is timed.

A range's message is ``<what> <backend> <mode> <arm>``, for example ``prep trtllm_mha decode fused-eager``, so that a
tracer can be pointed at one of them::

    ncu --nvtx --nvtx-include "attn_graph@prep trtllm_mha decode fused-eager/" attn-graph bench ...

The NVTX library decides whether a domain is live when it is first asked for it, from the tool that was injected at the
start of the process. Without a tool every call is an empty function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from timeit import repeat

DOMAIN = "attn_graph"
RANGES = ("prep", "launch", "step")


class StepRanges:
    """The ranges of one backend, mode and arm.

    Attributes:
        push_prep, push_launch, push_step: open that range; no arguments.
        pop: close the innermost open one.

    Look a method up once and call it in the loop: a pair then takes tens of ns (`range_cost_ns`), where
    ``nvtx.annotate`` with a fresh message takes ten times as long.
    """

    __slots__ = ("pop", "push_launch", "push_prep", "push_step")

    push_prep: Callable[[], object]
    push_launch: Callable[[], object]
    push_step: Callable[[], object]
    pop: Callable[[], object]

    def __init__(self, backend: str, mode: str, arm: str, *, enabled: bool = True) -> None:
        domain = _domain() if enabled else None
        self.pop = _nothing if domain is None else domain.pop_range
        for what in RANGES:
            setattr(self, f"push_{what}", _opener(domain, range_message(what, backend, mode, arm)))


def range_message(what: str, backend: str, mode: str, arm: str) -> str:
    """The message of a range, as tracers show and filter it."""
    return f"{what} {backend} {mode} {arm}"


def range_cost_ns() -> float:
    """Cost of one push and pop in this process, with whatever tool is attached to it (`range_state`). Takes some ms."""
    ranges = StepRanges("range_cost", "none", "none")
    loops = 10_000
    setup = "push, pop = ranges.push_prep, ranges.pop"
    # The best of several is what the calls take; the rest is what else ran meanwhile.
    pair = min(repeat("push(); pop()", setup, number=loops, repeat=7, globals={"ranges": ranges}))
    empty = min(repeat("pass", setup, number=loops, repeat=7, globals={"ranges": ranges}))
    return max(0.0, pair - empty) / loops * 1e9


def range_state() -> str:
    """``traced`` (a tool listens), ``idle`` (none does) or ``disabled`` (no NVTX, or NVTX_DISABLE is set)."""
    domain = _domain()
    if domain is None:
        return "disabled"
    import nvtx

    return "traced" if isinstance(domain, nvtx.Domain) else "idle"


@cache
def _domain():
    """The NVTX domain, or None where there is no NVTX or the user switched it off."""
    try:
        import nvtx
    except ImportError:
        return None
    # Domains ignore NVTX_DISABLE; only the module's own functions heed it.
    return nvtx.get_domain(DOMAIN) if nvtx.enabled() else None


def _opener(domain, message: str) -> Callable[[], object]:
    if domain is None:
        return _nothing
    return partial(domain.push_range, domain.get_event_attributes(message=message))


def _nothing() -> None:
    pass
