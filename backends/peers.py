"""Kernels of engines found installed, to run as arms beside ours on the same buffers.

Only the file that holds a kernel is loaded, by its path: importing an engine starts half of it, and takes seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from .base import PeerMissing
from .modes import TailPolicy


@dataclass(frozen=True, slots=True)
class Peer:
    """A page-table update as an engine ships it.

    Attributes:
        update: takes the keyword arguments of `kernels.decode_metadata.update_decode_metadata`, tail and config apart.
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


@cache
def sglang_page_table_update() -> Peer:
    """SGLang's fused trtllm_mha update.

    Raises:
        PeerMissing: sglang is not installed, or this release keeps the kernel elsewhere.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PeerMissing("sglang is not installed here: its arms are left out")
    return page_table_update_in(Path(spec.submodule_search_locations[0]).parent)


def page_table_update_in(site: Path) -> Peer:
    """SGLang's fused trtllm_mha update from the packages installed under `site`.

    Raises:
        PeerMissing: this release keeps the kernel elsewhere.
    """
    for relative, tail in _PAGE_TABLE_UPDATES:
        if (site / relative).is_file():
            update = _function(site / relative, "update_trtllm_mha_graph_metadata")
            return Peer(update, tail, relative, _release(site))
    known = " or ".join(relative for relative, _ in _PAGE_TABLE_UPDATES)
    raise PeerMissing(f"sglang in {site} has no {known}: its arms are left out")


def _release(site: Path) -> str:
    """``sglang 0.5.15``, or without a version where the packages carry no metadata."""
    found = next((d for d in distributions(name="sglang", path=[str(site)])), None)
    return f"sglang {found.version}" if found else "sglang"


def _function(path: Path, name: str) -> Callable[..., None]:
    spec = importlib.util.spec_from_file_location(f"attn_graph_peer_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
