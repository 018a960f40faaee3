"""How this process takes part in torch.distributed: the world, and the groups that ranks are divided into."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist

from inferd.engine.config import Device
from inferd.engine.layers.parallel import GroupCoordinator

# What the host agrees on travels through main memory even where tensors travel between cards.
BACKENDS: dict[Device, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

LOOPBACK = "lo"  # ranks are processes of one machine: nobody else is to reach their sockets


def rank_groups(sizes: Mapping[str, int]) -> dict[str, list[list[int]]]:
    """By axis the groups of ranks that differ along this axis alone. Ranks count along the last axis first.

    {"pp": 2, "tp": 2} -> {"pp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}
    """
    groups, stride = {}, prod(sizes.values())
    world = range(stride)
    for axis, size in sizes.items():
        stride //= size
        firsts = (rank for rank in world if rank // stride % size == 0)
        groups[axis] = [[first + step * stride for step in range(size)] for first in firsts]
    return groups


class ParallelState:
    """The groups of one rank. `join` is a meeting of all ranks, and so is every collective call."""

    def __init__(self, rank: int, groups: Mapping[str, GroupCoordinator]) -> None:
        """For `join` and `alone`."""
        self.rank = rank
        self._groups = dict(groups)

    @classmethod
    def alone(cls) -> ParallelState:
        """Of the only rank: nothing is set up, and nothing is sent."""
        return cls(0, {"tp": GroupCoordinator([0], 0)})

    @classmethod
    def join(cls, rank: int, sizes: Mapping[str, int], device: torch.device, store_path: str) -> ParallelState:
        """Returns when all ranks of `sizes` (see `rank_groups`) have come.

        They find each other through the file `store_path`. `device` must be the current one if it is a card; its
        communicator exists afterwards, so that what it holds counts as taken and a captured graph may use it.
        """
        num_ranks = prod(sizes.values())
        if num_ranks == 1:
            return cls.alone()
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, LOOPBACK)
        meeting = f"file://{store_path}"
        dist.init_process_group(_backend(device), init_method=meeting, rank=rank, world_size=num_ranks)
        groups = {axis: _own_group(rank, all_ranks) for axis, all_ranks in rank_groups(sizes).items()}
        for group in groups.values():
            group.all_reduce(torch.zeros(1, device=device))
            group.barrier()
        return cls(rank, groups)

    @property
    def tp(self) -> GroupCoordinator:
        """The ranks that layers are divided over."""
        return self.group("tp")

    def group(self, axis: str) -> GroupCoordinator:
        return self._groups[axis]

    def leave(self) -> None:
        """Idempotent. Another `join` may follow."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _own_group(rank: int, groups: list[list[int]]) -> GroupCoordinator:
    """Making a process group takes all ranks, also those outside of it, in the same order."""
    own = None
    for ranks in groups:
        process_group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            own = GroupCoordinator(ranks, rank, process_group)
    assert own is not None
    return own


def _backend(device: torch.device) -> str:
    return BACKENDS["cuda" if device.type == "cuda" else "cpu"]
