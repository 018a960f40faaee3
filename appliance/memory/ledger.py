"""Who has the memory: rows that add up to the total, for main memory and for each GPU. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inferd.appliance.schemas import DeviceMemory, ModelMemory


@dataclass(frozen=True)
class Reading:
    """As the system counts it: `available` could be had now, `ours` is what our processes really hold."""

    total: int
    available: int
    ours: int

    @property
    def other(self) -> int:
        """What is not ours."""
        return max(self.total - self.available - self.ours, 0)


def ledger(reading: Reading, models: Iterable[ModelMemory]) -> DeviceMemory:
    """Memory that a model has reserved counts as its own, whether it was touched yet or not."""
    rows = list(models)
    parts = {name: sum(getattr(row, name) for row in rows) for name in ("weights", "kv", "graphs", "workspace")}
    sleeping = sum(row.sleeping_host for row in rows)
    reserved = sum(parts.values()) + sleeping
    other = min(reading.other, max(reading.total - reserved, 0))  # a reading is older than what was reserved since
    free = max(reading.total - other - reserved, 0)
    return DeviceMemory(total=other + free + reserved, **parts, sleeping=sleeping, other=other, free=free)


def room(reading: Reading, limit: int | None, reserve: int) -> int:
    """What all models together may hold: all that others leave, without a reserve, and no more than `limit`."""
    left = reading.total - reading.other - reserve
    return max(left if limit is None else min(left, limit), 0)
