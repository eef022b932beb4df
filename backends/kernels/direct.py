"""Launching a compiled Triton kernel through the driver, without Triton's own launcher.

Triton's launcher binds and inspects every argument anew, which costs more host time than most of these kernels run.
Here a launch that has been seen before only writes its arguments and calls the driver. Everything that Triton compiles
for (types, equal to 1, divisible by 16) is part of the key, so a launch never meets a variant made for other values;
whatever is not understood goes through Triton. This is the one file that knows a compiled kernel's insides.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import torch
import triton

_WORDS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64}
_MAX_SCRATCH_POINTERS = 2  # Triton 3.4 and later append null pointers for scratch that these kernels do not use


class DirectLaunch:
    """One compiled variant on one device, with a cell for each of its parameters."""

    __slots__ = ("_block", "_call", "_cells", "_function", "_parameters", "_positions", "_shared")

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
        self._positions = [i for i, kind in enumerate(kinds) if kind != "constexpr" and (i,) not in constants]
        self._cells = [_cell(kinds[i]) for i in self._positions]
        scratch = _ptx_parameters(compiled.asm["ptx"]) - len(self._cells)
        if not 0 <= scratch <= _MAX_SCRATCH_POINTERS:
            raise ValueError(f"{len(self._cells)} runtime arguments for {len(self._cells) + scratch} parameters")
        cells = self._cells + [ctypes.c_uint64(0) for _ in range(scratch)]
        self._cells = cells[: len(self._cells)]
        self._parameters = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        self._call = _driver_launch()
        self._function = ctypes.c_void_p(compiled.function)
        self._block = metadata.num_warps * getattr(metadata, "warp_size", 32)
        self._shared = metadata.shared

    def __call__(self, grid: tuple[int, ...], values: list[int], stream: int) -> None:
        """Launch. values: every argument as an integer, pointers as addresses.

        Raises:
            RuntimeError: the driver refuses.
        """
        for cell, i in zip(self._cells, self._positions):  # noqa: B905 - equal by construction, and this is the hot path
            cell.value = values[i]
        x, y, z = (*grid, 1, 1)[:3]
        code = self._call(
            self._function, x, y, z, self._block, 1, 1, self._shared, stream, self._parameters, None
        )  # fmt: skip
        if code:
            raise RuntimeError(f"cuLaunchKernel failed with code {code}")


class DirectLauncher:
    """Launches of one process: remembers each variant after its first launch through Triton."""

    def __init__(self) -> None:
        self._variants: dict[tuple, DirectLaunch | None] = {}
        self._stream = self._device = None

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Launch on the current stream of the current device."""
        if self._stream is None:
            active = triton.runtime.driver.active
            self._stream, self._device = active.get_current_stream, active.get_current_device
        values: list[int] = []
        shape: list[Any] = [kernel, self._device()]
        for arg in args:
            if type(arg) is int:
                values.append(arg)
                shape.append((arg == 1) + 2 * (arg & 15 == 0) + 4 * (-2147483648 <= arg < 2147483648))
            elif isinstance(arg, torch.Tensor):
                address = arg.data_ptr()
                values.append(address)
                shape.append(arg.dtype)
                shape.append(address & 15)
            else:
                kernel[grid](*args, **options)
                return
        shape.extend(options.values())
        key = tuple(shape)
        variant = self._variants.get(key)
        if variant is not None:
            variant(grid, values, self._stream(shape[1]))
            return
        compiled = kernel[grid](*args, **options)
        if key not in self._variants:
            self._variants[key] = _taken_apart(compiled, len(args))


def supported(kernel: Any) -> bool:
    """Whether `kernel` is compiled for NVIDIA here: interpreted, autotuned and HIP kernels go through Triton."""
    return isinstance(kernel, triton.JITFunction) and torch.version.cuda is not None


def _taken_apart(compiled: Any, n_args: int) -> DirectLaunch | None:
    try:
        return DirectLaunch(compiled, n_args)
    except (ValueError, KeyError, AttributeError):
        return None  # another Triton's kernel: correct through its own launcher, only slower


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


def _driver_launch() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    words, pointer = [ctypes.c_uint] * 7, ctypes.c_void_p
    function.argtypes = [pointer, *words, pointer, pointer, pointer]
    function.restype = ctypes.c_int
    return function
