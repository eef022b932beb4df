"""Measurers without a device: times and mishaps as the candidates' own parameters say. Shared with child processes."""

from __future__ import annotations

import os
import signal
import time

from attn_graph.tuning.outcome import SKIPPED, Finals, Outcome, timed
from attn_graph.tuning.space import Candidate


def candidate(n: int) -> Candidate:
    return Candidate.of(n=n)


class MadeUpTimes:
    """Rough and final times by candidate; a candidate without times is broken.

    Attributes:
        tried: what was measured, in order.
    """

    def __init__(self, rough: dict[int, float], hot: dict[int, list[float]] | None = None, cold=None) -> None:
        self._rough, self._hot, self._cold = rough, hot, cold or {}
        self.tried: list[int] = []

    def rough(self, candidate: Candidate) -> Outcome:
        n = candidate.as_dict()["n"]
        self.tried.append(n)
        if n not in self._rough:
            return Outcome(candidate, SKIPPED, "wrong_values", "page_table[0, 512] is -7, wanted 93")
        return timed(candidate, [self._rough[n]] * 5)

    def finals(self, candidates) -> Finals:
        if self._hot is None:
            return Finals({c: (self._rough[c.as_dict()["n"]],) * 20 for c in candidates})
        hot, cold = ({c: tuple(t[c.as_dict()["n"]]) for c in candidates if c.as_dict()["n"] in t}
                     for t in (self._hot, self._cold))  # fmt: skip
        return Finals(hot, cold)


class Mishaps:
    """What a child process may hold: 1 is good, 2 hangs, 3 takes its process along, 4 fails, 5 is faster than 1."""

    def __init__(self, *arguments: str) -> None:
        self.prepared = None
        if "refuse" in arguments:
            raise ValueError("no such device")

    def prepare(self, case) -> None:
        self.prepared = case

    def rough(self, candidate: Candidate) -> Outcome:
        assert self.prepared is not None
        n = candidate.as_dict()["n"]
        if n == 2:
            time.sleep(60)
        if n == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if n == 4:
            return Outcome(candidate, SKIPPED, "failed", "an illegal memory access was encountered")
        return timed(candidate, [{1: 2.0, 5: 1.0}[n]] * 5)

    def finals(self, candidates) -> Finals:
        if len(candidates) > 2:
            os._exit(7)
        return Finals({c: self.rough(c).samples_us * 4 for c in candidates})

    def pid(self) -> int:
        return os.getpid()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def odd(self) -> None:
        raise Unportable(1, 2)


class Unportable(Exception):
    """Cannot be made from its own arguments, as pickle tries to."""

    def __init__(self, one, two) -> None:
        super().__init__(f"{one} and {two}")
