"""Low-rank parts of linear maps of few tokens by the C kernel: to torch, small products cost a call, not their work."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from inferd.kernels.lora import reference
from inferd.kernels.lora.rows import AddLora, LoraRows

BAD_INDEX = 1  # as in runtime.h; any other status but 0 is a want of memory
MAX_TOKENS = 256  # with more, torch's matrix products are faster
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


def make_add_lora(library: ctypes.CDLL) -> AddLora:
    """`reference.add_lora` for bfloat16. `library`: as `cpu.build.load_library` gives it."""
    function = library.inferd_add_lora
    function.argtypes = (
        *(_POINTER, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER),
        *(_INT, _INT, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT),
    )
    function.restype = ctypes.c_int

    def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int], lora: LoraRows) -> None:
        if len(lora.rows) > MAX_TOKENS:
            reference.add_lora(y, x, a, b, sizes, lora)
            return
        if any(tensor.dtype is not torch.bfloat16 or tensor.stride(-1) != 1 for tensor in (x, y, a, b)):
            raise TypeError(f"add_lora takes bfloat16 with a dense last dimension, not {x.dtype}, {y.dtype}, {a.dtype}")
        num_slots, max_rank, num_matrices, in_features = a.shape
        is_dense = a.is_contiguous() and b.is_contiguous() and lora.rows.is_contiguous() and lora.tiles.is_contiguous()
        if lora.rows.dtype is not torch.int64 or lora.tiles.dtype is not torch.int32 or not is_dense:
            raise TypeError("add_lora takes dense factors, int64 rows and int32 tiles")
        if x.shape != (len(y), in_features) or y.shape[1] != sum(sizes) or b.shape != (num_slots, max_rank, sum(sizes)):
            raise ValueError(f"add_lora: {tuple(a.shape)} and {tuple(b.shape)} do not fit x {tuple(x.shape)}")
        status = function(
            *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), len(x), a.data_ptr(), b.data_ptr()),
            *(num_slots, max_rank, num_matrices, _array(tuple(sizes)), in_features),
            *(lora.rows.data_ptr(), len(lora.rows), lora.tiles.data_ptr(), len(lora.tiles)),
        )
        if status == BAD_INDEX:
            raise IndexError("add_lora: a row, slot or rank points outside of its table")
        if status:
            raise MemoryError("add_lora: no scratch memory")

    return add_lora


@lru_cache
def _array(sizes: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (_INT * len(sizes))(*sizes)
