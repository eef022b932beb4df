"""Which configurations `attn-graph verify` looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from ...backends.base import ConfigError, tensors_of
from ...backends.batch import with_unassigned_slots
from ...backends.modes import Arm, ForwardMode, Implementation, Placement
from ...backends.registry import lookup
from ..measure import case_pools
from ..sample import Case
from .subject import Subject

HAVE_METADATA = ("backend", "wrapper")
"""Kinds in the registry that are rebuilt."""

OF_A_COMPOSITION = {False: 2, True: 4}
"""How many sizes each composition of a wrapper is looked at on, in full or not. Its children have been on all."""

WITH_OPTIONS = {False: 1, True: 2}
"""How many sizes each option of a backend is looked at on."""

CHEAPEST = Arm(Implementation.ATEN, Placement.EAGER)


@dataclass(frozen=True, slots=True)
class Sizes:
    """One configuration before a backend and a mode are chosen. Lengths in tokens.

    Attributes:
        buckets: captured batch sizes.
        draft_tokens, draft_steps, step_id, topk: used in speculative modes only.
        holes: some token slots are unassigned (-1).
        probe: also looked at by the checks that are not made everywhere.
        steps, thin, live: see `Subject`; `live` are its sizes.
        options: name and value: which backends a wrapper is made of, or what else a backend is to do.
    """

    page_size: int
    max_context: int
    buckets: tuple[int, ...]
    draft_tokens: int = 4
    draft_steps: int = 3
    step_id: int = 0
    topk: int = 1
    swa: bool = False
    holes: bool = False
    lens: torch.dtype = torch.int64
    rows: torch.dtype = torch.int64
    probe: bool = False
    steps: int | None = None
    thin: int = 1
    live: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def subject(self, backend: str, mode: ForwardMode, device: torch.device, arms: Sequence[Arm], seed: int) -> Subject:
        """A subject of these sizes.

        Raises:
            ConfigError: the backend does not do this.
        """
        speculative = mode.is_speculative
        case = Case(
            backend=backend,
            mode=str(mode),
            bs=max(self.buckets),
            bucket=max(self.buckets),
            context="",
            page_size=self.page_size,
            max_context=self.max_context,
            swa=self.swa,
            topk=self.topk if speculative else 0,
            draft_tokens=self.draft_tokens if speculative else 0,
            draft_steps=self.draft_steps if speculative else 0,
            step_id=self.step_id if mode is ForwardMode.DRAFT_DECODE else 0,
            device=str(device),
            seed=seed,
        )
        pools = case_pools(case, device)
        if self.holes:
            pools = with_unassigned_slots(pools, seed)
        subject = Subject(
            case, lookup(backend, *HAVE_METADATA).load(), pools, self.buckets, device, tuple(arms),
            lens=self.lens, rows=self.rows, steps=self.steps, thin=self.thin, sizes=self.live,
            extra=dict(self.options) or None,
        )  # fmt: skip
        subject.rig(CHEAPEST, buckets=[min(self.buckets)])
        return subject


def quick_sizes(mode: ForwardMode) -> Iterator[Sizes]:
    """Small tables; every page size and bucket, each dtype and the window switched between modes. Ten seconds a mode
    where kernels are interpreted, of which most goes to the interpreter."""
    turn = list(ForwardMode).index(mode) % 2 == 1
    small = Sizes(16, 116, (2, 3), probe=True, thin=5, steps=4 if mode is ForwardMode.IDLE else None)
    yield small
    yield replace(small, swa=True, step_id=1, steps=4)
    if mode is ForwardMode.IDLE:
        yield Sizes(256, 1500, (2,), swa=True, steps=4, thin=5)
        return
    int32 = torch.int32
    yield Sizes(1, 61, (1, 8), 2, 2, swa=turn, holes=True, lens=int32, rows=int32, steps=5, thin=5)
    yield Sizes(64, 500, (7,), 8, 3, step_id=1, swa=not turn, holes=True, rows=int32, steps=5, thin=5)
    yield Sizes(128, 1000, (33,), 1, 2, swa=turn, lens=int32, steps=2, thin=2)
    yield Sizes(256, 1500, (2,), 2, 2, swa=True, thin=5)
    if mode.is_speculative:
        yield Sizes(1, 61, (3,), 4, 3, topk=4, thin=5)
        yield Sizes(16, 116, (2,), 4, 3, topk=2, swa=turn, steps=5, thin=5)


def full_sizes(mode: ForwardMode, device: torch.device) -> Iterator[Sizes]:
    """Everything: on a GPU captured sizes up to 512 and every live size from 1 to 512 on real tables."""
    if device.type == "cpu":
        for sizes in quick_sizes(mode):
            for swa in (False, True):
                yield replace(sizes, swa=swa, thin=1, steps=None)
        return
    for swa in (False, True):
        yield Sizes(16, 500, (1, 2, 8), swa=swa, step_id=int(swa), probe=True)
        if mode is ForwardMode.IDLE:
            continue
        for i, (page, context) in enumerate(((1, 600), (16, 4000), (32, 8000), (64, 8192), (128, 16000), (256, 32000))):
            yield Sizes(
                page_size=page,
                max_context=context,
                buckets=(1, 2, 3, 7, 8, 33, 64, 128, 256, 512) if page == 64 else (1, 33, 512),
                swa=swa,
                step_id=i % 2,
                holes=page in (1, 32),
                lens=torch.int32 if page == 32 else torch.int64,
                rows=torch.int32 if page == 128 else torch.int64,
                live=tuple(range(1 + i, 513, 5)),
            )
        if mode.is_speculative:
            yield Sizes(16, 500, (1, 8, 64), 8, 3, topk=4, swa=swa)


def possible_sizes(
    backend: str, mode: ForwardMode, device: torch.device, arms: Sequence[Arm], *, full: bool
) -> tuple[list[tuple[Sizes, int]], list[str]]:
    """What a mode of a backend is looked at on, each with its seed, and why other sizes were refused.

    Some backends take one page size only, or need a window. The first sizes that they refuse are tried with other
    pages and the window switched, until there are two.
    """
    taken: dict[Sizes, int] = {}  # two may become the same: one that was switched, one without a window
    refused = []
    for seed, wanted in enumerate(_wanted_sizes(backend, mode, device, full=full)):
        alike = sum(size.options == wanted.options for size in taken)
        variants = _variants(wanted) if alike < 2 else ()
        made, why = _first_possible((wanted, *variants), lambda s, n=seed: s.subject(backend, mode, device, arms, n))
        if made is None:
            refused.append(why)
        else:
            taken.setdefault(made, seed)
    return list(taken.items()), refused


def _wanted_sizes(backend: str, mode: ForwardMode, device: torch.device, *, full: bool) -> Iterator[Sizes]:
    info = lookup(backend, *HAVE_METADATA)
    sizes = full_sizes(mode, device) if full else quick_sizes(mode)
    if not info.compositions:
        every = list(sizes)
        yield from every
        for options in info.options_in(mode):
            for size in every[: WITH_OPTIONS[full]]:
                yield replace(size, probe=False, steps=4, options=tuple(options.items()))
        return
    for number, size in enumerate(islice(sizes, OF_A_COMPOSITION[full])):
        size = replace(size, probe=number == 0)
        for options in info.compositions:
            # No multiples of the draft steps: so many write slots could be those of all steps of fewer requests.
            yield replace(size, buckets=(1, 4, 8) if full else (2, 5), options=tuple(options.items()))


def _first_possible(sizes: Iterable[Sizes], subject_of: Callable[[Sizes], Subject]) -> tuple[Sizes | None, str]:
    """The first of `sizes` that the backend takes, without a window where that changes nothing; and why it refused the
    one before all others."""
    why = ""
    for size in sizes:
        try:
            if size.swa and not has_window_fields(subject_of(size)):
                size = replace(size, swa=False)
            subject_of(size)
            return size, why
        except ConfigError as error:
            why = why or str(error)
    return None, why


def _variants(size: Sizes) -> Iterator[Sizes]:
    for page in (64, 128, 256):
        for swa in (size.swa, not size.swa):
            yield replace(size, page_size=page, swa=swa, max_context=max(size.max_context, 5 * page + 20))


def has_window_fields(subject: Subject) -> bool:
    """Whether a sliding-window pool changes what this backend's metadata is made of."""
    plain = subject.but(case=replace(subject.case, swa=False), pools=replace(subject.pools, full_to_swa=None))
    try:
        with_window, without = (s.rig(CHEAPEST, buckets=[1]).metadata(1) for s in (subject, plain))
    except ConfigError:
        return True  # it cannot do without one
    return tensors_of(with_window).keys() != tensors_of(without).keys()
