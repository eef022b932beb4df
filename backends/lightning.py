"""Lightning linear attention: the fields of recurrent layers, and query lengths for its segment kernels.

With v live requests and N tokens each in verify (1 in decode):

| field                                    | every mode                                                  |
|------------------------------------------|-------------------------------------------------------------|
| mamba_cache_indices, query_start_loc     | as in `mamba`                                               |
| q_lengths                                | N, 0 from v on                                              |
| has_initial_states                       | ones, constant; dtype of seq_lens                           |
| batch_size, num_decodes                  | B, B                                                        |
| num_prefills, num_prefill_tokens         | 0, 0                                                        |
| value_tile                               | 32 up to 128 requests (verify: up to 2), 64 above           |

Upstream makes q_lengths and has_initial_states anew with every call, so that a graph that reads them reads freed
memory. Here they are buffers. Draft trees are refused, as upstream. A verify kernel takes its step from the number of
tokens, so padding rows have N tokens of input each, which -1 makes it skip; their output is nobody's.

Each layer also has a constant, the decay of its heads: see `decay_slopes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .base import Allowances, ConfigError
from .batch import ForwardBatch
from .mamba import MambaBackend, MambaMetadata
from .oracle import Expected, HostBatch, HostPools, lightning


@dataclass(slots=True, kw_only=True)
class LightningMetadata(MambaMetadata):
    """Views into the instance's buffers, bound at capture, and host constants. B = captured batch size."""

    q_lengths: torch.Tensor  # [B] int32, device
    has_initial_states: torch.Tensor  # [B] ones of the dtype of seq_lens, device, constant
    batch_size: int
    num_decodes: int
    value_tile: int
    num_prefills: int = 0
    num_prefill_tokens: int = 0


class LightningBackend(MambaBackend):
    """Metadata of lightning attention. Pattern A, on top of the recurrent layers' refresh.

    Options, in config.extra: layers (1), tp_rank (0), tp_size (1), which the decay tables depend on.
    """

    allowances = Allowances(
        shared_between_modes=MambaBackend.allowances.shared_between_modes | {"q_lengths", "has_initial_states"}
    )

    has_rings = False

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self.config.topk > 1:
            raise ConfigError(f"lightning has no draft trees: topk must be at most 1, got {self.config.topk}")
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.q_lengths = self._ints(0, max_bs)
        # The dtype of lengths is the engine's: known at capture, when nothing may be allocated any more.
        self.ones = {d: torch.ones(max_bs, dtype=d, device=self.device) for d in (torch.int32, torch.int64)}
        extra, heads = self.config.extra, self.config.num_heads
        layers, rank, ranks = (extra.get(name, d) for name, d in (("layers", 1), ("tp_rank", 0), ("tp_size", 1)))
        mine = slice(rank * heads, (rank + 1) * heads)
        self.tp_slope = [
            torch.tensor(decay_slopes(heads * ranks, layer, layers)[mine], device=self.device).view(-1, 1, 1)
            for layer in range(layers)
        ]

    def bind(self, fb: ForwardBatch) -> LightningMetadata:
        b = fb.batch_size
        return LightningMetadata(
            **self._views(fb),
            q_lengths=self.q_lengths[:b],
            has_initial_states=self.ones[fb.seq_lens.dtype][:b],
            batch_size=b,
            num_decodes=b,
            value_tile=32 if b <= (2 if self._verifies(fb) else 128) else 64,
        )

    def rebuild_aten(self, fb: ForwardBatch, md: LightningMetadata) -> None:
        super().rebuild_aten(fb, md)
        md.has_initial_states.fill_(1)
        self._aten_lengths(md)

    def rebuild_aten_static(self, fb: ForwardBatch, md: LightningMetadata) -> None:
        super().rebuild_aten_static(fb, md)
        self._aten_lengths(md)

    @staticmethod
    def _aten_lengths(md: LightningMetadata) -> None:
        torch.sub(md.query_start_loc[1:], md.query_start_loc[:-1], out=md.q_lengths)

    def _launch_arguments(self, fb: ForwardBatch, md: LightningMetadata) -> dict:
        return super()._launch_arguments(fb, md) | {"query_lengths": md.q_lengths}

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        return lightning.expected(batch, pools, draft_tokens=self.tokens)


def decay_slopes(heads: int, layer: int, layers: int) -> list[float]:
    """Decay of each head of all ranks in one layer: ALiBi's slopes, weaker with depth."""
    depth = 1 - layer / (layers - 1) if layers > 1 else 1
    return [slope * (depth + 1e-5) for slope in _alibi_slopes(heads)]


def _alibi_slopes(heads: int) -> list[float]:
    """Geometric for a power of two; others are filled up with every second slope of twice as many heads."""
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    return slopes if below == heads else slopes + _alibi_slopes(2 * below)[::2][: heads - below]
