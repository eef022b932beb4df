"""What came of trying a candidate. A candidate that cannot be used is a row with a reason, never an end of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Protocol

from .space import Candidate

OK, SKIPPED, NOT_TRIED = "ok", "skipped", "not_tried"

CAUSES = (
    "spills",  # needs more registers than there are
    "compile_error",
    "out_of_resources",  # shared memory, threads or device memory
    "wrong_values",  # not what the oracle says
    "changed_inputs",  # wrote where it may only read
    "hung",  # no answer within the limit
    "died",  # took its process with it
    "failed",  # any other error
    "bad_timer",  # samples of zero and below
    "slower_cold",  # beaten by the default once the caches are cold
    "slower_rank",  # beaten by the default where a tensor-parallel step waits: on the slowest rank
    "time_budget",  # there was no time left to try it
    "search",  # the search ended without it
)
"""Why a candidate is out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One candidate.

    Attributes:
        status: ``ok``, ``skipped`` or ``not_tried``.
        cause: one of CAUSES; empty if ok.
        reason: the same for people, with numbers.
        samples_us: device time of one rebuild, mean over the length mix; empty where values alone were checked.
    """

    candidate: Candidate
    status: str = OK
    cause: str = ""
    reason: str = ""
    samples_us: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.status == OK) == (self.cause in CAUSES):
            raise ValueError(f"{self.candidate}: status {self.status!r} with cause {self.cause!r}")

    @property
    def median_us(self) -> float | None:
        return median(self.samples_us) if self.samples_us else None


def timed(candidate: Candidate, samples_us: Sequence[float]) -> Outcome:
    """An outcome with times. A timer that says zero or less says nothing, least of all that this one is the fastest."""
    if samples_us and median(samples_us) <= 0:
        reason = f"the timer returned {median(samples_us):.3g} us, which cannot be"
        return Outcome(candidate, SKIPPED, "bad_timer", reason, tuple(samples_us))
    return Outcome(candidate, samples_us=tuple(samples_us))


@dataclass(frozen=True, slots=True)
class Finals:
    """The finalists side by side: value i of every candidate was taken in the same moment, with buffers of its own.

    Attributes:
        hot_us, cold_us: by candidate, the mean over ranks; hot: buffers as the rebuild before left them in the caches.
        slowest_us: the same hot times on the candidate's slowest rank; empty for one rank.
        short_us, long_us: hot, on batches of short and of long requests only, whatever the mix.
        rejected: finalists that were found out only now.
        note: what a reader must know of how these were taken.
    """

    hot_us: Mapping[Candidate, tuple[float, ...]]
    cold_us: Mapping[Candidate, tuple[float, ...]] = field(default_factory=dict)
    slowest_us: Mapping[Candidate, tuple[float, ...]] = field(default_factory=dict)
    rejected: Mapping[Candidate, Outcome] = field(default_factory=dict)
    note: str = ""
    short_us: Mapping[Candidate, tuple[float, ...]] = field(default_factory=dict)
    long_us: Mapping[Candidate, tuple[float, ...]] = field(default_factory=dict)

    def followed_by(self, more: Finals) -> Finals:
        """These with further values of some of the candidates."""
        times = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_us")}
        longer = {
            name: {c: (*values, *getattr(more, name).get(c, ())) for c, values in own.items()}
            for name, own in times.items()
        }
        return Finals(**longer, rejected={**more.rejected, **self.rejected}, note=self.note or more.note)


class Measurer(Protocol):
    """A device, a log of one, or a test's made-up times."""

    def rough(self, candidate: Candidate) -> Outcome:
        """Check the candidate's values, then time it quickly."""
        ...

    def finals(self, candidates: Sequence[Candidate]) -> Finals:
        """Time these against each other."""
        ...
