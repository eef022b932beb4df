"""Draft steps inside one graph: forward passes in a row, each with the hidden states of the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..batch import ForwardBatch
from .graph_runner import Outputs


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What the forward pass of one draft step sees. B requests of K branches; everything is on the device.

    Attributes:
        index: i, the step. Attention layers use the metadata of step i.
        batch: the captured batch.
        slots: the runner's static slots, rows of this size, by name. A forward pass reads them and writes none.
        hidden_states: the static slot at step 0, then what the step before returned under this name.
        out_cache_loc: [B * K] int64, write slots of this step; None where no KV is written.
    """

    index: int
    batch: ForwardBatch
    slots: Mapping[str, torch.Tensor]
    hidden_states: torch.Tensor
    out_cache_loc: torch.Tensor | None = None


Forward = Callable[[DraftStep], Outputs | None]
"""Issues the device work of one step; returns its outputs by name."""


def no_work(step: DraftStep) -> None:
    """A forward pass of no kernels."""


def hidden_after(made: Outputs | None, before: torch.Tensor) -> torch.Tensor:
    """Hidden states for the next step: those a step returned, or the same again."""
    return made.get("hidden_states", before) if isinstance(made, Mapping) else before


def write_slots(flat: torch.Tensor, branches: int, steps: int, index: int) -> torch.Tensor:
    """[branches] write slots of one step, from a flat [branches, steps] vector: a column, not a prefix."""
    return flat.view(branches, steps)[:, index].clone()
