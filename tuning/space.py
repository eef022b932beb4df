"""What can be tuned: per kernel its parameters, their values and what rules combinations out. Imports no torch.

A grid is fixed when a graph is captured, so a setting is chosen by what is known then: the captured batch size (bucket)
and the table's columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..backends.registry import unknown_message
from ..profilers.sample import Case
from .store import Key


class NotTunable(LookupError):
    """A backend without a kernel that has block sizes; the message lists those that have."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting of a kernel's parameters, under the kernel's own names."""

    values: tuple[tuple[str, int], ...]

    @staticmethod
    def of(**values: int) -> Candidate:
        return Candidate(tuple(values.items()))

    def as_dict(self) -> dict[str, int]:
        return dict(self.values)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with parameters to choose.

    Attributes:
        name: as the store has it.
        default: (bucket, columns) -> what runs untuned. Loads the kernel's module.
        candidates: (bucket, columns, warp_size) -> every setting worth a try, in the order that breaks ties.
    """

    name: str
    default: Callable[[int, int], Candidate]
    candidates: Callable[[int, int, int], Iterator[Candidate]]


PROGRAMS_PER_ROW = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCKS = (64, 128, 256, 512, 1024)
WARPS = (1, 2, 4, 8)
MOST_PROGRAMS = 2048
"""An idle program costs about 0.6 ns: at this many, as much as the rest of the kernel."""
COLUMNS_PER_LANE = (1, 4)
"""Below, lanes idle; above, one lane's loads wait for each other. Measured winners have 1, 2 or 4."""


def _decode_metadata_default(bucket: int, columns: int) -> Candidate:
    from ..backends.kernels.decode_metadata import default_config

    return Candidate.of(**default_config(bucket, columns).as_dict())


def _decode_metadata_candidates(bucket: int, columns: int, warp_size: int) -> Iterator[Candidate]:
    for programs, block, warps in itertools.product(PROGRAMS_PER_ROW, BLOCKS, WARPS):
        if (
            programs <= -(-columns // block)  # a program without a column never helps
            and (block < 2 * columns or block == BLOCKS[0])  # nor does a block that is mostly past the table
            and (programs == 1 or programs * bucket <= MOST_PROGRAMS)
            and COLUMNS_PER_LANE[0] <= block / (warps * warp_size) <= COLUMNS_PER_LANE[1]
        ):
            yield Candidate.of(programs_per_row=programs, block=block, num_warps=warps)


TUNABLE: dict[str, Kernel] = {
    "trtllm_mha": Kernel("decode_metadata", _decode_metadata_default, _decode_metadata_candidates),
}
"""Backend -> the kernel of its fused rebuild."""


def kernel_of(backend: str) -> Kernel:
    """The tunable kernel of a backend.

    Raises:
        NotTunable: it has none.
    """
    if backend not in TUNABLE:
        raise NotTunable(unknown_message("tunable backend", backend, list(TUNABLE)))
    return TUNABLE[backend]


def candidates(case: Case, warp_size: int = 32) -> list[Candidate]:
    """Every setting to try for a case: the default first, then the space in the order that breaks ties."""
    kernel, columns = kernel_of(case.backend), table_columns(case)
    default = kernel.default(case.bucket, columns)
    return list(dict.fromkeys([default, *kernel.candidates(case.bucket, columns, warp_size)]))


def table_columns(case: Case) -> int:
    """Page-table columns of a case, as `AttentionConfig.table_columns` has them."""
    return -(-(case.max_context + max(case.draft_tokens, case.draft_steps)) // case.page_size)


def key_of(case: Case, device: str) -> Key:
    """Under what a choice for `case` is stored. `device` is the GPU's own name, as ``NVIDIA H200``.

    Raises:
        NotTunable: the backend has no tunable kernel.
    """
    return Key(
        device=device,
        kernel=kernel_of(case.backend).name,
        page_size=case.page_size,
        swa=case.swa,
        mode=case.mode,
        bucket=case.bucket,
        columns=table_columns(case),
        context=case.context,
    )
