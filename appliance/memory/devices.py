"""The memories that models can lie in: main memory, and each GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from inferd.appliance.memory.ledger import Reading
from inferd.appliance.memory.probe import HostProbe
from inferd.appliance.schemas import OtherProcess


@dataclass(frozen=True)
class Gpu:
    uuid: str
    index: int
    name: str
    total_bytes: int


@dataclass(frozen=True)
class Vitals:
    """None: this card does not say."""

    util: float | None = None  # 0 to 1
    power_w: float | None = None
    temperature_c: float | None = None
    fan: float | None = None  # 0 to 1


class Devices(Protocol):
    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """In the driver's order; empty on a machine without."""
        ...

    def host(self, pids: Iterable[int]) -> Reading: ...

    def gpu(self, uuid: str, pids: Iterable[int]) -> Reading: ...

    def vitals(self, uuid: str) -> Vitals: ...

    def others(self, uuid: str, pids: Iterable[int]) -> tuple[OtherProcess, ...]:
        """Programs that are not ours, the largest first."""
        ...


class HostOnly:
    """A machine without GPUs, or one whose GPUs are not to be used."""

    gpus: tuple[Gpu, ...] = ()

    def __init__(self) -> None:
        self._probe = HostProbe()

    def host(self, pids: Iterable[int]) -> Reading:
        return self._probe.read(pids)

    def gpu(self, uuid: str, pids: Iterable[int]) -> Reading:
        raise KeyError(uuid)

    def vitals(self, uuid: str) -> Vitals:
        raise KeyError(uuid)

    def others(self, uuid: str, pids: Iterable[int]) -> tuple[OtherProcess, ...]:
        raise KeyError(uuid)
