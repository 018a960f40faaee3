"""Follows a daemon's events for as long as a screen is open: through restarts, and honest about what is old."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Literal

from inferd.appliance.admin_client import ActFailed, AdminClient, NotAllowed, Unreachable
from inferd.appliance.events.messages import EventId
from inferd.appliance.events.mirror import Mirror
from inferd.appliance.schemas import Topic

Link = Literal["connecting", "live", "stale", "down", "refused"]
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0


class Follower:
    """`run` is one task. `link`: live; stale, when the connection broke and what is shown is old; down, when nobody
    answers; refused, when the key does not do. `on_change` gets the topics that changed, none when only the link did.
    """

    def __init__(
        self,
        client: AdminClient,
        topics: Collection[Topic],
        on_change: Callable[[frozenset[str]], None] = lambda topics: None,
    ) -> None:
        self.mirror = Mirror()
        self.link: Link = "connecting"
        self.trouble = ""
        self.since = time.monotonic()
        self._client = client
        self._topics = topics
        self._on_change = on_change
        self._last_id: EventId | None = None

    async def run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                async with aclosing(self._client.events(self._topics, self._last_id)) as events:
                    async for self._last_id, event in events:
                        retry_s = FIRST_RETRY_S
                        changed = self.mirror.apply(event)
                        self._set_link("live", "")
                        self._on_change(changed)
                self._set_link("stale", "the daemon ended the stream")
            except NotAllowed as error:
                self._set_link("refused", str(error))
            except (Unreachable, ActFailed) as error:
                self._set_link("stale" if self.link == "live" else "down", str(error))
            self._on_change(frozenset())
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, LONGEST_RETRY_S)

    def _set_link(self, link: Link, trouble: str) -> None:
        if link != self.link:
            self.link, self.since = link, time.monotonic()
        self.trouble = trouble
