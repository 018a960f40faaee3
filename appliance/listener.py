"""The daemon's listening socket, or who has it."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

ALL_ADDRESSES = ("0.0.0.0", "::")


class PortTaken(Exception):
    """Names the holder as far as this user may know it."""


def listen(host: str, port: int, backlog: int = 1024) -> socket.socket:
    """A bound socket that does not accept yet. Raises `PortTaken`, `OSError`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a daemon that just ended holds nothing
    try:
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTaken(
            f"port {port} of {host} is taken by {holder_of(address)}; choose another one with --port"
        ) from None
    listener.setblocking(False)
    return listener


def listen_unix(path: Path, backlog: int = 128) -> socket.socket:
    """A bound socket that only this user can reach. What a killed daemon left at that path is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def holder_of(address: tuple[Any, ...]) -> str:
    """Name and pid of the process that listens at (host, port), or "another process" where this user may not know."""
    import psutil  # here, because most starts never need it

    host, port = address[:2]
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return "another process"
    for connection in connections:
        bound_to = connection.laddr  # empty for an unconnected socket
        if connection.status != psutil.CONN_LISTEN or not bound_to or bound_to.port != port or not connection.pid:
            continue
        if bound_to.ip not in (host, *ALL_ADDRESSES):  # another address may have the same port
            continue
        try:
            return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
        except psutil.NoSuchProcess:
            break
    return "another process"
