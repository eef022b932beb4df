"""The default beside the stored choice on shapes that nobody tuned: where a choice that only fits its own shape shows.

A choice is made for a captured shape and a mix of lengths. Held out are other lengths in the same captured shape, and
batch sizes between the tuned ones, which get what the store's rules give them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..profilers.sample import Case
from ..profilers.stats import paired_verdict
from .decide import MARGIN
from .outcome import Finals, Measurer
from .space import Candidate, default
from .store import Found, lookup_case

SAME = "same setting"
NOT_MEASURED = "not measured"


class CaseMeasurer(Measurer, Protocol):
    """A measurer that is told the case."""

    def prepare(self, case: Case) -> None: ...


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out shape.

    Attributes:
        default, chosen: settings; the same where the store has nothing better, and then nothing is measured.
        found: the store's answer.
        finals: both side by side.
    """

    case: Case
    default: Candidate
    chosen: Candidate
    found: Found
    finals: Finals

    @property
    def word(self) -> str:
        """``faster``, ``slower``, ``same``, ``undecided`` and the like; of the choice, with a margin of 2%."""
        if self.chosen == self.default:
            return SAME
        if self.chosen in self.finals.rejected:
            return self.finals.rejected[self.chosen].cause
        verdict = self._verdict()
        return verdict.word if verdict else NOT_MEASURED

    @property
    def ratio(self) -> float | None:
        """Time of the choice over that of the default."""
        if self.chosen == self.default:
            return 1.0
        verdict = self._verdict()
        return verdict.ratio if verdict else None

    def _verdict(self):
        hot = self.finals.hot_us
        if not hot:
            return None
        return paired_verdict(hot[self.default], hot[self.chosen], tolerance=MARGIN)


def shapes(tuned: Sequence[Case]) -> list[Case]:
    """Held-out cases of the tuned ones: short lengths, any lengths, the same mix with half as many requests more."""
    made = [shape for case in tuned for shape in _around(case)]
    return [case for case in dict.fromkeys(made) if case not in tuned]


def short_mix(limit: int) -> str:
    """Lengths of short requests: up to the limit's 64th part."""
    return f"uniform:1:{max(1, limit // 64)}"


def _around(case: Case) -> Iterator[Case]:
    for context in (short_mix(case.max_context), f"uniform:1:{case.max_context}"):
        yield replace(case, context=context)
    more = case.bucket + max(1, case.bucket // 2)
    yield replace(case, bs=more, bucket=more)


def compare(case: Case, gpu: str, measurer: CaseMeasurer) -> HeldOut:
    """Look a shape up as a bench would, and time what it gets beside the default."""
    found, usual = lookup_case(case, gpu), default(case)
    chosen = Candidate.of(**found.config) if found.config else usual
    if chosen == usual:
        return HeldOut(case, usual, usual, found, Finals({}))
    measurer.prepare(case)
    return HeldOut(case, usual, chosen, found, measurer.finals([usual, chosen]))


def geometric_mean(found: Iterable[HeldOut]) -> float | None:
    """Of the ratios; None where nothing was measured."""
    ratios = [one.ratio for one in found if one.ratio]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
