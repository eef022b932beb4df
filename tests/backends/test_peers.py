"""An engine's kernel found installed runs as an arm; a release that keeps it elsewhere is named, not guessed."""

from __future__ import annotations

import sys

import pytest
import torch
from attn_graph.backends import peers
from attn_graph.backends.base import AttentionConfig, PeerMissing
from attn_graph.backends.batch import make_pools
from attn_graph.backends.modes import Implementation, TailPolicy
from attn_graph.backends.trtllm_mha import TrtllmMhaBackend

KERNEL = """
from attn_graph.backends.kernels.decode_metadata import update_decode_metadata
from attn_graph.backends.modes import TailPolicy

def update_trtllm_mha_graph_metadata(**arguments):
    update_decode_metadata(**arguments, tail=TailPolicy.STATIC_FULL)
"""


LISTS = """
from attn_graph.backends.kernels.kv_indices import launch_kv_indices

class create_flashinfer_kv_indices_triton:
    def __class_getitem__(cls, grid):
        def launch(table, pool, lens, indptr, start, indices, stride):
            assert grid == (lens.shape[0],) and stride == table.stride(0)
            launch_kv_indices(table, pool, lens, indptr, indices, lens.shape[0], start)
        return launch

def get_num_kv_index_blocks_flashmla(width, page_size):
    return -(-width * page_size // 4096)

class create_flashmla_kv_indices_triton:
    def __class_getitem__(cls, grid):
        from attn_graph.backends.kernels.block_table import build_block_table

        def launch(source, pool, lens, start, table, source_stride, table_stride, page_size):
            assert grid == (lens.shape[0], get_num_kv_index_blocks_flashmla(table_stride, page_size))
            assert start is None and source_stride == source.stride(0) and table_stride == table.stride(0)
            build_block_table(source, pool, lens, table, lens.shape[0], page_size)
        return launch
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Installs a made-up sglang with its kernel at a given place."""

    def install(where: str | None) -> None:
        (tmp_path / "sglang").mkdir()
        (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('the engine must not be imported')")
        if where:
            (tmp_path / where).parent.mkdir(parents=True)
            (tmp_path / where).write_text(LISTS if where.endswith("kv_indices.py") else KERNEL)
        monkeypatch.syspath_prepend(str(tmp_path))

    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    peers.sglang_page_table_update.cache_clear()
    peers.sglang_index_gather.cache_clear()
    peers.sglang_block_table.cache_clear()
    yield install
    peers.sglang_page_table_update.cache_clear()
    peers.sglang_index_gather.cache_clear()
    peers.sglang_block_table.cache_clear()


def backend() -> TrtllmMhaBackend:
    pools = make_pools(rows=3, width=70, page_size=16, swa=True, seed=0, device=torch.device("cpu"))
    return TrtllmMhaBackend(AttentionConfig(page_size=16, max_context=64), pools, Implementation.SGLANG)


@pytest.mark.parametrize(("where", "tail"), peers._PAGE_TABLE_UPDATES)
def test_each_release_is_found_without_importing_the_engine(engine, where, tail):
    engine(where)
    assert backend().tail is tail
    assert peers.sglang_page_table_update().source == where


def test_a_release_that_keeps_the_kernel_elsewhere_is_named(engine):
    engine(None)
    with pytest.raises(PeerMissing, match="has no sglang/srt"):
        backend()


def test_without_an_engine_one_sentence_says_so():
    if peers.importlib.util.find_spec("sglang") is not None:
        pytest.skip("an engine is installed here")
    with pytest.raises(PeerMissing, match="sglang is not installed here"):
        backend()


def test_its_arm_agrees_with_the_oracle_in_every_placement(engine):
    from attn_graph.profilers.graphs import GraphFactory
    from attn_graph.profilers.measure import CaseBench, MeasureSettings
    from attn_graph.profilers.sample import Case

    engine(peers._PAGE_TABLE_UPDATES[0][0])
    case = Case("trtllm_mha", "decode", 2, 2, "40", 16, 64, True, graph_nodes=2, device="cpu")
    settings = MeasureSettings(("sglang-eager", "sglang-glue", "sglang-graph"), 1, 0)
    bench = CaseBench(case, settings, torch.device("cpu"), GraphFactory(torch.device("cpu")))
    assert not bench.failed
    assert bench.built["sglang-graph"].backend.tail is TailPolicy.STATIC_FULL
    assert [s.value for s in bench.check()] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("where", peers._LIST_KERNELS)
@pytest.mark.parametrize(
    ("name", "mode", "page_size"),
    [
        ("triton", "decode", 1),
        ("trtllm_mla", "decode", 32),
        ("trtllm_mla", "target_verify", 64),
        ("flashmla", "decode", 64),
        ("cutlass_mla", "decode", 128),
    ],
)
def test_its_lists_and_block_tables_are_arms_of_the_backends_that_use_them(engine, where, name, mode, page_size):
    from attn_graph.profilers.graphs import GraphFactory
    from attn_graph.profilers.measure import CaseBench, MeasureSettings
    from attn_graph.profilers.sample import Case

    engine(where)
    drafts = 2 * (mode == "target_verify")
    case = Case(name, mode, 2, 2, "40", page_size, 256, False, draft_tokens=drafts, graph_nodes=2, device="cpu")
    settings = MeasureSettings(("sglang-eager", "sglang-graph"), 1, 0)
    bench = CaseBench(case, settings, torch.device("cpu"), GraphFactory(torch.device("cpu")))
    assert not bench.failed
    assert [s.value for s in bench.check()] == [1.0, 1.0]


def test_index_lists_with_a_window_map_have_no_counterpart_in_every_release(engine):
    from attn_graph.backends.triton import TritonBackend

    engine(peers._LIST_KERNELS[0])
    pools = make_pools(rows=3, width=70, page_size=1, swa=True, seed=0, device=torch.device("cpu"))
    with pytest.raises(PeerMissing, match="sliding-window map"):
        TritonBackend(AttentionConfig(page_size=1, max_context=64), pools, Implementation.SGLANG)
