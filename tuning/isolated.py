"""A measurer in a child process that is replaced when a candidate breaks it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..profilers.sample import Case
from .child import Child, ChildDied, ChildTimeout
from .outcome import SKIPPED, Finals, Outcome
from .space import Candidate

BENCH = "attn_graph.tuning.measure:DeviceBench"
PREPARE_LIMIT_S = 300.0
CANDIDATE_LIMIT_S = 60.0
"""Compilation, checks and rough times of one candidate take about a second."""
FINALS_LIMIT_S = 180.0


class IsolatedBench:
    """Measures the prepared case in a process of its own.

    Args:
        target, arguments: what the process holds; see `Child`. Its object has `prepare`, `rough` and `finals`.
        variables: environment variables of that process.
        limit_s: for one candidate; above it the candidate counts as hung.
    """

    def __init__(
        self,
        target: str,
        *arguments: Any,
        variables: Mapping[str, str] | None = None,
        limit_s: float = CANDIDATE_LIMIT_S,
    ) -> None:
        self._making = (target, arguments, variables)
        self._limit_s = limit_s
        self._child: Child | None = None
        self._case: Case | None = None

    def start(self) -> None:
        """Start the process now, so that no case pays for it."""
        self._ready()

    def prepare(self, case: Case) -> None:
        """Make `case` the one that is measured.

        Raises:
            Exception: what building it raised, such as `ConfigError` or running out of device memory.
        """
        self._case = case
        self._ready().call("prepare", case, limit_s=PREPARE_LIMIT_S)

    def rough(self, candidate: Candidate) -> Outcome:
        try:
            outcome = self._prepared().call("rough", candidate, limit_s=self._limit_s)
        except ChildTimeout as error:
            self.close()
            return Outcome(candidate, SKIPPED, "hung", f"{error}; it was ended")
        except ChildDied as error:
            self.close()
            return Outcome(candidate, SKIPPED, "died", str(error))
        if outcome.cause == "failed":
            self.close()  # an illegal access leaves the device context unusable for every candidate after it
        return outcome

    def finals(self, candidates: Sequence[Candidate]) -> Finals:
        try:
            return self._prepared().call("finals", list(candidates), limit_s=FINALS_LIMIT_S)
        except (ChildTimeout, ChildDied) as error:
            self.close()
            return Finals({}, note=f"the finalists could not be timed side by side ({error})")

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def __enter__(self) -> IsolatedBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> Child:
        if self._child is None:
            target, arguments, variables = self._making
            self._child = Child(target, *arguments, variables=variables)
        return self._child

    def _prepared(self) -> Child:
        if self._child is None and self._case is not None:
            self.prepare(self._case)
        return self._ready()
