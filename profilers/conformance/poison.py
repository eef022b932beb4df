"""Poison before a rebuild, comparison after it: which cells were written, with what, and what else was touched.

Works on whole storages, so that a store outside a bound view is seen too, and on bit patterns, so that every dtype
compares exactly. All on the device: what replays left is kept there until somebody asks, for many of them at once.
"""

from __future__ import annotations

import operator
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
            overwritten, or state is not what it must be; ``extra``: written although the tail policy leaves it alone;
            ``outside``: a store behind the bound view; ``shape`` or ``overflow``: the field itself is wrong.
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
            "constant": f"{at}: a preset or state that must be {self.wanted} is {self.found}",
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
    presets: bool  # some cells are held and not written
    preset: bool  # nothing is written

    @staticmethod
    def of(expected: Expected, device: torch.device) -> OnDevice:
        presets = bool((expected.live & ~expected.written).any())
        # The driver has taken pageable memory when the call returns; a blocking copy would wait for the device too.
        there = lambda x: torch.from_numpy(x).to(device, non_blocking=True)  # noqa: E731
        written = there(expected.written)
        held = there(expected.written | expected.live) if presets else written
        return OnDevice(bits(there(expected.values)), written, held, presets, not expected.written.any())


@dataclass(frozen=True, slots=True)
class _Place:
    """One storage and the fields in it."""

    paths: tuple[str, ...]
    whole: torch.Tensor  # [bytes] uint8
    inside: torch.Tensor  # [bytes] bool: bytes of some field
    covered: bool  # one field is all of it


class Layout:
    """Where bound tensors lie. Made once for tensors that stay; `fits` tells whether these are still the same."""

    def __init__(self, bound: Mapping[str, torch.Tensor]) -> None:
        self._tensors = list(bound.values())
        groups: dict[int, list[str]] = {}
        for path, t in bound.items():
            if t.numel():
                groups.setdefault(t.untyped_storage().data_ptr(), []).append(path)
        self.places = [_place(paths, bound) for paths in groups.values()]

    @property
    def held_bytes(self) -> int:
        return sum(place.inside.numel() for place in self.places)

    def fits(self, bound: Mapping[str, torch.Tensor]) -> bool:
        return len(bound) == len(self._tensors) and all(map(operator.is_, bound.values(), self._tensors))


def _place(paths: list[str], bound: Mapping[str, torch.Tensor]) -> _Place:
    first = bound[paths[0]]
    whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    inside, covered = torch.zeros_like(whole), False
    for path in paths:
        t = bound[path]
        bytes_over(inside, t).fill_(1)
        covered |= t.is_contiguous() and t.numel() * t.element_size() == whole.numel()
    return _Place(tuple(paths), whole, inside.bool(), covered)


@dataclass(slots=True)
class _Storage:
    """A storage as it was, as it is poisoned, as it must become. All [bytes] uint8; `saved` is None where nothing of it
    outlives a comparison."""

    place: _Place
    saved: torch.Tensor | None
    start: torch.Tensor
    wanted: torch.Tensor
    keeps_outside: bool


@dataclass(frozen=True, slots=True)
class _Left:
    """A storage after a replay: its bytes, and which of them are wrong."""

    storage: _Storage
    got: torch.Tensor
    wrong: torch.Tensor


