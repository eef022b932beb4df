"""Wave (AMD) paged decode and verify attention: the Triton backend's index lists and splits, 32 bits wide.

| mode          | KV length          | qo_indptr | mask_indptr          | num_kv_splits |
|---------------|--------------------|-----------|----------------------|---------------|
| decode, idle  | len                |           |                      | by SplitRule  |
| target_verify | len (prefix only)  | i * N     | sum of N * (len + N) |               |

No windows and no draft extend. Wave's kernels use the most splits themselves; only their Triton fallback reads
num_kv_splits. Draft decode, for engines that bring index lists of their own, is `WaveGivenLists`.
Source: specs of SGLang's wave backend.
"""

from __future__ import annotations

import torch

from .aten_ops import write_running_sum
from .base import Allowances, ConfigError
from .batch import ForwardBatch
from .kernels.csr_metadata import CsrTables
from .kernels.given_lists import launch_given_lists
from .modes import ForwardMode
from .oracle import Expected, HostBatch, HostPools, wave
from .triton import TritonBackend, TritonMetadata

Mode = ForwardMode


class WaveBackend(TritonBackend):
    """Metadata of SGLang's Wave attention. Pattern A. Options as the Triton backend's, less those of windows."""

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY})
    allowances = Allowances(shared_between_modes=frozenset({"kv_indptr", "kv_indices"}))
    index_dtype = torch.int32
    qo_dtype = torch.int32
    has_windows = False

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_bs)  # lists and splits are those of requests, not of their tokens
        self.max_tokens = max_num_tokens
        c, most = self.config, self.splits.max_splits
        v_dim = c.extra.get("v_head_dim", 128)
        self.attn_logits = self._zeros(most, max_bs, c.num_heads, v_dim, dtype=torch.float32)
        self.attn_lse = self._zeros(most, max_bs, c.num_heads, dtype=torch.float32)

    def _aten_decode(self, fb: ForwardBatch, b: int) -> None:
        write_running_sum(self.kv_indptr[: b + 1], fb.seq_lens[:b])
        pool, seq_lens = fb.req_pool_indices[:b], fb.seq_lens[:b]
        self._kv_indices(pool, seq_lens, self.kv_indptr, self.kv_indices, b)
        self._aten_splits(self.num_kv_splits[:b], fb.seq_lens[:b])


class WaveGivenLists(WaveBackend):
    """Draft decode over index lists that the engine made: spec_info.kv_indptr and kv_indices, copied at each replay.

    Upstream binds the engine's tensors at capture and refreshes its own at replay, which no captured kernel reads.
    """

    modes = frozenset({Mode.DRAFT_DECODE})

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        branches, longest = max_bs * max(self.config.topk, 1), self.config.max_context + self.config.draft_steps
        self.kv_indptr = self._zeros(branches + 1)
        self.kv_indices = self._zeros(branches * longest, dtype=self.index_dtype)
        self.num_kv_splits = self._full_splits(branches)

    def bind(self, fb: ForwardBatch) -> TritonMetadata:
        n = self._given(fb)[0].shape[0]
        tables = CsrTables(self.kv_indptr[:n], self.kv_indices, num_kv_splits=self.num_kv_splits, splits=self.splits)
        return self._metadata(tables, None, self.kernel_config(fb.batch_size))

    def rebuild_aten(self, fb: ForwardBatch, md: TritonMetadata) -> None:
        indptr, indices = self._given(fb)
        n, m = indptr.shape[0], indices.shape[0]
        self.kv_indptr[:n].copy_(indptr)
        self.kv_indices[:m].copy_(indices)
        self._aten_splits(self.num_kv_splits[: n - 1], fb.seq_lens[: fb.batch_size])

    rebuild_aten_static = rebuild_aten
    """Nothing is read on the host: a graph records the chain as it is."""

    def rebuild_fused(self, fb: ForwardBatch, md: TritonMetadata) -> None:
        indptr, indices = self._given(fb)
        launch_given_lists(
            indptr, indices, fb.seq_lens, md.kv_indptr, md.kv_indices, md.num_kv_splits, fb.batch_size, self.splits
        )

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        c, rule = self.config, self.splits
        return wave.given_lists(
            batch,
            capacity=self.kv_indices.shape[0],
            split_size=self.num_kv_splits.shape[0],
            splits=dict(
                max_splits=rule.max_splits,
                cores=rule.cores,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                tile=rule.tile,
            ),
        )

    def _given(self, fb: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's lists.

        Raises:
            ConfigError: there are none, they do not fit, or requests have branches of unlike number.
        """
        spec, b = fb.spec_info, fb.batch_size
        if spec is None or spec.kv_indptr is None or spec.kv_indices is None:
            raise ConfigError("draft decode needs the kv_indptr and kv_indices of its step in spec_info, got none")
        n, m = spec.kv_indptr.shape[0], spec.kv_indices.shape[0]
        if n > self.kv_indptr.shape[0] or m > self.kv_indices.shape[0]:
            raise ConfigError(
                f"lists of {n - 1} branches and {m} entries do not fit kv_indptr ({self.kv_indptr.shape[0] - 1}) and "
                f"kv_indices ({self.kv_indices.shape[0]})"
            )
        if (n - 1) % b:
            raise ConfigError(f"kv_indptr has {n - 1} branches, not a multiple of the {b} requests")
        return spec.kv_indptr, spec.kv_indices
