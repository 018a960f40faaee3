"""uvicorn's HTTP protocol with limits on what comes before a body.

The parser keeps a partial header line without any bound, and uvicorn waits for it without any deadline: one client
could hold memory and connections. Here a request's head has a size and a time. (Bodies have theirs in `body.py`.)
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEADERS = 64
PEERCRED = struct.Struct("3i")  # pid, uid, gid
PEER_UID = "inferd.peer_uid"  # in the scope of a request that came over the admin socket


class GuardedProtocol(HttpToolsProtocol):
    """Use a subclass made by `limited`."""

    head_limit_bytes = 16 * 1024
    head_timeout_s = 10.0
    max_connections = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._in_head = True
        self._peer_uid: int | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer_uid = peer_uid(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._start_clock()
            self._num_head_bytes += len(data)
        super().data_received(data)
        # A head that came whole within this piece is counted header by header in `on_header`.
        if self._in_head and self._num_head_bytes > self.head_limit_bytes:
            self._refuse(431, "The request's headers are too large.")
        elif not self._in_head and self.cycle is not None and self.cycle.response_complete:
            self._start_clock()  # the rest of a refused body is thrown away, but not for ever

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._peer_uid is not None:
            self.scope[PEER_UID] = self._peer_uid  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.transport.is_closing():
            return
        super().on_header(name, value)
        num_bytes = len(self.url) + sum(len(one) + len(other) for one, other in self.headers)
        if len(self.headers) > MAX_HEADERS or num_bytes > self.head_limit_bytes:
            self._refuse(431, "The request's headers are too large.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_clock()
        if len(self.connections) > self.max_connections:
            self._refuse(503, "This server has too many connections.")
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()
        self._stop_clock()
        self._in_head, self._num_head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _too_slow(self) -> None:
        if self._in_head:
            self._refuse(408, "The request's headers did not arrive in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def peer_uid(transport: asyncio.Transport) -> int | None:
    """Of the process at the other end of a unix socket, as the system has it; None for other connections."""
    end = transport.get_extra_info("socket")
    if end is None or end.family != socket.AF_UNIX:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=os.dup(end.fileno())) as copy:
        credentials = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size)
    _, uid, _ = PEERCRED.unpack(credentials)
    return int(uid)


def limited(*, head_limit_bytes: int, head_timeout_s: float, max_connections: int) -> type[GuardedProtocol]:
    """uvicorn takes a class and makes the objects itself, so limits are attributes of a class."""
    limits = {
        "head_limit_bytes": head_limit_bytes,
        "head_timeout_s": head_timeout_s,
        "max_connections": max_connections,
    }
    return type("LimitedProtocol", (GuardedProtocol,), limits)
