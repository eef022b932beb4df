"""Measuring candidates of one case: values first, on freshly poisoned outputs, then times, inside a graph.

`CaseMeasurer` does the work, `DeviceBench` serves it from a child process, `IsolatedBench` is the parent's end.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np
import torch

from ..backends.base import AttentionBackend, tensors_of
from ..backends.batch import ForwardBatch, Pools, context_lengths, edge_lengths, live_batch, parse_context
from ..backends.modes import Implementation, Placement
from ..backends.oracle import Expected
from ..backends.registry import lookup
from ..backends.runners.decode import DecodeRunner, StaticSlots, StepInputs, upload
from ..profilers.agreement import Disagreement, host_batch, host_pools, poison_value
from ..profilers.device_time import GpuTimer, Timer, interleaved_us
from ..profilers.graphs import CaptureError, capturing
from ..profilers.measure import attention_config, batch_shape, case_pools
from ..profilers.sample import Case
from .held_out import short_mix
from .outcome import SKIPPED, Finals, Outcome, timed
from .space import Candidate

DRAWS = 8
"""Batches that are drawn from the length mix; a sample is the mean over them."""
HOT_COUNTS = (5 * DRAWS, 15 * DRAWS)
COLD_COUNTS = (2 * DRAWS, 6 * DRAWS)
ROUGH_REPEATS = 4
FINAL_BUILDS = 6
"""Where its outputs lie in memory moves a kernel's time by a percent or two, and repeats of one build all alike. So a
value of the finals is of a build, and there are as many as an interval takes."""
FINAL_COUNTS, FINAL_REPEATS = (2 * DRAWS, 6 * DRAWS), 3
COLD_REPEATS, UNLIKE_REPEATS = 1, 1
"""A flush before each rebuild makes cold samples expensive, and they only guard; those on lengths unlike the mix's only
say what else a choice is good for."""
LONG_SHARE = 2
"""Long requests have at least the limit's half; short ones are those of held-out shapes."""
Samples = dict[Candidate, tuple[float, ...]]
MOST_POOLS = 8
"""Tables that are kept, of the last shapes: each up to some hundred megabytes."""
CALLS_AGAIN = 9
"""Rebuilds after the first that must leave the same values."""

_CAUSES = {
    "CompilationError": "compile_error",
    "PTXASError": "compile_error",
    "OutOfResources": "out_of_resources",
    "OutOfMemoryError": "out_of_resources",
}
"""By class name: the compiler's classes have moved between versions."""


