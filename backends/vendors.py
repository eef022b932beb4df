"""Vendor planners, where their packages are installed, beside the references that stand in for them.

Only those whose call the specification gives. Each comparison returns one sentence for each way in which the vendor's
plan differs from ours in what an attention kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from .schedules import paged_mqa_schedule, split_kv


class VendorMissing(ImportError):
    """The package is not installed here."""


def vendor_function(path: str) -> Any:
    """``package.module.function`` of an installed package.

    Raises:
        VendorMissing: it is not there, or does not load on this machine.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:
        raise VendorMissing(f"{module} is not installed, or has no {name} ({error})") from error


def compare_split_kv(get_mla_metadata: Callable, lens: Sequence[int], device: torch.device) -> list[str]:
    """FlashMLA's ``get_mla_metadata(lens, query rows, KV heads)``: parts [P, 8] and the running number of splits.

    Of a part without work only the first request, bs, means something; column 7 is never read.
    """
    given = torch.tensor(lens, dtype=torch.int32, device=device)
    parts, num_splits = (t.cpu().numpy() for t in get_mla_metadata(given, 32, 1))
    ours = split_kv(list(lens), len(parts))
    wanted = np.array(ours.parts, dtype=np.int32)
    busy = wanted[:, 0] < len(lens)
    idle = _first_difference("begin_request of idle parts", parts[~busy, 0], wanted[~busy, 0])
    return [
        *_first_difference("num_splits", num_splits, np.array(ours.num_splits, dtype=np.int32)),
        *_first_difference("parts", parts[busy, :7], wanted[busy, :7]),
        *idle,
    ]


def compare_paged_mqa(get_paged_mqa_logits_metadata: Callable, lens: Sequence[int], device: torch.device) -> list[str]:
    """DeepGEMM's ``get_paged_mqa_logits_metadata(ctx_lens [B, 1], block size, SMs)``: [SMs + 1, 2]."""
    given = torch.tensor(lens, dtype=torch.int32, device=device).view(-1, 1)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 12
    found = get_paged_mqa_logits_metadata(given, 64, sms).cpu().numpy()
    return _first_difference("schedule", found, np.array(paged_mqa_schedule(lens, sms), dtype=np.int32))


def _first_difference(what: str, found: np.ndarray, wanted: np.ndarray) -> list[str]:
    if found.shape != wanted.shape:
        return [f"{what} is {list(found.shape)}, the reference's {list(wanted.shape)}"]
    wrong = np.argwhere(found != wanted)
    if not len(wrong):
        return []
    i = tuple(wrong[0].tolist())
    return [f"{what}{list(i)} is {found[i]}, the reference has {wanted[i]}"]


@dataclass(frozen=True, slots=True)
class Vendor:
    """How a vendor's planner is compared with its reference."""

    function: str
    compare: Callable[[Callable, Sequence[int], torch.device], list[str]]


VENDORS = {
    vendor.function: vendor
    for vendor in (
        Vendor("sgl_kernel.flash_mla.get_mla_metadata", compare_split_kv),
        Vendor("deep_gemm.get_paged_mqa_logits_metadata", compare_paged_mqa),
    )
}
"""By function, as the registry names them."""
