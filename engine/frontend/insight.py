"""What is going on in an engine, and what may be done about one request of it: typed control calls.

Requests are named by the engine's own ids, `RequestRecord.id`. The two classes are the same, with and without `await`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from inferd.engine.core.client import AsyncMPClient, EngineCoreClient
from inferd.engine.core.inbox import OnFeed
from inferd.engine.errors import EngineDeadError, EngineError
from inferd.engine.frontend.feed import FeedReaders
from inferd.engine.insight.records import BlockMap, RequestRecord
from inferd.engine.messages import FeedUpdate


class EngineInsight:
    """For ordinary code. Every call raises `EngineError` for what goes wrong in the engine."""

    def __init__(self, client: EngineCoreClient) -> None:
        self._client = client

    def records(self) -> list[RequestRecord]:
        """Of all unfinished requests, oldest first, as they are now."""
        return _to_records(self._client.call("records"))

    def block_map(self) -> BlockMap:
        """Takes the engine a time in proportion to the number of its blocks."""
        return _to_block_map(self._client.call("block_map"))

    def batch_mates(self, request_id: str) -> list[str]:
        """The other requests of the last step, if this one was in it."""
        return list(self._client.call("batch_mates", request_id))

    def cancel(self, request_id: str) -> bool:
        """This and the following return whether there is such an unfinished request. See `core.actions`."""
        return bool(self._client.call("cancel", request_id))

    def set_priority(self, request_id: str, priority: int) -> bool:
        return bool(self._client.call("set_priority", request_id, priority))

    def pause_request(self, request_id: str, by: str = "admin") -> bool:
        return bool(self._client.call("pause_request", request_id, by))

    def resume_request(self, request_id: str) -> bool:
        return bool(self._client.call("resume_request", request_id))

    @contextmanager
    def watch(self, on_update: OnFeed) -> Iterator[None]:
        """`on_update` gets a snapshot, then what has changed, whenever the engine is asked for anything; at the end all
        that it has not heard.

        Raises `EngineError` when somebody watches already.
        """
        if self._client.on_feed is not None:
            raise EngineError("the engine's feed is being watched already; end that first")
        self._client.on_feed = on_update
        try:
            self._client.call("subscribe")
            try:
                yield
            finally:
                with suppress(EngineDeadError):
                    self._client.call("unsubscribe")
        finally:
            self._client.on_feed = None


class AsyncEngineInsight:
    """For an event loop. Every call raises `EngineError` for what goes wrong in the engine."""

    def __init__(self, client: AsyncMPClient) -> None:
        self._client = client
        self._readers = FeedReaders(client)

    def feed(self) -> AsyncGenerator[FeedUpdate, None]:
        """A snapshot, then what has changed, ten times a second at most; several updates are merged into one for a
        slow reader. It ends by being closed, or with `EngineDeadError`. Any number of readers may read.
        """
        return self._readers.read()

    async def records(self) -> list[RequestRecord]:
        return _to_records(await self._client.call("records"))

    async def block_map(self) -> BlockMap:
        return _to_block_map(await self._client.call("block_map"))

    async def batch_mates(self, request_id: str) -> list[str]:
        return list(await self._client.call("batch_mates", request_id))

    async def cancel(self, request_id: str) -> bool:
        return bool(await self._client.call("cancel", request_id))

    async def set_priority(self, request_id: str, priority: int) -> bool:
        return bool(await self._client.call("set_priority", request_id, priority))

    async def pause_request(self, request_id: str, by: str = "admin") -> bool:
        return bool(await self._client.call("pause_request", request_id, by))

    async def resume_request(self, request_id: str) -> bool:
        return bool(await self._client.call("resume_request", request_id))


def _to_records(reply: Any) -> list[RequestRecord]:
    return msgspec.convert(reply, list[RequestRecord])


def _to_block_map(reply: Any) -> BlockMap:
    return msgspec.convert(reply, BlockMap)
