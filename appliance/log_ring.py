"""The newest log lines of the daemon and its engines, for whoever looks: the "logs" journal of the event hub."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inferd.appliance.events.hub import JOURNAL_LENGTHS, EventHub
from inferd.appliance.log import OneLine
from inferd.appliance.schemas import LogLine
from inferd.engine.core.lines import LogRelay

DAEMON = "daemon"
MAX_CHARS = 2000  # of a line


class LogRing(logging.Handler):
    """Any thread may log. Lines wait in a bounded queue for the event loop, which is asked for one turn at a time: who
    logs faster than it turns loses the oldest lines, and no memory.
    """

    def __init__(self, append: Callable[[LogLine], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.setFormatter(OneLine("%(name)s: %(message)s"))
        self._append = append
        self._loop = loop
        self._waiting: deque[LogLine] = deque(maxlen=JOURNAL_LENGTHS["logs"])
        self._mutex = threading.Lock()
        self._asked = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            source = str(getattr(record, "model", DAEMON))
            text = self.format(record).replace(f": [{source}] ", ": ", 1)
            lines = [
                LogLine(at=record.created, level=record.levelname.lower(), source=source, text=line[:MAX_CHARS])
                for line in text.splitlines()  # a traceback is more than one
            ]
            with self._mutex:
                self._waiting.extend(lines)
                ask, self._asked = not self._asked, True
            if ask:
                self._loop.call_soon_threadsafe(self._hand_over)
        except Exception:
            self.handleError(record)

    def _hand_over(self) -> None:
        with self._mutex:
            lines = list(self._waiting)
            self._waiting.clear()
            self._asked = False
        for line in lines:
            self._append(line)


@contextmanager
def log_lines_to(hub: EventHub) -> Iterator[None]:
    """Inside the event loop that the hub belongs to."""
    ring, root = LogRing(lambda line: hub.append("logs", line), asyncio.get_running_loop()), logging.getLogger()
    root.addHandler(ring)
    try:
        yield
    finally:
        root.removeHandler(ring)


def lines_of(model: str) -> Callable[[str], None]:
    """What becomes of the lines that the model's engine prints: log records that know whose they are."""
    return LogRelay(model)
