"""Tuning cases on one device: compilers, the measuring process, the log and the store, in the order they are needed."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from statistics import median

from ..profilers.devices import Device
from ..profilers.sample import Case
from . import held_out, store
from .isolated import BENCH, IsolatedBench
from .log import Log, Replay, Resumed
from .outcome import NOT_TRIED, OK, Finals, Measurer, Outcome
from .ranks import RankBenches
from .space import Candidate, candidates, key_of
from .static import Compiled, Compilers, Target
from .trials import Round, Search, Trials, in_turns, seen_from
from .tuner import Tuned, rough_time, tune

START_SHARE = 0.25
"""Of a time budget, at most, for the first compilation: compilers import for seconds before it."""
FINALS_S = 1.0
"""What finals take until some have been seen."""

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
        seconds: what it took, by what was done.
    """

    case: Case
    space: list[Candidate]
    tuned: Tuned
    compiled: dict[Candidate, Compiled] = field(default_factory=dict)
    key: store.Key | None = None
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def default(self) -> Candidate:
        return self.space[0]


class Session:
    """Tunes cases one after the other, kernel by kernel in turns. A context manager: leaving it ends the processes.

    Only what the search asks for is compiled, a round at a time and in parallel, and what it is likely to ask for next;
    the first round of a case while the case before it is measured. What was timed in one case tells the search where to
    begin in the next, and so do stored choices.

    Args:
        device: where to measure. On a CPU values are checked in Triton's interpreter, nothing is timed or stored.
        target: what to compile candidates for beforehand, in parallel; None does not.
        jobs: compiler processes.
        ranks: devices that time the finalists, one a rank; the first is `device`.
        resumed: what the log of an interrupted run already has.
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
        listen: Listen = lambda case, phase, outcome: None,
    ) -> None:
        self._device, self._log, self._search, self._seed, self._listen = device, log, search, seed, listen
        self._compilers = Compilers(target, jobs) if target else None
        self._warp_size = target.warp_size if target else 32
        self._resumed = dict(resumed or {})
        self._known: dict[Case, dict[Candidate, float]] = {}
        self._stored = [entry for _, entry in store.saved_entries()[0]]
        self._finals_s = FINALS_S
        self._ranks = len(ranks) or 1
        variables = {"TRITON_INTERPRET": "0" if device.is_cuda else "1"}
        benches = [IsolatedBench(BENCH, name, variables=variables) for name in ranks or [str(device)]]
        self._bench = RankBenches(benches, len(set(ranks)) == len(ranks)) if len(benches) > 1 else benches[0]

    def tune(self, cases: Sequence[Case], budget_s: float = math.inf) -> Iterator[Report]:
        """Compile, check and time the candidates of each case, choose, and store the choice.

        Every case has the same share of the time that is left when it begins; starting processes is in none's.

        Raises:
            StoreError: a choice cannot be saved.
        """
        ends = time.monotonic() + budget_s
        cases = in_turns(cases)
        ahead = (self._begun(case, turn) for turn, case in enumerate(cases))
        following = next(ahead, None)
        for i in range(len(cases)):
            begun, following = following, next(ahead, None)  # which is compiled while this one is measured
            if i == 0:
                self._bench.start()
                begun.wait_for_compilers(START_SHARE * max(0.0, ends - time.monotonic()))
            now = time.monotonic()
            yield self._tuned(begun, now + max(0.0, ends - now) / (len(cases) - i))

    def _begun(self, case: Case, turn: int) -> _Begun:
        """A case whose search has said what it tries first, and whose compilers are at it."""
        space = candidates(case, self._warp_size)
        near = seen_from(case, self._known, self._device.name, self._stored)
        trials = Trials(self._search, space, self._seed, near)
        begun = _Begun(case, turn, space, trials, self._compilers, self._resumed.get(case), self._log, self._listen)
        begun.expect(trials.next)
        return begun

    def _tuned(self, begun: _Begun, ends: float) -> Report:
        case, space, logged = begun.case, begun.space, self._resumed.get(begun.case)
        try:
            with begun.timed("preparing"):
                self._bench.prepare(case)
        except Exception as error:  # out of memory, a backend that refuses: the other cases go on
            begun.drop()
            return Report(case, space, Tuned(()), begun.compiled, notes=(f"not measured: {error}",))
        budget_s = max(0.0, ends - time.monotonic())
        rough_s = rough_time(budget_s, self._finals_s)
        begun.measure_with(Resumed(logged, self._bench) if logged else self._bench, rough_s)
        tuned = tune(
            space,
            begun,
            trials=begun.trials,
            budget_s=budget_s,
            finals_s=self._finals_s,
            clock=time.monotonic,
            expect=begun.expect,
            listen=lambda outcome: self._measured(case, outcome),
        )
        begun.drop()
        self._finals_s = begun.seconds["finals"] or self._finals_s
        self._known[case] = {o.candidate: o.median_us for o in tuned.outcomes if o.status == OK and o.samples_us}
        if not (logged and logged.finals(list(tuned.finals.hot_us)).hot_us):
            self._log.finals(case, tuned.finals)
        if tuned.choice is None:
            return Report(case, space, tuned, begun.compiled, notes=tuned.notes, seconds=begun.seconds)
        entry = entry_of(case, self._device.name, space[0], tuned, self._ranks)
        notes = (*tuned.notes, *store.save([entry]))
        return Report(case, space, tuned, begun.compiled, entry.key, notes, begun.seconds)

    def held_out(self, reports: Sequence[Report], ends: float = math.inf) -> Iterator[held_out.HeldOut]:
        """The default beside what the store gives, on shapes that were not tuned, as long as there is time."""
        for case in held_out.shapes([report.case for report in reports if report.key]):
            if time.monotonic() >= ends:
                return
            found = held_out.compare(case, self._device.name, self._bench)
            self._log.held_out(case, found.finals, found.found.rule)
            yield found

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


class _Begun:
    """A case from its first round on: the measurer that waits for compilers before it measures.

    Attributes:
        compiled: what came of compiling, by candidate.
        seconds: what was done for how long.
    """

    def __init__(
        self,
        case: Case,
        turn: int,
        space: list[Candidate],
        trials: Trials,
        compilers: Compilers | None,
        logged: Replay | None,
        log: Log,
        listen: Listen,
    ) -> None:
        self.case, self.space, self.trials = case, space, trials
        self.compiled: dict[Candidate, Compiled] = {}
        self.seconds: Counter[str] = Counter()
        self._turn = turn
        self._compilers, self._logged, self._log, self._listen = compilers, logged or (), log, listen
        self._compiling: dict[Candidate, Future[Compiled]] = {}
        self._measurer: Measurer | None = None
        self._compiled_by = math.inf

    def expect(self, round_: Round) -> None:
        """Compile these, in parallel, before what cases after this one need; what is compiled or logged already is not.

        What is only likely to be asked for comes after what is asked for.
        """
        if self._compilers is None:
            return
        for last, wanted in enumerate(round_):
            new = [c for c in wanted if c not in self._compiling and c not in self._logged]
            futures = self._compilers.submit(self.case, new, (self._turn, last))
            self._compiling.update(zip(new, futures, strict=True))

    def wait_for_compilers(self, limit_s: float) -> None:
        """Until what is tried first is compiled."""
        first = [self._compiling[c] for c in self.trials.next.tries if c in self._compiling]
        wait(first, None if limit_s == math.inf else limit_s)

    def measure_with(self, measurer: Measurer, limit_s: float) -> None:
        """From now on it is measured; compilers are waited for no longer than `limit_s`."""
        self._measurer, self._compiled_by = measurer, time.monotonic() + limit_s

    def rough(self, candidate: Candidate) -> Outcome:
        # The default runs today, whatever a compiler thinks of it, so it is measured in any case.
        is_default = candidate == self.space[0]
        try:
            compiled = self._waited_for(candidate)
        except TooLate:
            if not is_default:
                return Outcome(candidate, NOT_TRIED, "time_budget", "its compiler did not end in time")
            compiled = None
        if compiled and compiled.outcome.status != OK and not is_default:
            return compiled.outcome
        with self.timed("trying"):
            return self._measurer.rough(candidate)

    def finals(self, finalists: Sequence[Candidate]) -> Finals:
        with self.timed("finals"):
            return self._measurer.finals(finalists)

    def drop(self) -> None:
        """Compile no more of it."""
        for future in self._compiling.values():
            future.cancel()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] += time.monotonic() - started

    def _waited_for(self, candidate: Candidate) -> Compiled | None:
        if candidate not in self._compiling:
            return None
        left_s = max(0.0, self._compiled_by - time.monotonic())
        with self.timed("waiting for compilers"):
            compiled = self._compiling[candidate].result(None if left_s == math.inf else left_s)
        self.compiled[candidate] = compiled
        self._log.compiled(self.case, compiled)
        self._listen(self.case, "compiled", compiled.outcome)
        return compiled


def replay(logged: Replay, search: Search, seed: int = 0) -> Report:
    """Tune a logged case again from its log; nothing is stored."""
    tuned = tune(logged.space, logged, search=search, seed=seed, repeats=0)
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
        store.SERVES: list(choice.serves),
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
