"""Static input buffers of runners: what each holds at capture, and what its padding holds at replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .inputs import StepInputs


@dataclass(frozen=True, slots=True)
class SlotRule:
    """How one slot is filled.

    Attributes:
        per_req: entries of one request.
        init: what it holds when a size is captured.
        pad: what the rows behind the live ones hold at replay; None keeps their last content.
        host: on the host, so copied apart.
    """

    per_req: int
    init: int | float
    pad: int | float | None
    host: bool


@dataclass(slots=True)
class BufferPool:
    """Buffers that runners of one process share by (name, elements, dtype, device).

    They alias: safe because each runner fills its slots right before its own replay and resets them before capture.
    """

    _buffers: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of this shape, with whatever content it has."""
        elements = torch.Size(shape).numel()
        key = name, elements, dtype, device
        if key not in self._buffers:
            self._buffers[key] = torch.empty(elements, dtype=dtype, device=device)
        return self._buffers[key].view(shape)


class StaticSlots:
    """A runner's input buffers. Graphs read these addresses; every fill resets the padding behind the live rows.

    Args:
        max_bs: largest captured batch.
        tokens_per_req: t, tokens per request and step.
        fill: seq_lens of padding rows.
        lens, rows: dtypes of seq_lens and req_pool_indices, int32 or int64.
        mask_context: longest context of a tree mask, in tokens; 0 without a mask (topk of at most 1).
        encoder_fill: encoder_lens at start, or None without an encoder; its padding keeps the last content.
        slots_per_token: write slots for each token; S where a draft decode brings those of all steps.
        slot_init: out_cache_loc at capture.
        tracks: whether recurrent states are cached, so that steps bring mamba_track_indices.
        pool: buffers shared with other runners; None for buffers of its own.
    """

    req_pool_indices: torch.Tensor  # [max_bs]
    seq_lens: torch.Tensor  # [max_bs]
    seq_lens_cpu: torch.Tensor  # [max_bs], host
    out_cache_loc: torch.Tensor  # [max_bs * slots_per_req] int64
    input_ids: torch.Tensor  # [max_bs * t] int64
    positions: torch.Tensor  # [max_bs * t] int64
    num_accept_tokens: torch.Tensor  # [max_bs] int32
    extend_seq_lens: torch.Tensor  # [max_bs] int32
    retrieve_next_token: torch.Tensor  # [max_bs, t] int64
    retrieve_next_sibling: torch.Tensor  # [max_bs, t] int64
    encoder_lens: torch.Tensor | None  # [max_bs] int32
    mamba_track_indices: torch.Tensor | None  # [max_bs] int64

    def __init__(
        self,
        max_bs: int,
        tokens_per_req: int,
        fill: int,
        device: torch.device | str,
        *,
        lens: torch.dtype = torch.int64,
        rows: torch.dtype = torch.int64,
        mask_context: int = 0,
        encoder_fill: int | None = None,
        slots_per_token: int = 1,
        slot_init: int = 0,
        tracks: bool = False,
        pool: BufferPool | None = None,
    ) -> None:
        t, tokens = tokens_per_req, max_bs * tokens_per_req
        self.max_bs, self.tokens_per_req, self.fill_value = max_bs, t, fill
        self.slots_per_req = t * slots_per_token
        self.pooled = pool is not None
        self._pool, self._device = pool, torch.device(device)
        self._rules: dict[str, SlotRule] = {}
        self.add("req_pool_indices", dtype=rows)
        self.add("seq_lens", dtype=lens, init=fill, pad=fill)
        self.add("seq_lens_cpu", dtype=lens, init=fill, pad=fill, host=True)
        self.add("out_cache_loc", self.slots_per_req, init=slot_init)
        self.add("input_ids", t, pad=None)
        self.add("positions", t)
        self.add("num_accept_tokens", dtype=torch.int32, init=t, pad=t)
        self.add("extend_seq_lens", dtype=torch.int32, init=t, pad=t)
        # As wide as this runner's tokens: a buffer of the same size may have another runner's layout.
        self.add("retrieve_next_token", width=(t,), init=-1, pad=None, shared=False)
        self.add("retrieve_next_sibling", width=(t,), init=-1, pad=None, shared=False)
        self.encoder_lens = None
        if encoder_fill is not None:
            self.add("encoder_lens", dtype=torch.int32, init=encoder_fill, pad=None)
        self.mamba_track_indices = None
        if tracks:
            self.add("mamba_track_indices")
        self.num_token_non_padded = torch.zeros(1, dtype=torch.int32, device=device)
        cells = tokens * (mask_context + t) if mask_context else 0
        self.custom_mask = torch.ones(cells, dtype=torch.bool, device=device) if cells else None
        # Padding rows of an idle step: they see everything, and no stale tree.
        self.idle_mask = torch.ones(tokens * (fill + t), dtype=torch.bool, device=device) if cells else None

    def add(
        self,
        name: str,
        per_req: int = 1,
        *,
        dtype: torch.dtype = torch.int64,
        init: int | float = 0,
        pad: int | float | None = 0,
        width: tuple[int, ...] = (),
        host: bool = False,
        shared: bool = True,
    ) -> torch.Tensor:
        """Allocate slot `name`, [max_bs * per_req, *width], filled from the step's field of that name.

        Args:
            init, pad: see SlotRule.
            host: on the host.
            shared: from the pool, if there is one; False where the layout depends on this runner's width.
        """
        shape, device = (self.max_bs * per_req, *width), torch.device("cpu") if host else self._device
        if self._pool is not None and shared:
            buffer = self._pool.take(name, shape, dtype, device)
        else:
            buffer = torch.empty(shape, dtype=dtype, device=device)
        buffer.fill_(init)
        self._rules[name] = SlotRule(per_req, init, pad, host)
        setattr(self, name, buffer)
        return buffer

    @property
    def rules(self) -> Mapping[str, SlotRule]:
        """How each slot is filled, by name."""
        return self._rules

    def reset(self, bucket: int) -> None:
        """What a capture of `bucket` must find, whoever used the buffers before."""
        for name, rule in self._rules.items():
            if rule.pad is not None:
                getattr(self, name)[: bucket * rule.per_req].fill_(rule.init)

    def slices(self, bucket: int) -> dict[str, torch.Tensor]:
        """Every slot's rows of a captured size, by name."""
        return {name: getattr(self, name)[: bucket * rule.per_req] for name, rule in self._rules.items()}

    def fill(self, step: StepInputs, bucket: int, only: tuple[str, ...] = ()) -> None:
        """Reset the padding [b:bucket], then copy the live rows in, one grouped copy for each pair of dtypes.

        Args:
            only: slots to fill, all by default.
        """
        b, copies = step.batch_size, defaultdict(lambda: ([], []))
        for name, rule in self._rules.items():
            live = getattr(step, name, None)
            # An idle step brings hardly anything, and all of its rows are padding.
            if (live is None and b) or (only and name not in only):
                continue
            slot, n = getattr(self, name), rule.per_req
            if rule.pad is not None and b < bucket:
                slot[b * n : bucket * n].fill_(rule.pad)
            if live is None:
                continue
            into, source = copies[rule.host, slot.dtype, live.dtype]
            into.append(slot[: b * n])
            source.append(live)
        if self.custom_mask is not None and step.custom_mask is not None and not only:
            # In place: a recorded rebuild reads this address, whoever built the tree.
            self.custom_mask[: step.custom_mask.shape[0]].copy_(step.custom_mask)
        for into, source in copies.values():
            torch._foreach_copy_(into, source)
        if not only:
            self.num_token_non_padded.fill_(b * self.tokens_per_req)
