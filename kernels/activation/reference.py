"""Gated activations in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` in float32, rounded once; gate_up[n, 2i] holds the gate first -> [n, i]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` in GELU's tanh form (Hendrycks and Gimpel, 2016), in float32, rounded once; as `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
