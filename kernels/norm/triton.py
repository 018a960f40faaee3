"""Root-mean-square norm as a Triton kernel, alone or after an addition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.cuda.launch import Launcher

_TILE = 4096  # elements that one program aims at: short vectors share a program


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    source = x + (rows // inner * outer_stride + rows % inner * inner_stride)[:, None] + columns[None, :]
    target = rows[:, None] * SIZE + columns[None, :]
    wide = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(residual + rows[:, None] * residual_stride + columns[None, :], mask=mask, other=0.0)
        rounded = (wide + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + target, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    tl.store(out + target, (wide * inverse[:, None] * scale[None, :]).to(out.dtype.element_ty), mask=mask)


_rms_norm = Launcher(_rms_norm_kernel)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dim() > 3 or x.stride(-1) != 1:
        return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    outer_stride = x.stride(0) if x.dim() > 1 else 0
    num_rows = x.numel() // x.shape[-1]
    _launch(x, x, weight, out, out, num_rows, (inner, outer_stride, inner_stride, 0), eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides = (1, x.stride(0), 0, residual.stride(0))
    _launch(x, residual, weight, out, total, x.shape[0], strides, eps, add=True)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    num_rows: int,
    strides: tuple[int, int, int, int],
    eps: float,
    *,
    add: bool,
) -> None:
    """`strides`: rows of the inner dimension, then the strides of x's outer and inner rows and of the residual's."""
    if num_rows == 0:
        return
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    rows = max(1, min(_TILE // block, triton.next_power_of_2(num_rows)))
    _rms_norm(
        (triton.cdiv(num_rows, rows), 1, 1),
        (x, residual, weight, out, total, num_rows, *strides, eps),
        {"SIZE": size, "BLOCK": block, "ROWS": rows, "ADD": add},
        device=x.device,
        num_warps=8 if block * rows >= 4096 else 4,
    )
