"""How far our fused rebuilds are from what the device allows, beside the kernels that engines ship.

The floor of a point is a kernel that only follows the rebuild's chain of dependent loads (row, slot, with a window the
mapping, store) plus the bytes it must move over the measured copy bandwidth. Everything is a marginal time in a graph,
taken in turns.

Two settings of ours: `default` is what runs untuned; `tuned` is the best of a few neighbours of it, found in this run
and then timed anew, in turns with everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
import triton
import triton.language as tl

from ..backends.batch import context_lengths, parse_context
from ..backends.kernels import csr_metadata, decode_metadata
from ..backends.kernels.csr_metadata import CsrConfig, CsrMetadata, CsrTables
from ..backends.kernels.decode_metadata import DecodeMetadataConfig, update_decode_metadata
from ..backends.kernels.launch import launch
from ..backends.peers import Peer, index_lists_in, page_table_update_in
from .device_time import Body, GpuTimer, interleaved_us

SECTOR_BYTES = 32
REPEATS = 9
ROUGH_REPEATS = 3
FINALISTS = 4
MARGIN = 0.01
DECODE, CSR = "decode_metadata", "csr_metadata"


@dataclass(frozen=True, slots=True)
class Point:
    """One shape of a rebuild. Lengths in tokens; `context` as for `--context`."""

    kernel: str
    bs: int
    context: str
    page_size: int
    max_context: int
    swa: bool


_PAGE_TABLES = (
    (1, "128", 64, 1_048_576),
    (1, "4096", 64, 131_072),
    (1, "131072", 64, 131_072),
    (1, "1048576", 64, 1_048_576),
    (1, "1048576", 16, 1_048_576),
    (8, "32768", 64, 131_072),
    (64, "8192", 64, 131_072),
    (64, "131072", 64, 131_072),
    (256, "8192", 64, 32_768),
    (256, "32768", 16, 32_768),
    (512, "2048", 64, 32_768),
    (512, "2048", 64, 1_048_576),
    (256, "8192", 16, 1_048_576),
    (32, "8192", 1, 32_768),
    (1024, "1024", 64, 8_192),
    (64, "loguniform:1:131072", 64, 131_072),
)
_INDEX_LISTS = (
    (1, "1048576", 1, 1_048_576),
    (64, "32768", 1, 131_072),
    (256, "4096", 1, 131_072),
    (64, "loguniform:1:131072", 1, 131_072),
)
POINTS = (
    *(Point(DECODE, *shape, swa) for shape in _PAGE_TABLES for swa in (False, True)),
    *(Point(CSR, *shape, False) for shape in _INDEX_LISTS),
)
"""From interactive to saturated, from short lengths under a large captured maximum to lengths at the maximum."""


@dataclass(frozen=True, slots=True)
class FloorRow:
    """One point, cache state, setting and peer. Times are medians in us; `peer` is blank where none is at hand.

    `start_us`: what it costs to start as many programs as ours has, with nothing in them, beyond starting one. It is
    not in the floor: a chain of loads needs one program.
    """

    kernel: str
    bs: int
    context: str
    page_size: int
    max_context: int
    swa: bool
    cache: str
    ours_us: float
    peer: str
    peer_us: float | None
    floor_us: float
    config: str
    setting: str
    start_us: float


def measure(points: Iterable[Point], peers: Iterable[Path], device: torch.device) -> Iterator[FloorRow]:
    """Measure every point, hot and cold, both settings and every peer in the same run.

    Args:
        peers: folders that hold an installed ``sglang``.

    Raises:
        DeviceError: there is no GPU.
        PeerMissing: a folder has no kernel that we know.
        ValueError: a peer's result, or that of a setting, differs from ours in a live cell.
    """
    timer = GpuTimer(device)
    sites = list(peers)
    find = {DECODE: page_table_update_in, CSR: index_lists_in}
    found = {kernel: {str(site): find[kernel](site) for site in sites} for kernel in find}
    bandwidth = copy_bytes_per_us(timer, device)
    for point in points:
        yield from _rows(point, found[point.kernel], bandwidth, timer, device)


def _rows(
    point: Point, peers: dict[str, Peer], bandwidth: float, timer: GpuTimer, device: torch.device
) -> Iterator[FloorRow]:
    inputs = _INPUTS[point.kernel](point, device)
    default, *others = candidates(point)
    bodies = {config: inputs.ours(config) for config in (default, *others)}
    theirs = {name: inputs.peer(peer) for name, peer in peers.items()}
    _compile([*bodies.values(), *theirs.values()], device)
    for other in (*(bodies[c] for c in others), *theirs.values()):
        inputs.check_equal(bodies[default], other)
    best = _best(bodies, timer, device)
    arms: dict[Any, Body] = {"default": bodies[default], "chain": inputs.chain(), "one": _idle(1), **theirs}
    if best != default:
        arms["tuned"] = bodies[best]
    starts = {config: (inputs.programs(config), config.num_warps) for config in (default, best)}
    arms |= {start: _idle(*start) for start in starts.values()}
    for cold in (False, True):
        times = interleaved_us(arms, device=device, cold=cold, repeats=REPEATS, timer=timer)
        mid = {name: median(values) for name, values in times.items()}
        floor = mid["chain"] + inputs.least_bytes / bandwidth
        for setting, config in (("default", default), ("tuned", best)):
            ours = mid.get(setting, mid["default"])
            for name in peers or {"": None}:
                yield FloorRow(
                    point.kernel, point.bs, point.context, point.page_size, point.max_context, point.swa,
                    "cold" if cold else "hot", round(ours, 3), peers[name].release if name else "",
                    round(mid[name], 3) if name else None, round(floor, 3),
                    " ".join(f"{k}={v}" for k, v in config.as_dict().items()), setting,
                    round(mid[starts[config]] - mid["one"], 3),
                )  # fmt: skip


def _best(bodies: dict[Any, Body], timer: GpuTimer, device: torch.device) -> Any:
    """The setting with the least hot and cold times, by their product: one setting serves both. Judged are the
    FINALISTS that are fastest when hot, and the first, which stays unless it is beaten by MARGIN."""
    default = next(iter(bodies))
    hot = _sound_us(bodies, False, ROUGH_REPEATS, timer, device)
    finalists = {config: bodies[config] for config in [default, *sorted(hot, key=hot.get)[:FINALISTS]]}
    hot, cold = (_sound_us(finalists, cold, REPEATS, timer, device) for cold in (False, True))
    products = {config: hot[config] * cold[config] for config in finalists if config in hot and config in cold}
    best = min(products, key=products.get, default=default)
    return best if products.get(best, 0) < (1 - MARGIN) * products.get(default, float("inf")) else default


def _sound_us(
    bodies: dict[Any, Body], cold: bool, repeats: int, timer: GpuTimer, device: torch.device
) -> dict[Any, float]:
    """Median times; without those that came out negative, as a difference of two noisy times can."""
    times = interleaved_us(bodies, device=device, cold=cold, repeats=repeats, timer=timer)
    mid = {config: median(values) for config, values in times.items()}
    return {config: us for config, us in mid.items() if us > 0}


def _compile(bodies: list[Body], device: torch.device) -> None:
    """Run each body once, side by side: most of a compiler's work leaves the interpreter free."""

    def run(body: Body) -> None:
        with torch.cuda.device(device):
            body()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, bodies))
    torch.cuda.synchronize(device)


