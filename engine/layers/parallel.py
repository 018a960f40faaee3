"""How layers are divided over the ranks of one tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inferd.engine.errors import ConfigError, NotSupported


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place in its group. With one rank, `reduce` and `gather` are the identity.

    Raises NotSupported for more than one rank: there is no communicator yet, while every layer already computes its
    shard from `rank` and `size`.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size != 1:
            raise NotSupported(f"tensor_parallel_size={self.size} is not supported yet, only 1")

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on every rank."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` joined along the last dimension in rank order, on every rank."""
        return x

    def share(self, total: int, what: str) -> int:
        """One rank's part of `total`; ConfigError names `what` when the ranks cannot have equal parts."""
        if total % self.size:
            raise ConfigError(f"tensor_parallel_size={self.size} does not divide {what}={total}; choose a divisor")
        return total // self.size
