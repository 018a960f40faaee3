"""Arrays from main memory to a device, all in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT_BYTES = 16  # of each array's beginning: what kernels read in one load


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors of the same shapes and dtypes; on the CPU they share the arrays' memory.

    The staging memory is pinned, and torch does not give it to anybody else before the copy has been made.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    offsets, total = place([array.nbytes for array in arrays])
    staging = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    host = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        window(host, offset, array.shape, array.dtype)[...] = array
    moved = staging.to(device, non_blocking=True)
    return [
        moved[offset : offset + array.nbytes].view(torch_dtype(array.dtype)).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]


def place(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of parts that lie behind each other, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes_bytes:
        offsets.append(end)
        end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def window(memory: NDArray[np.uint8], offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A part of raw memory, seen as an array."""
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of the same name."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found
