"""Linear maps in plain torch."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional

from inferd.kernels.common.ops import Linear


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`x[n, in] @ weight[out, in].T + bias[out]`, over the weight as it lies."""
    return partial(functional.linear, weight=weight, bias=bias)


def make_logits(weight: Tensor) -> Linear:
    """`x[n, in] @ weight[out, in].T`, as float32.

    Logits are compared with each other, and bfloat16 has one value for all that lie within 1/8 at the height where they
    are. A kernel keeps the sums that it has anyway; here they come from the product in the dtype of the operands.
    """
    linear = make_linear(weight, None)
    return lambda x: linear(x).float()
