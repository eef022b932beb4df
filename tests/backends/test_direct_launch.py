"""Launches past Triton's launcher: what the driver is handed, and when the long way is taken instead."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import triton
import triton.language as tl
from attn_graph.backends.kernels import direct, launch
from attn_graph.backends.kernels.direct import LaunchConfig, Variant, bound_launch
from conftest import HAS_GPU

PTX = (
    ".visible .entry kernel(\n.param .u64 a,\n.param .u64 b,\n.param .u32 n,\n.param .u64 scratch,\n.param .u64 more\n)"
)


def compiled(**changes):
    """What Triton returns for kernel(a, b, n, BLOCK): two pointers, a number, a constant, two scratch pointers."""
    metadata = {"num_warps": 4, "shared": 64, "num_ctas": 1} | changes
    signature = {"a": "*i64", "b": "*i32", "n": "i32", "BLOCK": "constexpr"}
    return SimpleNamespace(
        metadata=SimpleNamespace(**metadata),
        src=SimpleNamespace(signature=signature, constants={(3,): 128}),
        asm={"ptx": PTX},
        function=0xF00D,
    )


@pytest.fixture
def driver(monkeypatch):
    """Reads what a driver would read, from the addresses that it is handed."""
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def call(config, function, parameters, extra) -> int:
        c = LaunchConfig.from_address(config)
        at = (ctypes.c_void_p * 5).from_address(parameters)
        a, b = (ctypes.c_uint64.from_address(at[i]).value for i in (0, 1))
        n = ctypes.c_int32.from_address(at[2]).value
        grid, block = (c.grid_x, c.grid_y, c.grid_z), (c.block_x, c.block_y, c.block_z)
        scratch = [ctypes.c_uint64.from_address(at[i]).value for i in (3, 4)]
        seen.append(SimpleNamespace(
            grid=grid, block=block, shared=c.shared_bytes, stream=c.stream, n_attributes=c.n_attributes,
            function=function, values=(a, b, n), scratch=scratch, extra=extra,
        ))  # fmt: skip
        return 0

    state = SimpleNamespace(seen=seen, device=0, stream=7)
    monkeypatch.setattr(direct, "_driver_launch", lambda: call)
    monkeypatch.setattr(direct, "current_device", lambda: state.device)
    monkeypatch.setattr(direct, "current_stream", lambda device: state.stream + 100 * device)
    return state


A, B, OTHER = torch.zeros(32, dtype=torch.int64), torch.zeros(32, dtype=torch.int32), torch.ones(32, dtype=torch.int64)


def bound():
    return bound_launch(compiled(), (5, 2), (A, B, 9), varying=(0, 2))


@contextmanager
def without_garbage_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_the_driver_reads_the_new_values_beside_the_bound_ones(driver):
    assert bound()((OTHER, 10))
    (seen,) = driver.seen
    assert seen.values == (OTHER.data_ptr(), B.data_ptr(), 10)
    assert (seen.grid, seen.block, seen.shared, seen.n_attributes) == ((5, 2, 1), (128, 1, 1), 64, 0)
    assert (seen.function, seen.stream, seen.scratch, seen.extra) == (0xF00D, 7, [0, 0], None)


def test_each_launch_goes_to_the_stream_that_is_current_then(driver):
    again = bound()
    again((A, 9))
    driver.stream = 8
    again((A, 9))
    assert [seen.stream for seen in driver.seen] == [7, 8]


def test_on_another_device_it_takes_the_long_way_and_comes_back(driver):
    again = bound()
    driver.device = 1
    assert not again((A, 9)) and not driver.seen
    driver.device = 0
    assert again((A, 9))


@pytest.mark.parametrize(
    "values",
    [(A[1:], 9), (B, 9), (A, 1), (A, 16), (A, 2**40), (A, 9.0), (A, B)],
    ids=["alignment", "dtype", "equal to 1", "divisible by 16", "wide", "no int", "no number"],
)
def test_what_another_variant_was_compiled_for_is_not_launched(driver, values):
    assert not bound()(values) and not driver.seen


def test_memory_that_another_tensor_had_before_is_not_mistaken_for_it(driver):
    again = bound()
    assert not again((A.view(torch.int32), 9)) and not driver.seen
    assert again((A.view(-1), 9)), "the same words"


def test_a_tensor_that_was_given_other_memory_since_is_read_where_it_is_now(driver):
    moved = A.clone()
    again = bound()
    assert again((moved, 9))
    moved.set_(OTHER)
    assert again((moved, 9))
    assert driver.seen[-1].values[0] == OTHER.data_ptr()


def test_what_a_refused_call_had_written_is_written_over(driver):
    again = bound()
    assert not again((OTHER, 1)) and not driver.seen
    assert again((A, 9))
    assert driver.seen[-1].values == (A.data_ptr(), B.data_ptr(), 9)


def test_a_bound_launch_keeps_what_the_driver_reads_and_nothing_else_keeps_it(driver):
    constant = torch.zeros(32, dtype=torch.int32)
    again, alive = bound_launch(compiled(), (5,), (A, constant, 9), varying=(0, 2)), ref(constant)
    address = constant.data_ptr()
    del constant
    again((OTHER, 9))
    assert driver.seen[-1].values[1] == address and alive() is not None
    with without_garbage_collection():
        del again
        assert alive() is None


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_really_compiled_kernel_has_the_parameters_that_are_laid_out(driver):
    jit = pytest.importorskip("triton.runtime.jit")

    def kernel(a, n, b, far, one, N: tl.constexpr):
        tl.store(a + tl.arange(0, N), tl.load(b + n) + far + one)

    function = jit.JITFunction(kernel)
    signature = {"a": "*i64", "n": "i32", "b": "*i32", "far": "i64", "one": "constexpr", "N": "constexpr"}
    source = triton.compiler.ASTSource(function, signature, {(4,): 1, (5,): 32})
    made = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
    variant = Variant(SimpleNamespace(metadata=made.metadata, src=made.src, asm=made.asm, function=1), 6)
    assert variant.positions == [0, 1, 2, 3]
    bits = [8 * ctypes.sizeof(cell) for cell in direct.Packet(variant, (1,)).cells]
    entry = re.search(r"\.entry.*?\)", made.asm["ptx"], re.DOTALL)[0]
    assert bits + [64] * variant.scratch == [int(n) for n in re.findall(r"\.param \.[a-z](\d+)", entry)]


def test_a_thread_that_has_not_touched_the_device_is_given_its_context(driver, monkeypatch):
    bindings = []
    good = direct._driver_launch()
    monkeypatch.setattr(direct, "bind_context", bindings.append)
    monkeypatch.setattr(
        direct, "_driver_launch", lambda: lambda *handles: good(*handles) if bindings else direct.NO_CONTEXT
    )
    assert bound()((A, 9))
    assert bindings == [0]
    assert len(driver.seen) == 1


def test_what_the_driver_refuses_is_said(driver, monkeypatch):
    monkeypatch.setattr(direct, "_driver_launch", lambda: lambda *handles: 700)
    with pytest.raises(RuntimeError, match="700"):
        bound()((A, 9))


def test_a_forked_child_takes_the_long_way(driver):
    again = bound()
    child = os.fork()
    if not child:
        os._exit(0 if not again((A, 9)) and not driver.seen else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert again((A, 9))  # its parent goes on


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"launch_cooperative_grid": True}, "cooperative"), ({"num_ctas": 2}, "clusters"), ({"launch_pdl": True}, "pdl")],
)
def test_what_only_tritons_launcher_provides_is_refused(driver, change, reason):
    with pytest.raises(ValueError, match=reason):
        Variant(compiled(**change), 3)


def test_an_argument_of_unknown_type_is_refused(driver):
    odd = compiled()
    odd.src.signature["n"] = "fp32"
    with pytest.raises(ValueError, match="type fp32"):
        Variant(odd, 3)


def test_a_driver_without_the_call_leaves_everything_to_triton(driver, monkeypatch):
    def missing():
        raise AttributeError("cuLaunchKernelEx")

    monkeypatch.setattr(direct, "_driver_launch", missing)
    with pytest.raises(ValueError, match="cuLaunchKernelEx"):
        bound()


class MadeUpKernel:
    """Launches through Triton are counted; what they return can be taken apart."""

    def __init__(self) -> None:
        self.through_triton = 0

    def __getitem__(self, grid):
        def run(*args, **options):
            self.through_triton += 1
            return compiled()

        return run


def test_only_the_first_of_many_launches_goes_through_triton(driver, monkeypatch):
    monkeypatch.setattr(direct, "supported", lambda kernel: True)
    kernel = MadeUpKernel()
    prepared = launch.PreparedLaunch(kernel, (5,), (A, B, 9), {"BLOCK": 128}, varying=(0, 2))
    for _ in range(4):
        prepared(OTHER, 9)
    assert (kernel.through_triton, len(driver.seen)) == (1, 3)
    prepared(OTHER[1:], 9)  # another variant: bound to none
    prepared(OTHER, 9)
    assert (kernel.through_triton, len(driver.seen)) == (2, 4)


def test_launches_that_are_not_prepared_are_told_apart_by_grid_and_constants(driver, monkeypatch):
    kernel, launcher = MadeUpKernel(), direct.DirectLauncher()
    for grid, block in (((5,), 128), ((5,), 128), ((6,), 128), ((6,), 256), ((6,), 256)):
        launcher.launch(kernel, grid, (A, B, 9), {"BLOCK": block})
    assert (kernel.through_triton, [seen.grid[0] for seen in driver.seen]) == (3, [5, 6])


def page_tables(device: torch.device) -> dict:
    zeros = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=device)  # noqa: E731
    return {
        "req_pool_indices": torch.arange(4, device=device), "seq_lens": torch.full((4,), 100, device=device),
        "req_to_token": torch.arange(512, dtype=torch.int32, device=device).view(4, 128),
        "cache_seqlens": zeros(4), "cu_seqlens_k": zeros(5), "page_table": zeros(4, 8), "bs": 4, "page_size": 16,
    }  # fmt: skip


def is_rebuilt(c: dict) -> bool:
    want = torch.arange(32, dtype=torch.int32).view(4, 8)[:, :7]
    return torch.equal(c["page_table"][:, :7].cpu(), want) and c["cu_seqlens_k"].tolist() == [0, 100, 200, 300, 400]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_on_a_gpu_a_launch_is_ordered_by_the_stream_it_was_made_on():
    from attn_graph.backends.kernels.decode_metadata import update_decode_metadata

    c = page_tables(torch.device("cuda"))
    for _ in range(2):  # the first compiles
        update_decode_metadata(**c)
    torch.cuda.synchronize()
    c["page_table"].zero_()
    c["seq_lens"].zero_()
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(50_000_000)
        c["seq_lens"].fill_(100)
        update_decode_metadata(**c)  # on the default stream it would have read lengths of 0 long ago
    other.synchronize()
    assert is_rebuilt(c)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_on_a_gpu_a_new_thread_launches_as_well():
    from attn_graph.backends.kernels.decode_metadata import update_decode_metadata

    c = page_tables(torch.device("cuda"))
    update_decode_metadata(**c)
    torch.cuda.synchronize()
    c["page_table"].zero_()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(update_decode_metadata, **c).result()
    torch.cuda.synchronize()
    assert is_rebuilt(c)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus_each_launch_goes_to_its_own():
    from attn_graph.backends.kernels.decode_metadata import update_decode_metadata

    for _ in range(2):
        for device in (torch.device("cuda:0"), torch.device("cuda:1")):
            c = page_tables(device)
            with torch.cuda.device(device):
                update_decode_metadata(**c)
                torch.cuda.synchronize()
            assert is_rebuilt(c)
