"""What backends share whose metadata is one block table that is rebuilt up to each row's live length and no further."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .base import AttentionBackend, ConfigError
from .batch import ForwardBatch
from .kernels.block_table import (
    build_block_table,
    fused_config,
    prepare_block_table,
    reachable_columns,
)
from .kernels.decode_metadata import DecodeMetadataConfig
from .kernels.launch import PreparedLaunch, foreign_launch
from .modes import TailPolicy


class BlockTableBackend(AttentionBackend):
    """Owns `table`, [max_bs, columns] int32. Upstream builds it with one launch too, so its classic chain is short."""

    @staticmethod
    def default_tail(implementation, recorded) -> TailPolicy:
        """Every implementation stops at the live length, the classic one too: it is a kernel, not a gather."""
        return TailPolicy.LIVE_ONLY

    def allocate_table(self, max_bs: int, columns: int, fill: int) -> None:
        """Make the table, every cell `fill`.

        Raises:
            ConfigError: `tail` asks for more than the live prefix, or req_to_token ends before the longest length.
        """
        c, name = self.config, type(self).__name__
        if self.tail is not TailPolicy.LIVE_ONLY:
            raise ConfigError(f"{name} writes live columns only, got tail {self.tail}: leave it out")
        width = self.pools.req_to_token.shape[1]
        if (c.table_columns - 1) * c.page_size >= width:
            raise ConfigError(
                f"block_kv_indices needs {c.table_columns} columns of {c.page_size} tokens for max_context "
                f"{c.max_context} and {c.headroom} pending tokens, but req_to_token is only {width} tokens wide"
            )
        self.max_bs = max_bs
        self.table = torch.full((max_bs, columns), fill, dtype=torch.int32, device=self.device)

    def check_batch_size(self, fb: ForwardBatch) -> int:
        if not 0 < fb.batch_size <= self.max_bs:
            raise ConfigError(f"batch size {fb.batch_size} is not within 1..{self.max_bs}, the block table's rows")
        return fb.batch_size

    def kernel_config(self, bs: int) -> DecodeMetadataConfig:
        """Block sizes for a captured batch size; the tuner's choice if one was given, else the default."""
        columns = reachable_columns(self.table, self.pools.req_to_token, self.config.page_size)
        return self.config.extra.get("kernel_config") or fused_config(bs, columns)

    def build_classic(self, pool: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, bs: int) -> None:
        """Upstream's launch: the table alone, from lengths that are already those of the kernel."""
        build_block_table(self.pools.req_to_token, pool, lens, table, bs, self.config.page_size)

    def peer_rebuild(self) -> Callable[[ForwardBatch, Any], None]:
        """The classic chain with the engine's own kernel for the table, which is how the engine runs it."""
        from .peers import sglang_block_table

        update = sglang_block_table().update

        def build(pool: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, bs: int) -> None:
            arguments = (self.pools.req_to_token, pool, lens, table)
            foreign_launch(partial(update, *arguments, bs, self.config.page_size), arguments)

        self.build_classic = build
        return self.classic_rebuild()

    def prepare_fused(
        self, fb: ForwardBatch, table: torch.Tensor, lens: torch.Tensor | None, offset: int
    ) -> PreparedLaunch:
        """One launch for the table and, if the kernel wants its own, lengths seq_lens + offset."""
        return prepare_block_table(
            self.pools.req_to_token, fb.req_pool_indices, fb.seq_lens, lens, table, fb.batch_size,
            self.config.page_size, offset, self.kernel_config(fb.batch_size),
        )  # fmt: skip

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)
