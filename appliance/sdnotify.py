"""What systemd wants to hear of a service: sd_notify(3), without a library because it is one datagram.

Nothing is sent where there is no NOTIFY_SOCKET, so a daemon in a terminal runs the same code.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping

log = logging.getLogger(__name__)
USEC = 1_000_000


class Notifier:
    """`environment` has NOTIFY_SOCKET and WATCHDOG_USEC when systemd started us."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        usec = environment.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(usec) / USEC if usec.isdigit() and int(usec) > 0 else None
        self._status = ""

    def ready(self, status: str) -> None:
        self._status = status
        self._send("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        self._status = text
        self._send(f"STATUS={text}")

    def reloading(self) -> None:
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self, trouble: str = "") -> None:
        """The status of before, and what went wrong meanwhile."""
        self._send("READY=1", f"STATUS={self._status}{'; ' if trouble else ''}{trouble}")

    def stopping(self, status: str, within_s: float) -> None:
        """`within_s`: how long it may take before systemd loses patience."""
        self._send("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(within_s * USEC)}")

    async def watchdog(self) -> None:
        """Says that the event loop turns, twice in each period. A loop that stands still says nothing."""
        if self._watchdog_s is None:
            return
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.connect(self._address)
                sender.sendall(message.encode())
        except OSError as error:
            log.warning("systemd could not be told %r: %s", lines[0], error)
