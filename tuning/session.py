"""Tuning cases on one device: compilers, the measuring process, the log and the store, in the order they are needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from statistics import median

from ..profilers.devices import Device
from ..profilers.sample import Case
from . import store
from .isolated import BENCH, IsolatedBench
from .log import Log, Replay
from .outcome import OK, Outcome
from .space import Candidate, candidates, key_of
from .static import Compiled, Compilers, Target
from .tuner import Search, Tuned, tune

COMPILE_SHARE = 0.5
"""Of a time budget, for compiling beforehand."""

Listen = Callable[[str, Outcome], None]
"""Called with ``compiled`` or ``measured`` and what came of a candidate."""


@dataclass(frozen=True, slots=True)
class Report:
    """One case, tuned.

    Attributes:
        space: the candidates, the default first.
        compiled: registers and spills, where it was compiled beforehand.
        key: under what the choice is stored; None where nothing is.
        notes: what a reader must know, of the measurement and of the store.
    """

    case: Case
    space: list[Candidate]
    tuned: Tuned
    compiled: dict[Candidate, Compiled] = field(default_factory=dict)
    key: store.Key | None = None
    notes: tuple[str, ...] = ()

    @property
    def default(self) -> Candidate:
        return self.space[0]


class Session:
    """Tunes one case after the other. A context manager: leaving it ends the processes.

    Args:
        device: where to measure. On a CPU values are checked in Triton's interpreter, nothing is timed or stored.
        target: what to compile candidates for beforehand, in parallel; None does not.
        jobs: compiler processes.
    """

    def __init__(
        self,
        device: Device,
        log: Log,
        *,
        target: Target | None = None,
        jobs: int = 1,
        search: Search,
        seed: int = 0,
        listen: Listen = lambda phase, outcome: None,
    ) -> None:
        self._device, self._log, self._search, self._seed, self._listen = device, log, search, seed, listen
        self._compilers = Compilers(target, jobs) if target else None
        self._warp_size = target.warp_size if target else 32
        interpret = "0" if device.is_cuda else "1"
        self._bench = IsolatedBench(BENCH, str(device), variables={"TRITON_INTERPRET": interpret})

    def tune(self, case: Case, budget_s: float = math.inf) -> Report:
        """Compile, check and time the candidates of a case, choose, and store the choice.

        Raises:
            ConfigError: the case cannot be built.
            StoreError: the choice cannot be saved.
        """
        ends = time.monotonic() + budget_s
        space = candidates(case, self._warp_size)
        compiled = self._compiled(case, space, time.monotonic() + COMPILE_SHARE * budget_s)
        # The default runs today, whatever a compiler thinks of it, so it is measured in any case.
        out = {c: found.outcome for c, found in compiled.items() if found.outcome.status != OK and c != space[0]}
        self._bench.prepare(case)
        tuned = tune(
            space,
            self._bench,
            search=self._search,
            seed=self._seed,
            budget_s=max(0.0, ends - time.monotonic()),
            pruned=out,
            listen=lambda outcome: self._measured(case, outcome),
        )
        self._log.finals(case, tuned.finals)
        if tuned.choice is None:
            return Report(case, space, tuned, compiled, notes=tuned.notes)
        entry = entry_of(case, self._device.name, space[0], tuned)
        notes = store.save([entry])
        return Report(case, space, tuned, compiled, entry.key, (*tuned.notes, *notes))

    def _compiled(self, case: Case, space: list[Candidate], deadline: float) -> dict[Candidate, Compiled]:
        """What could be compiled by `deadline`. The rest is compiled when it is measured, one by one."""
        found: dict[Candidate, Compiled] = {}
        if self._compilers is None:
            return found
        with closing(self._compilers.survey(case, space)) as survey:
            for compiled in survey:
                self._log.compiled(case, compiled)
                self._listen("compiled", compiled.outcome)
                found[compiled.outcome.candidate] = compiled
                if time.monotonic() >= deadline:
                    break
        return found

    def _measured(self, case: Case, outcome: Outcome) -> None:
        self._log.outcome(case, outcome)
        self._listen("measured", outcome)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._bench.close()
        if self._compilers is not None:
            self._compilers.close()


def replay(logged: Replay, search: Search, seed: int = 0) -> Report:
    """Tune a logged case again from its log; nothing is stored."""
    tuned = tune(logged.space, logged, search=search, seed=seed)
    return Report(logged.case, logged.space, tuned, notes=tuned.notes)


def entry_of(case: Case, gpu: str, default: Candidate, tuned: Tuned) -> store.Entry:
    """What is stored of a choice."""
    choice, cold = tuned.choice, tuned.finals.cold_us
    facts = {
        "p50_us": round(choice.medians_us[choice.winner], 4),
        "default_p50_us": _rounded(choice.medians_us.get(default)),
        "cold_p50_us": _rounded(median(cold[choice.winner]) if choice.winner in cold else None),
        "default_cold_p50_us": _rounded(median(cold[default]) if default in cold else None),
        "reason": choice.reason,
        "tied": [candidate.as_dict() for candidate in choice.tied],
        "seed": case.seed,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **{package.replace("-", "_"): _version(package) for package in ("torch", "triton", "attn-graph")},
    }
    return store.Entry(key_of(case, gpu), choice.winner.as_dict(), facts)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
