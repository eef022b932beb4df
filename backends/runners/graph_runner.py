"""What all runners share: captured sizes, the order of hooks around a captured body, launch and read-done event.

Capture, for each size, largest first: reset slots, out-graph hook, then twice {body, warm-up hook} and the recording.
The body is in-graph hook, read-done marker, forward pass. Replay: fill slots, out-graph hook, launch, publish.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..base import AttentionBackend, ConfigError, NotCapturedError
from ..batch import ForwardBatch
from ..modes import ForwardMode, Placement
from .fork import ForkedPrep, check_forkable
from .inputs import StepInputs
from .read_done import ReadDone
from .slots import StaticSlots

Outputs = Mapping[str, torch.Tensor]


class GraphRunner:
    """Captures one graph per size and replays it for live batches of any size up to the largest.

    A subclass says what batch a capture and a replay see (`capture_batch`, `load_batch`) and what the forward pass is.

    Attributes:
        rebuild: rebuilds the metadata of the loaded batch where the placement says; in the main graph it only selects
            the bound object.
        launch: launches the loaded batch's graph.

    Args:
        backend: with its state initialised by this runner.
        mode: captured mode.
        buckets: sizes to capture, in requests.
        slots: static inputs, possibly shared with other runners that never run at the same time.
        placement: where the rebuild runs.
        new_graph: makes an empty graph.
        read_done: where to publish that the engine's tables are read; None publishes nothing.
        autotune: called once with the body of the largest size, before its warm-ups.
    """

    needs: tuple[str, ...] = ()
    """Fields of StepInputs that every step must bring."""
    rows_per_request = 1
    """Rows of the batch for each request of a captured size."""
    marks_reads = True
    """Whether the graph records the read-done marker."""

    def __init__(
        self,
        backend: AttentionBackend,
        mode: ForwardMode,
        buckets: Sequence[int],
        slots: StaticSlots,
        placement: Placement,
        new_graph: Callable[[], Any],
        *,
        read_done: ReadDone | None = None,
        fork: ForkedPrep | None = None,
        autotune: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        if backend.recorded is (placement is Placement.EAGER):
            raise ConfigError(
                f"placement {placement} with recorded={backend.recorded}: eager rebuilds are not recorded"
            )
        if fork is not None:
            check_forkable(backend, placement)
        self.backend, self.mode, self.slots, self.placement = backend, mode, slots, placement
        self.buckets = sorted(set(buckets))
        self.read_done, self.fork = read_done, fork
        self._new_graph, self._autotune = new_graph, autotune
        self.graphs: dict[int, Any] = {}
        self.glue: dict[int, Any] = {}
        self._outputs: dict[int, Outputs | None] = {}
        rows = self.buckets[-1] * self.rows_per_request
        backend.init_cuda_graph_state(rows, rows * slots.tokens_per_req)
        self.bucket = self.live = 0
        self.view: ForwardBatch | None = None
        self.rebuild: Callable[[], None] = _nothing_loaded
        self.launch: Callable[[], None] = _nothing_loaded

    # Capture.

    def capture(self) -> None:
        """Capture every size, largest first, so that smaller graphs reuse the larger ones' memory.

        A second call frees the graphs and captures anew over the same backend state.

        Raises:
            CaptureError: from the graph, if a hook does what a graph cannot hold.
        """
        self.graphs.clear()
        self.glue.clear()
        self._outputs.clear()
        for bucket in reversed(self.buckets):
            self.slots.reset(bucket * self.rows_per_request)
            self._capture_size(bucket, self.capture_batch(bucket))

    def _capture_size(self, bucket: int, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        if self.placement is Placement.GLUE:
            self.glue[bucket] = self._captured(partial(self._metadata, batch))
            body = partial(self._run_forward, bucket, batch)
        else:
            body = partial(self._run, bucket, batch)
        if self._autotune is not None and bucket == self.buckets[-1]:
            self._autotune(body)
            self._after_warmup()
        self.graphs[bucket] = self._captured(body)

    def _captured(self, body: Callable[[], None]) -> Any:
        graph = self._new_graph()
        graph.capture(body, after_warmup=self._after_warmup)
        return graph

    def _after_warmup(self) -> None:
        """The hook of the backend that is captured, whichever one layers would use by default."""
        self.backend.on_after_cuda_graph_warmup()

    def _run(self, bucket: int, batch: ForwardBatch) -> None:
        """The captured body."""
        if self.fork is None:
            self._metadata(batch)
            self._run_forward(bucket, batch)
        else:
            self.fork.begin(partial(self._metadata, batch))
            self._run_forward(bucket, batch)
            self.fork.check_joined()

    def _metadata(self, batch: ForwardBatch) -> None:
        self.backend.init_forward_metadata_in_graph(batch)
        if self.read_done is not None and self.marks_reads:
            self.read_done.mark()

    def _run_forward(self, bucket: int, batch: ForwardBatch) -> None:
        self._outputs[bucket] = self._forward(bucket, batch)

    # What a subclass supplies.

    def capture_batch(self, bucket: int) -> ForwardBatch:
        """The batch a capture sees: static slices only, so that recorded work reads live data at replay."""
        raise NotImplementedError

    def load_batch(self, step: StepInputs) -> None:
        """Fill static slots, choose the graph, make the view for `rebuild`.

        Raises:
            NotCapturedError: the batch is larger than the largest captured size.
            ConfigError: a length does not fit the tables, or a needed field is missing.
        """
        raise NotImplementedError

    def _forward(self, bucket: int, batch: ForwardBatch) -> Outputs | None:
        raise NotImplementedError

    # Replay.

    def _bucket_of(self, requests: int) -> int:
        """The smallest captured size that holds so many requests."""
        if not self.graphs:
            raise NotCapturedError("nothing is captured: call capture first")
        i = bisect_left(self.buckets, requests)
        if i == len(self.buckets):
            raise NotCapturedError(
                f"batch size {requests} exceeds the captured sizes {', '.join(map(str, self.buckets))}"
            )
        return self.buckets[i]

    def _select(self, bucket: int, live: int, view: ForwardBatch) -> None:
        self.bucket, self.live, self.view = bucket, live, view
        self.launch = self.graphs[bucket].launch
        hook = partial(self.backend.init_forward_metadata_out_graph, view)
        glue = self.glue.get(bucket)
        self.rebuild = hook if glue is None else partial(_in_turn, hook, glue.launch)

    def replay(self) -> dict[str, torch.Tensor]:
        """Rebuild, launch, publish. What the forward pass returned, live rows only; the next replay overwrites it."""
        self.rebuild()
        if self.read_done is None:
            self.launch()
        else:
            end = self._read_end()
            self.read_done.before_launch(end)
            self.launch()
            self.read_done.after_launch(end, marked=self.marks_reads)
        return self.outputs()

    def _read_end(self):
        return self.backend.shared_read_ends(self.mode)

    def outputs(self) -> dict[str, torch.Tensor]:
        """The last replay's outputs without padding. Each has the same number of rows for every request."""
        made = self._outputs.get(self.bucket)
        if not isinstance(made, Mapping):  # a body may be any callable; what it returns otherwise is not for us
            return {}
        return {name: x[: x.shape[0] // self.bucket * self.live] for name, x in made.items()}

    def _check(self, step: StepInputs) -> None:
        if step.batch_size == 0:
            return
        missing = [name for name in self.needs if getattr(step, name) is None]
        if missing:
            raise ConfigError(f"{type(self).__name__} needs {', '.join(missing)} in every step")
        if step.seq_lens_cpu is None:
            return
        longest, limit = int(step.seq_lens_cpu.max()), self.backend.config.max_context
        if longest > limit:
            raise ConfigError(f"seq_lens has {longest} tokens, more than max_context {limit}")

    def _sum_of_lengths(self, step: StepInputs | None, rows: int) -> int | None:
        """Host sum of a padded batch; None where the engine keeps no host lengths."""
        if step is not None and step.seq_lens_cpu is None:
            return None
        return int(self.slots.seq_lens_cpu[:rows].sum())


def _in_turn(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _nothing_loaded() -> None:
    raise NotCapturedError("no batch is loaded: call load_batch first")
