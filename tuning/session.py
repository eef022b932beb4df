"""Tuning cases on one device: compilers, the measuring process, the log and the store, in the order they are needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from statistics import median

from ..profilers.devices import Device
from ..profilers.sample import Case
from . import held_out, store
from .isolated import BENCH, IsolatedBench
from .log import Log, Replay, Resumed
from .outcome import OK, Outcome
from .random_order import shuffled
from .ranks import RankBenches
from .space import Candidate, candidates, key_of
from .static import Compiled, Compilers, Target
from .tuner import Search, Tuned, tune

COMPILE_SHARE = 0.3
"""Of a case's time budget, for waiting until its candidates are compiled."""
START_SHARE = 0.3
"""Of the whole budget, for the processes to start and the first case to be compiled."""

Listen = Callable[[Case, str, Outcome], None]
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
    """Tunes cases one after the other. A context manager: leaving it ends the processes.

    All candidates of all cases are compiled ahead, in the background and in the cases' order, so that a case is
    compiled while those before it are measured.

    Args:
        device: where to measure. On a CPU values are checked in Triton's interpreter, nothing is timed or stored.
        target: what to compile candidates for beforehand, in parallel; None does not.
        jobs: compiler processes.
        ranks: devices that time the finalists, one a rank; the first is `device`.
        resumed: what the log of an interrupted run already has.
        variables: environment variables of the processes.
        stores: whether choices are saved.
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
        ranks: Sequence[str] = (),
        resumed: Mapping[Case, Replay] | None = None,
        variables: Mapping[str, str] | None = None,
        stores: bool = True,
        listen: Listen = lambda case, phase, outcome: None,
    ) -> None:
        self._device, self._log, self._search, self._seed, self._listen = device, log, search, seed, listen
        self._stores = stores
        self._compilers = Compilers(target, jobs, variables) if target else None
        self._warp_size = target.warp_size if target else 32
        self._resumed = dict(resumed or {})
        self._ranks = len(ranks) or 1
        variables = {**(variables or {}), "TRITON_INTERPRET": "0" if device.is_cuda else "1"}
        benches = [IsolatedBench(BENCH, name, variables=variables) for name in ranks or [str(device)]]
        self._bench = RankBenches(benches, len(set(ranks)) == len(ranks)) if len(benches) > 1 else benches[0]

    def tune(self, cases: Sequence[Case], budget_s: float = math.inf) -> Iterator[Report]:
        """Compile, check and time the candidates of each case, choose, and store the choice.

        Raises:
            StoreError: a choice cannot be saved.
        """
        started = time.monotonic()
        ends = started + budget_s
        spaces = {case: candidates(case, self._warp_size) for case in cases}
        compiling = {case: self._submitted(case, space) for case, space in spaces.items()}
        self._bench.start()
        for i, case in enumerate(cases):
            now = time.monotonic()
            share = max(0.0, ends - now) / (len(cases) - i)
            compiled_by = max(now + COMPILE_SHARE * share, started + START_SHARE * budget_s if i == 0 else now)
            compiled = self._compiled(case, compiling[case], compiled_by)
            yield self._tuned(case, spaces[case], compiled, now + share)

    def _tuned(self, case: Case, space: list[Candidate], compiled: dict[Candidate, Compiled], ends: float) -> Report:
        # The default runs today, whatever a compiler thinks of it, so it is measured in any case.
        out = {c: found.outcome for c, found in compiled.items() if found.outcome.status != OK and c != space[0]}
        try:
            self._bench.prepare(case)
        except Exception as error:  # out of memory, a backend that refuses: the other cases go on
            return Report(case, space, Tuned(()), compiled, notes=(f"not measured: {error}",))
        logged = self._resumed.get(case)
        tuned = tune(
            space,
            Resumed(logged, self._bench) if logged else self._bench,
            search=self._search,
            seed=self._seed,
            budget_s=max(0.0, ends - time.monotonic()),
            pruned=out,
            listen=lambda outcome: self._measured(case, outcome),
        )
        if not (logged and logged.finals(list(tuned.finals.hot_us)).hot_us):
            self._log.finals(case, tuned.finals)
        if tuned.choice is None or not self._stores:
            return Report(case, space, tuned, compiled, notes=tuned.notes)
        entry = entry_of(case, self._device.name, space[0], tuned, self._ranks)
        notes = store.save([entry])
        return Report(case, space, tuned, compiled, entry.key, (*tuned.notes, *notes))

    def held_out(self, reports: Sequence[Report], ends: float = math.inf) -> Iterator[held_out.HeldOut]:
        """The default beside what the store gives, on shapes that were not tuned, as long as there is time."""
        for case in held_out.shapes([report.case for report in reports if report.key]):
            if time.monotonic() >= ends:
                return
            found = held_out.compare(case, self._device.name, self._bench)
            self._log.held_out(case, found.finals, found.found.rule)
            yield found

    def _submitted(self, case: Case, space: list[Candidate]) -> list[Future[Compiled]]:
        if self._compilers is None:
            return []
        logged = self._resumed.get(case, ())
        return self._compilers.submit(case, [c for c in shuffled(space, self._seed) if c not in logged])

    def _compiled(self, case: Case, compiling: list[Future[Compiled]], by: float) -> dict[Candidate, Compiled]:
        """What is compiled in time. The rest is compiled when it is measured, one by one."""
        found: dict[Candidate, Compiled] = {}
        left_s = None if by == math.inf else max(0.0, by - time.monotonic())
        with suppress(TooLate):
            for future in as_completed(compiling, left_s):
                compiled = future.result()
                self._log.compiled(case, compiled)
                self._listen(case, "compiled", compiled.outcome)
                found[compiled.outcome.candidate] = compiled
        for future in compiling:
            future.cancel()
        return found

    def _measured(self, case: Case, outcome: Outcome) -> None:
        if outcome.candidate not in self._resumed.get(case, ()):
            self._log.outcome(case, outcome)
        self._listen(case, "measured", outcome)

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


def entry_of(case: Case, gpu: str, default: Candidate, tuned: Tuned, ranks: int = 1) -> store.Entry:
    """What is stored of a choice."""
    choice, cold = tuned.choice, tuned.finals.cold_us
    facts = {
        "p50_us": round(choice.medians_us[choice.winner], 4),
        "default_p50_us": _rounded(choice.medians_us.get(default)),
        "cold_p50_us": _rounded(median(cold[choice.winner]) if choice.winner in cold else None),
        "default_cold_p50_us": _rounded(median(cold[default]) if default in cold else None),
        store.CHOSE_DEFAULT: choice.winner == default,
        "reason": choice.reason,
        "tied": [candidate.as_dict() for candidate in choice.tied],
        "ranks": ranks,
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
