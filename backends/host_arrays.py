"""NumPy views of tensors on the host, for planners that run before every replay."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

_WORDS = {torch.int32: ctypes.c_int32, torch.int64: ctypes.c_int64}


def host_array(x: torch.Tensor) -> np.ndarray:
    """[n] view of a contiguous host vector, int32 or int64; the caller keeps `x` alive.

    Unlike `x.numpy()` it dispatches nothing, so that a replay whose metadata is recorded stays without dispatches.
    """
    assert x.device.type == "cpu" and x.is_contiguous(), (x.device, x.stride())
    n = x.shape[0]
    return np.frombuffer((_WORDS[x.dtype] * n).from_address(x.data_ptr()), dtype=_WORDS[x.dtype]) if n else np.zeros(0)
