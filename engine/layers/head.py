"""The small matrix that turns one vector of a text into its labels."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from inferd.engine.layers.target import BuildTarget
from inferd.engine.layers.weights import Placement, WeightLayer


class LabelHead(WeightLayer):
    """x[m, in] f32 -> [m, out] f32, whole on every rank. In float32 whatever the model is: few rows, and no cost."""

    def __init__(self, input_size: int, output_size: int, bias: bool, target: BuildTarget) -> None:
        super().__init__(target)
        self.add_weight("weight", (output_size, input_size), {None: Placement.whole(output_size, input_size)})
        if bias:
            self.add_weight("bias", (output_size,), {None: Placement.whole(output_size)})
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def prepare(self) -> None:
        self._weight = self.get_parameter("weight").data.float()
        self._bias = self.get_parameter("bias").data.float() if "bias" in self.placements else None
        for name in self.placements:
            delattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        if self._weight is None:
            raise RuntimeError("labels were asked for before prepare()")
        return functional.linear(x, self._weight, self._bias)
