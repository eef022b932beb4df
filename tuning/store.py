"""Chosen block sizes on disk: what was measured, for which kernel on which GPU, and what a new shape gets from it.

One JSON file a user, ``tuned.json``, and read-only tables that are shipped. A choice is found under its whole key
(exact), or, for a shape that was not measured, under the nearest one within BOUND (neighbour), or, on a GPU that was
not measured, under the same or the nearest shape of one with the same chip generation (family), or not at all
(default). Which it was is always part of the answer, with what the rule cost where it could be tried: on tuned shapes
as if they had not been (leave-one-out). Imports no torch.

In another module::

    found = store.lookup_case(case, device.name)      # or store.lookup(Key(...))
    print(store.describe(found))                      # one line: the rule, the choice, the file and the key
    config = measure.attention_config(case, found.config)
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..profilers.sample import Case

SCHEMA = 1
FILE = "tuned.json"
FOLDER_VARIABLE = "ATTN_GRAPH_TUNED_DIR"
SHIPPED = Path(__file__).parent / "tables"
LOCK_TIMEOUT_S = 30.0
BOUND = 2.0
"""A neighbour's bucket and columns are at most this many times larger or smaller; so is the mean of its lengths, unless
it was timed on lengths of that kind too."""

CHOSE_DEFAULT = "chose_default"
"""Fact: whether the choice is what would have run untuned."""
SERVES, SHORT, LONG = "serves", "short", "long"
"""Fact: on which lengths unlike its mix's a choice was timed beside the default, and is not slower."""

EXACT, NEIGHBOUR, FAMILY, DEFAULT = "exact", "neighbour", "family", "default"

FAMILIES = {
    "Hopper": r"\b(H100|H200|H800|GH200)\b",
    "Ampere": r"\b(A100|A800)\b",
    "Blackwell": r"\b(B100|B200|B300|GB200|GB300)\b",
    "CDNA3": r"\bMI(300|308|325)[AX]?\b",
}
"""Chip generation -> how its data-centre GPUs are called. They differ in memory and clocks only."""


class StoreError(Exception):
    """The store cannot be written; names the path and says what to do."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a choice was measured for.

    The first row decides what is compiled, so it has to agree; a neighbour may differ in the second.
    """

    device: str
    kernel: str
    page_size: int
    swa: bool
    tail: str = "live_only"
    seq_lens: str = "int64"
    req_pool_indices: str = "int64"

    bucket: int = 1
    columns: int = 1
    mode: str = "decode"
    context: str = ""
    backend: str = "trtllm_mha"

    def __str__(self) -> str:
        swa = "SWA" if self.swa else "no SWA"
        return (
            f"{self.device}, {self.kernel} of {self.backend}, {self.mode}, bucket {self.bucket}, {self.columns} "
            f"columns, page {self.page_size}, {swa}, context {self.context}, {self.tail}, "
            f"{self.seq_lens}/{self.req_pool_indices}"
        )


_SHAPE = ("bucket", "columns", "mode", "context", "backend")
_VARIANT = tuple(f.name for f in fields(Key) if f.name not in _SHAPE)


