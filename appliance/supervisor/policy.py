"""Which loaded model makes room for another: a pure function over snapshots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadedModel:
    model: str
    num_open: int  # requests in flight or waiting
    last_used: float


def choose_victim(loaded: Iterable[LoadedModel]) -> str | None:
    """The least recently used model without open requests, or None when every model is in use."""
    idle = [one for one in loaded if one.num_open == 0]
    return min(idle, key=lambda one: one.last_used).model if idle else None
