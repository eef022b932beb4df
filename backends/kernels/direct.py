"""Launching a compiled Triton kernel through the driver, without Triton's own launcher.

Triton's launcher binds and inspects every argument anew, which costs more host time than most of these kernels run.
Here a launch that has been seen before only writes its arguments and calls the driver. Everything that Triton compiles
for (types, equal to 1, divisible by 16) is part of the key, so a launch never meets a variant made for other values;
whatever is not understood goes through Triton. This is the one file that knows a compiled kernel's insides.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
import triton

_WORDS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64}
_MAX_SCRATCH_POINTERS = 2  # Triton 3.4 and later append null pointers for scratch that these kernels do not use


NO_CONTEXT = 201
"""The driver's answer in a thread that has not touched the device yet. CUDA's runtime would have seen to that."""


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    ]


class Variant:
    """One compiled variant on one device: what a launch of it needs."""

    __slots__ = ("block", "function", "kinds", "positions", "scratch", "shared")

    def __init__(self, compiled: Any, n_args: int) -> None:
        """Take apart what Triton compiled.

        Raises:
            ValueError: the kernel needs something that only Triton's launcher provides; the message names it.
        """
        metadata = compiled.metadata
        for name in ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"):
            if getattr(metadata, name, None):
                raise ValueError(f"{name} is set")
        if getattr(metadata, "num_ctas", 1) != 1:
            raise ValueError("clusters")
        kinds = list(compiled.src.signature.values())[:n_args]
        constants = compiled.src.constants
        self.positions = [i for i, kind in enumerate(kinds) if kind != "constexpr" and (i,) not in constants]
        self.kinds = [kinds[i] for i in self.positions]
        self.scratch = _ptx_parameters(compiled.asm["ptx"]) - len(self.kinds)
        if not 0 <= self.scratch <= _MAX_SCRATCH_POINTERS:
            raise ValueError(f"{len(self.kinds)} runtime arguments for {len(self.kinds) + self.scratch} parameters")
        for kind in self.kinds:
            _cell(kind)  # refuses kinds of argument that it does not know
        self.function = compiled.function
        self.block = metadata.num_warps * getattr(metadata, "warp_size", 32)
        self.shared = metadata.shared


class Packet:
    """Everything that the driver reads at a launch of one variant on one grid, laid out once.

    Attributes:
        cells: one for each runtime argument, in the variant's order.
        config: where the stream is written.
        call, handles: the driver's launch and its arguments; returns 0 when all is well.
    """

    __slots__ = ("_kept", "call", "cells", "config", "handles")

    def __init__(self, variant: Variant, grid: tuple[int, ...]) -> None:
        self.call = _driver_launch()
        self.cells = [_cell(kind) for kind in variant.kinds]
        scratch = [ctypes.c_uint64(0) for _ in range(variant.scratch)]
        array = (ctypes.c_void_p * (len(self.cells) + variant.scratch))(*map(ctypes.addressof, self.cells + scratch))
        self.config = LaunchConfig(*(*grid, 1, 1)[:3], variant.block, 1, 1, variant.shared)
        # The driver reads through addresses, so what they point to must live as long as this does. Converted once: it
        # would cost as much as the call.
        self._kept = scratch, array
        pointers = ctypes.addressof(self.config), variant.function, ctypes.addressof(array), None
        self.handles = tuple(map(ctypes.c_void_p.from_param, pointers))

    def launch(self, stream: int) -> None:
        """Raises RuntimeError if the driver refuses."""
        self.config.stream = stream
        if self.call(*self.handles):
            self.call_again()

    def call_again(self) -> None:
        """After a call that failed: says what is wrong, unless this thread had only not touched the device yet."""
        code = self.call(*self.handles)
        if code == NO_CONTEXT:
            bind_context(current_device())
            code = self.call(*self.handles)
        if code:
            raise RuntimeError(f"cuLaunchKernelEx failed with code {code}")


class DirectLauncher:
    """Launches of one process: remembers each variant after its first launch through Triton."""

    def __init__(self) -> None:
        self._packets: dict[tuple, tuple[list[int], Packet] | None] = {}
        self._lock = Lock()

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Launch on the current stream of the current device."""
        values: list[int] = []
        shape: list[Any] = [kernel, current_device()]
        for arg in args:
            value, code = _seen(arg)
            if code is None:
                kernel[grid](*args, **options)
                return
            values.append(value)
            shape.append(code)
        shape.extend(options.values())
        shape.append(grid)
        key = tuple(shape)
        if key not in self._packets:
            self._packets[key] = _taken_apart(kernel[grid](*args, **options), grid, len(args))
            return
        known = self._packets[key]
        if known is None:
            kernel[grid](*args, **options)
            return
        positions, packet = known
        with self._lock:  # the driver reads the cells while other threads may run
            for cell, i in zip(packet.cells, positions):  # noqa: B905 - equal by construction, and this is the hot path
                cell.value = values[i]
            packet.launch(current_stream(shape[1]))

    def forget(self) -> None:
        self._packets.clear()
        self._lock = Lock()


