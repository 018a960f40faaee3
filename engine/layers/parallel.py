"""Groups of ranks: what they exchange, and how layers are divided over one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from inferd.engine.errors import ConfigError

# The one name for this call in all torch versions that are supported: the newer one warns about the older name.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupCoordinator:
    """One rank's view of a group whose members make the same calls in the same order.

    A tensor travels by the way of its device: gloo from main memory, NCCL between cards. There a call is a launch on
    the current stream that waits for nothing on the host, so it can be captured in a CUDA graph.
    """

    def __init__(self, ranks: Sequence[int], rank: int, process_group: dist.ProcessGroup | None = None) -> None:
        """`ranks`: members by their number in the world, ascending; `rank` is one of them.

        `process_group` connects them. A group of one needs none, and then each call is the identity.
        """
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        if self.size > 1 and process_group is None:
            raise ValueError(f"a group of {self.size} ranks needs a process group")
        self._group = process_group

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every member's `x`, the same bits everywhere. Written over `x`, which is contiguous."""
        if self._group is not None:
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x[..., v] -> [..., size * v]: every member's joined along the last dimension, in order of their ranks."""
        if self._group is None:
            return x
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        parts = x.new_empty((self.size * flat.shape[0], flat.shape[1]))
        _gather_into(parts, flat, group=self._group)
        joined = parts.view(self.size, *x.shape).movedim(0, -2)
        return joined.reshape(*x.shape[:-1], self.size * x.shape[-1])

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Member `source`'s `x`, written over everyone's. `source` counts within the group."""
        if self._group is not None:
            dist.broadcast(x, src=self.ranks[source], group=self._group)
        return x

    def barrier(self) -> None:
        """Returns once every member has come here. Through main memory: a card's stream is not waited for."""
        self.all_reduce(torch.zeros(1))


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place in the group that layers are divided over. Alone, `reduce` and `gather` are the identity.

    `group` is what connects the ranks, None for one rank.
    """

    rank: int = 0
    size: int = 1
    group: GroupCoordinator | None = None

    def __post_init__(self) -> None:
        if self.size > 1 and self.group is None:
            raise ValueError(f"{self.size} ranks of a tensor-parallel group need a coordinator")

    @classmethod
    def over(cls, group: GroupCoordinator) -> TensorParallel:
        return cls(group.rank, group.size, group if group.size > 1 else None)

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on every rank. `x` is contiguous, and not to be used afterwards."""
        return x if self.group is None else self.group.all_reduce(x)

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` joined along the last dimension in rank order, on every rank."""
        return x if self.group is None else self.group.all_gather(x)

    def agree(self, x: Tensor) -> Tensor:
        """The first rank's `x`, on every rank: for what each has computed, and must not differ in by a bit."""
        return x if self.group is None else self.group.broadcast(x.contiguous())

    def share(self, total: int, what: str) -> int:
        """One rank's part of `total`; ConfigError names `what` when the ranks cannot have equal parts."""
        if total % self.size:
            raise ConfigError(f"tensor_parallel_size={self.size} does not divide {what}={total}; choose a divisor")
        return total // self.size
