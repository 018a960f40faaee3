"""Signs of life of an engine process, from a thread of their own: its one working thread may be busy for minutes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Work:
    what: str
    until_s: float  # monotonic: when it must be done
    at_most_s: float


class Heartbeat:
    """`beat` is called every `every_s`, as long as what the working thread is doing takes no longer than it may.

    So a process that is stopped, swapped out or stuck falls silent, and whoever listens can end it; one that works
    hard does not.
    """

    def __init__(self, beat: Callable[[], None], every_s: float) -> None:
        self._beat = beat
        self._every_s = every_s
        self._work: _Work | None = None
        self._told: _Work | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="engine-heartbeat", daemon=True).start()

    @contextmanager
    def busy(self, what: str, at_most_s: float) -> Iterator[None]:
        """The working thread does something that has an end, or should have."""
        self._work = _Work(what, time.monotonic() + at_most_s, at_most_s)
        try:
            yield
        finally:
            self._work = None

    def is_stuck(self) -> bool:
        """Says so in the log, once for each time."""
        work = self._work
        if work is None or time.monotonic() < work.until_s:
            return False
        if work is not self._told:
            self._told = work
            logger.critical("%s takes longer than %g s: this engine hangs and falls silent", work.what, work.at_most_s)
        return True

    def _run(self) -> None:
        while True:
            time.sleep(self._every_s)
            if not self.is_stuck():
                self._beat()
