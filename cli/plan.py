"""From command-line options to cases: comma lists become a sweep, and what cannot work is refused before it runs."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass, replace

from ..backends.modes import ARMS, Arm, ForwardMode, Implementation
from ..backends.registry import lookup, unknown_message
from ..profilers.sample import Case
from .errors import CliError

CAPTURE_SIZES = (
    1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, 4097, 32),
)  # fmt: skip
"""Batch sizes that engines capture by default; a batch is padded to the next one."""

MAX_SLOTS = 2**31


def split(text: str | None, option: str) -> list[str]:
    """Items of a comma list.

    Raises:
        CliError: an empty item.
    """
    items = [item.strip() for item in (text or "").split(",")]
    if not all(items):
        raise CliError(f"{option} {text!r}: an item is empty. Give a comma list, like 1,8,64")
    return items


def numbers(text: str, option: str, least: int = 0) -> list[int]:
    """Integers of a comma list, each at least `least`."""
    found = []
    for item in split(text, option):
        if not item.lstrip("-").isdigit() or int(item) < least:
            raise CliError(f"{option}: {item!r} is not a whole number of at least {least}")
        found.append(int(item))
    return found


def rank_counts(text: str) -> tuple[int, ...]:
    """``LO..HI``: doubling from LO, HI included; or a comma list.

    Raises:
        CliError: neither, or a count below 2.
    """
    low, dots, high = text.partition("..")
    if not dots:
        return tuple(numbers(text, "--predict-ranks", 2))
    (first,), (last,) = (numbers(end, "--predict-ranks", 2) for end in (low, high))
    if last < first:
        raise CliError(f"--predict-ranks {text}: {last} is below {first}")
    doubled = itertools.takewhile(lambda n: n < last, (first * 2**i for i in itertools.count()))
    return (*doubled, last)


def arms(text: str | None, implementations: str | None = None) -> tuple[str, ...]:
    """Arm names of a comma list; a bare implementation or placement (``fused``, ``graph``) means all its arms.

    ``all`` and a bare placement leave out the kernels of other engines: those are asked for by name, here or in
    `implementations`, a comma list that leaves only their arms. Where it names engines alone, ours stand beside them.

    Raises:
        CliError: an unknown name, or nothing is left.
    """
    wanted = _implementations(implementations)
    known = [str(arm) for arm in ARMS]
    usual = [str(arm) for arm in ARMS if arm.implementation in wanted or not (wanted or arm.is_peer)]
    if text is None or text == "all":
        return tuple(usual)
    chosen: list[str] = []
    for item in split(text, "--arm"):
        matches = [n for n in known if item in (n, n.split("-")[0])] or [n for n in usual if item in n.split("-")]
        if not matches:
            raise CliError(unknown_message("arm", item, known))
        chosen += [name for name in matches if name not in chosen]
    left = [name for name in chosen if not wanted or Arm.parse(name).implementation in wanted]
    if not left:
        raise CliError(f"--arm {text} and --impl {implementations} have no arm in common")
    return tuple(left)


def _implementations(text: str | None) -> set[Implementation]:
    """Those of a comma list; empty for any."""
    known = {str(i): i for i in Implementation}
    found = set()
    for item in split(text, "--impl") if text else ():
        if item not in known:
            raise CliError(unknown_message("implementation", item, list(known)))
        found.add(known[item])
    return found | {Implementation.FUSED} if found == {Implementation.SGLANG} else found


def without_missing_engines(names: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The arms that can run here, and one line about those that cannot, blank if all can.

    Raises:
        CliError: only kernels of engines were asked for, and none is installed.
    """
    ours = tuple(name for name in names if not Arm.parse(name).is_peer)
    if ours == names:
        return names, ""
    from ..backends.base import PeerMissing
    from ..backends.peers import installed_site

    try:
        installed_site()
    except PeerMissing as missing:
        if not ours:
            raise CliError(str(missing)) from None
        return ours, str(missing)
    return names, ""


def backends(text: str) -> list[str]:
    """Backend names of a comma list, ``all`` for every one."""
    from ..backends.registry import registered

    if text == "all":
        return [info.name for info in registered().values() if info.kind == "backend"]
    return [lookup(name).name for name in split(text, "--backend")]


def modes(text: str, names: list[str]) -> list[tuple[str, str]]:
    """(backend, mode) for each mode of a comma list that a backend has; ``all`` for every mode of each.

    Raises:
        CliError: a mode that none of the backends has.
    """
    known = {name: lookup(name).modes for name in names}
    if text == "all":
        return [(name, mode) for name in names for mode in known[name]]
    asked = split(text.replace("-", "_"), "--mode")
    for item in asked:
        if not any(item in own for own in known.values()):
            everything = list(dict.fromkeys(mode for own in known.values() for mode in own))
            raise CliError(unknown_message(f"mode for {', '.join(names)}", item, everything))
    return [(name, mode) for name in names for mode in asked if mode in known[name]]


OTHER_PAGE_SIZES = (128, 256, 32, 16, 1)
"""Tried in turn where a backend does not take the usual 64 tokens and the user did not choose."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Cases to run, and those that their backend refuses, with its reason."""

    cases: list[Case]
    refused: dict[Case, str]


