"""What every route works on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from inferd.appliance.api.body import read_json
from inferd.appliance.boards.models import ModelBoard
from inferd.appliance.boards.ticker import BoardTicker
from inferd.appliance.downloads.manager import PullService
from inferd.appliance.events.hub import EventHub
from inferd.appliance.library.options import OptionsStore
from inferd.appliance.memory.planner import MemoryPlanner
from inferd.appliance.requests.live import Caller, LiveRequest
from inferd.appliance.requests.registry import RequestRegistry
from inferd.appliance.settings import Settings
from inferd.appliance.supervisor.catalog import Catalog
from inferd.appliance.supervisor.served import ServedModel
from inferd.appliance.supervisor.supervisor import Supervisor

SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "session_id", "x-conversation-id")


@dataclass(frozen=True)
class AppState:
    settings: Settings
    version: str
    catalog: Catalog
    options: OptionsStore
    pulls: PullService
    supervisor: Supervisor[ServedModel]
    planner: MemoryPlanner
    models: ModelBoard
    hub: EventHub
    ticker: BoardTicker
    requests: RequestRegistry

    @asynccontextmanager
    async def serve(self, request: Request, model: str, api: str) -> AsyncIterator[tuple[ServedModel, LiveRequest]]:
        """The ready model of that id or alias, and this request's entry among all others.

        Raises `UnknownModel`, `ModelUnavailable`, `RequestCancelled`.
        """
        caller = caller_of(request)
        with self.requests.serving(request.state.request_id, model, api, caller) as live:
            live.model = self.catalog.find(model).id
            async with self.supervisor.lease(live.model, ticket=live) as served:
                live.admitted_at = time.time()
                yield served, live

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The body within this server's limits. Raises `ApiError`."""
        settings = self.settings
        return await read_json(request, limit_bytes=settings.body_limit_bytes, timeout_s=settings.body_timeout_s)


def caller_of(request: Request) -> Caller:
    headers = request.headers
    return Caller(
        peer=request.client.host if request.client is not None else "",
        user_agent=headers.get("user-agent", "")[:200],
        session=next((headers[name][:100] for name in SESSION_HEADERS if name in headers), ""),
    )


def state_of(request: Request) -> AppState:
    state = request.app.state.inferd
    assert isinstance(state, AppState)
    return state
