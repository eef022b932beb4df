"""Does a rebuild leave what the oracle says? Poison before, comparison after, one host view for both.

Poison differs with every use, so that a copy of an older poison is not taken for the new one, and no legal value of a
metadata field equals it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..backends.base import tensors_of
from ..backends.modes import ForwardMode
from ..backends.oracle import Expected, HostBatch, HostPools
from ..backends.runners.decode import DecodeRunner, StaticSlots, StepInputs

POISON = -559_038_000


def host_pools(runner: DecodeRunner) -> HostPools:
    """The engine's tables on the host."""
    pools = runner.backend.pools
    return HostPools(
        req_to_token=pools.req_to_token.cpu().numpy(),
        full_to_swa=_host(pools.full_to_swa),
        swa_write=pools.swa_write,
        state_slots=_host(pools.state_slots),
        physical_slots=_host(pools.physical_slots),
        ring_cursors=_copy(pools.ring_cursors),
        ring_length=pools.ring_length,
    )


def host_batch(slots: StaticSlots, mode: ForwardMode, bucket: int, step: StepInputs) -> HostBatch:
    """The padded batch of a captured size that the last fill of `slots`, with `step`, made; on the host."""
    s, b, t = slots, bucket, slots.tokens_per_req
    return HostBatch(
        mode=str(mode),
        req_pool_indices=_host(s.req_pool_indices[:b]),
        seq_lens=_host(s.seq_lens[:b]),
        out_cache_loc=_host(s.out_cache_loc[: b * s.slots_per_req]),
        tokens_per_req=t,
        num_accept_tokens=_host(s.num_accept_tokens[:b]),
        positions=_host(s.positions[: b * t]),
        custom_mask=_host(step.custom_mask),
        live_requests=step.batch_size,
        retrieve_next_token=_host(step.retrieve_next_token),
        retrieve_next_sibling=_host(step.retrieve_next_sibling),
        encoder_lens=None if s.encoder_lens is None else _host(s.encoder_lens[:b]),
        seq_lens_fill=s.fill_value,
        mamba_track_indices=None if s.mamba_track_indices is None else _host(s.mamba_track_indices[:b]),
    )


def poison_value(dtype: np.dtype | torch.dtype, seed: int) -> int:
    """A value of `dtype` that no metadata field holds, another one for each seed."""
    if str(dtype).endswith(("int32", "int64")):
        return POISON - seed % 997
    return 249 - seed % 7 if str(dtype).endswith("uint8") else 0


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first cell of a field that is not as it must be."""

    path: str
    index: tuple[int, ...]
    wanted: int
    found: int
    untouched: bool

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        rule = f"must stay {self.wanted}: a rebuild may not write it" if self.untouched else f"wanted {self.wanted}"
        return f"{self.path}[{at}] is {self.found}, {rule}"


def replay_and_compare(runner: DecodeRunner, step: StepInputs, seed: int) -> list[Disagreement]:
    """Load `step`, poison every cell that is no preset, rebuild and launch, compare with the oracle.

    Written and preset cells must hold the oracle's values, all others their poison. One disagreement a field.
    """
    runner.load_batch(step)
    bound = tensors_of(runner.backend.metadata[runner.mode, runner.bucket])
    fields = runner.backend.expected(host_batch(runner.slots, runner.mode, runner.bucket, step), host_pools(runner))
    for path, field in fields.items():
        preset = torch.from_numpy(field.live & ~field.written).to(bound[path].device)
        bound[path].masked_fill_(~preset, poison_value(bound[path].dtype, seed))
    runner.replay()
    return [d for path, field in fields.items() if (d := _first(path, field, _host(bound[path]), seed))]


def _first(path: str, field: Expected, found: np.ndarray, seed: int) -> Disagreement | None:
    held = field.written | field.live
    wanted = np.where(held, field.values, poison_value(found.dtype, seed))
    wrong = np.argwhere(found != wanted)
    if not len(wrong):
        return None
    i = tuple(int(x) for x in wrong[0])
    return Disagreement(path, i, int(wanted[i]), int(found[i]), untouched=not held[i])


def _copy(x: torch.Tensor | None) -> np.ndarray | None:
    """On the host, and not what a rebuild is going to change."""
    return None if x is None else _host(x).copy()


def _host(x: torch.Tensor | None) -> np.ndarray | None:
    return None if x is None else x.cpu().numpy()