@dataclass(frozen=True, slots=True)
class Entry:
    """A choice. `facts`: what a reader wants to know about the measurement, by name; times in us."""

    key: Key
    config: dict[str, int]
    facts: dict[str, Any] = field(default_factory=dict)

    def config_for(self, key: Key) -> dict[str, int] | None:
        """What it says for a shape. Where the default was chosen, another shape gets the default made for it: None."""
        kept = key == self.key or self.facts.get(CHOSE_DEFAULT) is not True
        return dict(self.config) if kept else None

    def fits_lengths(self, context: str) -> bool:
        """Whether it may be used for another mix of lengths.

        Means are alike within BOUND, or its facts say that on shorter (longer) lengths it is not slower either. A
        choice for long requests has many programs a row, which idle on short ones and cost a few percent.
        """
        if context == self.key.context:
            return True
        known, asked = mean_length(self.key.context), mean_length(context)
        if not known or not asked:
            return False
        if 1 / BOUND <= asked / known <= BOUND:
            return True
        served = self.facts.get(SERVES)
        return isinstance(served, list) and (SHORT if asked < known else LONG) in served


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a look-up.

    Attributes:
        config: parameters by the kernel's own names; None for the kernel's default.
        rule: ``exact``, ``neighbour``, ``family`` or ``default``.
        file: where it is from; for a default, where it was looked for.
        detail: how a neighbour differs, or why there is nothing.
        key: what was searched; None where nothing could be.
    """

    config: dict[str, int] | None
    rule: str
    file: Path | None
    detail: str
    key: Key | None

    @property
    def setting(self) -> str:
        """``block=256 num_warps=4``, or ``the default``."""
        return " ".join(f"{name}={value}" for name, value in (self.config or {}).items()) or "the default"


def describe(found: Found) -> str:
    """One line for people: ``tuned ...`` or ``default, searched ...``, with file and key."""
    if found.config is None and found.rule != DEFAULT:
        return f"Block sizes: default ({found.rule}, {found.detail}: there the default is best), from {found.file}"
    if found.config is None:
        searched = f", searched {found.key} in {found.file}" if found.key else ""
        return f"Block sizes: default{searched}: {found.detail}"
    differs = f", {found.detail}" if found.detail else ""
    return f"Block sizes: tuned ({found.rule}{differs}) {found.setting}, from {found.file} under {found.key}"


def user_file() -> Path:
    """Where choices are saved: ``$ATTN_GRAPH_TUNED_DIR`` or the user's configuration folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).absolute() / FILE
    from platformdirs import user_config_path

    return user_config_path("attn-graph", appauthor=False) / FILE


def lookup_case(case: Case, device: str) -> Found:
    """`lookup` for a case on the GPU called `device`. A backend without block sizes is answered too."""
    from .space import NotTunable, key_of

    try:
        return lookup(key_of(case, device))
    except NotTunable:
        return Found(None, DEFAULT, None, f"{case.backend} has no kernel that 'attn-graph tune' knows", None)


def lookup(key: Key) -> Found:
    """The choice for `key`. Never raises for what is in a file: an unusable file is a reason in `detail`."""
    files = [_read(path) for path in (user_file(), *sorted(SHIPPED.glob("*.json")))]
    known = [(file.path, entry) for file in files for entry in file.entries()]
    problems = [f"{file.path} is {file.problem}" for file in files if file.problem]
    found = nearest(key, [entry for _, entry in known])
    entries = [entry for _, entry in known]
    if found is None:
        detail = "; ".join(
            [*(problems or [_why_nothing(key, [e.key for e in entries])]), *_cost(key, DEFAULT, entries)]
        )
        return Found(None, DEFAULT, files[0].path, detail, key)
    rule, entry = found
    path = next(path for path, one in known if one is entry)
    differs = [] if rule == EXACT else [f"measured for {_difference(key, entry.key)}"]
    detail = "; ".join([*differs, *_cost(key, rule, entries), *problems])
    return Found(entry.config_for(key), rule, path, detail, key)


def nearest(key: Key, entries: Sequence[Entry]) -> tuple[str, Entry] | None:
    """The rule that gives a choice for `key`, and the choice; of equally near ones the first."""
    for rule, of in ((NEIGHBOUR, key), *((FAMILY, replace(key, device=device)) for device in _relatives(key, entries))):
        ranked = [
            (far, entry)
            for entry in entries
            if (far := _distance(of, entry.key)) is not None and entry.fits_lengths(of.context)
        ]
        if ranked:
            _, entry = min(ranked, key=lambda found: found[0])
            return (EXACT if entry.key == key else rule), entry
    return None


def left_out(entry: Entry, entries: Sequence[Entry]) -> tuple[str, dict[str, int] | None]:
    """What the rules give for a measured shape as if it had not been: the rule, and its config (None: the default).

    Entries of the same captured shape that differ in the lengths only go too: they know the shape.
    """
    unseen = replace(entry.key, context="", mode="", backend="")
    others = [e for e in entries if replace(e.key, context="", mode="", backend="") != unseen]
    found = nearest(entry.key, others)
    return (DEFAULT, None) if found is None else (found[0], found[1].config_for(entry.key))


def family(device: str) -> str:
    """Chip generation of a GPU by its name; blank if unknown."""
    return next((name for name, pattern in FAMILIES.items() if re.search(pattern, device)), "")


def _relatives(key: Key, entries: Sequence[Entry]) -> list[str]:
    """Other GPUs of the same generation that something is known of."""
    own = family(key.device)
    devices = dict.fromkeys(entry.key.device for entry in entries)
    return [device for device in devices if own and device != key.device and family(device) == own]


