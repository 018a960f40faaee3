"""Linear maps in plain torch."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional

from inferd.kernels.common.ops import Linear


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`x[n, in] @ weight[out, in].T + bias[out]`, over the weight as it lies."""
    return partial(functional.linear, weight=weight, bias=bias)
