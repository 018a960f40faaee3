"""Linear layers with a low-rank part for each adapter that has a slot, added to the tokens that want it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.config import LoRAConfig
from inferd.engine.layers.linear import ParallelLinear
from inferd.engine.layers.weights import Placement
from inferd.engine.loader.names import FUSED
from inferd.engine.lora.config import LINEARS
from inferd.kernels.common.ops import Linear
from inferd.kernels.lora.rows import AddLora, LoraRows

Factors = tuple[Tensor, Tensor]  # A[rank, in], B[out, rank]


class StepAdapters:
    """What the layers of one model look at in each step; the worker's manager sets it."""

    def __init__(self) -> None:
        self.rows: LoraRows | None = None  # None: no token of the step has an adapter
        self.is_static = False  # which tokens have one, and of which slots, is not known before the layers run


@dataclass(frozen=True)
class LinearPlan:
    """The matrices of one `ParallelLinear`, in order of their outputs, and this rank's part of each.

    Of a matrix divided by outputs every rank has all of A, and its own rows of B. Of one divided by inputs it has its
    own columns of A, and all of B: the sum over the ranks, which the layer makes anyway, is linear in what each adds.
    So no adapter costs a message between ranks.
    """

    matrices: tuple[str, ...]  # their names in the checkpoint, without ".weight"
    placements: tuple[Placement, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, layer: ParallelLinear) -> LinearPlan | None:
        """None for a layer that no adapter is for."""
        placements = sorted(layer.placements["weight"].items(), key=lambda item: item[1].target_start)
        matrices = tuple(_matrix(name, shard) for shard, _ in placements)
        if any(matrix.rpartition(".")[2] not in LINEARS for matrix in matrices):
            return None
        return cls(matrices, tuple(placement for _, placement in placements), layer.target.torch_dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """This rank's outputs of each matrix."""
        return tuple(part.length if part.dim == 0 else part.full_shape[0] for part in self.placements)

    @property
    def num_inputs(self) -> int:
        part = self.placements[0]
        return part.full_shape[1] if part.dim == 0 else part.length

    def shape(self, index: int) -> tuple[int, int]:
        """(out, in) of one of the matrices, all ranks together."""
        num_outputs, num_inputs = self.placements[index].full_shape
        return num_outputs, num_inputs

    def own_part(self, index: int, factors: Factors) -> Factors:
        """Views of what this rank needs of a matrix's factors."""
        a, b = factors
        part = self.placements[index]
        if part.dim == 0:
            return a, b.narrow(0, part.source_start, part.length)
        return a.narrow(1, part.source_start, part.length), b


class LoraLinear:
    """Buffers for the factors of all slots, and the layer's computation with their products added."""

    def __init__(
        self, plan: LinearPlan, layer: ParallelLinear, config: LoRAConfig, step: StepAdapters, add_lora: AddLora
    ) -> None:
        """Wraps the layer's computation. For a layer whose weights are in their final form."""
        num_slots, max_rank, device = config.max_loras, config.max_lora_rank, layer.target.device
        self._sizes = sizes = plan.sizes
        shapes = (num_slots, max_rank, len(sizes), plan.num_inputs), (num_slots, max_rank, sum(sizes))
        # Written, not only reserved: the memory that is free is measured after this.
        a, b = (torch.empty(shape, dtype=plan.dtype, device=device).zero_() for shape in shapes)
        self._a, self._b = a, b
        self._is_filled = is_filled = [False] * num_slots

        def wrap(base: Linear) -> Linear:
            def linear(x: Tensor) -> Tensor:
                y = base(x)
                rows = step.rows
                if rows is not None and (step.is_static or any(is_filled[segment.slot] for segment in rows.segments)):
                    add_lora(y, x, a, b, sizes, rows)
                return y

            return linear

        layer.wrap(wrap)

    def fill(self, slot: int, factors: Mapping[int, Factors]) -> None:
        """Own parts by index of the matrix, where there are none, nothing is added. A[rank, in], and B[rank, out] as
        buffers hold it, scaled already."""
        if not (factors or self._is_filled[slot]):
            return
        self._is_filled[slot] = bool(factors)
        self._a[slot].zero_()
        self._b[slot].zero_()
        offset = 0
        for index, size in enumerate(self._sizes):
            if index in factors:
                a, b = factors[index]
                self._a[slot, : len(a), index].copy_(a, non_blocking=True)
                self._b[slot, : len(a), offset : offset + size].copy_(b, non_blocking=True)
            offset += size


def _matrix(layer_name: str, shard: str | None) -> str:
    prefix, _, module = layer_name.rpartition(".")
    parts = {fused: part for part, fused in FUSED.items()}
    return f"{prefix}.{parts.get((module, shard), module)}" if shard is not None else layer_name
