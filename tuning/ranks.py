"""Finalists on every rank, so that one choice is made for all of them. Imports no torch.

Ranks that time alone end with picks of their own, since noise is larger than the gap between the best. So the ranks'
times are put together before anything is chosen: their mean decides, and what makes the slowest rank slower than the
default does not win, since a tensor-parallel step waits for that rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean, median

from ..profilers.sample import Case
from .isolated import IsolatedBench
from .outcome import Finals, Outcome
from .space import Candidate

MEANS = ("hot_us", "cold_us", "short_us", "long_us")
Times = dict[Candidate, tuple[float, ...]]


class RankBenches:
    """The measuring processes of all ranks as one measurer.

    Args:
        benches: one a rank, the first also takes the rough times.
        at_once: they have GPUs of their own; else they take turns, as their work would add up in each other's times.
    """

    def __init__(self, benches: Sequence[IsolatedBench], at_once: bool) -> None:
        self._benches = list(benches)
        self._threads = ThreadPoolExecutor(len(self._benches) if at_once else 1)

    def start(self) -> None:
        self._on_all("start")

    def prepare(self, case: Case) -> None:
        self._on_all("prepare", case)

    def rough(self, candidate: Candidate) -> Outcome:
        return self._benches[0].rough(candidate)

    def finals(self, candidates: Sequence[Candidate]) -> Finals:
        return together(self._on_all("finals", candidates))

    def close(self) -> None:
        for bench in self._benches:
            bench.close()
        self._threads.shutdown()

    def _on_all(self, method: str, *arguments: object) -> list:
        calls = [self._threads.submit(getattr(bench, method), *arguments) for bench in self._benches]
        return [call.result() for call in calls]


def together(ranks: Sequence[Finals]) -> Finals:
    """One answer from all ranks: value i of a candidate is the mean of the ranks' values i."""
    notes = [f"rank {rank}: {finals.note}" for rank, finals in enumerate(ranks) if finals.note]
    if not all(finals.hot_us for finals in ranks):
        return Finals({}, note="; ".join(notes))
    rejected = {c: outcome for finals in reversed(ranks) for c, outcome in finals.rejected.items()}
    means = {name: _means([getattr(f, name) for f in ranks]) for name in MEANS}
    hot = means["hot_us"]
    slowest = {c: max((finals.hot_us[c] for finals in ranks), key=median) for c in hot} if len(ranks) > 1 else {}
    return Finals(**means, slowest_us=slowest, rejected=rejected, note="; ".join(notes))


def _means(ranks: Sequence[Times]) -> Times:
    return {
        c: tuple(map(fmean, zip(*(times[c] for times in ranks), strict=True)))
        for c in ranks[0]
        if all(c in times for times in ranks)
    }
