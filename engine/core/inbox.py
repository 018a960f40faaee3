"""What an engine process has said, between the thread that reads its socket and the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from inferd.engine.core.link import EngineLink
from inferd.engine.errors import EngineDeadError, EngineError
from inferd.engine.messages import CallReply, EngineOutputs, EngineReady, FeedUpdate, SchedulerStats

OnFeed = Callable[[FeedUpdate], None]


class Inbox:
    """What came from the engine; touched by the event loop alone. Death comes after all that was said before."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineReady] = loop.create_future()
        self.closed = asyncio.Event()  # the engine is gone and everything of it is cleared up
        self.replies: dict[int, asyncio.Future[CallReply]] = {}
        self.last_heartbeat_s = time.monotonic()
        self.stats = SchedulerStats()
        self.on_feed: OnFeed | None = None
        self._death: EngineError | None = None
        self._outputs: deque[EngineOutputs] = deque()
        self._changed = asyncio.Event()

    def expect(self, call_id: int) -> asyncio.Future[CallReply]:
        reply: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()
        self.replies[call_id] = reply
        return reply

    async def get(self) -> EngineOutputs:
        while not self._outputs:
            if self._death is not None:
                raise EngineDeadError(str(self._death))
            self._changed.clear()
            await self._changed.wait()
        return self._outputs.popleft()

    def put_ready(self, ready: EngineReady) -> None:
        if not self.ready.done():
            self.ready.set_result(ready)

    def put(self, outputs: EngineOutputs) -> None:
        self.last_heartbeat_s = time.monotonic()
        self.stats = outputs.stats or self.stats
        if outputs.reply is not None:
            reply = self.replies.get(outputs.reply.call_id)
            if reply is not None and not reply.done():
                reply.set_result(outputs.reply)
        if outputs.outputs or outputs.kv_events:
            self._outputs.append(outputs)
            self._changed.set()
        pass_on(outputs, self.on_feed)

    def put_death(self, death: EngineError) -> None:
        self._death = death
        if not self.ready.done():
            self.ready.set_exception(death)
        for reply in self.replies.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(str(death)))
        self._changed.set()


class InboxReader:
    """The thread between an engine's socket and the event loop. It closes the link when the engine is gone."""

    def __init__(self, link: EngineLink, inbox: Inbox, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._inbox = inbox
        self._loop = loop

    def run(self, start_timeout_s: float) -> None:
        death = self._receive_all(start_timeout_s)
        self._tell(self._inbox.put_death, death)  # before the clearing up, which may take seconds
        self._link.close()
        self._tell(self._inbox.closed.set)

    def _receive_all(self, start_timeout_s: float) -> EngineError:
        try:
            self._tell(self._inbox.put_ready, self._link.wait_ready(start_timeout_s))
            while True:
                outputs = self._link.receive(None)
                if outputs is not None:
                    self._tell(self._inbox.put, outputs)
        except EngineError as error:
            return error
        except Exception as error:  # whatever it is, those who wait must hear of it
            return self._link.mark_dead(f"its messages cannot be handled: {type(error).__name__}: {error}")

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed, and with it everybody who could be told
            self._link.process.kill()


def pass_on(outputs: EngineOutputs, on_feed: OnFeed | None) -> None:
    if outputs.feed is not None and on_feed is not None:
        on_feed(outputs.feed)
