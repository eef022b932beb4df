"""Two-batch overlap: the batch once whole for layers that run it so, and once in halves, one backend each.

| child   | requests      | tokens                    | its metadata at replay                  |
|---------|---------------|---------------------------|-----------------------------------------|
| primary | [0, B)        | all                       | as without the wrapper                  |
| child0  | [0, B // 2)   | [0, B // 2 * t)           | of its rows; none where B is 1          |
| child1  | [B // 2, B)   | [B // 2 * t, B * t)       | of its rows                             |

t is the tokens per request. Halves are views of the whole batch's tensors, split on the host. Capture splits as replay
does: upstream relies on its runner for that, and where the runner did not, the halves had nothing to replay. A batch
field without a rule below is refused, not passed on whole.

A rebuild is one launch for each of the three, which know nothing of each other, and one for what no view gives: the
live tokens of each half and, behind a tree mask whose first half ends where lengths say, the second half's mask.

Options in `config.extra`: ``inner`` (trtllm_mha), the wrapped backend's name; others are its own. A backend whose
class says ``tbo_supports_cuda_graph = False`` gets no halves. Source: specs of SGLang's two-batch-overlap backend.
Three fields of upstream's verify batch (draft_token, retrieve_index, retrieve_cum_len) and its list of host lengths are
no metadata and not here, so a split takes eight dispatches less there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..base import Allowances, AttentionBackend, ConfigError
from ..batch import ForwardBatch, SpecInfo
from ..kernels.batch_halves import prepare_batch_halves
from ..kernels.launch import PreparedLaunch
from ..modes import ForwardMode, Implementation
from ..oracle import HostBatch
from ..registry import lookup
from .composed import Composed, Part, joined

Mode = ForwardMode
HALVES = ("child0", "child1")


@dataclass(frozen=True, slots=True)
class Half:
    """Which rows and tokens of a batch a child sees. rows: [first, last) of B; queries: tokens per request."""

    index: int
    first: int
    last: int
    queries: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def rows(self, x: Any) -> Any:
        return None if x is None else x[self.first : self.last]

    def tokens(self, x: Any) -> Any:
        """A live vector may end before the half begins: it is then empty."""
        return None if x is None else x[self.first * self.queries : self.last * self.queries]

    def live(self, requests: int) -> int:
        """Of so many live requests, those in this half."""
        return min(max(requests - self.first, 0), self.size)


def halves_of(batch_size: int, tokens: int) -> list[Half]:
    """The halves that have requests; the second is the larger one."""
    split, queries = batch_size // 2, tokens // batch_size
    bounds = ((0, split), (split, batch_size))
    return [Half(i, first, last, queries) for i, (first, last) in enumerate(bounds) if last > first]


def _kept(value: Any, half: Half) -> Any:
    return value


def _dropped(value: Any, half: Half) -> None:
    """What only draft extend reads: verify batches have none."""


def _refused(value: Any, half: Half) -> None:
    if value is not None:
        raise ConfigError("two-batch overlap cannot split encoder_lens or kv index lists of a draft: pass None")


def _by_rows(value: Any, half: Half) -> Any:
    return half.rows(value)


def _by_tokens(value: Any, half: Half) -> Any:
    return half.tokens(value)


Rule = Callable[[Any, Half], Any]
"""What a half sees of a field."""

BATCH_RULES: dict[str, Rule] = {
    "forward_mode": _kept,
    "actual_forward_mode": _kept,
    "batch_size": lambda value, half: half.size,
    "req_pool_indices": _by_rows,
    "seq_lens": _by_rows,
    "seq_lens_cpu": _by_rows,
    "out_cache_loc": _by_tokens,
    "positions": _by_tokens,
    "encoder_lens": _refused,
    "mamba_track_indices": _by_rows,
    # Set by `TwoBatchOverlap.half` from the whole batch.
    "seq_lens_sum": _kept,
    "num_padding": _kept,
    "num_token_non_padded": _kept,
    "spec_info": _kept,
}

SPEC_RULES: dict[str, Rule] = {
    "draft_token_num": _kept,
    "topk": _kept,
    "num_steps": _kept,
    "num_tokens_per_req": _kept,
    "num_accept_tokens": _dropped,
    "num_accept_tokens_cpu": _dropped,
    "extend_seq_lens": _dropped,
    "positions": _by_tokens,
    "retrieve_next_token": _by_rows,
    "retrieve_next_sibling": _by_rows,
    "kv_indptr": _refused,
    "kv_indices": _refused,
    "custom_mask": _kept,  # set by `TwoBatchOverlap.half_of_mask`
}

HOST_RULES: dict[str, Rule] = {
    "mode": _kept,
    "tokens_per_req": _kept,
    "seq_lens_fill": _kept,
    "req_pool_indices": _by_rows,
    "seq_lens": _by_rows,
    "num_accept_tokens": _by_rows,
    "extend_seq_lens": _by_rows,
    "retrieve_next_token": _by_rows,
    "retrieve_next_sibling": _by_rows,
    "mamba_track_indices": _by_rows,
    "out_cache_loc": _by_tokens,
    "positions": _by_tokens,
    "encoder_lens": _refused,
    "kv_indptr": _refused,
    "kv_indices": _refused,
    # Set by `host_half`.
    "live_requests": _kept,
    "custom_mask": _kept,
}


def split(value: Any, rules: dict[str, Rule], half: Half) -> dict[str, Any]:
    """What a half sees of each field of a batch.

    Raises:
        ConfigError: a field is set that has no rule, or that cannot be split.
    """
    seen = {}
    for field in fields(value):
        given = getattr(value, field.name)
        if field.name in rules:
            seen[field.name] = rules[field.name](given, half)
        elif given is not None:
            raise ConfigError(f"two-batch overlap has no rule for splitting {type(value).__name__}.{field.name}")
    return seen


class TwoBatchOverlap(Composed):
    """Three instances of one backend: whole batch, first half, second half."""

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY})

    def take_options(self) -> None:
        inner = lookup(self.config.extra.get("inner", "trtllm_mha")).load()
        self.primary, *halves = (self.new_child(inner) for _ in range(3))
        self.halves = halves if getattr(self.primary, "tbo_supports_cuda_graph", True) else []
        self.tail = self.primary.tail
        # Recorded halves read static slots, and look at their own batch for nothing but its size; a plan does look.
        self.splits_at_replay = not self.recorded or type(self.primary).plan is not AttentionBackend.plan
        self._split: dict[tuple[ForwardMode, int], list[Part]] = {}
        self._refresh: dict[tuple[ForwardMode, int], PreparedLaunch] = {}

    @property
    def children(self) -> Sequence[AttentionBackend]:
        return (self.primary, *self.halves)

    @property
    def seq_len_fill_value(self) -> int:
        """seq_lens of padding rows: the wrapped backend's."""
        return self.primary.seq_len_fill_value

    @property
    def allowances(self) -> Allowances:
        own = self.primary.allowances
        names = ("primary", *HALVES[: len(self.halves)])
        # The three sets of metadata depend on nothing of each other's; the fourth launch is the halves' live tokens.
        launches = own.fused_launches * len(names) + bool(self.halves)
        return joined(dict.fromkeys(names, own), fused_launches=launches)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.max_bs = max_bs
        self.live_tokens = torch.zeros(2, dtype=torch.int32, device=self.device)
        self.live_of_half = self.live_tokens[:1], self.live_tokens[1:]
        self.second_mask: torch.Tensor | None = None
        cells = max_num_tokens * (self.seq_len_fill_value + max_num_tokens // max_bs)
        self.padding_mask = torch.ones(cells, dtype=torch.bool, device=self.device)
        self.forward_hook("init_cuda_graph_state", max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        key = fb.forward_mode, fb.batch_size
        if in_capture:
            self._prepare(fb)
        if not self.recorded and self.implementation is Implementation.FUSED:
            self._refresh_halves(fb)
        if in_capture or (self.splits_at_replay and key in self.metadata):
            self._split[key] = self._halves(fb)
        super().init_forward_metadata_out_graph(fb, in_capture)

    def init_forward_metadata_in_graph(self, fb: ForwardBatch) -> None:
        if self.recorded:
            self._refresh_halves(fb)
        super().init_forward_metadata_in_graph(fb)

    def parts(self, fb: ForwardBatch) -> list[Part]:
        return [Part("primary", self.primary, fb), *self._split[fb.forward_mode, fb.batch_size]]

    def host_parts(self, batch: HostBatch) -> list[Part]:
        whole = Part("primary", self.primary, batch)
        b = len(batch.seq_lens)
        halves = halves_of(b, b * batch.tokens_per_req) if self.halves else []
        return [whole, *(Part(HALVES[h.index], self.halves[h.index], host_half(batch, h)) for h in halves)]

    def forwarding(self, fb: ForwardBatch, hook: str) -> dict[str, int]:
        """How often each child must see a hook, by attribute."""
        reached = {"primary": 1} | {f"halves.{i}": 1 for i in range(len(self.halves))}
        if hook != "on_after_cuda_graph_warmup" and fb.batch_size == 1:
            reached.pop("halves.0", None)
        return reached

    def _halves(self, fb: ForwardBatch) -> list[Part]:
        if not self.halves:
            return []
        halves = halves_of(fb.batch_size, self._tokens(fb))
        return [Part(HALVES[half.index], self.halves[half.index], self.half(fb, half)) for half in halves]

    def _tokens(self, fb: ForwardBatch) -> int:
        """T of the captured shape. An idle rank's batch has the captured mode, so never zero tokens per request."""
        return fb.batch_size if fb.forward_mode is Mode.DECODE else fb.positions.shape[0]

    def half(self, fb: ForwardBatch, half: Half) -> ForwardBatch:
        """The batch that one half sees."""
        seen = split(fb, BATCH_RULES, half)
        lens = seen["seq_lens_cpu"]
        if lens is not None:
            seen["seq_lens_sum"] = int(lens.sum().item())
        if fb.num_padding is not None:
            seen["num_padding"] = half.size - half.live(fb.batch_size - fb.num_padding)
        counted = self.recorded or self.implementation is Implementation.FUSED
        known = fb.num_token_non_padded is not None and counted
        seen["num_token_non_padded"] = self.live_of_half[half.index] if known else None
        if fb.spec_info is not None:
            spec = split(fb.spec_info, SPEC_RULES, half)
            spec["custom_mask"] = self.half_of_mask(fb, half)
            seen["spec_info"] = SpecInfo(**spec)
        return ForwardBatch(**seen)

    def half_of_mask(self, fb: ForwardBatch, half: Half) -> torch.Tensor | None:
        """Cells of the half's requests; ones for a half that is all padding, as an idle rank has them."""
        mask, n = fb.spec_info.custom_mask, half.queries
        if mask is None:
            return None
        if self.recorded:  # where the second half begins depends on lengths: it gets a copy that begins at 0
            return mask if half.first == 0 else self.second_mask
        if fb.seq_lens_cpu is None:
            raise ConfigError(
                "seq_lens_cpu is None: an eager split finds the second half of a tree mask by lengths on "
                "the host, so keep a mirror of them or record the rebuild"
            )
        first = _cells_before(fb.seq_lens_cpu, half.first, n)
        cells = mask[first:] if half.last == fb.batch_size else mask[: _cells_before(fb.seq_lens_cpu, half.last, n)]
        # Upstream hands the whole mask to a half without cells, and its padding then reads the other half's tree.
        return cells if cells.shape[0] else self.padding_mask[: half.size * n * (self.seq_len_fill_value + n)]

    def _prepare(self, fb: ForwardBatch) -> None:
        """Bind the launch that a rebuild of this size begins with."""
        if not self.halves or fb.num_token_non_padded is None:
            return
        mask = None if fb.spec_info is None or not self.recorded else fb.spec_info.custom_mask
        if mask is not None and (self.second_mask is None or self.second_mask.shape[0] < mask.shape[0]):
            # Kept for every captured size: the first and largest one allocates it.
            self.second_mask = torch.ones_like(mask)
        b, queries = fb.batch_size, self._tokens(fb) // fb.batch_size
        second = None if mask is None else self.second_mask
        self._refresh[fb.forward_mode, b] = prepare_batch_halves(
            fb.num_token_non_padded, fb.seq_lens, mask, self.live_tokens, second, b, b // 2, queries
        )

    def _refresh_halves(self, fb: ForwardBatch) -> None:
        refresh = self._refresh.get((fb.forward_mode, fb.batch_size))
        if refresh is not None:
            refresh()


def _cells_before(lens: torch.Tensor, requests: int, n: int) -> int:
    return sum(int((lens[i] + n) * n) for i in range(requests))


def host_half(batch: HostBatch, half: Half) -> HostBatch:
    """A half of the oracle's batch."""
    live, n = half.live(batch.live_requests), half.queries
    mask = batch.custom_mask
    if mask is not None:
        ends = [sum(int(length + n) * n for length in batch.seq_lens[:k]) for k in (half.first, half.first + live)]
        mask = mask[ends[0] : ends[1]]
    return HostBatch(**split(batch, HOST_RULES, half) | {"live_requests": live, "custom_mask": mask})
