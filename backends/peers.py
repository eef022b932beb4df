"""Kernels of engines found installed, to run as arms beside ours on the same buffers.

Only the file that holds a kernel is loaded, by its path: importing an engine starts half of it, and takes seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import torch

from .base import PeerMissing
from .modes import TailPolicy


@dataclass(frozen=True, slots=True)
class Peer:
    """A rebuild as an engine ships it.

    Attributes:
        update: rebuilds in place. For page tables it takes the keyword arguments of
            `kernels.decode_metadata.update_decode_metadata`, tail and config apart; for index lists and block tables
            those of `_index_lists`, `_gather` and `_block_table`.
        tail: what it leaves right of a row's live prefix.
        source: file it came from, relative to the installed packages.
        release: the engine's name and version.
    """

    update: Callable[..., None]
    tail: TailPolicy
    source: str
    release: str


_PAGE_TABLE_UPDATES = (
    # sglang 0.5.15 rewrites the table's whole width, 0.5.23 stops at each row's live length.
    ("sglang/srt/layers/attention/triton_ops/trtllm_mha_graph_metadata.py", TailPolicy.STATIC_FULL),
    ("sglang/kernels/ops/attention/trtllm_mha_graph_metadata.py", TailPolicy.LIVE_ONLY),
)


_LIST_KERNELS = (
    "sglang/srt/layers/attention/triton_ops/kv_indices.py",
    "sglang/kernels/ops/attention/kv_indices.py",
)


@cache
def sglang_page_table_update() -> Peer:
    """SGLang's fused trtllm_mha update.

    Raises:
        PeerMissing: sglang is not installed, or this release keeps the kernel elsewhere.
    """
    return page_table_update_in(installed_site())


def installed_site() -> Path:
    """The folder of installed packages that holds sglang.

    Raises:
        PeerMissing: none does.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PeerMissing("sglang is not installed here: its arms are left out")
    return Path(spec.submodule_search_locations[0]).parent


def page_table_update_in(site: Path) -> Peer:
    """SGLang's fused trtllm_mha update from the packages installed under `site`.

    Raises:
        PeerMissing: this release keeps the kernel elsewhere.
    """
    for relative, tail in _PAGE_TABLE_UPDATES:
        if (site / relative).is_file():
            update = _module(site / relative).update_trtllm_mha_graph_metadata
            return Peer(update, tail, relative, _release(site))
    raise _elsewhere(site, [relative for relative, _ in _PAGE_TABLE_UPDATES])


@cache
def sglang_index_gather() -> Peer:
    """SGLang's kernel that lists requests' slots, of the sglang that is installed.

    Raises:
        PeerMissing: sglang is not installed, or this release keeps the kernel elsewhere.
    """
    return index_gather_in(installed_site())


def index_gather_in(site: Path) -> Peer:
    """The same from the packages installed under `site`; takes the arguments of `_gather`, the first apart.

    Raises:
        PeerMissing: this release keeps the kernel elsewhere.
    """
    return _list_kernel_in(site, _gather)


@cache
def sglang_block_table() -> Peer:
    """SGLang's kernel that builds the block tables of its MLA backends, of the sglang that is installed; takes the
    arguments of `_block_table`, the first apart.

    Raises:
        PeerMissing: sglang is not installed, or this release keeps the kernel elsewhere.
    """
    return _list_kernel_in(installed_site(), _block_table)


def _list_kernel_in(site: Path, call: Callable[..., None]) -> Peer:
    for relative in _LIST_KERNELS:
        if (site / relative).is_file():
            return Peer(partial(call, _module(site / relative)), TailPolicy.LIVE_ONLY, relative, _release(site))
    raise _elsewhere(site, list(_LIST_KERNELS))


def index_lists_in(site: Path) -> Peer:
    """SGLang's CSR index lists from the packages installed under `site`: a running sum by PyTorch, lists by its kernel.

    Raises:
        PeerMissing: this release keeps the kernel elsewhere.
    """
    gather = index_gather_in(site)
    return replace(gather, update=partial(_index_lists, gather.update))


def _gather(
    engine: ModuleType,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    start: torch.Tensor | None = None,
) -> None:
    """One launch, as the engine's triton backend makes it at a replay, where no length is known on the host.

    Args:
        req_to_token: [rows, width] int32. req_pool_indices, lens: [B]. start: [B], first tokens; 0 if None.
        kv_indptr: [B + 1] int32. kv_indices: [capacity] int32 or int64, out.
    """
    bs = lens.shape[0]
    options, grid = {}, (bs,)
    if hasattr(engine, "spec_kv_index_token_blocks"):  # later releases let several programs share a request
        width = req_to_token.shape[1]
        blocks = engine.spec_kv_index_token_blocks(table_width=width, kv_lens_sum=None, batch_size=bs)
        if blocks > 1:
            options, grid = {"TOKEN_BLOCK_PARALLEL": True}, (bs, blocks)
    engine.create_flashinfer_kv_indices_triton[grid](
        req_to_token, req_pool_indices, lens, kv_indptr, start, kv_indices, req_to_token.stride(0), **options
    )


def _block_table(
    engine: ModuleType,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor,
    bs: int,
    page_size: int,
) -> None:
    """One launch, a program for each block of pages that a row has room for.

    Args:
        req_to_token: [rows, width] int32. req_pool_indices, lens: [>=bs]. table: [>=bs, columns] int32, out.
    """
    blocks = engine.get_num_kv_index_blocks_flashmla(table.stride(0), page_size)
    engine.create_flashmla_kv_indices_triton[(bs, blocks)](
        req_to_token, req_pool_indices, lens, None, table, req_to_token.stride(0), table.stride(0), page_size
    )


def _index_lists(
    gather: Callable[..., None],
    *,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
) -> None:
    """kv_indptr from index 1, then the lists; layouts as in `_gather`."""
    kv_indptr[1:] = torch.cumsum(seq_lens, dim=0)
    gather(req_to_token, req_pool_indices, seq_lens, kv_indptr, kv_indices)


def _elsewhere(site: Path, known: list[str]) -> PeerMissing:
    return PeerMissing(f"sglang in {site} has no {' or '.join(known)}: its arms are left out")


def _release(site: Path) -> str:
    """``sglang 0.5.15``, or without a version where the packages carry no metadata."""
    found = next((d for d in distributions(name="sglang", path=[str(site)])), None)
    return f"sglang {found.version}" if found else "sglang"


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"attn_graph_peer_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
