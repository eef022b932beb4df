"""The fused page-table kernel: values on poisoned buffers for any input, refusals, large offsets, compiled variants."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
import triton
from attn_graph.backends.kernels import decode_metadata
from attn_graph.backends.kernels.decode_metadata import DecodeMetadataConfig, QueryMode, update_decode_metadata
from attn_graph.backends.kernels.launch import observed
from attn_graph.backends.modes import TailPolicy
from attn_graph.backends.oracle import Expected, HostPools, page_table, write_slots
from conftest import HAS_GPU
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = "cuda" if HAS_GPU else "cpu"
POISON = -1000003
INTS = (torch.int32, torch.int64)


def there(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype, device=DEVICE)


@st.composite
def calls(draw):
    """Any call that the contract allows, small enough for the interpreter."""
    page_size, width = draw(st.sampled_from([1, 2, 3, 16, 48, 64])), draw(st.integers(1, 9))
    bs, rows = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    slots = 60 * page_size
    table = rng.integers(0, slots, (rows, width * page_size)).astype(np.int32)
    if draw(st.booleans()):
        table[rng.random(table.shape) < 0.3] = -1
    offset = draw(st.integers(0, 5))
    edges = [1, page_size, width * page_size]
    lens = np.where(rng.random(bs) < 0.5, rng.choice(edges, bs), rng.integers(1, width * page_size + 1, bs))
    tokens = draw(st.integers(0, 3)) * bs
    swa = draw(st.sampled_from([(False, False), (True, False), (True, True), (False, True)]))
    return {
        "page_size": page_size, "width": width, "bs": bs, "table": table, "offset": offset,
        "lens": np.maximum(lens - offset, 0), "rows": rng.integers(0, rows, bs),
        "map": np.append(rng.integers(0, slots, slots), -1), "swa": swa,
        "loc": rng.integers(-1, slots, draw(st.integers(0, tokens))), "tokens": tokens,
        "qlens": rng.integers(0, 6, bs), "q_mode": draw(st.sampled_from(list(QueryMode))),
        "tail": draw(st.sampled_from(list(TailPolicy))), "zero": draw(st.booleans()),
        "dtypes": [draw(st.sampled_from(INTS)) for _ in range(3)],
        "config": DecodeMetadataConfig(
            draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 16])), 1, draw(st.sampled_from([1, 2, 4])),
            draw(st.sampled_from([0, 2, 8])),
        ),
        "spare": draw(st.integers(0, 2)),
    }  # fmt: skip


def run(c: dict) -> dict[str, np.ndarray]:
    """Make the call on poisoned buffers that are larger than needed; every buffer afterwards."""
    bs, width, extra = c["bs"], c["width"], c["spare"]
    buffers = {
        "cache_seqlens": poisoned(bs + extra),
        "cu_seqlens_k": poisoned(bs + 1 + extra),
        "cu_seqlens_q": poisoned(bs + 1 + extra),
        "page_table": poisoned(bs + extra, width + extra),
        "swa_page_table": poisoned(bs + extra, width + extra),
        "swa_out_cache_loc": poisoned(c["tokens"] + 3, dtype=torch.int64),
    }
    pages, slots = c["swa"]
    update_decode_metadata(
        req_pool_indices=there(c["rows"], c["dtypes"][0]),
        seq_lens=there(c["lens"], c["dtypes"][1]),
        req_to_token=there(c["table"], torch.int32),
        cache_seqlens=buffers["cache_seqlens"],
        cu_seqlens_k=buffers["cu_seqlens_k"],
        page_table=buffers["page_table"],
        bs=bs,
        seqlen_offset=c["offset"],
        max_seq_pages=width,
        page_size=c["page_size"],
        swa_mapping=there(c["map"], torch.int64),
        swa_page_table=buffers["swa_page_table"] if pages else None,
        out_cache_loc=there(c["loc"], c["dtypes"][2]) if slots else None,
        swa_out_cache_loc=buffers["swa_out_cache_loc"][: c["tokens"]] if slots else None,
        cu_seqlens_q=buffers["cu_seqlens_q"],
        qlens=there(c["qlens"], torch.int32),
        q_stride=7,
        q_mode=c["q_mode"],
        tail=c["tail"],
        write_cu_zero=c["zero"],
        config=c["config"],
    )
    return {name: t.cpu().numpy() for name, t in buffers.items()}


def wanted(c: dict) -> dict[str, Expected]:
    """The oracle's word on every buffer, by the same names."""
    lens = (c["lens"] + c["offset"]).astype(np.int32)
    pools = HostPools(c["table"], c["map"])
    args = (c["rows"], lens, pools, c["page_size"], c["width"], c["tail"])
    queries = {QueryMode.CUMSUM: c["qlens"], QueryMode.STRIDED: np.full(c["bs"], 7)}.get(c["q_mode"])
    found = {
        "cache_seqlens": Expected.whole(lens),
        "cu_seqlens_k": Expected.prefix_sum(lens),
        "page_table": page_table(*args),
    }
    if queries is not None:
        found["cu_seqlens_q"] = Expected.prefix_sum(queries)
    if c["zero"]:
        for name in ("cu_seqlens_k", "cu_seqlens_q"):
            if name in found:
                found[name] = Expected.whole(found[name].values)
    if c["swa"][0]:
        found["swa_page_table"] = page_table(*args, swa=True)
    if c["swa"][1]:
        found["swa_out_cache_loc"] = write_slots(c["loc"], c["tokens"], c["map"])
    return found


