"""What arrives before a body has a size and a time, and so have connections. Raw sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

StartDaemon = Any  # the conftest's; test folders are no packages


async def exchange(address: str, *pieces: bytes) -> bytes:
    """Sends the pieces, then everything that the server says until it closes."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [GET + b"x: " + b"a" * 20_000 + b"\r\n\r\n"],
        [GET + b"x: ", *[b"a" * 4000] * 5],  # a header line without an end
        [GET + b"".join(b"h%d: 1\r\n" % n for n in range(100)) + b"\r\n"],
        [b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"],
    ],
    ids=["long header", "endless header", "many headers", "long path"],
)
async def test_large_heads(start_daemon: StartDaemon, pieces: list[bytes]) -> None:
    daemon = await start_daemon()
    answer = await exchange(daemon.address, *pieces)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'{"error":{' in answer
    assert (await daemon.chat()).status_code == 200


@pytest.mark.parametrize("start", [b"", b"GET / HT", GET], ids=["nothing", "half a line", "no end"])
async def test_slow_heads(start_daemon: StartDaemon, start: bytes) -> None:
    daemon = await start_daemon(head_timeout_s=0.2)
    assert (await exchange(daemon.address, start)).startswith(b"HTTP/1.1 408 ")


async def test_slow_bodies(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(body_timeout_s=0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    answer = await exchange(daemon.address, head + b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(body_limit_bytes=10, head_timeout_s=0.2)
    host, port = daemon.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: 999\r\n\r\n")
    assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 413 ")
    writer.write(b"x")
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


async def test_too_many_connections(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(max_connections=1)
    answer = await exchange(daemon.address, GET + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    host, port = daemon.address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    await asyncio.sleep(0.05)
    assert (await exchange(daemon.address, GET + b"\r\n")).startswith(b"HTTP/1.1 503 ")
    writer.close()


async def test_garbage_is_answered_in_our_shape(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    answer = await exchange(daemon.address, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":{' in answer


async def test_two_requests_in_one_piece_are_both_answered(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    first = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = await exchange(daemon.address, first + GET + b"\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 2
