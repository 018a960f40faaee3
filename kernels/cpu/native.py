"""The C kernels as operations on bfloat16 tensors, each with the contract of its twin.

They are told addresses, so what they rely on is checked here: a tensor of another dtype or layout is an error, never
a wrong result. Memory belongs to torch; calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from inferd.kernels.common.ops import Linear

_BF16 = torch.bfloat16
_POINTER, _INT, _FLOAT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_CACHE = (_POINTER, _POINTER, _INT, _INT, _INT, _INT)  # keys, values, blocks, block size, key heads, head size
_SIGNATURES: dict[str, tuple[type[Any], ...]] = {
    "inferd_rms_norm": (_POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER, _FLAG, _FLOAT, _POINTER),
    "inferd_add_rms_norm": (_POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER, _FLAG, _FLOAT, _POINTER, _POINTER),
    "inferd_act_mul": (_FLAG, _POINTER, _INT, _INT, _INT, _POINTER),
    "inferd_rope_store": (
        *(_POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _INT, _INT, _INT, _INT),
        *(_POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT),
    ),
    "inferd_linear": (_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _FLAG),
    "inferd_paged_decode": (
        *(_POINTER, _INT, _INT, _INT, *_CACHE, _POINTER, _INT, _INT, _POINTER),
        *(_FLOAT, _FLOAT, _INT, _POINTER, _POINTER),
    ),
    "inferd_paged_prefill": (
        *(_POINTER, _INT, _INT, _INT, *_CACHE, _POINTER, _POINTER, _INT, _INT, _POINTER),
        *(_FLAG, _FLOAT, _FLOAT, _INT, _POINTER, _POINTER),
    ),
    "inferd_merge_lse": (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER),
}
_BAD_INDEX = 1  # as in runtime.h; any other status but 0 is a want of memory


class NativeKernels:
    """One loaded library; a method for every field of `Ops` but `make_linear`, which is `linear` with its weight."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        for name, argument_types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = argument_types
            function.restype = ctypes.c_int
        library.inferd_set_threads(num_threads)
        self._rms_norm = library.inferd_rms_norm
        self._add_rms_norm = library.inferd_add_rms_norm
        self._act_mul = library.inferd_act_mul
        self._rope_store = library.inferd_rope_store
        self._linear = library.inferd_linear
        self._paged_decode = library.inferd_paged_decode
        self._paged_prefill = library.inferd_paged_prefill
        self._merge_lse = library.inferd_merge_lse

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        shape, strides = x.shape, x.stride()
        if len(shape) not in (2, 3):
            return self.rms_norm(x.reshape(-1, shape[-1]), weight, eps).view(shape)
        _check_vectors("rms_norm", x)
        out = torch.empty(shape, dtype=_BF16)
        inner, inner_stride = (shape[1], strides[1]) if len(shape) == 3 else (1, 0)
        self._rms_norm(
            *(x.data_ptr(), strides[0], inner_stride, shape[0], inner, shape[-1]),
            *(weight.data_ptr(), _is_wide("rms_norm", weight), eps, out.data_ptr()),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        _check_vectors("add_rms_norm", x, residual)
        num_rows, size = x.shape
        out, total = torch.empty(x.shape, dtype=_BF16), torch.empty(x.shape, dtype=_BF16)
        self._add_rms_norm(
            *(x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), num_rows, size),
            *(weight.data_ptr(), _is_wide("add_rms_norm", weight), eps, out.data_ptr(), total.data_ptr()),
        )
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=True)

    def _gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        _check_vectors("gelu_mul" if gelu else "silu_mul", gate_up)
        num_rows, double = gate_up.shape
        out = torch.empty((num_rows, double // 2), dtype=_BF16)
        self._act_mul(gelu, gate_up.data_ptr(), gate_up.stride(0), num_rows, double // 2, out.data_ptr())
        return out

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        _check_vectors("rope_store", q, k, v)
        num_rows, num_heads, head_size = q.shape
        num_kv_heads = k.shape[1]
        keys, values, num_blocks, block_size = _planes(kv_cache)[:4]
        if positions.dtype is not torch.int64 or slots.dtype is not torch.int64 or cos_sin.dtype is not torch.float32:
            raise TypeError("rope_store takes int64 positions and slots, and float32 cos_sin")
        status = self._rope_store(
            *(q.data_ptr(), q.stride(0), num_heads, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(num_kv_heads, head_size, num_rows, positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[0]),
            *(keys, values, slots.data_ptr(), num_blocks * block_size),
        )
        if status:
            raise _error("rope_store", status)

    def linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        """Over the weight as it lies: [out, in], dense; see `accepts_linear`. `wide` leaves its sums in float32."""
        function, dtype, empty = self._linear, _BF16, torch.empty
        out_dtype = torch.float32 if wide else _BF16
        out_features, in_features = weight.shape
        weight_address, bias_address = weight.data_ptr(), None if bias is None else bias.data_ptr()
        owners = (weight, bias)  # the addresses are good for as long as these live

        def linear(x: Tensor, _owners: object = owners) -> Tensor:
            num_rows, width = x.shape
            row_stride, dense = x.stride()
            if x.dtype is not dtype or dense != 1 or width != in_features:
                raise TypeError(f"linear takes dense bfloat16 rows of {in_features}, not {x.dtype} {tuple(x.shape)}")
            out = empty((num_rows, out_features), dtype=out_dtype)
            status = function(
                x.data_ptr(),
                row_stride,
                num_rows,
                weight_address,
                bias_address,
                out_features,
                in_features,
                out.data_ptr(),
                wide,
            )
            if status:
                raise _error("linear", status)
            return out

        return linear

    def paged_decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        _check_vectors("paged_decode", q)
        _check_indices("paged_decode", block_tables, seq_lens)
        num_rows, num_heads, _ = q.shape
        out, lse = torch.empty(q.shape, dtype=_BF16), torch.empty((num_rows, num_heads))
        status = self._paged_decode(
            *(q.data_ptr(), q.stride(0), num_rows, num_heads, *_planes(kv_cache)),
            *(block_tables.data_ptr(), block_tables.stride(0), block_tables.shape[1], seq_lens.data_ptr()),
            *(scale, softcap or 0.0, window or 0, out.data_ptr(), lse.data_ptr()),
        )
        if status:
            raise _error("paged_decode", status)
        return out, lse

    def paged_prefill(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        _check_indices("paged_prefill", block_tables, query_starts, seq_lens)
        return self._prefill(q, kv_cache, block_tables, query_starts, seq_lens, True, scale, window, softcap)

    def prefix_attend(
        self, q: Tensor, kv_cache: Tensor, block_ids: Tensor, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        _check_indices("prefix_attend", block_ids)
        starts = torch.tensor((0, q.shape[0]), dtype=torch.int32)
        length = torch.tensor((block_ids.shape[0] * kv_cache.shape[2],), dtype=torch.int32)
        return self._prefill(q, kv_cache, block_ids[None], starts, length, False, scale, None, softcap)

    def _prefill(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        causal: bool,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        _check_vectors("paged_prefill", q)
        num_tokens, num_heads, _ = q.shape
        out, lse = torch.empty(q.shape, dtype=_BF16), torch.empty((num_tokens, num_heads))
        status = self._paged_prefill(
            *(q.data_ptr(), q.stride(0), seq_lens.shape[0], num_heads, *_planes(kv_cache)),
            *(query_starts.data_ptr(), block_tables.data_ptr(), block_tables.stride(0), block_tables.shape[1]),
            *(seq_lens.data_ptr(), causal, scale, softcap or 0.0, window or 0, out.data_ptr(), lse.data_ptr()),
        )
        if status:
            raise _error("paged_prefill", status)
        return out, lse

    def merge_lse(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
        num_rows, num_heads, size = out_a.shape
        parts = (out_a, out_b, lse_a, lse_b)
        if out_a.dtype is not _BF16 or out_b.dtype is not _BF16 or not all(part.is_contiguous() for part in parts):
            raise TypeError("merge_lse takes dense bfloat16 results")
        out = torch.empty(out_a.shape, dtype=_BF16)
        self._merge_lse(
            *(out_a.data_ptr(), lse_a.data_ptr(), out_b.data_ptr(), lse_b.data_ptr()),
            *(num_rows * num_heads, size, out.data_ptr()),
        )
        return out


def accepts_linear(weight: Tensor, bias: Tensor | None) -> str | None:
    """None when `NativeKernels.linear` can serve, else the reason against."""
    out_features, in_features = weight.shape
    if in_features % 2 or out_features < 8:
        return f"a weight of {out_features}x{in_features} (in_features must be even, out_features at least 8)"
    dense = weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if weight.dtype is not _BF16 or (bias is not None and bias.dtype is not _BF16) or not dense:
        return f"a weight or bias that is not dense bfloat16 ({weight.dtype})"
    return None


def _planes(kv_cache: Tensor) -> tuple[int, int, int, int, int, int]:
    """Keys' address, values' address, blocks, block size, key heads, head size."""
    if kv_cache.dtype is not _BF16 or not kv_cache.is_contiguous():
        raise TypeError(f"a KV cache must be dense bfloat16, not {kv_cache.dtype} of strides {kv_cache.stride()}")
    _, num_blocks, block_size, num_kv_heads, head_size = kv_cache.shape
    keys = kv_cache.data_ptr()
    return keys, keys + 2 * kv_cache.stride(0), num_blocks, block_size, num_kv_heads, head_size


def _check_vectors(operation: str, *tensors: Tensor) -> None:
    """bfloat16 with a dense last dimension; of three dimensions, the last two dense."""
    for tensor in tensors:
        if tensor.dtype is not _BF16 or tensor.stride(-1) != 1:
            layout = f"{tensor.dtype} of strides {tensor.stride()}"
            raise TypeError(f"{operation} takes bfloat16 with a dense last dimension, not {layout}")


def _is_wide(operation: str, weight: Tensor) -> bool:
    if weight.dtype not in (_BF16, torch.float32) or not weight.is_contiguous():
        raise TypeError(f"{operation} takes a dense weight of bfloat16 or float32, not {weight.dtype}")
    return weight.dtype is torch.float32


def _check_indices(operation: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype is not torch.int32 or tensor.stride(-1) != 1:
            raise TypeError(f"{operation} takes int32 block ids and lengths, not {tensor.dtype}")


def _error(operation: str, status: int) -> Exception:
    if status == _BAD_INDEX:
        return IndexError(f"{operation}: a position, slot, block id or length points outside of its table")
    return MemoryError(f"{operation}: no scratch memory")
