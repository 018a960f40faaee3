"""`GET /admin/v1/events`: everything that goes on, as server-sent events.

First a `snapshot`, then merged `delta`s (`events.messages`). `topics=a,b` chooses; `Last-Event-ID` resumes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.errors import bad_request
from inferd.appliance.api.sse import Exchange, Wire
from inferd.appliance.api.state import AppState, state_of
from inferd.appliance.events.messages import EventId, encode_sse
from inferd.appliance.schemas import TOPICS, Topic

router = APIRouter()
EVENTS_PATH = "/admin/v1/events"


@router.get(EVENTS_PATH)
async def events(request: Request, topics: str = "") -> Response:
    state, wanted = state_of(request), parse_topics(topics)
    last_id = EventId.parse(request.headers.get("last-event-id", ""))

    async def work(wire: Wire) -> None:
        await wire.stream(_encoded(state, wanted, last_id), {}, for_clients=False)

    return Exchange(work, state.settings.keepalive_s)


def parse_topics(text: str) -> frozenset[Topic]:
    """Empty: all of them. Raises a 400 `ApiError` that names those there are."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in TOPICS]:
        raise bad_request(f"There is no topic {unknown[0][:40]!r}. Topics: {', '.join(TOPICS)}.", param="topics")
    return frozenset(topic for topic in TOPICS if topic in asked or not asked)


async def _encoded(state: AppState, topics: frozenset[Topic], last_id: EventId | None) -> AsyncGenerator[bytes, None]:
    async with aclosing(state.hub.subscribe(topics, last_id)) as stream:
        async for event in stream:
            yield encode_sse(event, state.hub.epoch)
