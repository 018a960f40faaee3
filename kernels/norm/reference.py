"""Root-mean-square norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x²) + eps) * weight` over the last dimension, in float32, rounded once to x's dtype.

    x[..., h], weight[h] of x's dtype or float32 -> [..., h] (Zhang and Sennrich, 2019).
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`total = x + residual` rounded to x's dtype, and the norm of that rounded total: (normed, total), both [n, h]."""
    total = x + residual
    return rms_norm(total, weight, eps), total
