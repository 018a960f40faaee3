"""The engine's feed for any number of readers on one event loop: it is subscribed to for as long as there is one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from inferd.engine.core.client import AsyncMPClient
from inferd.engine.errors import EngineDeadError, EngineError
from inferd.engine.insight.mirror import FeedMirror, PendingFeed
from inferd.engine.messages import FeedUpdate

UNSUBSCRIBE_S = 1.0  # how long an engine may take to hear that nobody listens


class _Reader:
    def __init__(self) -> None:
        self._pending: PendingFeed | None = None
        self.has_news = asyncio.Event()

    def put(self, update: FeedUpdate) -> None:
        if self._pending is None:
            self._pending = PendingFeed(update)
        else:
            self._pending.put(update)
        self.has_news.set()

    def take(self) -> FeedUpdate:
        assert self._pending is not None, "whoever takes has waited for news"
        update, self._pending = self._pending.merged(), None
        self.has_news.clear()
        return update


class FeedReaders:
    """Gives each reader a snapshot first, and then what has changed; updates are merged for one that is slow."""

    def __init__(self, client: AsyncMPClient) -> None:
        self._client = client
        self._mirror = FeedMirror()
        self._readers: set[_Reader] = set()

    async def read(self) -> AsyncGenerator[FeedUpdate, None]:
        """Endless. Raises `EngineDeadError` when the engine is gone."""
        reader = _Reader()
        death = asyncio.create_task(self._client.wait_dead())
        try:
            await self._join(reader)
            while True:
                await self._wait(reader, death)
                yield reader.take()
        finally:
            death.cancel()
            await self._leave(reader)

    async def _join(self, reader: _Reader) -> None:
        is_first = not self._readers
        self._readers.add(reader)
        if is_first:
            self._mirror = FeedMirror()
            self._client.on_feed = self._put
            await self._client.call("subscribe")
        elif (snapshot := self._mirror.snapshot()) is not None:
            reader.put(snapshot)

    async def _leave(self, reader: _Reader) -> None:
        self._readers.discard(reader)
        if self._readers:
            return
        self._client.on_feed = None
        with contextlib.suppress(EngineError, TimeoutError):  # an engine that does not hear it tells nothing either
            async with asyncio.timeout(UNSUBSCRIBE_S):
                await self._client.call("unsubscribe")

    @staticmethod
    async def _wait(reader: _Reader, death: asyncio.Task[EngineDeadError]) -> None:
        """For news, which come before the end."""
        news = asyncio.create_task(reader.has_news.wait())
        try:
            await asyncio.wait((news, death), return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if not reader.has_news.is_set():
            raise death.result()

    def _put(self, update: FeedUpdate) -> None:
        self._mirror.apply(update)
        for reader in self._readers:
            reader.put(update)
