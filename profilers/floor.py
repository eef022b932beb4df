"""How far a fused rebuild is from what the device allows, beside the kernels that engines ship.

The floor of a point is a kernel that only follows the rebuild's chain of dependent loads (row, slot, store) plus the
bytes it must move over the measured copy bandwidth. Everything is a marginal time in a graph, taken in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import triton
import triton.language as tl

from ..backends.batch import context_lengths, parse_context
from ..backends.kernels.decode_metadata import DecodeMetadataConfig, default_config, update_decode_metadata
from ..backends.kernels.launch import launch
from ..backends.peers import Peer, page_table_update_in
from .device_time import GpuTimer, interleaved_us

SECTOR_BYTES = 32
REPEATS = 9


@dataclass(frozen=True, slots=True)
class Point:
    """One shape of the page-table rebuild. Lengths in tokens; `context` as for `--context`."""

    bs: int
    context: str
    page_size: int
    max_context: int
    swa: bool


_SHAPES = (
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
POINTS = tuple(Point(*shape, swa) for shape in _SHAPES for swa in (False, True))
"""From interactive to saturated, from short lengths under a large captured maximum to lengths at the maximum."""


@dataclass(frozen=True, slots=True)
class FloorRow:
    """One point, cache state and peer. Times are medians in us; `peer` is blank where none is at hand."""

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


def measure(
    points: Iterable[Point],
    peers: Iterable[Path],
    device: torch.device,
    tuned: Callable[[Point], DecodeMetadataConfig | None] = lambda point: None,
) -> Iterator[FloorRow]:
    """Measure every point, hot and cold, with every peer in the same run.

    Args:
        peers: folders that hold an installed ``sglang``.
        tuned: block sizes for a point; the default where it returns None.

    Raises:
        DeviceError: there is no GPU.
        ValueError: a peer's result differs from ours in a live cell.
    """
    timer = GpuTimer(device)
    found = {str(site): page_table_update_in(site) for site in peers}
    bandwidth = copy_bytes_per_us(timer, device)
    for point in points:
        inputs = _Inputs(point, device)
        config = tuned(point) or default_config(point.bs, inputs.columns)
        bodies = {"ours": inputs.ours(config), "chain": inputs.chain()}
        bodies |= {name: inputs.peer(peer) for name, peer in found.items()}
        for name in found:
            inputs.check_equal(bodies["ours"], bodies[name], name)
        for cold in (False, True):
            times = interleaved_us(bodies, device=device, cold=cold, repeats=REPEATS, timer=timer)
            mid = {name: median(values) for name, values in times.items()}
            floor = mid["chain"] + inputs.least_bytes / bandwidth
            for name in found or {"": None}:
                yield FloorRow(
                    "decode_metadata", point.bs, point.context, point.page_size, point.max_context, point.swa,
                    "cold" if cold else "hot", round(mid["ours"], 3), found[name].release if name else "",
                    round(mid[name], 3) if name else None, round(floor, 3),
                    " ".join(f"{k}={v}" for k, v in config.as_dict().items()),
                )  # fmt: skip
        del inputs, bodies


def copy_bytes_per_us(timer: GpuTimer, device: torch.device, size: int = 2**31) -> float:
    """Bytes read and written per us by a device-to-device copy of `size` bytes."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_(0, 255)
    times = interleaved_us({"copy": lambda: target.copy_(source)}, device=device, counts=(1, 3), timer=timer)
    return 2 * size / median(times["copy"])


class _Inputs:
    """Random tables and lengths of one point, and the calls that rebuild from them."""

    def __init__(self, point: Point, device: torch.device) -> None:
        rng = np.random.default_rng(0)
        b, p = point.bs, point.page_size
        self.point = point
        self.columns = -(-point.max_context // p)
        # Slots at random, not whole tables of distinct pages: a table of this size takes minutes to permute, and no
        # kernel's time depends on which page a slot is in.
        slots = 2**22
        self.table = torch.randint(0, slots, (b + 1, point.max_context), dtype=torch.int32, device=device)
        self.mapping = torch.randint(0, slots, (slots + 1,), dtype=torch.int64, device=device) if point.swa else None
        lengths = context_lengths(parse_context(point.context), b, point.max_context, rng)
        self.live_pages = int(sum(-(-int(n) // p) for n in lengths))
        self.lens = torch.from_numpy(lengths).to(device)
        self.rows = torch.from_numpy(1 + rng.permutation(b)).to(device)
        self.loc = torch.randint(0, slots, (b,), dtype=torch.int64, device=device)
        self.device = device

    @property
    def least_bytes(self) -> int:
        """A live page costs a sector of the table (or 4 bytes where pages are small) and a 4-byte store; with a
        sliding window also a random sector and another store."""
        read = min(4 * self.point.page_size, SECTOR_BYTES)
        window = SECTOR_BYTES + 4 if self.point.swa else 0
        return self.live_pages * (read + 4 + window)

    def _arguments(self) -> dict:
        b = self.point.bs
        int32 = {"dtype": torch.int32, "device": self.device}
        swa = self.point.swa
        return {
            "req_pool_indices": self.rows,
            "seq_lens": self.lens,
            "req_to_token": self.table,
            "cache_seqlens": torch.zeros(b, **int32),
            "cu_seqlens_k": torch.zeros(b + 1, **int32),
            "page_table": torch.zeros(b, self.columns, **int32),
            "bs": b,
            "seqlen_offset": 0,
            "max_seq_pages": self.columns,
            "page_size": self.point.page_size,
            "swa_mapping": self.mapping,
            "swa_page_table": torch.zeros(b, self.columns, **int32) if swa else None,
            "out_cache_loc": self.loc if swa else None,
            "swa_out_cache_loc": torch.zeros(b, dtype=torch.int64, device=self.device) if swa else None,
        }

    def ours(self, config: DecodeMetadataConfig) -> Callable[[], None]:
        arguments = self._arguments()
        return _call(update_decode_metadata, arguments | {"config": config})

    def peer(self, peer: Peer) -> Callable[[], None]:
        return _call(peer.update, self._arguments())

    def chain(self) -> Callable[[], None]:
        out = torch.zeros(1, dtype=torch.int32, device=self.device)
        args = (self.rows, self.table, out, self.table.stride(0))
        return lambda: launch(_chain_kernel, (1,), args, {"num_warps": 1})

    def check_equal(self, ours: Callable[[], None], peer: Callable[[], None], name: str) -> None:
        ours()
        peer()
        torch.cuda.synchronize(self.device)
        mine, theirs = ours.arguments, peer.arguments
        columns = torch.arange(self.columns, device=self.device)
        live = columns[None] < ((self.lens + self.point.page_size - 1) // self.point.page_size)[:, None]
        for field in ("cache_seqlens", "cu_seqlens_k", "swa_out_cache_loc", "page_table", "swa_page_table"):
            a, b = mine[field], theirs[field]
            if a is None:
                continue
            same = torch.equal(a[live], b[live]) if a.dim() == 2 else torch.equal(a, b)
            if not same:
                raise ValueError(f"{name} and ours differ in {field} at {self.point}: times would mean nothing")


def _call(function: Callable[..., None], arguments: dict) -> Callable[[], None]:
    def body() -> None:
        function(**arguments)

    body.arguments = arguments
    return body


@triton.jit
def _chain_kernel(rows, table, out, stride):
    row = tl.load(rows).to(tl.int64)
    tl.store(out, tl.load(table + row * stride))
