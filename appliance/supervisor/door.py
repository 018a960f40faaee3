"""Who is inside one model, and who waits before its door."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Door:
    """Counts only; whoever waits looks for itself whether it may go in. Times are monotonic."""

    def __init__(self) -> None:
        self.num_open = 0
        self.held_for: str | None = None  # nobody goes in: the model makes room for that one
        self.last_used = time.monotonic()
        self._waiting: dict[object, float] = {}  # in order of arrival

    @property
    def held(self) -> bool:
        return self.held_for is not None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_since(self) -> float:
        return next(iter(self._waiting.values()), 0.0)

    def position(self, ticket: object) -> int:
        """1 for whoever waits longest; 0 for who does not wait."""
        return next((place for place, other in enumerate(self._waiting, 1) if other is ticket), 0)

    @contextmanager
    def waiting(self, ticket: object) -> Iterator[None]:
        self._waiting[ticket] = time.monotonic()
        try:
            yield
        finally:
            del self._waiting[ticket]

    def enter(self) -> None:
        self.num_open += 1
        self.last_used = time.monotonic()

    def leave(self) -> None:
        self.num_open -= 1
        self.last_used = time.monotonic()
