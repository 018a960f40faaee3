"""Low-rank parts of linear maps of few tokens by the C kernel: in torch a small product costs its call, not its work."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from inferd.kernels.cpu.native import check_status, check_vectors
from inferd.kernels.lora import reference
from inferd.kernels.lora.rows import AddLora, LoraRows

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
        check_vectors("add_lora", x, y, a, b)
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
        check_status("add_lora", status)

    return add_lora


@lru_cache
def _array(sizes: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (_INT * len(sizes))(*sizes)