def _cost(key: Key, rule: str, entries: Sequence[Entry]) -> list[str]:
    """What a rule lost on tuned shapes of this kernel as if they had not been tuned, where that is known."""
    if rule == FAMILY:
        return ["what it costs on this GPU is not known"]
    tried = [e.facts["left_out"] for e in entries if (e.key.device, e.key.kernel) == (key.device, key.kernel)
             and isinstance(e.facts.get("left_out"), dict)]  # fmt: skip
    lost = [one["regret"] for one in tried if one.get("rule") == rule and isinstance(one.get("regret"), float)]
    if rule == EXACT or not lost:
        return []
    return [
        f"left out, {len(lost)} tuned shapes lose at most {max(lost):.1%} by this rule, {median(lost):.1%} in median"
    ]


def diff(a: Path, b: Path) -> list[tuple[Key, Entry | None, Entry | None]]:
    """Choices that differ between two files: the key, what `a` has, what `b` has; None where one has nothing.

    Raises:
        StoreError: a file cannot be used.
    """
    sides = []
    for path in (a, b):
        file = _read(path)
        if file.problem or not path.exists():
            raise StoreError(f"{path} is {file.problem or 'not there'}")
        sides.append({entry.key: entry for entry in file.entries()})
    keys = dict.fromkeys([*sides[0], *sides[1]])
    pairs = [(key, sides[0].get(key), sides[1].get(key)) for key in keys]
    return [(key, x, y) for key, x, y in pairs if x is None or y is None or x.config != y.config]


def saved_entries() -> tuple[list[tuple[Path, Entry]], list[str]]:
    """Every usable choice, with its file, and what kept other files from being read."""
    files = [_read(path) for path in (user_file(), *sorted(SHIPPED.glob("*.json")))]
    found = [(file.path, entry) for file in files for entry in file.entries()]
    return found, [f"{file.path}: {file.problem}" for file in files if file.problem]


def check_writable() -> Path:
    """The user's file, after making sure that `save` can write it.

    Raises:
        StoreError: it cannot; better known before minutes of measuring.
    """
    path = user_file()
    with _locked(path):
        pass
    return path


def save(entries: Iterable[Entry]) -> list[str]:
    """Merge `entries` into the user's file. Returns notes for the user, of files that were set aside.

    Entries of other keys, of other GPUs and of newer versions stay, as do fields that we do not know. A file that
    cannot be read is renamed, never deleted. Safe with writers in other processes, and when killed at any moment.

    Raises:
        StoreError: the file cannot be written.
    """
    path = user_file()
    with _locked(path):
        file = _read(path)
        notes = [_set_aside(path, file.problem)] if file.problem else []
        content = dict(file.content)
        raw = list(content.get("entries", []))
        for entry in entries:
            places = [i for i, old in enumerate(raw) if (known := _entry(old)) and known.key == entry.key]
            before = raw[places[0]] if places else {}
            after = {**before, "key": asdict(entry.key), "config": entry.config, **entry.facts}
            raw = [old for i, old in enumerate(raw) if i not in places] + [after]
        _replace(path, content | {"schema": SCHEMA, "entries": raw})
    return notes


def clear() -> str:
    """Forget the user's choices; the file is renamed, not deleted. Returns what was done.

    Raises:
        StoreError: the file cannot be renamed.
    """
    path = user_file()
    if not path.exists():
        return f"{path}: nothing is stored"
    with _locked(path):
        return _set_aside(path, "cleared")


# Files.


@dataclass(frozen=True, slots=True)
class _File:
    """What a file holds. `problem`: why its content is not used; empty for a good or an absent file."""

    path: Path
    content: Mapping[str, Any]
    problem: str = ""

    def entries(self) -> Iterator[Entry]:
        """Those that this version understands."""
        return filter(None, map(_entry, self.content.get("entries", ())))


def _read(path: Path) -> _File:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return _File(path, {})
    except OSError as error:
        return _File(path, {}, f"ignored, it cannot be read ({error.strerror})")
    except ValueError:
        return _File(path, {}, "ignored, it is not valid JSON")
    if not isinstance(content, dict) or not isinstance(content.get("entries", []), list):
        return _File(path, {}, "ignored, it is no table of tuned block sizes")
    if content.get("schema") != SCHEMA:
        version = f"schema version {content['schema']!r}" if "schema" in content else "no schema version"
        return _File(path, {}, f"ignored, it has {version}, this attn-graph reads {SCHEMA}")
    return _File(path, content)


