"""A loopback HTTP server that serves ranges well, and misbehaves on request."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PIECE_BYTES = 4096


@dataclass
class Reply:
    """`file`: bytes that can be asked for in ranges, and that the faults apply to."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    file: bool = False


@dataclass
class Request:
    method: str
    path: str  # without the query
    query: str
    headers: Mapping[str, str]  # by lower-case name


@dataclass
class Faults:
    """Each list is used up from the front, one entry a file request; an empty list is good behaviour."""

    cut_after: list[int] = field(default_factory=list)  # body bytes until the connection is dropped
    statuses: list[Reply] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)  # silence between headers and body
    ignore_ranges: int = 0
    flip_at: list[int] = field(default_factory=list)  # place in the file of a byte that is sent wrong
    lie_bytes: int = 0  # added to every announced size
    hide_size: bool = False  # no Content-Length
    encoding: str | None = None
    piece_pause_s: float = 0.0


class MeanServer:
    def __init__(self) -> None:
        self.faults = Faults()
        self.requests: list[Request] = []
        self.answer: Callable[[Request], Reply] = lambda request: Reply(404)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def serve(self, files: Mapping[str, bytes]) -> None:
        """Answers with these files, each under its path."""
        self.answer = lambda request: file_reply(files[request.path]) if request.path in files else Reply(404)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def file_reply(body: bytes, **headers: str) -> Reply:
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return Reply(200, body, {"etag": etag, **{name.replace("_", "-"): value for name, value in headers.items()}}, True)


def _make_handler(server: MeanServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            request = Request(
                self.command, url.path, url.query, {name.lower(): value for name, value in self.headers.items()}
            )
            server.requests.append(request)
            reply = server.answer(request)
            if reply.file and server.faults.statuses:
                reply = server.faults.statuses.pop(0)
            if reply.file:
                self._send_file(reply, server.faults)
            else:
                self._send_all(reply)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        do_HEAD = do_GET

        def _send_all(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)

        def _send_file(self, reply: Reply, faults: Faults) -> None:
            first = self._first_byte(reply, faults)
            if first is not None and first >= len(reply.body):
                return self._send_all(Reply(416))
            size = len(reply.body) + faults.lie_bytes
            self.send_response(200 if first is None else 206)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if first is not None:
                self.send_header("content-range", f"bytes {first}-{size - 1}/{size}")
            if faults.encoding:
                self.send_header("content-encoding", faults.encoding)
            if faults.hide_size:
                self.send_header("connection", "close")
            else:
                self.send_header("content-length", str(size - (first or 0)))
            self.end_headers()
            self._send_body(reply.body, first or 0, faults)

        def _first_byte(self, reply: Reply, faults: Faults) -> int | None:
            match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
            if match is None:
                return None
            if faults.ignore_ranges:
                faults.ignore_ranges -= 1
                return None
            if self.headers.get("if-range", reply.headers["etag"]) != reply.headers["etag"]:
                return None
            return int(match[1])

        def _send_body(self, body: bytes, first: int, faults: Faults) -> None:
            if faults.stalls_s:
                self.wfile.flush()
                time.sleep(faults.stalls_s.pop(0))
            data = bytearray(body)
            if faults.flip_at:
                data[faults.flip_at.pop(0)] ^= 1
            rest = bytes(data[first:])
            cut = faults.cut_after.pop(0) if faults.cut_after else len(rest)
            for start in range(0, min(cut, len(rest)), PIECE_BYTES):
                try:
                    self.wfile.write(rest[start : min(start + PIECE_BYTES, cut)])
                except OSError:  # the client was killed
                    self.close_connection = True
                    return
                time.sleep(faults.piece_pause_s)
            if cut < len(rest) or faults.hide_size or faults.lie_bytes:
                self.close_connection = True
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_WR)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: the requests are in `MeanServer.requests`."""

    return Handler
