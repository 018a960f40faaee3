"""Norms of activations."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from inferd.engine.layers.target import BuildTarget
from inferd.engine.layers.weights import Placement, WeightLayer


class RMSNorm(WeightLayer):
    """Over the last dimension of `size`; the same on every rank."""

    def __init__(self, size: int, eps: float, target: BuildTarget) -> None:
        super().__init__(target)
        self.add_weight("weight", (size,), {None: Placement.whole(size)})
        self._weight = self.get_parameter("weight").data  # the same memory, reached without Module's slow lookup
        self._eps = eps
        self._rms_norm = target.ops.rms_norm
        self._add_rms_norm = target.ops.add_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """x[..., size] -> [..., size]."""
        return self._rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), [n, size] each."""
        return self._add_rms_norm(x, residual, self._weight, self._eps)


class UnitOffsetRMSNorm(RMSNorm):
    """Scales by 1 + weight, as Gemma does: the sum is kept in float32, where small weights count."""

    def prepare(self) -> None:
        self._weight = 1.0 + self.get_parameter("weight").data.float()
        del self.weight


class LayerNorm(WeightLayer):
    """Ba et al., 2016, over the last dimension of `size`; the same on every rank."""

    def __init__(self, size: int, eps: float, target: BuildTarget) -> None:
        super().__init__(target)
        for name in ("weight", "bias"):
            self.add_weight(name, (size,), {None: Placement.whole(size)})
        self._weight, self._bias = self.get_parameter("weight").data, self.get_parameter("bias").data
        self._shape, self._eps = (size,), eps

    def forward(self, x: Tensor) -> Tensor:
        """x[..., size] -> [..., size]."""
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)
