"""Refreshes the boards: at once when something changed, and every second while somebody looks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from inferd.appliance.events.hub import EventHub
from inferd.appliance.schemas import Topic

TICK_S = 1.0
log = logging.getLogger(__name__)


class BoardTicker:
    """`boards`: what to refresh for each topic. Whoever begins to look gets what is true at that moment."""

    def __init__(self, hub: EventHub) -> None:
        self.boards: Mapping[Topic, Callable[[], None]] = {}
        self._hub = hub
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._hub.on_demand(self._look)
        self._task = asyncio.create_task(self._run(), name="boards")

    def changed(self) -> None:
        """Refreshed soon, and once for all that changes together."""
        self._news.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            is_watched = self._refresh()
            try:
                async with asyncio.timeout(TICK_S if is_watched else None):
                    await self._news.wait()
                await asyncio.sleep(0.05)
            except TimeoutError:
                pass
            self._news.clear()

    def _look(self) -> None:
        self._refresh()
        self._news.set()

    def _refresh(self) -> bool:
        """Whether anybody looks at any of them."""
        wanted = [refresh for topic, refresh in self.boards.items() if self._hub.is_wanted(topic)]
        for refresh in wanted:
            try:
                refresh()
            except Exception:
                log.exception("a board could not be refreshed")
        return bool(wanted)
