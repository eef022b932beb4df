"""What a case implies before anything is built: length bounds and graph sizes. Imports no torch."""

from __future__ import annotations

from ..backends.modes import ForwardMode
from ..backends.registry import lookup
from .sample import Case

GRAPH_NODES = {"typical": 500, "large": 2876}
"""Node counts of decode graphs in public reports, by name."""


def tokens_per_request(case: Case) -> int:
    """Query tokens of one request in one step."""
    mode = ForwardMode(case.mode)
    if mode is ForwardMode.DRAFT_DECODE:
        return max(case.topk, 1)
    extend = mode in (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
    return case.draft_tokens if extend or mode is ForwardMode.TARGET_VERIFY else 1


def slots_per_token(case: Case) -> int:
    """Write slots of one query token: what serves all draft steps, and a drafting tree, gets those of all at once."""
    return steps_at_once(case) or 1


def steps_at_once(case: Case) -> int:
    """Draft steps whose write slots come together; 0 where a step brings its own alone."""
    if ForwardMode(case.mode) is not ForwardMode.DRAFT_DECODE:
        return 0
    serves_all = lookup(case.backend, "backend", "wrapper").family == "steps"
    return case.draft_steps if serves_all or case.topk > 1 else 0


def added_tokens(case: Case) -> int:
    """Tokens that the mode counts on top of seq_lens, so that seq_lens must stay that far below the context limit."""
    mode = ForwardMode(case.mode)
    if mode is ForwardMode.TARGET_VERIFY:
        return case.draft_tokens
    if mode is ForwardMode.DRAFT_DECODE:
        return max(case.draft_steps, case.step_id + 1)
    return 0


def batch_limits(case: Case) -> tuple[int, int]:
    """Smallest and largest seq_lens of a live request, in tokens."""
    extend = ForwardMode(case.mode) in (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
    return (case.draft_tokens if extend else 1), case.max_context - added_tokens(case)