def _entry(raw: object) -> Entry | None:
    """An entry, or None for one that this version does not understand and therefore neither uses nor touches."""
    try:
        key = Key(**raw["key"])
        config = dict(raw["config"])
    except (TypeError, KeyError, ValueError):
        return None
    typed = all(type(getattr(key, f.name)).__name__ == f.type for f in fields(Key))
    if not typed or min(key.bucket, key.columns) < 1 or not config or any(type(v) is not int for v in config.values()):
        return None
    return Entry(key, config, {name: value for name, value in raw.items() if name not in ("key", "config")})


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside `path`, in a folder that is made for it."""
    from filelock import FileLock, Timeout

    remedy = f"Set {FOLDER_VARIABLE} to a folder that can be written"
    if not path.is_absolute():
        raise StoreError(f"no folder for tuned block sizes: there is no home directory ({path}). {remedy}")
    lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=LOCK_TIMEOUT_S)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise StoreError(
            f"{lock.lock_file} has been held by another process for {LOCK_TIMEOUT_S:g} s. End it, or {remedy.lower()}"
        ) from None
    except OSError as error:
        raise StoreError(f"cannot write tuned block sizes to {path}: {error.strerror or error}. {remedy}") from error
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write tuned block sizes to {path}: {error.strerror or error}. {remedy}") from error
    finally:
        lock.release()


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    """Readers, and whoever comes after a kill, see the old file or the new one, never a part.

    The part file's name is fixed, so that kills do not pile up leftovers: the lock keeps other writers away.
    """
    part = path.with_name(f"{path.name}.part")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _set_aside(path: Path, why: str) -> str:
    aside = next(p for i in count(1) if not (p := path.with_name(f"{path.stem}.aside-{i}{path.suffix}")).exists())
    os.rename(path, aside)
    return f"{path}: {why}; it is now {aside}"


# Nearness.


def mean_length(context: str) -> float | None:
    """Of a mix as ``--context`` has it, in tokens; None for what is no mix."""
    kind, *bounds = context.split(":")
    try:
        if not bounds:
            lengths = [int(length) for length in kind.split("+")]
            return sum(lengths) / len(lengths)
        low, high = map(int, bounds)
    except ValueError:
        return None
    if kind == "loguniform" and 0 < low < high:
        return (high - low) / math.log(high / low)
    return (low + high) / 2


def _distance(wanted: Key, known: Key) -> tuple[float, bool, bool, bool] | None:
    """How far a known shape is from the wanted one, (0, False, ...) being the same; None: too far to be used."""
    if any(getattr(wanted, name) != getattr(known, name) for name in _VARIANT):
        return None
    ratios = [getattr(wanted, name) / getattr(known, name) for name in ("bucket", "columns")]
    if not all(1 / BOUND <= ratio <= BOUND for ratio in ratios):
        return None
    unlike = (getattr(wanted, name) != getattr(known, name) for name in ("backend", "context", "mode"))
    return (sum(abs(math.log2(ratio)) for ratio in ratios), *unlike)


def _difference(wanted: Key, known: Key) -> str:
    """``bucket 4, context loguniform:1:131072``: in what the measured shape differs."""
    return ", ".join(
        f"{name} {getattr(known, name)}"
        for name in ("device", *_SHAPE)
        if getattr(known, name) != getattr(wanted, name)
    )


def _why_nothing(key: Key, known: list[Key]) -> str:
    """The first step at which the search came up empty."""
    if not known:
        return "nothing is tuned yet, run 'attn-graph tune'"
    here = [k for k in known if k.device == key.device]
    if not here:
        return f"tuned only for {_listed(k.device for k in known)}"
    same = [k for k in here if all(getattr(k, name) == getattr(key, name) for name in _VARIANT)]
    if not same:
        return "tuned on this GPU only for other page sizes, pools or dtypes"
    near = [k for k in same if _distance(key, k) is not None]
    if near:
        return (
            f"tuned for {_listed(k.context for k in near)} only: lengths that are on average more than {BOUND:g} times "
            "longer or shorter, and on ones like these the choice was slower than the default or not timed"
        )
    shapes = _listed(f"{k.bucket} x {k.columns}" for k in same)
    return f"no tuned shape (bucket x columns: {shapes}) is within {BOUND:g} times of it"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
