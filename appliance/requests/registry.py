"""Every API request of this daemon, live ones and the last that ended, published to whoever looks."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inferd.appliance.events.hub import EventHub
from inferd.appliance.requests.errors import RequestCancelled
from inferd.appliance.requests.live import Caller, LiveRequest

REFRESH_S = 0.2
log = logging.getLogger(__name__)
KEPT_ENDED = 200
Explain = Callable[[LiveRequest], None]  # writes why a request that is not in its engine yet waits
Ended = Callable[[LiveRequest], None]


class RequestRegistry:
    """What changes with every token is published a few times a second, and only while somebody looks."""

    def __init__(self, hub: EventHub, explain: Explain = lambda live: None, on_end: Ended = lambda live: None) -> None:
        self._hub = hub
        self._explain = explain
        self._on_end = on_end
        self._live: dict[str, LiveRequest] = {}
        self._ended: OrderedDict[str, LiveRequest] = OrderedDict()
        self._refreshing: asyncio.Task[None] | None = None
        hub.on_demand(self._on_demand)

    @property
    def live(self) -> list[LiveRequest]:
        """In order of arrival."""
        return list(self._live.values())

    def find(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id) or self._ended.get(request_id)

    @contextmanager
    def serving(self, request_id: str, model: str, api: str, caller: Caller) -> Iterator[LiveRequest]:
        """From arrival to end: finished, cancelled by whoever left or was allowed to, or failed with an error.

        Raises `RequestCancelled` in the place of the cancellation that `LiveRequest.cancel` caused.
        """
        live = LiveRequest(self._unique(request_id), model, api, caller)
        self._live[live.id] = live
        self.publish(live)
        try:
            yield live
            live.end_as_it_went()
        except RequestCancelled as error:
            live.end("cancelled", str(error))
            raise
        except (asyncio.CancelledError, GeneratorExit):
            live.end("cancelled", "the client left" if live.cancelled_by is None else None)
            if live.cancelled_by is not None and (task := asyncio.current_task()) is not None:
                task.uncancel()
                raise RequestCancelled(live.cancelled_by) from None
            raise
        except Exception as error:
            live.end("failed", str(error)[:500])
            raise
        finally:
            self._retire(live)

    def publish(self, live: LiveRequest) -> None:
        self._hub.put("requests", live.record())

    def refresh(self) -> None:
        for live in self._live.values():
            self._explain(live)
            self.publish(live)

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})

    def _unique(self, request_id: str) -> str:
        """Clients may send an id of their own, and send it twice."""
        number, unique = 1, request_id
        while unique in self._live or unique in self._ended:
            number += 1
            unique = f"{request_id}.{number}"
        return unique

    def _retire(self, live: LiveRequest) -> None:
        del self._live[live.id]
        self._ended[live.id] = live
        self.publish(live)
        while len(self._ended) > KEPT_ENDED:
            oldest, _ = self._ended.popitem(last=False)
            self._hub.drop("requests", oldest)
        self._on_end(live)

    def _on_demand(self) -> None:
        if self._hub.is_wanted("requests") and (self._refreshing is None or self._refreshing.done()):
            self.refresh()
            self._refreshing = asyncio.get_running_loop().create_task(self._keep_fresh(), name="request-records")

    async def _keep_fresh(self) -> None:
        while self._hub.is_wanted("requests"):
            try:
                self.refresh()
            except Exception:
                log.exception("the records of requests could not be refreshed")
            await asyncio.sleep(REFRESH_S)
