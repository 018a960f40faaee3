"""What a signal means to the daemon."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)


class Signals:
    """The first SIGTERM or SIGINT asks for a clean end, the second for a quick one; SIGHUP calls `reload`.

    The SIGHUP of a terminal that was closed asks for a clean end: whoever started the daemon there has gone.
    """

    def __init__(self, reload: Callable[[], None]) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self.exit_code = 0
        self._reload = reload
        self._terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_stop, 0)
        loop.add_signal_handler(signal.SIGINT, self._on_stop, 130)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_stop(self, exit_code: int) -> None:
        if self.asked.is_set():
            self.hurry.set()
        else:
            self.exit_code = exit_code
            self.asked.set()
            log.info("stopping; open requests may finish, a second signal ends them")

    def _on_hangup(self) -> None:
        if self._terminals and not any(map(os.isatty, self._terminals)):
            _let_go_of(self._terminals)
            self._on_stop(0)
        elif not self.asked.is_set():
            self._reload()


def _let_go_of(terminals: Sequence[int]) -> None:
    """What is still said goes nowhere: writing to a terminal that is closed is an error."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in terminals:
        os.dup2(null, fd)
    os.close(null)
