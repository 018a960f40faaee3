"""How an answer reaches a client: as one JSON body or as server-sent events, and given up when the client leaves.

Everything that can be refused is refused before the first byte; what goes wrong afterwards becomes an error event, so
that a stream always ends with `data: [DONE]` and a complete chunked body.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferd.appliance.api.errors import ApiError, is_expected, to_api_error

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
log = logging.getLogger(__name__)


def event(payload: bytes) -> bytes:
    """One event; `payload` is JSON, which never holds a line break."""
    return b"data: " + payload + b"\n\n"


class Wire:
    """The sending side of one exchange; either `json` or `stream` is called, once."""

    def __init__(self, send: Send, keepalive_s: float) -> None:
        self._send = send
        self._keepalive_s = keepalive_s
        self._last_sent = 0.0

    async def json(self, payload: bytes, headers: Mapping[str, str]) -> None:
        await self._start(200, {"content-type": "application/json", "content-length": str(len(payload)), **headers})
        await self._send({"type": "http.response.body", "body": payload})

    async def stream(
        self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], *, for_clients: bool = True
    ) -> None:
        """Sends `events`, and a comment whenever they are silent for long.

        `for_clients`: an error event when they raise, and the end mark that OpenAI's clients wait for.
        """
        await self._start(200, {**STREAM_HEADERS, **headers})
        keepalive = asyncio.create_task(self._keep_alive())
        try:
            async with aclosing(events):
                async for piece in events:
                    await self._chunk(piece)
        except Exception as error:
            failure = event(_reported(error).body())
            if for_clients:
                await self._chunk(failure)
        finally:
            keepalive.cancel()
        if for_clients:
            await self._chunk(DONE)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self._last_sent = time.monotonic()

    async def _chunk(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._last_sent = time.monotonic()

    async def _keep_alive(self) -> None:
        while True:
            silent_s = time.monotonic() - self._last_sent
            if silent_s >= self._keepalive_s:
                await self._chunk(KEEPALIVE)
                silent_s = 0.0
            await asyncio.sleep(self._keepalive_s - silent_s)


def _reported(error: Exception) -> ApiError:
    if not is_expected(error):
        log.error("a stream failed", exc_info=error)
    return to_api_error(error)


class Exchange(Response):
    """A response that is worked out while the client is watched: when it leaves, the work is cancelled at once.

    The request's body must have been read: what `receive` gives next is the disconnect.
    """

    def __init__(self, work: Callable[[Wire], Awaitable[None]], keepalive_s: float) -> None:
        super().__init__()
        self._work = work
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(Wire(send, self._keepalive_s)))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
