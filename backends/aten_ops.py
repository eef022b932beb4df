"""Steps of the classic chains that several backends share, op for op as upstream dispatches them."""

from __future__ import annotations

import torch

from .base import AttentionBackend, ConfigError, too_many_slots
from .batch import ForwardBatch
from .modes import Implementation


def write_running_sum(indptr: torch.Tensor, counts: torch.Tensor) -> None:
    """indptr[1:] = running sum of counts; index 0 keeps its 0. cumsum, slice, copy_: the sum is int64, the copy
    narrows."""
    indptr[1:] = torch.cumsum(counts, dim=0)


def translate_in_place(indices: torch.Tensor, indptr: torch.Tensor, full_to_swa: torch.Tensor) -> None:
    """Map the live entries of an index list to sliding-window slots.

    How many are live is read from the device, twice: upstream slices with a device scalar on both sides.
    """
    end = indptr[-1]
    indices[:end] = full_to_swa[indices[:end]]


def write_swa_slots(buffer: torch.Tensor, out_cache_loc: torch.Tensor, full_to_swa: torch.Tensor) -> torch.Tensor:
    """Mapped write slots at the front of `buffer`, zeros behind; the front.

    Raises:
        ConfigError: more slots than the buffer holds.
    """
    return buffer[: refill_swa_slots(buffer, out_cache_loc, full_to_swa)]


def refill_swa_slots(buffer: torch.Tensor, out_cache_loc: torch.Tensor, full_to_swa: torch.Tensor) -> int:
    """The same for callers that have bound the front already; how many slots were written."""
    n = check_slots(out_cache_loc, buffer)
    buffer[n:].zero_()
    buffer[:n].copy_(full_to_swa[out_cache_loc])
    return n


def check_slots(out_cache_loc: torch.Tensor, buffer: torch.Tensor) -> int:
    """Number of write slots.

    Raises:
        ConfigError: more than the buffer holds.
    """
    n, room = out_cache_loc.shape[0], buffer.shape[0]
    if n > room:
        raise too_many_slots(n, room)
    return n


def check_mask_as_captured(mask: torch.Tensor | None, captured: torch.Tensor | None) -> None:
    """A captured graph reads a tree mask, or none; a replay cannot change that.

    Raises:
        ConfigError: one has a mask and the other has not.
    """
    if (mask is None) is not (captured is None):
        had, has = ("without" if x is None else "with" for x in (captured, mask))
        raise ConfigError(f"captured {had} a custom_mask, replayed {has} one")


def check_mask_fits(mask: torch.Tensor, buffer: torch.Tensor) -> None:
    """Raises ConfigError: the tree mask has more cells than the buffer that graphs read."""
    if mask.shape[0] > buffer.shape[0]:
        raise ConfigError(
            f"custom_mask has {mask.shape[0]} cells, its buffer holds {buffer.shape[0]}: it was sized for fewer "
            "requests, draft tokens or tokens of context"
        )


def checked_mask(fb: ForwardBatch, captured: torch.Tensor | None, buffer: torch.Tensor | None) -> torch.Tensor | None:
    """The batch's tree mask, as captured and within its buffer.

    Raises:
        ConfigError: it is not.
    """
    mask = fb.spec_info.custom_mask
    check_mask_as_captured(mask, captured)
    if mask is not None:
        check_mask_fits(mask, buffer)
    return mask


def bind_mask(backend: AttentionBackend, fb: ForwardBatch) -> torch.Tensor | None:
    """The buffer that a captured graph reads its tree mask from; None where the capture has none. Baked either way.

    Raises:
        ConfigError: the mask does not fit.
    """
    mask = fb.spec_info.custom_mask
    if mask is None:
        return None
    check_mask_fits(mask, backend.custom_mask)
    if backend.recorded and backend.implementation is not Implementation.FUSED and backend.cell_numbers is None:
        # The recorded ATen chain cannot slice by a live length, it selects by cell number.
        backend.cell_numbers = torch.arange(backend.custom_mask.shape[0], device=backend.device)
    return backend.custom_mask


def live_token_count(fb: ForwardBatch, otherwise: str = "how long the live mask is") -> torch.Tensor:
    """How many tokens of a padded batch are live: [1] int32, on the device.

    Raises:
        ConfigError: the batch does not say; `otherwise` is what nobody can tell then.
    """
    if fb.num_token_non_padded is None:
        raise ConfigError(f"num_token_non_padded is None: recorded work cannot tell {otherwise}")
    return fb.num_token_non_padded


def padded_mask(mask: torch.Tensor, cells: int) -> torch.Tensor:
    """The tree mask, `cells` long: padding rows have none in it, and see everything."""
    missing = cells - mask.shape[0]
    if missing <= 0:
        return mask
    return torch.cat([mask, torch.full((missing,), True, dtype=torch.bool, device=mask.device)])


def tokens_on_host(fb: ForwardBatch) -> int:
    """The sum of a padded batch's seq_lens, from the host.

    Raises:
        ConfigError: the engine keeps neither the sum nor a mirror.
    """
    if fb.seq_lens_sum is not None:
        return fb.seq_lens_sum
    if fb.seq_lens_cpu is None:
        raise ConfigError(
            "seq_lens_sum and seq_lens_cpu are None: an eager rebuild by ATen pads a tree mask to the sum of lengths "
            "on the host, so keep a mirror of them, or take a recorded or the fused rebuild"
        )
    return int(fb.seq_lens_cpu[: fb.batch_size].sum())


def copy_live_mask(
    buffer: torch.Tensor,
    mask: torch.Tensor,
    mask_indptr: torch.Tensor,
    live: torch.Tensor,
    bs: int,
    cell_numbers: torch.Tensor,
) -> None:
    """The live requests' cells of a static tree mask to the front of `buffer`, as a graph can record it.

    In an idle step padding is all there is, and it may see everything.

    Args:
        buffer: uint8, at least as long as the mask.
        mask_indptr: [bs + 1] int64, where each request's cells begin.
        live: [1] int32, live requests.
        cell_numbers: [>=cells] int64, 0, 1, ...
    """
    cells, idle = mask.shape[0], live == 0
    end = mask_indptr[live + idle * bs]
    front = buffer[:cells]
    front.copy_(torch.where(cell_numbers[:cells] < end, mask | idle, front))
