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


class Variant:
    """One compiled variant on one device: what a launch of it needs."""

    __slots__ = ("block", "call", "function", "kinds", "positions", "scratch", "shared")

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
        self.cells()  # refuses kinds of argument that it does not know
        self.call = _driver_launch()
        self.function = ctypes.c_void_p(compiled.function)
        self.block = metadata.num_warps * getattr(metadata, "warp_size", 32)
        self.shared = metadata.shared

    def cells(self) -> tuple[list[Any], Any]:
        """A cell for each runtime argument, and the array of their addresses that the driver reads."""
        cells = [_cell(kind) for kind in self.kinds]
        scratch = [ctypes.c_uint64(0) for _ in range(self.scratch)]
        array = (ctypes.c_void_p * (len(cells) + self.scratch))(*map(ctypes.addressof, cells + scratch))
        array.cells = cells + scratch  # the driver reads through their addresses: they must live as long as the array
        return cells, array

    def launch(self, grid: tuple[int, int, int], parameters: Any, stream: int) -> None:
        """Raises RuntimeError if the driver refuses."""
        x, y, z = grid
        code = self.call(self.function, x, y, z, self.block, 1, 1, self.shared, stream, parameters, None)
        if code:
            raise RuntimeError(f"cuLaunchKernel failed with code {code}")


class DirectLauncher:
    """Launches of one process: remembers each variant after its first launch through Triton."""

    def __init__(self) -> None:
        self._variants: dict[tuple, tuple[Variant, list[Any], Any] | None] = {}

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
        key = tuple(shape)
        if key not in self._variants:
            self._variants[key] = _taken_apart(kernel[grid](*args, **options), len(args))
            return
        known = self._variants[key]
        if known is None:
            kernel[grid](*args, **options)
            return
        variant, cells, parameters = known
        for cell, i in zip(cells, variant.positions):  # noqa: B905 - equal by construction, and this is the hot path
            cell.value = values[i]
        variant.launch((*grid, 1, 1)[:3], parameters, current_stream(shape[1]))


class BoundLaunch:
    """A launch whose arguments are bound once; a repetition writes those that may change, and calls the driver.

    Args:
        compiled: what launching (grid, args) through Triton returned.
        varying: positions of the arguments that change from call to call.

    Raises:
        ValueError: the kernel cannot be launched directly, or an argument is neither a tensor nor an int.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], varying: tuple[int, ...]) -> None:
        seen = [_seen(arg) for arg in args]
        if any(code is None for _, code in seen):
            raise ValueError("an argument is neither a tensor nor an int")
        try:
            self._variant = variant = Variant(compiled, len(args))
        except (AttributeError, KeyError) as error:
            raise ValueError(f"not a compiled kernel as this file knows it: {error}") from error
        self._grid = (*grid, 1, 1)[:3]
        self._device = current_device()
        cells, self._parameters = variant.cells()
        for cell, i in zip(cells, variant.positions, strict=True):
            cell.value = seen[i][0]
        by_position = dict(zip(variant.positions, cells, strict=True))
        self._varying = [(by_position.get(i), seen[i][1]) for i in varying]
        # The driver reads addresses: the tensors that never change must live as long as this does.
        self._kept = [arg for i, arg in enumerate(args) if i not in varying]

    def repeat(self, values: tuple[Any, ...]) -> bool:
        """Launch with new values for the varying arguments. False: they need another variant, nothing was launched."""
        for (cell, wanted), value in zip(self._varying, values):  # noqa: B905 - hot path
            new, code = _seen(value)
            if code != wanted:
                return False
            if cell is not None:
                cell.value = new
        if current_device() != self._device:
            return False
        self._variant.launch(self._grid, self._parameters, current_stream(self._device))
        return True


def current_device() -> int:
    return triton.runtime.driver.active.get_current_device()


def current_stream(device: int) -> int:
    return triton.runtime.driver.active.get_current_stream(device)


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


def _taken_apart(compiled: Any, n_args: int) -> tuple[Variant, list[Any], Any] | None:
    try:
        variant = Variant(compiled, n_args)
    except (ValueError, KeyError, AttributeError):
        return None  # another Triton's kernel: right through its own launcher, only slower
    return variant, *variant.cells()


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