def check(c: dict) -> None:
    got, words = run(c), wanted(c)
    for name, buffer in got.items():
        want = np.full(buffer.shape, POISON, dtype=buffer.dtype)
        if name in words and c["bs"]:
            inner = want[tuple(slice(n) for n in words[name].values.shape)]
            np.copyto(inner, words[name].values, where=words[name].written)
        np.testing.assert_array_equal(buffer, want, name)


@settings(max_examples=60, deadline=None)
@given(calls())
def test_every_cell_is_the_oracle_s_or_still_poison(c):
    check(c)


def a_call(**changes) -> dict:
    rng = np.random.default_rng(0)
    bs, page_size, width = 3, 16, 4
    slots = 60 * page_size
    return {
        "page_size": page_size, "width": width, "bs": bs, "offset": 0, "lens": np.array([1, 64, 33]),
        "table": rng.integers(0, slots, (3, width * page_size)).astype(np.int32), "rows": np.array([2, 0, 1]),
        "map": np.append(rng.integers(0, slots, slots), -1), "swa": (True, True), "loc": np.array([5, -1]), "tokens": 3,
        "qlens": np.array([2, 0, 3]), "q_mode": QueryMode.CUMSUM, "tail": TailPolicy.LIVE_ONLY, "zero": False,
        "dtypes": [torch.int64] * 3, "config": DecodeMetadataConfig(1, 16, 1), "spare": 1,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"table": np.zeros((3, 64), dtype=np.int32)},
        {"offset": 1, "lens": np.array([1, 63, 33])},
        {"q_mode": QueryMode.STRIDED},
        {"zero": True},
        {"tail": TailPolicy.STATIC_FULL},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_comparison_notices_a_wrong_input(change):
    """A check that cannot fail proves nothing: compare the buffers of one call with the oracle's word on another."""
    got, words = run(a_call()), wanted(a_call(**change))
    held = [np.where(words[n].written, words[n].values, POISON) for n in words]
    found = [got[n][tuple(slice(k) for k in words[n].values.shape)] for n in words]
    assert any(not np.array_equal(a, b) for a, b in zip(held, found, strict=True))


@pytest.mark.parametrize("q_mode", [QueryMode.CUMSUM, QueryMode.STRIDED])
def test_prefix_sums_carry_over_chunks_of_rows(monkeypatch, q_mode):
    monkeypatch.setattr(decode_metadata, "SCAN_BLOCK", 16)
    rng, bs = np.random.default_rng(1), 37
    c = a_call(bs=bs, lens=rng.integers(1, 65, bs), rows=rng.integers(0, 3, bs), qlens=rng.integers(0, 5, bs), tokens=0)
    check(c | {"q_mode": q_mode, "swa": (False, False), "tail": TailPolicy.BATCH_MAX})


def test_write_slots_of_many_tokens_span_programs(monkeypatch):
    monkeypatch.setattr(decode_metadata, "SLOT_BLOCK", 16)
    check(a_call(tokens=53, loc=np.random.default_rng(2).integers(-1, 960, 41)))


