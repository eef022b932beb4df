"""How many KV splits each decode token gets, in one launch: enough for the longest row and for the whole device.

All integer, but for one float32 logarithm that is truncated right away. `write_kv_splits` is the device side, shared
with the fused rebuilds, so that both arms take the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .kv_indices import check_vector
from .launch import launch

NO_LIMIT = 2**31 - 1
"""`limit` that leaves every length as it is."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How split counts come about, fixed at capture.

    Attributes:
        max_splits: M, the most splits of a token.
        cores: multiprocessors, for the heuristic; 0 gives every token M splits.
        head_programs: see `head_programs`.
        tile: tokens per split where results must not depend on the batch, else 0.
    """

    max_splits: int
    cores: int = 0
    head_programs: int = 1
    tile: int = 0

    @property
    def mode(self) -> int:
        """1 heuristic, 2 constant, 3 fixed tile, as the kernel tells them apart."""
        return 3 if self.tile else 1 if self.cores > 0 else 2


def head_programs(num_heads: int, num_kv_heads: int) -> int:
    """Programs of the split-KV attention kernel per token and split: grouped heads share blocks of up to 16."""
    group = num_heads // num_kv_heads
    return num_heads if group == 1 else -(-num_heads // min(16, group))


@triton.jit
def write_kv_splits(lens, splits, n, limit, group, cores, head_programs, max_splits, BLOCK: tl.constexpr):
    """splits[r * group + j] for the n requests of `lens`, each cut at `limit` tokens (a sliding window).

    Two split sizes are tried, one that balances rows of unlike length and one that fills `cores`; a row takes the
    larger number of splits. An empty row gets none.
    """
    longest = tl.full((), 0, tl.int32)
    shortest = tl.full((), 2147483647, tl.int32)
    for begin in range(0, n, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        length = tl.load(lens + i, mask=i < n, other=0).to(tl.int32)
        longest = tl.maximum(longest, tl.max(length, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(i < n, length, 2147483647), 0))
    longest = tl.minimum(longest, limit)
    shortest = tl.minimum(shortest, limit)
    # Nearly equal rows count as equal. A length of 0 has no ratio; engines pad with 1, so the maxima below change no
    # legal value.
    shortest = tl.maximum(tl.where(longest * 8 < shortest * 10, longest, shortest), 1)
    balanced = tl.maximum(tl.minimum((longest + shortest - 1) // shortest, max_splits), 1)
    by_row = tl.maximum((longest + balanced - 1) // balanced, 1)

    # Longer contexts are worth more splits than there are cores: a split's cost is not all in its tokens.
    depth = tl.log2(tl.cast(tl.maximum(longest, 1), tl.float32) / 64.0)
    wanted = tl.cast(cores * tl.maximum(depth, 1.0), tl.int32)
    grid = n * group * head_programs
    filling = tl.maximum(tl.minimum((wanted + grid - 1) // grid, max_splits), 1)
    by_device = tl.maximum((longest + filling - 1) // filling, 1)

    for begin in range(0, n, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        length = tl.minimum(tl.load(lens + i, mask=i < n, other=0).to(tl.int32), limit)
        count = tl.maximum((length + by_row - 1) // by_row, (length + by_device - 1) // by_device)
        for j in range(0, group):
            tl.store(splits + i * group + j, count, mask=i < n)


@triton.jit
def write_splits(
    lens, splits, n, limit, group, cores, head_programs, max_splits, tile, MODE: tl.constexpr, BLOCK: tl.constexpr
):
    """splits[r * group + j] by a SplitRule: MODE 1 the heuristic, 2 the constant, 3 lengths in tiles."""
    if MODE == 1:
        write_kv_splits(lens, splits, n, limit, group, cores, head_programs, max_splits, BLOCK)
    else:
        for begin in range(0, n, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            count = tl.zeros([BLOCK], tl.int32) + max_splits
            if MODE == 3:
                length = tl.minimum(tl.load(lens + i, mask=i < n, other=0).to(tl.int32), limit)
                count = (length + tile - 1) // tile
            for j in range(0, group):
                tl.store(splits + i * group + j, count, mask=i < n)


@triton.jit(do_not_specialize=["n", "limit", "group", "cores", "head_programs", "max_splits"])
def _kv_splits_kernel(lens, splits, n, limit, group, cores, head_programs, max_splits, BLOCK: tl.constexpr):
    write_kv_splits(lens, splits, n, limit, group, cores, head_programs, max_splits, BLOCK)


def build_kv_splits(
    *,
    lens: torch.Tensor,
    num_kv_splits: torch.Tensor,
    cores: int,
    num_heads: int,
    num_kv_heads: int,
    max_kv_splits: int,
    limit: int = NO_LIMIT,
) -> None:
    """Choose the number of KV splits of each token, in place, in one launch.

    Args:
        lens: [n] int32 or int64, KV tokens of each request, padding included.
        num_kv_splits: [n * group] int32, out; each request has `group` tokens (draft branches).
        cores: multiprocessors of the device, at least 1.
        num_heads, num_kv_heads: per rank.
        max_kv_splits: upper bound of a split count.
        limit: tokens at which a length is cut, for sliding windows.

    Raises:
        ValueError: a dtype or shape differs from the above; nothing is launched then.

    Cost: one launch of one program, no allocation.
    """
    check_vector("lens", lens, 1, (torch.int32, torch.int64))
    check_vector("num_kv_splits", num_kv_splits, lens.shape[0], (torch.int32,))
    if num_kv_splits.shape[0] % lens.shape[0]:
        raise ValueError(
            f"num_kv_splits has {num_kv_splits.shape[0]} tokens, not a multiple of the {lens.shape[0]} requests in lens"
        )
    if cores < 1:
        raise ValueError(f"cores must be at least 1, got {cores}: without a core count, fill with max_kv_splits")
    launch_kv_splits(lens, num_kv_splits, cores, head_programs(num_heads, num_kv_heads), max_kv_splits, limit)


def launch_kv_splits(lens, num_kv_splits, cores, programs, max_kv_splits, limit=NO_LIMIT):
    """`build_kv_splits` without its checks; `programs` as `head_programs` gives it."""
    n = lens.shape[0]
    launch(
        _kv_splits_kernel,
        (1,),
        (lens, num_kv_splits, n, limit, num_kv_splits.shape[0] // n, cores, programs, max_kv_splits),
        {"BLOCK": max(256, triton.next_power_of_2(n)), "num_warps": 4},
    )
