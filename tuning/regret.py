"""What the store's rules would have cost on the shapes of a run, had these not been tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from . import store
from .space import Candidate

if TYPE_CHECKING:
    from .session import Report


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One tuned shape as if it had not been.

    Attributes:
        rule: what the store would have gone by.
        regret: share of time lost against the choice; None where the setting it gives was never timed on this shape.
    """

    key: store.Key
    config: dict[str, int]
    rule: str
    regret: float | None

    @property
    def entry(self) -> store.Entry:
        """What is added to the stored choice."""
        known = None if self.regret is None else round(self.regret, 4)
        return store.Entry(self.key, self.config, {"left_out": {"rule": self.rule, "regret": known}})


def left_out(reports: Sequence[Report]) -> list[LeftOut]:
    """Every stored choice of these reports, judged by the others."""
    stored = {report.key: report for report in reports if report.key}
    entries = [_entry(key, report) for key, report in stored.items()]
    found = []
    for entry in entries:
        rule, config = store.left_out(entry, entries)
        report = stored[entry.key]
        given = report.default if config is None else Candidate.of(**config)
        found.append(LeftOut(entry.key, entry.config, rule, _regret(report, given)))
    return found


def _entry(key: store.Key, report: Report) -> store.Entry:
    winner = report.tuned.choice.winner
    return store.Entry(key, winner.as_dict(), {store.CHOSE_DEFAULT: winner == report.default})


def _regret(report: Report, given: Candidate) -> float | None:
    winner = report.tuned.choice.winner
    rough = {o.candidate: o.samples_us for o in report.tuned.outcomes if o.samples_us}
    for times in (report.tuned.finals.hot_us, rough):  # times of one pass: others were taken at another moment
        if given in times and winner in times:
            return max(0.0, median(times[given]) / median(times[winner]) - 1)
    return None