def test_no_rows_launch_nothing():
    launches = []
    with observed(lambda run, args: launches.append(args)):
        run(
            a_call(
                bs=0, lens=np.zeros(0, int), rows=np.zeros(0, int), qlens=np.zeros(0, int), tokens=0, loc=np.zeros(0)
            )
        )
    assert launches == []


def test_a_length_that_is_too_long_loses_pages_and_overwrites_nothing():
    check(a_call(lens=np.array([200, 1, 64]), tail=TailPolicy.LIVE_ONLY))


BAD = {
    "rows dtype": ({"req_pool_indices": torch.zeros(3)}, "req_pool_indices must be torch.int32 or torch.int64"),
    "rows short": ({"req_pool_indices": torch.zeros(2, dtype=torch.int64)}, "vector of at least 3, got shape [2]"),
    "lens strided": ({"seq_lens": torch.zeros(6, dtype=torch.int64)[::2]}, "seq_lens must be contiguous, got stride 2"),
    "cache dtype": ({"cache_seqlens": torch.zeros(3, dtype=torch.int64)}, "cache_seqlens must be torch.int32"),
    "cu short": ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_k must be a vector of at least 4"),
    "table narrow": ({"max_seq_pages": 9}, "page_table must be int32 of at least [3, 9]"),
    "table strided": ({"page_table": torch.zeros(4, 3, dtype=torch.int32).T}, "page_table must be row-contiguous"),
    "source narrow": ({"page_size": 64}, "req_to_token must be int32 of at least [1, 193]"),
    "source dtype": ({"req_to_token": torch.zeros(3, 64, dtype=torch.int64)}, "req_to_token must be int32"),
    "no map": ({"swa_page_table": torch.zeros(3, 4, dtype=torch.int32)}, "need swa_mapping, got None"),
    "no slots": (
        {"swa_mapping": torch.zeros(9, dtype=torch.int64), "swa_out_cache_loc": torch.zeros(3, dtype=torch.int64)},
        "swa_out_cache_loc needs out_cache_loc, got None",
    ),
    "too many slots": (
        {
            "swa_mapping": torch.zeros(9, dtype=torch.int64),
            "swa_out_cache_loc": torch.zeros(3, dtype=torch.int64),
            "out_cache_loc": torch.zeros(4, dtype=torch.int64),
        },
        "out_cache_loc has 4 slots, swa_out_cache_loc only 3",
    ),
    "no queries": ({"q_mode": QueryMode.STRIDED}, "q_mode STRIDED needs cu_seqlens_q, got None"),
    "no qlens": (
        {"q_mode": QueryMode.CUMSUM, "cu_seqlens_q": torch.zeros(4, dtype=torch.int32)},
        "q_mode CUMSUM needs qlens, got None",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_differs_from_the_contract_is_refused_and_nothing_is_written(change, message):
    good = {
        "req_pool_indices": torch.zeros(3, dtype=torch.int64), "seq_lens": torch.ones(3, dtype=torch.int64),
        "req_to_token": torch.zeros(3, 64, dtype=torch.int32), "cache_seqlens": torch.zeros(3, dtype=torch.int32),
        "cu_seqlens_k": torch.zeros(4, dtype=torch.int32), "page_table": torch.full((3, 4), POISON, dtype=torch.int32),
        "bs": 3, "page_size": 16,
    }  # fmt: skip
    call = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in (good | change).items()}
    launches = []
    with observed(lambda run, args: launches.append(args)), pytest.raises(ValueError) as refusal:
        update_decode_metadata(**call)
    assert message in str(refusal.value)
    assert launches == []


# Offsets past 2^31 elements (A15).


def far_apart(rows: int, width: int, stride: int) -> torch.Tensor:
    """[rows, width] int32 zeros with `stride` elements between rows; address space only, but for what is touched."""
    elements = (rows - 1) * stride + width
    if HAS_GPU:
        return torch.zeros(elements, dtype=torch.int32, device=DEVICE).as_strided((rows, width), (stride, 1))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    room = mmap.mmap(-1, elements * 4, flags=flags)
    return torch.frombuffer(room, dtype=torch.int32).as_strided((rows, width), (stride, 1))


@pytest.fixture
def no_copies_back(monkeypatch):
    """The interpreter copies every argument's storage onto itself after a launch, which would touch all of a sparse
    table. On a CPU both are the same memory."""
    if not HAS_GPU:
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)