def settle(cases: list[Case], *, any_page: bool, any_swa: bool) -> Plan:
    """Ask each case's backend whether it can do it, before anything runs.

    Args:
        any_page, any_swa: the user left the page size, or the sliding window, to us: another one is tried.

    Raises:
        CliError: every case is refused.
    """
    from ..profilers.measure import refusal

    told: dict[Case, str] = {}

    def refused(case: Case) -> str:
        key = replace(case, bs=1, bucket=1, context="", tp=1, graph_nodes=0, graph_branches=1)
        if key not in told:
            told[key] = refusal(case)
        return told[key]

    runnable, impossible = [], {}
    for case in cases:
        pages = (case.page_size, *OTHER_PAGE_SIZES) if any_page else (case.page_size,)
        windows = (case.swa, not case.swa) if any_swa else (case.swa,)
        variants = [replace(case, page_size=page, swa=swa) for swa in windows for page in pages]
        taken = next((v for v in variants if not refused(v)), None)
        if taken is None:
            impossible[case] = refused(case)
        else:
            runnable.append(taken)
    if not runnable:
        raise CliError(next(iter(impossible.values())))
    return Plan(list(dict.fromkeys(runnable)), impossible)


def sweep(
    *,
    backend: str,
    mode: str,
    bs: str,
    context: str,
    page_size: str | None,
    max_context: str,
    swa: bool | None,
    topk: str,
    draft_tokens: str,
    tp: str,
    graph_nodes: str,
    graph_branches: str,
    allreduce_at: int,
    device: str,
    seed: int,
) -> Plan:
    """Every combination, in the order of the options, the largest rank count last, as far as backends can do it.

    `page_size` and `swa` None: what each backend takes, and both with and without a window where it has both.

    Raises:
        CliError: a value that no run could use; the message names the option and both numbers.
    """
    names = backends(backend)
    axes = itertools.product(
        numbers(tp, "--tp", 1),
        [(b, m, w) for b, m in modes(mode, names) for w in _windows(swa, b, m, several=len(names) > 1)],
        numbers(page_size or "64", "--page-size", 1),
        numbers(max_context, "--max-context", 1),
        split(context, "--context"),
        numbers(bs, "--bs", 0),
        numbers(topk, "--topk"),
        numbers(draft_tokens, "--draft-tokens"),
        _nodes(graph_nodes),
        numbers(graph_branches, "--graph-branches", 1),
    )
    cases = [
        _case(
            backend=b, mode=m, bs=n, context=ctx, page_size=page, max_context=limit, swa=window, topk=k,
            draft_tokens=drafts, graph_nodes=nodes, graph_branches=branches, allreduce_at=allreduce_at, tp=ranks,
            device=device, seed=seed,
        )
        for ranks, (b, m, window), page, limit, ctx, n, k, drafts, nodes, branches in axes
    ]  # fmt: skip
    return settle(list(dict.fromkeys(cases)), any_page=page_size is None, any_swa=swa is None)


def _windows(swa: bool | None, backend: str, mode: str, several: bool) -> tuple[bool, ...]:
    """With and without a sliding window, as the backend has it; one of them in a sweep over backends."""
    if swa is not None:
        return (swa,)
    without, with_window = lookup(backend).dispatches.get(mode, (0, None))
    both = (*([False] if without is not None else []), *([True] if with_window is not None else []))
    return both[:1] if several else both


def _nodes(text: str) -> list[int]:
    from ..profilers.shapes import GRAPH_NODES

    return [
        GRAPH_NODES[i] if i in GRAPH_NODES else numbers(i, "--graph-nodes")[0] for i in split(text, "--graph-nodes")
    ]


def _case(*, mode: str, bs: int, topk: int, draft_tokens: int, **rest) -> Case:
    kind = ForwardMode(mode)
    if kind is ForwardMode.IDLE:
        bs = 0
    elif bs < 1:
        raise CliError(f"--bs {bs}: mode {mode} needs at least 1 request. Use --mode idle for an empty batch")
    if not kind.is_speculative:
        topk = draft_tokens = 0
    elif draft_tokens < 1:
        raise CliError(f"--draft-tokens {draft_tokens}: mode {mode} needs at least 1")
    else:
        topk = max(topk, 1)
    steps = draft_tokens - 1 if kind is ForwardMode.DRAFT_DECODE else 0
    case = Case(
        mode=mode, bs=bs, bucket=_bucket(bs), topk=topk, draft_tokens=draft_tokens, draft_steps=max(steps, 0), **rest
    )
    _refuse_sizes(case)
    return case


def _bucket(bs: int) -> int:
    if bs > CAPTURE_SIZES[-1]:
        raise CliError(f"--bs {bs}: the largest captured batch size is {CAPTURE_SIZES[-1]}")
    return CAPTURE_SIZES[bisect_left(CAPTURE_SIZES, max(bs, 1))]


def _refuse_sizes(case: Case) -> None:
    from ..profilers.shapes import batch_limits

    slots = (case.bucket * -(-(case.max_context + 4) // case.page_size) + 1) * case.page_size
    if slots >= MAX_SLOTS:
        raise CliError(
            f"req_to_token: {case.bucket} requests x {case.max_context} tokens need {slots} KV slots, but slots are "
            f"int32 (below {MAX_SLOTS}). Lower --bs or --max-context"
        )
    low, high = batch_limits(case)
    if high < low:
        raise CliError(
            f"--max-context {case.max_context} leaves no room for mode {case.mode} "
            f"with {case.draft_tokens} draft tokens"
        )
    if case.context.isdigit() and not low <= int(case.context) <= high:
        raise CliError(
            f"--context {case.context} does not fit: page tables of --max-context {case.max_context} hold seq_lens of "
            f"{low} to {high} tokens in mode {case.mode}"
        )
