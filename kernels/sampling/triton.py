"""The choice of the greatest logit as two Triton kernels: parts of each row, then what they found.

A logit and its place make one 64-bit number: the logit's bits, in an order of whole numbers that is that of the
floats, above the place counted from the end. The greatest of them is the first of the greatest logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.cuda.launch import Launcher

_PART = 4096  # logits of one program
_LEAST = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["size", "row_stride"])
def _parts_kernel(logits, found, size, row_stride, PART: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    places = part * PART + tl.arange(0, PART)
    inside = places < size
    value = tl.load(logits + row * row_stride + places, mask=inside, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # one zero instead of two
    order = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    packed = (order.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)
    tl.store(found + row * tl.num_programs(1) + part, tl.max(tl.where(inside, packed, _LEAST), axis=0))


@triton.jit(do_not_specialize=["num_parts"])
def _rows_kernel(found, ids, num_parts, PARTS: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    packed = tl.max(tl.load(found + row * num_parts + parts, mask=parts < num_parts, other=_LEAST), axis=0)
    order = packed >> 32
    is_finite = (order < 0x7F800000) & (order > -0x7F800001)
    tl.store(ids + row, tl.where(is_finite, 0x7FFFFFFF - (packed & 0xFFFFFFFF), -1))


_parts = Launcher(_parts_kernel)
_rows = Launcher(_rows_kernel)


def greedy(logits: Tensor) -> Tensor:
    num_rows, size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 with dense rows, not {logits.dtype} of strides {logits.stride()}")
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return ids
    num_parts = triton.cdiv(size, _PART)
    found = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
    _parts((num_rows, num_parts, 1), (logits, found, size, logits.stride(0)), {"PART": _PART}, device=logits.device)
    constants = {"PARTS": triton.next_power_of_2(num_parts)}
    _rows((num_rows, 1, 1), (found, ids, num_parts), constants, device=logits.device, num_warps=1)
    return ids