def candidates(point: Point) -> list[DecodeMetadataConfig] | list[CsrConfig]:
    """Settings to try at a point: the default first, its neighbours, each of which changes one thing or trades two, and
    for page tables what has won elsewhere."""
    if point.kernel == CSR:
        return _list_candidates(csr_metadata.default_config(point.bs, point.max_context), point.max_context)
    columns = -(-point.max_context // point.page_size)
    tried = _table_candidates(decode_metadata.default_config(point.bs, columns))
    return [c for c in tried if c.programs_per_row * c.block < 4 * max(columns, 64) and c.rows <= point.bs]


_TABLE_WINNERS = (
    # Short rows: one program each, or a few that read early.
    (1, 64, 1), (1, 64, 1, 2), (1, 64, 4, 2), (1, 64, 8, 4), (1, 128, 1), (1, 128, 4), (1, 512, 4), (2, 64, 4, 2),
    (2, 128, 1, 1, 64), (2, 128, 2, 1, 64), (4, 128, 1), (4, 128, 1, 1, 64), (4, 128, 2, 1, 64), (4, 256, 2, 1, 64),
    # Long and unlike ones: many programs, so that the longest row has enough of them.
    (8, 64, 4, 2), (8, 128, 1), (8, 256, 2), (16, 128, 1), (16, 128, 2), (16, 128, 2, 2), (16, 128, 8, 2),
    (32, 64, 1, 2), (32, 64, 2), (32, 64, 2, 4), (32, 64, 4, 2), (32, 64, 8, 4),
)  # fmt: skip
"""What an exhaustive search of the tuner's space has found fastest at one point or another, on an H200."""


def _table_candidates(d: DecodeMetadataConfig) -> list[DecodeMetadataConfig]:
    k, rows, most = d.programs_per_row, d.rows, decode_metadata.MOST_COLUMNS
    tried = [
        d,
        replace(d, early=0 if d.early else min(d.block, 64)),
        replace(d, programs_per_row=2 * k, block=max(d.block // 2, 32)),
        replace(d, programs_per_row=2 * k),
        replace(
            d, programs_per_row=max(k // 2, 1), block=min(2 * d.block, most // rows), num_warps=min(2 * d.num_warps, 8)
        ),
        replace(d, num_warps=8 if d.num_warps < 8 else 4),
        replace(d, rows=1, block=min(d.block, 128), num_warps=4),
        *(DecodeMetadataConfig(*values) for values in _TABLE_WINNERS),
    ]
    return list(dict.fromkeys(tried))


def _list_candidates(d: CsrConfig, max_context: int) -> list[CsrConfig]:
    k = d.programs_per_row
    tried = [
        d,
        replace(d, programs_per_row=2 * k),
        replace(d, programs_per_row=2 * k, block=d.block // 2, num_warps=4),
        replace(d, programs_per_row=2 * k, block=d.block // 2, num_warps=2),
        replace(d, programs_per_row=4 * k, block=d.block // 4, num_warps=4),
        replace(d, programs_per_row=max(k // 2, 1)),
        replace(d, programs_per_row=max(k // 2, 1), num_warps=4),
        replace(d, block=d.block // 2, num_warps=4),
        replace(d, block=d.block // 2, num_warps=2),
        replace(d, num_warps=4 if d.num_warps == 8 else 8),
    ]
    return list(dict.fromkeys(c for c in tried if c.programs_per_row * c.block < 4 * max_context))


def copy_bytes_per_us(timer: GpuTimer, device: torch.device, size: int = 2**31) -> float:
    """Bytes read and written per us by the faster of a copy engine and a kernel that copies `size` bytes."""
    source, target = (torch.empty(size // 8, dtype=torch.int64, device=device) for _ in range(2))
    source.random_()
    ways = {"copy": lambda: target.copy_(source), "kernel": lambda: torch.bitwise_not(source, out=target)}
    times = interleaved_us(ways, device=device, counts=(1, 5), timer=timer)
    return 2 * size / min(median(values) for values in times.values())


class _Inputs(Protocol):
    """Random tables and lengths of one point, and the calls that rebuild from them."""

    least_bytes: int

    def ours(self, config: Any) -> Body: ...

    def programs(self, config: Any) -> int: ...

    def peer(self, peer: Peer) -> Body: ...

    def chain(self) -> Body: ...

    def check_equal(self, ours: Body, other: Body) -> None: ...


class _Tables:
    """What both families read: a slot table, requests at random rows of it, and their lengths."""

    def __init__(self, point: Point, device: torch.device) -> None:
        rng = np.random.default_rng(0)
        self.point, self.device = point, device
        # Slots at random, not whole tables of distinct pages: a table of this size takes minutes to permute, and no
        # kernel's time depends on which page a slot is in.
        self.slots = 2**22
        self.table = torch.randint(0, self.slots, (point.bs + 1, point.max_context), dtype=torch.int32, device=device)
        self.lengths = context_lengths(parse_context(point.context), point.bs, point.max_context, rng)
        self.lens = torch.from_numpy(self.lengths).to(device)
        self.rows = torch.from_numpy(1 + rng.permutation(point.bs)).to(device)

    def chain(self) -> Body:
        out = torch.zeros(1, dtype=torch.int32, device=self.device)
        mapping = getattr(self, "mapping", None)
        args = (self.rows, self.table, out if mapping is None else mapping, out, self.table.stride(0))
        options = {"HAS_SWA": mapping is not None, "num_warps": 1}
        return lambda: launch(_chain_kernel, (1,), args, options)

    def _int32(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)


class _PageTables(_Tables):
    def __init__(self, point: Point, device: torch.device) -> None:
        super().__init__(point, device)
        self.columns = -(-point.max_context // point.page_size)
        shape = (self.slots + 1,)
        self.mapping = torch.randint(0, self.slots, shape, dtype=torch.int64, device=device) if point.swa else None
        self.loc = torch.randint(0, self.slots, (point.bs,), dtype=torch.int64, device=device)

    @property
    def least_bytes(self) -> int:
        """A live page costs a sector of the table (or 4 bytes where pages are small) and a 4-byte store; with a
        sliding window also a random sector and another store."""
        pages = int(np.sum(-(-self.lengths // self.point.page_size)))
        read = min(4 * self.point.page_size, SECTOR_BYTES)
        return pages * (read + 4 + (SECTOR_BYTES + 4 if self.point.swa else 0))

    def _arguments(self) -> dict:
        b, swa = self.point.bs, self.point.swa
        return {
            "req_pool_indices": self.rows,
            "seq_lens": self.lens,
            "req_to_token": self.table,
            "cache_seqlens": self._int32(b),
            "cu_seqlens_k": self._int32(b + 1),
            "page_table": self._int32(b, self.columns),
            "bs": b,
            "seqlen_offset": 0,
            "max_seq_pages": self.columns,
            "page_size": self.point.page_size,
            "swa_mapping": self.mapping,
            "swa_page_table": self._int32(b, self.columns) if swa else None,
            "out_cache_loc": self.loc if swa else None,
            "swa_out_cache_loc": torch.zeros(b, dtype=torch.int64, device=self.device) if swa else None,
        }

    def ours(self, config: DecodeMetadataConfig) -> Body:
        return _call(update_decode_metadata, self._arguments() | {"config": config})

    def programs(self, config: DecodeMetadataConfig) -> int:
        return decode_metadata.programs(config, self.point.bs, self.point.bs if self.point.swa else 0)

    def peer(self, peer: Peer) -> Body:
        return _call(peer.update, self._arguments())

    def check_equal(self, ours: Body, other: Body) -> None:
        mine, theirs = ours.arguments, other.arguments
        columns = torch.arange(self.columns, device=self.device)
        live = columns[None] < ((self.lens + self.point.page_size - 1) // self.point.page_size)[:, None]
        for field in ("cache_seqlens", "cu_seqlens_k", "swa_out_cache_loc", "page_table", "swa_page_table"):
            a, b = mine[field], theirs[field]
            if a is None:
                continue
            same = torch.equal(a[live], b[live]) if a.dim() == 2 else torch.equal(a, b)
            if not same:
                raise ValueError(f"two results differ in {field} at {self.point}: times would mean nothing")


class _IndexLists(_Tables):
    """Token-granular lists of int64 slots, as SGLang's triton backend has them."""

    @property
    def least_bytes(self) -> int:
        """4 bytes read and 8 written per token."""
        return 12 * int(np.sum(self.lengths))

    def _arguments(self) -> dict:
        b = self.point.bs
        return {
            "req_to_token": self.table,
            "req_pool_indices": self.rows,
            "seq_lens": self.lens,
            "kv_indptr": self._int32(b + 1),
            "kv_indices": torch.zeros(int(np.sum(self.lengths)), dtype=torch.int64, device=self.device),
        }

    def ours(self, config: CsrConfig) -> Body:
        arguments = self._arguments()
        tables = CsrTables(arguments["kv_indptr"], arguments["kv_indices"])
        rebuild = CsrMetadata(tables, config, self.table, self.point.bs)

        def body() -> None:
            rebuild(self.rows, self.lens)

        body.arguments = arguments
        return body

    def programs(self, config: CsrConfig) -> int:
        return 1 + self.point.bs * config.programs_per_row

    def peer(self, peer: Peer) -> Body:
        return _call(peer.update, self._arguments())

    def check_equal(self, ours: Body, other: Body) -> None:
        for field in ("kv_indptr", "kv_indices"):
            if not torch.equal(ours.arguments[field], other.arguments[field]):
                raise ValueError(f"two results differ in {field} at {self.point}: times would mean nothing")


_INPUTS: dict[str, Callable[[Point, torch.device], _Inputs]] = {DECODE: _PageTables, CSR: _IndexLists}


def _call(function: Callable[..., None], arguments: dict) -> Body:
    def body() -> None:
        function(**arguments)

    body.arguments = arguments
    return body


def _idle(programs: int, num_warps: int = 1) -> Body:
    return lambda: launch(_idle_kernel, (programs,), (), {"num_warps": num_warps})


@triton.jit
def _idle_kernel():
    pass


@triton.jit
def _chain_kernel(rows, table, mapping, out, stride, HAS_SWA: tl.constexpr):
    row = tl.load(rows).to(tl.int64)
    slot = tl.load(table + row * stride)
    if HAS_SWA:
        slot = tl.load(mapping + slot).to(tl.int32)
    tl.store(out, slot)
