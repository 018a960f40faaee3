"""Linear layers divided over tensor-parallel ranks: by output rows, or by input columns.

A fused projection shards each of its matrices first and joins the shards after, so that a rank's rows stay whole heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from inferd.engine.errors import ConfigError
from inferd.engine.layers.target import BuildTarget
from inferd.engine.layers.weights import Placement, Shard, WeightLayer
from inferd.kernels.common.ops import Linear


def _not_prepared(x: Tensor) -> Tensor:
    raise RuntimeError("a linear layer was called before prepare(): its weights are not in their final form")


class ParallelLinear(WeightLayer):
    """The common part: `weight[out_local, in_local]`, `bias[out_local]`, and the packed call made of them."""

    def __init__(self, target: BuildTarget) -> None:
        super().__init__(target)
        self._linear: Linear = _not_prepared

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)

    def prepare(self) -> None:
        """Hand weight and bias to the kernel. They live on only where its packed form still uses them."""
        weight = self.get_parameter("weight").data
        bias = self.get_parameter("bias").data if "bias" in self.placements else None
        for name in self.placements:
            delattr(self, name)
        self._linear = self.target.ops.make_linear(weight, self._own_bias(bias))

    def wrap(self, make: Callable[[Linear], Linear]) -> None:
        """After `prepare`: compute this rank's part by what `make` makes of what computed it so far."""
        self._linear = make(self._linear)

    def _own_bias(self, bias: Tensor | None) -> Tensor | None:
        return bias


class ColumnParallelLinear(ParallelLinear):
    """Each rank computes its own outputs: x[n, in] -> [n, out / size]."""

    def __init__(self, input_size: int, output_size: int, bias: bool, target: BuildTarget) -> None:
        super().__init__(target)
        local = target.tp.share(output_size, "output_size")
        rows: dict[Shard, _Rows] = {None: _Rows(output_size, target.tp.rank * local, local, 0)}
        _add_rows(self, input_size, rows, bias)


class MergedColumnParallelLinear(ParallelLinear):
    """Several column-parallel matrices of one input as one: x[n, in] -> [n, sum(out) / size], in order of the shards.

    `output_sizes` maps a shard's name to its full number of outputs.
    """

    def __init__(self, input_size: int, output_sizes: Mapping[str, int], bias: bool, target: BuildTarget) -> None:
        super().__init__(target)
        rows: dict[Shard, _Rows] = {}
        offset = 0
        for shard, output_size in output_sizes.items():
            local = target.tp.share(output_size, f"output_size of {shard}")
            rows[shard] = _Rows(output_size, target.tp.rank * local, local, offset)
            offset += local
        _add_rows(self, input_size, rows, bias)


class QKVParallelLinear(ParallelLinear):
    """q, k and v as one: x[n, in] -> [n, (num_heads + 2 * num_kv_heads) * head_size], this rank's heads.

    With more ranks than key-value heads each rank holds one, and neighbouring ranks hold the same one.
    `num_heads` and `num_kv_heads` are this rank's numbers.
    """

    def __init__(
        self, input_size: int, head_size: int, heads: tuple[int, int], bias: bool, target: BuildTarget
    ) -> None:
        """`heads`: all query heads and all key-value heads of the model."""
        super().__init__(target)
        all_heads, all_kv_heads = heads
        tp = target.tp
        self.num_heads = tp.share(all_heads, "num_heads")
        replicas = _kv_replicas(all_kv_heads, tp.size)
        self.num_kv_heads = all_kv_heads * replicas // tp.size
        q_local, kv_local = self.num_heads * head_size, self.num_kv_heads * head_size
        kv_start = tp.rank // replicas * kv_local
        rows: dict[Shard, _Rows] = {
            "q": _Rows(all_heads * head_size, tp.rank * q_local, q_local, 0),
            "k": _Rows(all_kv_heads * head_size, kv_start, kv_local, q_local),
            "v": _Rows(all_kv_heads * head_size, kv_start, kv_local, q_local + kv_local),
        }
        _add_rows(self, input_size, rows, bias)


class RowParallelLinear(ParallelLinear):
    """Each rank holds its own inputs, the sums of all are added: x[n, in / size] -> [n, out]; rank 0 adds the bias."""

    def __init__(self, input_size: int, output_size: int, bias: bool, target: BuildTarget) -> None:
        super().__init__(target)
        local = target.tp.share(input_size, "input_size")
        placement = Placement((output_size, input_size), local, dim=1, source_start=target.tp.rank * local)
        self.add_weight("weight", (output_size, local), {None: placement})
        if bias:
            self.add_weight("bias", (output_size,), {None: Placement.whole(output_size)})
        self._reduce = target.tp.reduce

    def forward(self, x: Tensor) -> Tensor:
        return self._reduce(self._linear(x))

    def _own_bias(self, bias: Tensor | None) -> Tensor | None:
        return bias if self.target.tp.rank == 0 else None


@dataclass(frozen=True)
class _Rows:
    """Rows [start, start + length) of `total`, to be put at `offset`."""

    total: int
    start: int
    length: int
    offset: int

    def placement(self, *tail: int) -> Placement:
        return Placement((self.total, *tail), self.length, source_start=self.start, target_start=self.offset)


def _add_rows(layer: ParallelLinear, input_size: int, rows: Mapping[Shard, _Rows], bias: bool) -> None:
    num_rows = sum(part.length for part in rows.values())
    placements = {shard: part.placement(input_size) for shard, part in rows.items()}
    layer.add_weight("weight", (num_rows, input_size), placements)
    if bias:
        layer.add_weight("bias", (num_rows,), {shard: part.placement() for shard, part in rows.items()})


def _kv_replicas(num_kv_heads: int, num_ranks: int) -> int:
    """How many ranks hold the same key-value head."""
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} does not fit num_kv_heads={num_kv_heads}: "
            "one must be a multiple of the other"
        )
    return max(1, num_ranks // num_kv_heads)