@dataclass(slots=True)
class Poisoned:
    """Bound tensors whose every cell that is no preset holds poison, until `compare` has looked.

    Args:
        bound: metadata tensors by path.
        expected: the oracle's word by path.
        salt: chooses the poison.
        spare: storages that must not be poisoned (the runner's slots, the engine's tables); only compared.
        spills: fields that may write behind their view.
        unordered: fields whose written cells may come in any order along the last axis.
        layout: of `bound`, if it is known.
    """

    bound: Mapping[str, torch.Tensor]
    expected: Mapping[str, OnDevice]
    salt: int
    spare: Collection[int] = ()
    spills: Collection[str] = ()
    unordered: Collection[str] = ()
    layout: Layout | None = None
    _storages: list[_Storage] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = self.layout or Layout(self.bound)
        for place in layout.places:
            paths = [path for path in place.paths if path in self.expected]
            if paths:
                self._storages.append(self._prepare(place, paths))

    def _prepare(self, place: _Place, paths: list[str]) -> _Storage:
        first, words = self.bound[paths[0]], [self.expected[path] for path in paths]
        spared = place.whole.untyped_storage().data_ptr() in self.spare
        # A storage of presets only is not poisoned: a replay may read every cell of it. Any change is a fault.
        as_it_is = spared or all(word.preset for word in words)
        presets = any(word.presets for word in words)
        saved = place.whole.clone() if as_it_is or presets or not place.covered else None
        if as_it_is:
            start = saved
        else:
            start = torch.empty_like(place.whole) if saved is None else saved.clone()
            bits_of(start, first).fill_(poison_bits(first.element_size(), self.salt))
            for path, word in zip(paths, words, strict=True):
                self._keep_presets(path, word, start, saved)
        wanted = start.clone()
        for path, word in zip(paths, words, strict=True):
            cells = over(wanted, self.bound[path])
            torch.where(word.held, word.values.to(cells.dtype), cells, out=cells)
        if not as_it_is:
            place.whole.copy_(start)
        keeps_outside = not (spared or any(path in self.spills for path in paths))
        return _Storage(place, saved, start, wanted, keeps_outside)

    def _keep_presets(self, path: str, word: OnDevice, start: torch.Tensor, saved: torch.Tensor | None) -> None:
        t = self.bound[path]
        cells = over(start, t)
        if word.presets:
            torch.where(word.held & ~word.written, over(saved, t), cells, out=cells)
        if t.element_size() == 1:  # a byte has no illegal value: make sure that its poison is a wrong one
            torch.where(word.written & (cells == word.values), cells ^ 1, cells, out=cells)

    def compare(self) -> Compared:
        """Keep what is there now, and give the cells outside the bound views back what they held. Waits for nothing."""
        left = []
        for s in self._storages:
            whole = s.place.whole
            got = whole.clone()
            for path in s.place.paths:
                if path in self.unordered and path in self.expected:
                    for buffer in (got, s.wanted):
                        _sort_rows(over(buffer, self.bound[path]), self.expected[path].written)
            wrong = got != s.wanted
            if not (s.keeps_outside or s.place.covered):
                wrong &= s.place.inside
            if not s.place.covered:
                torch.where(s.place.inside, whole, s.saved, out=whole)
            left.append(_Left(s, got, wrong))
        return Compared(self.bound, self.expected, left, [one.wrong.any() for one in left])

    def mismatches(self) -> list[Mismatch]:
        """Compare and read."""
        compared = self.compare()
        return compared.mismatches(read_together(compared.flags))


@dataclass(frozen=True, slots=True)
class Compared:
    """What a replay left, on the device.

    Attributes:
        flags: one for each storage, 0-d: something in it is wrong. For `mismatches`, once they are read.
    """

    bound: Mapping[str, torch.Tensor]
    expected: Mapping[str, OnDevice]
    left: Sequence[_Left]
    flags: list[torch.Tensor]

    @property
    def held_bytes(self) -> int:
        """Memory that is kept for an explanation."""
        return sum(4 * left.got.numel() for left in self.left)

    def mismatches(self, told: Sequence[bool]) -> list[Mismatch]:
        """The first wrong cell of each field and of each storage outside its fields. told: values of `flags`."""
        return [m for differs, left in zip(told, self.left, strict=True) if differs for m in self._explain(left)]

    def _explain(self, left: _Left) -> list[Mismatch]:
        s, found = left.storage, []
        paths = [path for path in s.place.paths if path in self.expected]
        for path in paths:
            t, want = self.bound[path], self.expected[path]
            is_, wanted, start = over(left.got, t), over(s.wanted, t), over(s.start, t)
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
        outside = (left.wrong & ~s.place.inside).nonzero()
        if len(outside):
            first = self.bound[paths[0]]
            element = int(outside[0]) // first.element_size()
            found.append(Mismatch("outside", "+".join(paths), (element,), "", int(bits_of(left.got, first)[element])))
        return found


class Watch:
    """Tensors that must stay as they are: one copy of all of them, one comparison."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._names = list(tensors)
        self._bytes = [t.view(torch.uint8).flatten() for t in tensors.values()]
        self._devices = sorted({t.device.type for t in tensors.values()})

    def copy(self) -> list[torch.Tensor]:
        """All bytes as they are now, one tensor for each kind of device. Tensors of one kind share a device."""
        return [torch.cat([t for t in self._bytes if t.device.type == kind]) for kind in self._devices]

    def changed(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> list[str]:
        """Names of those that differ. Waits for the device."""
        found = []
        for kind, old, new in zip(self._devices, before, after, strict=True):
            names = [name for name, t in zip(self._names, self._bytes, strict=True) if t.device.type == kind]
            sizes = [t.numel() for t in self._bytes if t.device.type == kind]
            differs = [part.any() for part in (old != new).split(sizes)]
            found += [name for name, yes in zip(names, read_together(differs), strict=True) if yes]
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
    whole = buffer.numel() // size * size
    return (buffer if whole == buffer.numel() else buffer[:whole]).view(BITS[size])


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
