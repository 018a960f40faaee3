"""Calls that were sent to workers and whose answers are still to come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

FAILURE_GRACE_S = 5.0  # once a rank has failed, the others may wait for it forever

ByRank = dict[int, Any]


@dataclass
class PendingCall:
    """One call that has been sent, or is about to be."""

    number: int
    name: str
    waiting: set[int]  # ranks that have not answered
    limit_s: float
    result: Callable[[ByRank], Any]  # from the answers of all ranks to the value of the future
    future: Future[Any] = field(default_factory=Future)
    values: ByRank = field(default_factory=dict)
    error: Exception | None = None  # the first

    def resolve(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result(self.values))


class PendingCalls:
    """In the order of sending, which is the order in which their futures are resolved. Two threads use it.

    The oldest one's time runs from the moment on at which it became the oldest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[PendingCall] = deque()
        self._num_sent = 0
        self._oldest_since_s = 0.0
        self._closed: Exception | None = None

    def add(self, name: str, ranks: Iterable[int], limit_s: float, result: Callable[[ByRank], Any]) -> PendingCall:
        """Raises what all calls were failed with, once they were."""
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self._num_sent += 1
            call = PendingCall(self._num_sent, name, set(ranks), limit_s, result)
            if not self._calls:
                self._oldest_since_s = time.monotonic()
            self._calls.append(call)
            return call

    def answer(self, number: int, rank: int, value: Any = None, error: Exception | None = None) -> None:
        """`error` in place of a value. An answer that nobody waits for is passed over."""
        with self._lock:
            call = next((call for call in self._calls if call.number == number), None)
            if call is None or rank not in call.waiting:
                return
            call.waiting.remove(rank)
            call.values[rank] = value
            if error is not None and call.error is None:
                call.error = error
                call.limit_s = min(call.limit_s, time.monotonic() - self._oldest_since_s + FAILURE_GRACE_S)
            complete = self._take_complete()
        for call in complete:
            call.resolve()

    def close(self, error: Exception) -> bool:
        """Fail all calls, those that come later too. False, and nothing done, when that had happened before."""
        with self._lock:
            if self._closed is not None:
                return False
            self._closed = error
            calls, self._calls = self._calls, deque()
        for call in calls:
            call.error = call.error or error
            call.resolve()
        return True

    def overdue(self) -> PendingCall | None:
        """The oldest, when its time is up."""
        with self._lock:
            late = self._calls and time.monotonic() - self._oldest_since_s >= self._calls[0].limit_s
            return self._calls[0] if late else None

    def seconds_left(self) -> float | None:
        """Until the oldest one's time is up; None when there is none."""
        with self._lock:
            if not self._calls:
                return None
            return max(0.0, self._oldest_since_s + self._calls[0].limit_s - time.monotonic())

    def _take_complete(self) -> list[PendingCall]:
        complete = []
        while self._calls and not self._calls[0].waiting:
            complete.append(self._calls.popleft())
            self._oldest_since_s = time.monotonic()
        return complete
