"""Kernels with block sizes to choose, and whose decode rebuild is one launch of which. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class TunableKernel:
    """A kernel module under `kernels`.

    Attributes:
        name: of the module, and of the kernel in stored choices.
        config: ``module:class`` of its block sizes, a dataclass.
        default: ``module:function`` (batch size, columns) -> the block sizes that run untuned.
    """

    name: str
    config: str
    default: str

    def config_of(self, values: dict[str, int]) -> Any:
        """Block sizes as the kernel takes them.

        Raises:
            TypeError: names that it does not have.
        """
        return _attribute(self.config)(**values)

    def default_of(self, bs: int, columns: int) -> dict[str, int]:
        return _attribute(self.default)(bs, columns).as_dict()


def _attribute(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(f".kernels.{module}", __package__), name)


_PAGES, _LISTS = "decode_metadata:DecodeMetadataConfig", "csr_metadata:CsrConfig"

DECODE_METADATA = TunableKernel("decode_metadata", _PAGES, "decode_metadata:default_config")
CSR_METADATA = TunableKernel("csr_metadata", _LISTS, "csr_metadata:default_config")
BLOCK_TABLE = TunableKernel("block_table", _PAGES, "block_table:fused_config")
PAGED_LISTS = TunableKernel("paged_lists", _LISTS, "csr_metadata:default_config")

KERNELS: dict[str, TunableKernel] = {
    "trtllm_mha": DECODE_METADATA,
    "triton": CSR_METADATA,
    "trtllm_mla": BLOCK_TABLE,
    "flashinfer": PAGED_LISTS,
    "flashattention": DECODE_METADATA,
    "wave": CSR_METADATA,
    "flashinfer_mla": PAGED_LISTS,
}
"""Backend -> its kernel. The first backend of a kernel stands for all of them when 'all' is tuned."""
