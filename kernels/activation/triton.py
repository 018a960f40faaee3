"""Gated activations as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.cuda.launch import Launcher


@triton.jit
def _silu_mul_kernel(gate_up, out, size, row_stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    source = gate_up + row * row_stride + columns
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + columns, gated.to(out.dtype.element_ty), mask=mask)


_silu_mul = Launcher(_silu_mul_kernel)


def silu_mul(gate_up: Tensor) -> Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return out
    block = min(triton.next_power_of_2(size), 2048 if num_rows > 64 else 1024)
    grid = (num_rows, triton.cdiv(size, block), 1)
    _silu_mul(grid, (gate_up, out, size, gate_up.stride(0)), {"BLOCK": block}, device=gate_up.device)
    return out
