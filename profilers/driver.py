"""Launching an instantiated graph through the driver itself, without PyTorch's wrapper.

ctypes on the driver library: measured as fast as the cuda-bindings package, and always there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from ..backends.kernels.direct import NO_CONTEXT, bind_context, current_device
from ..backends.kernels.launch import observers, through_observers


class DriverError(RuntimeError):
    """A driver call that failed; names the call and its code."""


@cache
def _graph_launch() -> ctypes._NamedFuncPointer:
    hip = torch.version.hip is not None
    library = ctypes.CDLL("libamdhip64.so" if hip else "libcuda.so.1")
    function = library.hipGraphLaunch if hip else library.cuGraphLaunch
    # No argument types: callers hand it ready-made handles, which would be converted once more at every launch.
    function.restype = ctypes.c_int
    return function


def raw_graph_launcher(executable: int, stream: int) -> Callable[[], None]:
    """A call that launches graph `executable` on `stream` (both driver handles).

    Raises:
        DriverError: when called, if the driver refuses.
    """
    function, graph, on = _graph_launch(), ctypes.c_void_p(executable), ctypes.c_void_p(stream)

    def call() -> None:
        code = function(graph, on)
        if code == NO_CONTEXT:
            bind_context(current_device())
            code = function(graph, on)
        if code:
            raise DriverError(f"cuGraphLaunch failed with code {code}")

    def launch() -> None:
        if observers:
            through_observers(call, None)
        elif function(graph, on):
            call()  # once more: says what is wrong, unless this thread had only not touched the device yet

    return launch