def pages_of_row(table: torch.Tensor, row: int, page_size: int) -> list[int]:
    width = table.shape[1] // page_size
    pages, lens = poisoned(1, width), poisoned(1)
    update_decode_metadata(
        req_pool_indices=torch.tensor([row], device=DEVICE),
        seq_lens=torch.tensor([table.shape[1]], device=DEVICE),
        req_to_token=table, cache_seqlens=lens, cu_seqlens_k=poisoned(2), page_table=pages, bs=1, page_size=page_size,
    )  # fmt: skip
    return pages[0].tolist()


@pytest.mark.usefixtures("no_copies_back")
@pytest.mark.parametrize("row", [1, 2, 3])
def test_a15_row_offsets_past_two_to_the_31_elements(row):
    """Row 2 starts exactly 2^31 elements behind row 0: a 32-bit product would land 8 GiB below the table."""
    table = far_apart(4, 128, 2**30)
    for r in range(4):
        table[r] = torch.arange(128, dtype=torch.int32) + 1000 * 64 * r
    assert pages_of_row(table, row, 64) == [1000 * row, 1000 * row + 1]


@pytest.mark.gpu
def test_a15_the_last_row_of_an_8_gib_table():
    table = torch.zeros(2049, 1048576, dtype=torch.int32, device="cuda")
    for row in (2047, 2048):
        table[row, :64] = torch.arange(64, dtype=torch.int32) + row * 64
        lens, pages = poisoned(1), poisoned(1, 1)
        update_decode_metadata(
            req_pool_indices=torch.tensor([row], device="cuda"), seq_lens=torch.tensor([64], device="cuda"),
            req_to_token=table, cache_seqlens=lens, cu_seqlens_k=poisoned(2), page_table=pages, bs=1, page_size=64,
        )  # fmt: skip
        assert pages.tolist() == [[row]]


# No recompilation when only lengths change.


def launched(c: dict) -> tuple[tuple, dict]:
    """Arguments and options of the launch a call makes, without making it."""
    seen = []
    with observed(lambda run, args: seen.append((run.args, run.keywords))):
        run(c)
    return seen[0]


def compiled_for(c: dict) -> object:
    """What Triton would look up a compiled variant by: types, alignment, values equal to one, constants."""
    jit = pytest.importorskip("triton.runtime.jit")
    kernel = decode_metadata._decode_metadata_kernel
    function = kernel if isinstance(kernel, jit.JITFunction) else jit.JITFunction(kernel.fn, **kernel.kwargs)
    backend = triton.compiler.make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    bind = jit.create_function_from_signature(function.signature, function.params, backend)
    args, options = launched(c)
    _, specialization, _ = bind(*args, **options)
    return specialization


def test_only_lengths_rows_and_live_tokens_may_change_without_a_new_variant():
    same = compiled_for(a_call(tokens=3, loc=np.array([5, 1, 2])))
    assert compiled_for(a_call(lens=np.array([17, 2, 60]), rows=np.array([0, 0, 0]), loc=np.array([7, 8, 9]))) == same
    assert compiled_for(a_call(loc=np.array([7]))) == same, "one live token must not become a constant"
    assert compiled_for(a_call(bs=1, lens=np.array([1]), rows=np.array([0]), qlens=np.array([1]))) == same
    assert compiled_for(a_call(offset=1, lens=np.array([0, 63, 32]))) == same
    assert compiled_for(a_call(dtypes=[torch.int32] * 3)) != same
    assert compiled_for(a_call(q_mode=QueryMode.STRIDED)) != same


@pytest.mark.gpu
def test_nothing_is_compiled_when_only_lengths_change(monkeypatch):
    check(a_call())
    compiled = []
    kernel = decode_metadata._decode_metadata_kernel
    monkeypatch.setattr(kernel, "compile", lambda *args, **kwargs: compiled.append(args), raising=False)
    monkeypatch.setattr(kernel, "_do_compile", lambda *args, **kwargs: compiled.append(args), raising=False)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        check(a_call(lens=rng.integers(1, 65, 3), rows=rng.integers(0, 3, 3), loc=rng.integers(-1, 960, seed % 4)))
    assert compiled == []
