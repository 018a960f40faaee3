"""When to try a transfer again, and after how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from inferd.appliance.library.errors import NetworkFailure, PullStopped

T = TypeVar("T")

MAX_ASKED_DELAY_S = 60.0  # the most that a server's Retry-After can make us wait


@dataclass(frozen=True)
class RetryPolicy:
    """A failure counts only when no new byte came since the last one: a slow line may fail as often as it likes."""

    max_failures: int = 6
    first_delay_s: float = 0.5
    max_delay_s: float = 20.0

    def delay_s(self, num_failures: int, asked_s: float | None) -> float:
        """`num_failures` ≥ 1 failures in a row; `asked_s` is what the server asked for, which wins up to a minute."""
        if asked_s is not None:
            return min(max(asked_s, 0.0), MAX_ASKED_DELAY_S)
        return min(self.first_delay_s * 2.0 ** (num_failures - 1), self.max_delay_s)


class Interrupted(Exception):
    """This attempt is over, the next may do better. Never leaves the downloads."""

    def __init__(self, message: str, asked_s: float | None = None) -> None:
        super().__init__(message)
        self.asked_s = asked_s


def retry_after_s(header: str | None) -> float | None:
    """The seconds form of Retry-After; the date form is left to our own back-off."""
    if header is not None and header.strip().isdecimal():
        return float(header)
    return None


class StopSignal:
    """Ends everything that waits or transfers: each of them asks `check` often. Any thread may `set` it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises `PullStopped` once the signal is set."""
        if self._event.is_set():
            raise PullStopped("the pull was stopped; pull again to go on from here")

    def pause(self, delay_s: float) -> None:
        """Sleeps, but not through the signal."""
        self._event.wait(delay_s)
        self.check()


def persist(ask: Callable[[], T], what: str, policy: RetryPolicy, stop: StopSignal) -> T:
    """The answer of `ask`, which raises `Interrupted` while asking again makes sense. Raises `NetworkFailure`."""
    for num_failures in range(1, policy.max_failures + 1):
        stop.check()
        try:
            return ask()
        except Interrupted as error:
            if num_failures == policy.max_failures:
                raise NetworkFailure(f"{what}: {error}; pull again later") from error
            stop.pause(policy.delay_s(num_failures, error.asked_s))
    raise AssertionError("a policy allows at least one failure")
