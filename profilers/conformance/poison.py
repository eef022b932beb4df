"""Poison before a rebuild, comparison after it: which cells were written, with what, and what else was touched.

Works on whole storages, so that a store outside a bound view is seen too, and on bit patterns, so that every dtype
compares exactly. All on the device: one host read for a replay that is right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...backends.oracle import Expected

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by element size."""


def bits(t: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return t.view(BITS[t.element_size()])


def poison_bits(element_size: int, salt: int) -> int:
    """A bit pattern that no metadata field holds, another one for each salt."""
    if element_size >= 4:
        return -559_038_737 + salt % 100_003
    return 2 + salt * 37 % 120


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first cell of a field that is not as it must be.

    Attributes:
        kind: ``value`` wrong in a written cell; ``stale``: the cell still holds its poison; ``constant``: a preset was
            overwritten; ``extra``: written although the tail policy leaves it alone; ``outside``: a store behind the
            bound view; ``shape`` or ``overflow``: the field itself is wrong.
        path: the field.
        index: cell, or element of the storage if outside.
        wanted, found: as the field's integers.
    """

    kind: str
    path: str
    index: tuple[int, ...] = ()
    wanted: int | str = ""
    found: int | str = ""

    def __str__(self) -> str:
        at = f"{self.path}[{', '.join(map(str, self.index))}]"
        return {
            "value": f"{at}: wanted {self.wanted}, found {self.found}",
            "stale": f"{at}: wanted {self.wanted}, found its poison {self.found}: not written",
            "constant": f"{at}: a preset of {self.wanted} was overwritten with {self.found}",
            "extra": f"{at}: must be left alone, found {self.found}",
            "outside": f"{self.path}: element {self.index[:1]} of the storage, outside the bound view, was overwritten "
            f"with {self.found}",
            "shape": f"{self.path}: wanted {self.wanted}, found {self.found}",
            "overflow": f"{self.path}: {self.wanted}",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class OnDevice:
    """An `Expected` beside the tensor it is compared with."""

    values: torch.Tensor
    written: torch.Tensor
    held: torch.Tensor  # written, or a preset that must stay
    preset: bool  # nothing is written

    @staticmethod
    def of(expected: Expected, device: torch.device) -> OnDevice:
        written, live = torch.from_numpy(expected.written), torch.from_numpy(expected.live)
        # The driver has taken pageable memory when the call returns; a blocking copy would wait for the device too.
        values, made, held = (
            t.to(device, non_blocking=True) for t in (torch.from_numpy(expected.values), written, written | live)
        )
        return OnDevice(bits(values), made, held, not expected.written.any())


@dataclass(slots=True)
class _Storage:
    """One storage: itself, as it was, as it is poisoned, as it must become. All [bytes] uint8; `inside` is bool."""

    paths: list[str]
    whole: torch.Tensor
    saved: torch.Tensor
    start: torch.Tensor
    wanted: torch.Tensor
    inside: torch.Tensor
    keeps_outside: bool


@dataclass(slots=True)
class Poisoned:
    """Bound tensors whose every cell that is no preset holds poison, until `mismatches` has looked.

    Args:
        bound: metadata tensors by path.
        expected: the oracle's word by path.
        salt: chooses the poison.
        spare: storages that must not be poisoned (the runner's slots, the engine's tables); only compared.
        spills: fields that may write behind their view.
        unordered: fields whose written cells may come in any order along the last axis.
    """

    bound: Mapping[str, torch.Tensor]
    expected: Mapping[str, OnDevice]
    salt: int
    spare: Collection[int] = ()
    spills: Collection[str] = ()
    unordered: Collection[str] = ()
    _storages: list[_Storage] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups: dict[int, list[str]] = {}
        for path, t in self.bound.items():
            if path in self.expected and t.numel():
                groups.setdefault(t.untyped_storage().data_ptr(), []).append(path)
        self._storages = [self._prepare(paths, pointer in self.spare) for pointer, paths in groups.items()]

    def _prepare(self, paths: list[str], spared: bool) -> _Storage:
        first = self.bound[paths[0]]
        whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
        saved, start, inside = whole.clone(), whole.clone(), torch.zeros_like(whole)
        # A storage of presets only is not poisoned: a replay may read every cell of it. Any change is a fault.
        if not (spared or all(self.expected[p].preset for p in paths)):
            bits_of(start, first).fill_(poison_bits(first.element_size(), self.salt))
        for path in paths:
            t, want = self.bound[path], self.expected[path]
            cells = over(start, t)
            cells.copy_(torch.where(want.held & ~want.written, over(saved, t), cells))
            if t.element_size() == 1:  # a byte has no illegal value: make sure that its poison is a wrong one
                cells.copy_(torch.where(want.written & (cells == want.values), cells ^ 1, cells))
            bytes_over(inside, t).fill_(1)
        wanted = start.clone()
        for path in paths:
            cells, want = over(wanted, self.bound[path]), self.expected[path]
            cells.copy_(torch.where(want.held, want.values, cells))
        whole.copy_(start)
        keeps_outside = not (spared or any(p in self.spills for p in paths))
        return _Storage(paths, whole, saved, start, wanted, inside.bool(), keeps_outside)

    def mismatches(self) -> list[Mismatch]:
        """Compare, then give the cells outside the bound views back what they held."""
        compared = []
        for s in self._storages:
            got = s.whole.clone()
            for path in s.paths:
                if path in self.unordered:
                    for buffer in (got, s.wanted):
                        _sort_rows(over(buffer, self.bound[path]), self.expected[path].written)
            wrong = got != s.wanted
            if not s.keeps_outside:
                wrong &= s.inside
            s.whole.copy_(torch.where(s.inside, s.whole, s.saved))
            compared.append((s, got, wrong))
        told = read_together([wrong.any() for _, _, wrong in compared])
        return [m for differs, it in zip(told, compared, strict=True) if differs for m in self._explain(*it)]

    def _explain(self, s: _Storage, got: torch.Tensor, wrong: torch.Tensor) -> list[Mismatch]:
        found = []
        for path in s.paths:
            t, want = self.bound[path], self.expected[path]
            is_, wanted, start = over(got, t), over(s.wanted, t), over(s.start, t)
            cells = (is_ != wanted).nonzero()
            if not len(cells):
                continue
            i = tuple(cells[0].tolist())
            if not want.held[i]:
                kind = "extra"
            elif not want.written[i]:
                kind = "constant"
            else:
                kind = "stale" if is_[i] == start[i] else "value"
            found.append(Mismatch(kind, path, i, int(wanted[i]), int(is_[i])))
        outside = (wrong & ~s.inside).nonzero()
        if len(outside):
            first = self.bound[s.paths[0]]
            element = int(outside[0]) // first.element_size()
            found.append(Mismatch("outside", "+".join(s.paths), (element,), "", int(bits_of(got, first)[element])))
        return found


def read_together(flags: Sequence[torch.Tensor]) -> list[bool]:
    """Values of 0-d tensors, with one wait for the device: processes that share it take turns at every wait."""
    there = [flag for flag in flags if flag.device.type != "cpu"]
    read = iter(torch.stack(there).tolist() if there else ())
    return [bool(flag) if flag.device.type == "cpu" else next(read) for flag in flags]


def _sort_rows(cells: torch.Tensor, written: torch.Tensor) -> None:
    """Put the written cells of each row in ascending order."""
    places = (~written).to(torch.uint8).argsort(dim=-1, stable=True)  # of the written cells first, from left to right
    values = torch.where(written, cells, torch.iinfo(cells.dtype).max).sort(dim=-1).values
    cells.copy_(torch.where(written, torch.empty_like(values).scatter_(-1, places, values), cells))


def bits_of(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A byte buffer as integers of `like`'s size. Trailing bytes that fill no element stay out."""
    size = like.element_size()
    return buffer[: buffer.numel() // size * size].view(BITS[size])


def over(buffer: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The cells of `t` in a copy of its storage, as integers."""
    return bits_of(buffer, t).as_strided(t.shape, t.stride(), t.storage_offset())


def bytes_over(buffer: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The same cells byte by byte: one more axis."""
    size = t.element_size()
    return buffer.as_strided((*t.shape, size), (*(s * size for s in t.stride()), 1), t.storage_offset() * size)


def unfit(bound: Mapping[str, torch.Tensor], expected: Mapping[str, Expected]) -> list[Mismatch]:
    """Fields that cannot be compared cell by cell: missing, of another shape or dtype, or too small."""
    found = []
    for path in bound.keys() | expected.keys():
        if path not in expected:
            found.append(Mismatch("shape", path, (), "a word of the oracle", "none"))
        elif path not in bound:
            found.append(Mismatch("shape", path, (), "a bound tensor", "none"))
        else:
            t, want = bound[path], expected[path]
            wanted = _kind(torch.from_numpy(want.values))
            if _kind(t) != wanted:
                found.append(Mismatch("shape", path, (), wanted, _kind(t)))
            elif want.overflow:
                found.append(Mismatch("overflow", path, (), want.overflow))
    return sorted(found, key=lambda m: m.path)


def _kind(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