class CaseMeasurer:
    """Checks and times settings of one case's fused rebuild.

    Args:
        case: what to measure, with full batches of `bucket` requests.
        device: where. Values are checked on any.
        backend: class to build instead of the registered one.
        timer: what times; None on a GPU makes one for each candidate, elsewhere nothing is timed.
        pools: the engine's tables of the case, to share them; None makes them.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device | str,
        backend: type[AttentionBackend] | None = None,
        timer: Timer | None = None,
        pools: Pools | None = None,
    ) -> None:
        self._case, self._device, self._timer = replace(case, bs=case.bucket), torch.device(device), timer
        self._times = timer is not None or self._device.type == "cuda"
        self._class = backend or lookup(case.backend).load()
        self._pools = pools or case_pools(self._case, self._device)
        batches = _Batches(self._case, self._class, self._pools)
        self._checks = batches.checks
        self._timed, self._short, self._long = batches.draws, batches.short, batches.long
        self._inputs = tensors_of([self._pools, self._timed, [check.batch for check in self._checks]], "inputs")
        self._originals = {path: tensor.clone() for path, tensor in self._inputs.items()}

    def rough(self, candidate: Candidate) -> Outcome:
        """Check, then time in a few repeats. Whatever the candidate does wrong is in the outcome.

        Raises:
            CaptureError: a graph is being captured, which trials would spoil.
        """
        _refuse_capture()
        try:
            backend = self._built(candidate)
            wrong = self._wrong(candidate, backend)
            if wrong is not None:
                return wrong
            if not self._times:
                return Outcome(candidate)
            return timed(candidate, self._samples({candidate: backend}, ROUGH_REPEATS)[candidate])
        except Exception as error:
            return Outcome(candidate, SKIPPED, *why(error))

    def finals(self, candidates: Sequence[Candidate]) -> Finals:
        """Times side by side, hot and cold, FINAL_BUILDS values each; then every candidate's values once more, and ten
        times in a row.

        Raises:
            CaptureError: a graph is being captured.
        """
        _refuse_capture()
        try:
            builds: list[dict[str, Samples]] = []
            backends: dict[Candidate, AttentionBackend] = {}
            for build in range(FINAL_BUILDS):
                turned = [*candidates[build % len(candidates) :], *candidates[: build % len(candidates)]]
                backends = {c: self._built(c) for c in turned}  # while the last ones hold their memory: not the same
                builds.append(self._side_by_side(backends))
            rejected = {c: found for c in candidates if (found := self._wrong(c, backends[c], CALLS_AGAIN))}
        except Exception as error:
            cause, reason = why(error)
            return Finals({}, note=f"the finalists could not be timed side by side ({cause}: {reason})")
        times = {name: {c: tuple(median(one[name][c]) for one in builds) for c in candidates} for name in builds[0]}
        return Finals(**times, rejected=rejected)

    def _side_by_side(self, backends: Mapping[Candidate, AttentionBackend]) -> dict[str, Samples]:
        """Samples of one build of each, by field of `Finals`."""
        return {
            "hot_us": self._samples(backends, FINAL_REPEATS, FINAL_COUNTS),
            "cold_us": self._samples(backends, COLD_REPEATS, COLD_COUNTS, cold=True),
            "short_us": self._samples(backends, UNLIKE_REPEATS, FINAL_COUNTS, self._short),
            "long_us": self._samples(backends, UNLIKE_REPEATS, FINAL_COUNTS, self._long),
        }

    def body(self, candidate: Candidate) -> Callable[[], None]:
        """A call that rebuilds for the next batch of the mix; neither checked nor captured."""
        return self._body(self._built(candidate))

    def _built(self, candidate: Candidate) -> AttentionBackend:
        """A backend with outputs of its own, bound as at capture."""
        config = attention_config(self._case, candidate.as_dict())
        backend = self._class(config, self._pools, Implementation.FUSED)
        batch = self._timed[0]
        backend.init_cuda_graph_state(batch.batch_size, batch.out_cache_loc.shape[0])
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        return backend

    def _wrong(self, candidate: Candidate, backend: AttentionBackend, again: int = 0) -> Outcome | None:
        """What is wrong with a candidate after one rebuild, or after `again` more; None if nothing."""
        reason = self._wrong_values(backend, again)
        changed = self._restored()  # first of all: values are wrong too where an input was overwritten
        if changed:
            return Outcome(candidate, SKIPPED, "changed_inputs", f"it wrote to {', '.join(changed)}")
        return Outcome(candidate, SKIPPED, "wrong_values", reason) if reason else None

    def _wrong_values(self, backend: AttentionBackend, again: int) -> str:
        bound = tensors_of(backend.forward_metadata)
        for check in self._checks:
            check.poison(bound)
            for calls in (1, again):
                for _ in range(calls):
                    backend.init_forward_metadata_in_graph(check.batch)
                reason = check.first_wrong(bound)
                if reason:
                    return reason
        return ""

    def _restored(self) -> list[str]:
        """Inputs that are no longer what they were; they are put back for the candidates that follow."""
        changed = [path for path, tensor in self._inputs.items() if not torch.equal(tensor, self._originals[path])]
        for path in changed:
            self._inputs[path].copy_(self._originals[path])
        return changed

    def _samples(
        self,
        backends: Mapping[Candidate, AttentionBackend],
        repeats: int,
        counts: tuple[int, int] = HOT_COUNTS,
        batches: Sequence[ForwardBatch] = (),
        cold: bool = False,
    ) -> Samples:
        bodies = {str(candidate): self._body(backend, batches) for candidate, backend in backends.items()}
        found = interleaved_us(
            bodies, device=self._device, cold=cold, repeats=repeats, counts=counts, timer=self._timer
        )
        return {candidate: tuple(found[str(candidate)]) for candidate in backends}

    def _body(self, backend: AttentionBackend, batches: Sequence[ForwardBatch] = ()) -> Callable[[], None]:
        """Rebuilds for the next batch, of the mix if none are given. A graph holds whole rounds, so each weighs the
        same."""
        turns = itertools.cycle(batches or self._timed)
        return lambda: backend.init_forward_metadata_in_graph(next(turns))


@dataclass(frozen=True, slots=True)
class _Check:
    """A batch and what a rebuild for it must leave: by field (values, where they hold, where they are preset)."""

    batch: ForwardBatch
    fields: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def poison(self, bound: Mapping[str, torch.Tensor]) -> None:
        for path, (_, _, preset) in self.fields.items():
            bound[path].masked_fill_(~preset, poison_value(bound[path].dtype, 0))

    def first_wrong(self, bound: Mapping[str, torch.Tensor]) -> str:
        for path, (values, held, _) in self.fields.items():
            found = bound[path]
            wanted = torch.where(held, values, poison_value(found.dtype, 0))
            wrong = (found != wanted).nonzero()
            if len(wrong):
                at = tuple(wrong[0].tolist())
                first = Disagreement(path, at, int(wanted[at]), int(found[at]), untouched=not bool(held[at]))
                return f"{first} ({len(wrong)} of {found.numel()} cells)"
        return ""


class _Batches:
    """Padded batches of a case as the hooks see them, each with tensors of its own.

    Attributes:
        draws: DRAWS batches from the length mix.
        short, long: as many of short and of long requests only.
        checks: batches with every length at which a kernel can go wrong, and the first draw.
    """

    def __init__(self, case: Case, backend: type[AttentionBackend], pools: Any) -> None:
        self._case, self._shape, self._pools = case, batch_shape(case), pools
        self._rng = np.random.default_rng(case.seed)
        self._runner = padding_runner(case, backend(attention_config(case), pools, Implementation.FUSED))
        self._tables = host_pools(self._runner)
        drawn = [self._drawn() for _ in range(DRAWS)]
        first = self._check(drawn[0])
        self.draws = [first.batch, *(self._loaded(lengths)[1] for lengths in drawn[1:])]
        self.checks = [*(self._check(lengths) for lengths in self._edges(drawn[0])), first]
        limit = self._shape.limit
        self.short = [self._loaded(self._drawn(short_mix(limit)))[1] for _ in range(DRAWS)]
        self.long = [
            self._loaded(self._drawn(f"uniform:{max(1, limit // LONG_SHARE)}:{limit}"))[1] for _ in range(DRAWS)
        ]

    def _drawn(self, context: str = "") -> np.ndarray:
        """Lengths of a batch, from the case's mix unless another is given."""
        shape = self._shape
        lengths = context_lengths(parse_context(context or self._case.context), shape.bucket, shape.limit, self._rng)
        return np.clip(lengths, shape.minimum, shape.limit)

    def _edges(self, filling: np.ndarray) -> Iterator[np.ndarray]:
        """All edge lengths over as many batches as it takes; the other rows are from the mix."""
        edges, bucket = edge_lengths(self._shape), self._shape.bucket
        for start in range(0, len(edges), bucket):
            lengths = filling.copy()
            part = edges[start : start + bucket]
            lengths[: len(part)] = part
            yield lengths

    def _check(self, lengths: np.ndarray) -> _Check:
        runner = self._runner
        step, batch = self._loaded(lengths)
        expected = runner.backend.expected(host_batch(runner.slots, runner.mode, runner.bucket, step), self._tables)
        device = self._pools.req_to_token.device
        return _Check(batch, {path: _on_device(field, device) for path, field in expected.items()})

    def _loaded(self, lengths: np.ndarray) -> tuple[StepInputs, ForwardBatch]:
        """Requests of these lengths, as the engine has them and as the hooks see them."""
        shape, runner = self._shape, self._runner
        rows = 1 + self._rng.permutation(shape.bucket)
        live = live_batch(shape.mode, lengths, rows, self._pools, shape.tokens_per_req, self._rng)
        step = upload(live, self._pools.req_to_token.device)
        runner.load_batch(step)
        return step, _copied(runner.capture_batch(shape.bucket))


