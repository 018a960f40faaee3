"""Parameters that know which part of which checkpoint tensor they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inferd.engine.layers.target import BuildTarget

Shard = str | None  # which tensor of a fused parameter ("q", "gate", …); None: the only one


class WeightMismatch(ValueError):
    """A checkpoint tensor has another shape than its parameter needs."""


@dataclass(frozen=True)
class Placement:
    """One copy along dimension `dim`: `length` entries from `source_start` of a checkpoint tensor of `full_shape` to
    `target_start` of this rank's parameter."""

    full_shape: tuple[int, ...]
    length: int
    dim: int = 0
    source_start: int = 0
    target_start: int = 0

    @staticmethod
    def whole(*shape: int) -> Placement:
        return Placement(shape, shape[0])

    def copy(self, tensor: Tensor, parameter: Tensor) -> int:
        """Converts to the parameter's dtype on the way. Returns the bytes that were filled."""
        if tuple(tensor.shape) != self.full_shape:
            raise WeightMismatch(f"its shape is {list(tensor.shape)}, the model needs {list(self.full_shape)}")
        target = parameter.narrow(self.dim, self.target_start, self.length)
        target.copy_(tensor.narrow(self.dim, self.source_start, self.length))
        return target.numel() * target.element_size()


class WeightLayer(nn.Module):
    """A layer with parameters of its own: declared by `add_weight`, filled by `weight_loader`, then `prepare`d."""

    def __init__(self, target: BuildTarget) -> None:
        super().__init__()
        self.target = target
        self.placements: dict[str, Mapping[Shard, Placement]] = {}

    def add_weight(self, name: str, shape: tuple[int, ...], placements: Mapping[Shard, Placement]) -> None:
        """An uninitialised parameter of this rank, and where each checkpoint tensor goes in it."""
        data = torch.empty(shape, dtype=self.target.torch_dtype, device=self.target.device)
        self.register_parameter(name, nn.Parameter(data, requires_grad=False))
        self.placements[name] = placements

    def weight_loader(self, name: str, tensor: Tensor, shard: Shard = None) -> int:
        """Take this rank's part of a checkpoint tensor into parameter `name`; the bytes filled.

        Raises WeightMismatch when the whole tensor's shape is wrong.
        """
        return self.placements[name][shard].copy(tensor, self.get_parameter(name).data)

    def prepare(self) -> None:
        """Called once, after every parameter is filled."""
