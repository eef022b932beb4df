"""What the scheduler hands to a runner for one step, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch import LiveBatch
from ..modes import ForwardMode


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A live batch on the device, as a scheduler hands it over. b requests, t tokens each.

    Those from input_ids on are for runners with a slot of that name; a runner says which of them it needs.
    """

    mode: ForwardMode
    req_pool_indices: torch.Tensor  # [b] int64, device
    seq_lens: torch.Tensor  # [b], device
    seq_lens_cpu: torch.Tensor | None  # [b], host; None where the engine keeps no mirror
    out_cache_loc: torch.Tensor  # [b * t] int64, device
    positions: torch.Tensor  # [b * t] int64, device
    num_accept_tokens: torch.Tensor | None  # [b] int32, device
    num_accept_tokens_cpu: tuple[int, ...] | None
    custom_mask: torch.Tensor | None = None  # flat bool, device
    retrieve_next_token: torch.Tensor | None = None  # [b, N] int64, device
    retrieve_next_sibling: torch.Tensor | None = None  # [b, N] int64, device
    encoder_lens: torch.Tensor | None = None  # [b] int32, device
    mamba_track_indices: torch.Tensor | None = None  # [b] int64, device
    input_ids: torch.Tensor | None = None  # [b * t] int64, device
    hidden_states: torch.Tensor | None = None  # [rows, H], device; rows as the runner's slot has them
    topk_p: torch.Tensor | None = None  # [b, K] float32, device
    topk_index: torch.Tensor | None = None  # [b, K] int64, device
    bonus_tokens: torch.Tensor | None = None  # [b] int64, device
    extend_seq_lens: torch.Tensor | None = None  # [b] int32, device; new tokens of each request

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]


def upload(
    live: LiveBatch,
    device: torch.device | str,
    *,
    lens: torch.dtype = torch.int64,
    rows: torch.dtype = torch.int64,
) -> StepInputs:
    """Put a live batch on the device. lens, rows: dtypes of seq_lens and req_pool_indices, int32 or int64."""
    mirror = torch.from_numpy(live.seq_lens).to(lens)
    accepted = live.num_accept_tokens
    there = lambda x: None if x is None else torch.from_numpy(x).to(device, non_blocking=True)  # noqa: E731
    return StepInputs(
        mode=live.mode,
        req_pool_indices=torch.from_numpy(live.req_pool_indices).to(device, rows, non_blocking=True),
        seq_lens=mirror.to(device, copy=True, non_blocking=True),
        seq_lens_cpu=mirror,
        out_cache_loc=there(live.out_cache_loc),
        positions=there(live.positions),
        num_accept_tokens=there(accepted),
        num_accept_tokens_cpu=None if accepted is None else tuple(accepted.tolist()),
        custom_mask=there(live.custom_mask),
        retrieve_next_token=there(live.retrieve_next_token),
        retrieve_next_sibling=there(live.retrieve_next_sibling),
        encoder_lens=there(live.encoder_lens),
        mamba_track_indices=there(live.mamba_track_indices),
    )
