"""The memories that models can lie in: main memory, and each GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from inferd.appliance.memory.ledger import Reading
from inferd.appliance.memory.probe import HostProbe


@dataclass(frozen=True)
class Gpu:
    uuid: str
    index: int
    name: str
    total_bytes: int


class Devices(Protocol):
    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """In the driver's order; empty on a machine without."""
        ...

    def host(self, pids: Iterable[int]) -> Reading: ...

    def gpu(self, uuid: str, pids: Iterable[int]) -> Reading: ...


class HostOnly:
    """A machine without GPUs, or one whose GPUs are not to be used."""

    gpus: tuple[Gpu, ...] = ()

    def __init__(self) -> None:
        self._probe = HostProbe()

    def host(self, pids: Iterable[int]) -> Reading:
        return self._probe.read(pids)

    def gpu(self, uuid: str, pids: Iterable[int]) -> Reading:
        raise KeyError(uuid)
