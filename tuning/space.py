"""What can be tuned: per kernel its parameters, their values and what rules combinations out. Imports no torch.

A grid is fixed when a graph is captured, so a setting is chosen by what is known then: the captured batch size (bucket)
and the table's columns.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..backends.registry import unknown_message
from ..backends.tunable import KERNELS, TunableKernel
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
class Shape:
    """What bounds the settings of a captured kernel: all that is known before lengths are."""

    bucket: int
    columns: int
    warp_size: int


@dataclass(frozen=True, slots=True)
class Space:
    """What may be set.

    Attributes:
        values: parameter -> values, in the order that breaks ties. Others stay as the default has them.
        cells_per_lane: fewest and most table cells of one lane and turn. Below, lanes idle; above, registers run out.
    """

    values: dict[str, tuple[int, ...]]
    cells_per_lane: tuple[int, int]


PAGES = Space(
    {
        "programs_per_row": (1, 2, 4, 8, 16, 32, 64, 128),
        "block": (64, 128, 256, 512, 1024),
        "num_warps": (1, 2, 4, 8),
        "rows": (1, 2, 4),
        "early": (0, 64),
    },
    cells_per_lane=(1, 4),  # measured winners have 1, 2 or 4
)
LISTS = Space(
    {
        "programs_per_row": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        "block": (256, 512, 1024, 2048),
        "num_warps": (2, 4, 8),
    },
    cells_per_lane=(2, 16),  # 12 bytes a token: bound by memory, so many loads on their way at a time
)
ROW_AT_A_TIME = Space({name: PAGES.values[name] for name in ("programs_per_row", "block", "num_warps")}, (1, 4))
SPACES: dict[str, Space] = {
    "decode_metadata": PAGES,
    "block_table": ROW_AT_A_TIME,
    "csr_metadata": LISTS,
    "paged_lists": LISTS,
}
"""By kernel."""

MOST_PROGRAMS = 2048
"""An idle program costs about 0.6 ns: at this many, as much as the rest of the kernel."""

Setting = Mapping[str, int]
Rule = Callable[[Setting, Shape, Space], bool]


def _programs(setting: Setting, shape: Shape) -> int:
    return setting["programs_per_row"] * -(-shape.bucket // setting.get("rows", 1))


def _cells_fit(setting: Setting, shape: Shape, space: Space) -> bool:
    low, high = space.cells_per_lane
    return low <= setting["block"] * setting.get("rows", 1) / (setting["num_warps"] * shape.warp_size) <= high


CONSTRAINTS: dict[str, Rule] = {
    "programs without a column": lambda s, on, space: s["programs_per_row"] <= -(-on.columns // s["block"]),
    "blocks mostly past the table": lambda s, on, space: (
        s["block"] < 2 * on.columns or s["block"] == space.values["block"][0]
    ),
    "more rows than the batch has": lambda s, on, space: s.get("rows", 1) <= on.bucket,
    "early reads past the table, or of many rows": lambda s, on, space: (
        s.get("early", 0) == 0 or (s["early"] < 2 * on.columns and s.get("rows", 1) == 1)
    ),
    f"more than {MOST_PROGRAMS} programs": lambda s, on, space: (
        s["programs_per_row"] == 1 or _programs(s, on) <= MOST_PROGRAMS
    ),
    "too few or too many cells a lane": _cells_fit,
}
"""What is wrong with a combination -> whether a setting is free of it."""


def kernel_of(backend: str) -> TunableKernel:
    """The tunable kernel of a backend.

    Raises:
        NotTunable: it has none.
    """
    if backend not in KERNELS:
        raise NotTunable(unknown_message("tunable backend", backend, list(KERNELS)))
    return KERNELS[backend]


def representatives() -> list[str]:
    """One backend for each tunable kernel."""
    first: dict[TunableKernel, str] = {}
    for name, kernel in KERNELS.items():
        first.setdefault(kernel, name)
    return list(first.values())


def candidates(case: Case, warp_size: int = 32) -> list[Candidate]:
    """Every setting to try for a case: the default first, then the space in the order that breaks ties."""
    return list(dict.fromkeys([default(case), *(c for c, broken in _combinations(case, warp_size) if not broken)]))


def default(case: Case) -> Candidate:
    """What runs untuned."""
    return Candidate.of(**kernel_of(case.backend).default_of(case.bucket, columns_of(case)))


def ruled_out(case: Case, warp_size: int = 32) -> dict[str, int]:
    """How many combinations each constraint rules out, counted at the first that one breaks."""
    return dict(Counter(broken for _, broken in _combinations(case, warp_size) if broken))


def _combinations(case: Case, warp_size: int) -> Iterator[tuple[Candidate, str]]:
    """Every combination of a kernel's values, with the first constraint that it breaks."""
    space, names = SPACES[kernel_of(case.backend).name], default(case).as_dict()
    shape = Shape(case.bucket, columns_of(case), warp_size)
    axes = [space.values.get(name, (value,)) for name, value in names.items()]
    for values in itertools.product(*axes):
        setting = dict(zip(names, values, strict=True))
        broken = next((what for what, holds in CONSTRAINTS.items() if not holds(setting, shape, space)), "")
        yield Candidate.of(**setting), broken


def columns_of(case: Case) -> int:
    """What a kernel's default is chosen by, besides the batch size: columns of its table, or tokens of its lists."""
    if SPACES[kernel_of(case.backend).name] is LISTS:
        return case.max_context
    return table_columns(case)


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
        columns=columns_of(case),
        context=case.context,
        backend=case.backend,
    )