def padding_runner(case: Case, backend: AttentionBackend) -> DecodeRunner:
    """A runner that binds the backend's metadata and pads batches, and captures nothing."""
    shape = batch_shape(case)
    slots = StaticSlots(case.bucket, shape.tokens_per_req, backend.seq_len_fill_value, backend.device)
    runner = DecodeRunner(backend, shape.mode.captured, [case.bucket], slots, Placement.GRAPH, _NoGraph)
    runner.capture()
    return runner


class _NoGraph:
    """Stands where a graph would."""

    def capture(self, body: Any, **_: Any) -> None:
        pass

    def launch(self) -> None:
        pass


def _on_device(field: Expected, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arrays = (field.values, field.written | field.live, field.live & ~field.written)
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def _copied(value: Any) -> Any:
    """The same dataclass, with copies of all tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if is_dataclass(value):
        return replace(value, **{f.name: _copied(getattr(value, f.name)) for f in fields(value)})
    return value


def _refuse_capture() -> None:
    if capturing():
        raise CaptureError("block sizes cannot be tuned while a graph is being captured. Tune first, then capture")


def why(error: Exception) -> tuple[str, str]:
    """Cause and reason of an error in a candidate."""
    while type(error).__name__ == type(error.__cause__).__name__ == "CompilationError":  # in a function that it calls
        error = error.__cause__
    names = [kind.__name__ for kind in type(error).__mro__]
    cause = next((_CAUSES[name] for name in names if name in _CAUSES), "failed")
    lines = str(error).strip().splitlines() or [""]
    # Triton quotes the kernel's source first; everybody else begins with what is wrong.
    told = lines[-1] if names[0] == "CompilationError" else lines[0]
    return cause, f"{names[0]}: {told}"[:300] + _cache_advice(error)


def _cache_advice(error: Exception) -> str:
    """Processes that share a kernel cache can get in each other's way, and so can its permissions."""
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
    if not isinstance(error, OSError) or not str(error.filename or "").startswith(cache):
        return ""
    return f". The kernel cache is {cache}: give each rank a folder of its own by TRITON_CACHE_DIR"


class DeviceBench:
    """What the child process holds: a device, and one case at a time."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._measurer: CaseMeasurer | None = None
        self._timer: GpuTimer | None = None
        self._pools = lru_cache(MOST_POOLS)(lambda case: case_pools(case, self._device))
        torch.set_num_threads(1)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Triton launches on the current device, not on its arguments'
            self._timer = GpuTimer(self._device)

    def prepare(self, case: Case) -> None:
        self._measurer = None  # its buffers first, then room for the next
        # Large tables take seconds to make, and every kernel is tuned on the same ones: a measurer restores them.
        pools = self._pools(replace(case, backend="", context="", bs=0))
        self._measurer = CaseMeasurer(case, self._device, timer=self._timer, pools=pools)

    def rough(self, candidate: Candidate) -> Outcome:
        return self._measurer.rough(candidate)

    def finals(self, candidates: Sequence[Candidate]) -> Finals:
        return self._measurer.finals(candidates)