def bound_launch(
    compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], varying: tuple[int, ...]
) -> Callable[[tuple[Any, ...]], bool]:
    """A launch whose arguments are bound once: a call writes those that changed, and calls the driver.

    It takes the varying arguments' values, as a tuple, and returns False if they need another variant; then nothing was
    launched. For one thread at a time, as are the buffers that it writes.

    Args:
        compiled: what launching (grid, args) through Triton returned.
        varying: positions of the arguments that change from call to call.

    Raises:
        ValueError: the kernel cannot be launched directly, or an argument is neither a tensor nor an int.
    """
    seen = [_seen(arg) for arg in args]
    if any(code is None for _, code in seen):
        raise ValueError("an argument is neither a tensor nor an int")
    try:
        variant = Variant(compiled, len(args))
        packet = Packet(variant, grid)
    except (AttributeError, KeyError) as error:
        raise ValueError(f"not a compiled kernel as this file knows it: {error}") from error
    cells, unread = dict(zip(variant.positions, packet.cells, strict=True)), ctypes.c_int64()
    for i, cell in cells.items():
        cell.value = seen[i][0]
    scope = {
        "bound": current_device(), "device": current_device, "stream": current_stream, "seen": _seen,
        "config": packet.config, "call": packet.call, "handles": packet.handles, "again": packet.call_again,
        # The driver reads addresses: the tensors that never change must live as long as this does.
        "constant": [arg for i, arg in enumerate(args) if i not in varying],
    }  # fmt: skip
    for n, i in enumerate(varying):
        word, code = seen[i]
        state = {"held": args[i], "word": word, "code": code, "cell": cells.get(i, unread)}
        scope |= {f"{name}{n}": value for name, value in state.items()}
    exec(_repeat_source([type(args[i]) is int for i in varying]), scope)
    repeat = scope.pop("repeat")  # in there it would keep itself alive
    _bound.add(repeat)
    return repeat


def _repeat_source(ints: list[bool]) -> str:
    """Python of what `bound_launch` returns; for each varying argument, whether it is an int or else a tensor.

    Unrolled, as the methods of dataclasses are: a loop takes as long again as looking at the arguments, which is most
    of an eager rebuild's host time beside the driver's.
    """
    each = [(_INT if is_int else _TENSOR).format(n=n) for n, is_int in enumerate(ints)]
    return _REPEAT.format(
        state="".join(f", held{n}, word{n}" for n in range(len(ints))),
        new=", ".join(f"new{n}" for n in range(len(ints))),
        each="".join(each),
    )


_REPEAT = """
def repeat(values):
    global bound{state}
    if device() != bound:
        return False
    [{new}] = values{each}
    config.stream = stream(bound)
    if call(*handles):
        again()
    return True
"""
_TENSOR = """
    address = new{n}.data_ptr()
    if address != word{n} or new{n} is not held{n}:
        if (new{n}.dtype, address & 15) != code{n}:
            return False
        held{n} = new{n}
        cell{n}.value = word{n} = address"""
_INT = """
    if type(new{n}) is not int or new{n} != word{n}:
        word, code = seen(new{n})
        if code != code{n}:
            return False
        cell{n}.value = word{n} = word"""


_bound: WeakSet[Callable] = WeakSet()


def forget_after_fork(launcher: DirectLauncher) -> None:
    """A forked child must not launch what its parent loaded: it goes through Triton, which says what is wrong."""

    def forget() -> None:
        launcher.forget()
        for repeat in list(_bound):
            repeat.__globals__["bound"] = None

    os.register_at_fork(after_in_child=forget)


# What Triton's driver asks, without the two calls around it; the same device and stream that PyTorch would use.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None) or (
    lambda: triton.runtime.driver.active.get_current_device()
)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: triton.runtime.driver.active.get_current_stream(device)
)


def _seen(arg: Any) -> tuple[int, Any]:
    """The word that a kernel gets for `arg`, and everything about it that Triton may compile for."""
    if type(arg) is int:
        return arg, (arg == 1) + 2 * (arg & 15 == 0) + 4 * (-2147483648 <= arg < 2147483648)
    if isinstance(arg, torch.Tensor):
        address = arg.data_ptr()
        return address, (arg.dtype, address & 15)
    return 0, None


def supported(kernel: Any) -> bool:
    """Whether `kernel` is compiled for NVIDIA here: interpreted, autotuned and HIP kernels go through Triton."""
    return isinstance(kernel, triton.JITFunction) and torch.version.cuda is not None


def _taken_apart(compiled: Any, grid: tuple[int, ...], n_args: int) -> tuple[list[int], Packet] | None:
    try:
        variant = Variant(compiled, n_args)
        return variant.positions, Packet(variant, grid)
    except (ValueError, KeyError, AttributeError):
        return None  # another Triton's kernel, or an old driver: right through its own launcher, only slower


def _cell(kind: str) -> Any:
    if kind.startswith("*"):
        return ctypes.c_uint64(0)
    if kind not in _WORDS:
        raise ValueError(f"argument of type {kind}")
    return _WORDS[kind](0)


def _ptx_parameters(ptx: str) -> int:
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise ValueError("no entry in the PTX")
    return entry[1].count(".param")


def bind_context(device: int) -> None:
    """Make PyTorch's context of `device` current in this thread, for calls to the driver itself.

    Raises:
        RuntimeError: the driver refuses.
    """
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or driver.cuCtxSetCurrent(context)
    if code:
        raise RuntimeError(f"no context of GPU {device} in this thread: the driver answers {code}")


@cache
def _driver_launch() -> Callable[..., int]:
    """The driver's launch, for ready-made handles only: it has no argument types to convert to.

    Raises:
        AttributeError: the driver is older than CUDA 11.8.
    """
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function
