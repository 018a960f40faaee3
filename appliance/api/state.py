"""What every route works on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from inferd.appliance.api.body import read_json
from inferd.appliance.api.errors import ApiError
from inferd.appliance.auth.admission import Admission
from inferd.appliance.auth.audit import AuditLog
from inferd.appliance.auth.keys import KeyStore
from inferd.appliance.auth.principal import LOCAL, Principal
from inferd.appliance.auth.sessions import Sessions
from inferd.appliance.auth.usage import UsageStore
from inferd.appliance.boards.incidents import IncidentLog
from inferd.appliance.boards.models import ModelBoard
from inferd.appliance.boards.ticker import BoardTicker
from inferd.appliance.downloads.jobs import DownloadJobs
from inferd.appliance.downloads.manager import PullService
from inferd.appliance.events.hub import EventHub
from inferd.appliance.library.options import OptionsStore
from inferd.appliance.live import LiveSettings
from inferd.appliance.memory.planner import MemoryPlanner
from inferd.appliance.requests.engine_feed import EngineFeeds
from inferd.appliance.requests.live import Caller, LiveRequest
from inferd.appliance.requests.registry import RequestRegistry
from inferd.appliance.settings import Settings
from inferd.appliance.supervisor.catalog import Catalog
from inferd.appliance.supervisor.served import ServedModel
from inferd.appliance.supervisor.supervisor import Supervisor
from inferd.appliance.telemetry.metrics import Metrics

SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "session_id", "x-conversation-id")


@dataclass(frozen=True)
class AppState:
    live: LiveSettings
    version: str
    catalog: Catalog
    options: OptionsStore
    pulls: PullService
    downloads: DownloadJobs
    supervisor: Supervisor[ServedModel]
    planner: MemoryPlanner
    models: ModelBoard
    hub: EventHub
    ticker: BoardTicker
    requests: RequestRegistry
    feeds: EngineFeeds
    keys: KeyStore
    sessions: Sessions
    admission: Admission
    usage: UsageStore
    metrics: Metrics
    audit: AuditLog
    incidents: IncidentLog

    @property
    def settings(self) -> Settings:
        """As they are now: ask again each time."""
        return self.live.current

    @asynccontextmanager
    async def serve(self, request: Request, model: str, api: str) -> AsyncIterator[tuple[ServedModel, LiveRequest]]:
        """The ready model of that id or alias, and this request's entry among all others.

        Raises `UnknownModel`, `ModelUnavailable`, `RequestCancelled`, `ApiError` 403 and 429.
        """
        record, who = self.catalog.find(model), principal_of(request)
        if not who.may_use(record.id):
            text = f"The key '{who.name}' may not use the model '{record.id}'."
            raise ApiError(403, text, type="permission_error", code="forbidden", param="model")
        caller = caller_of(request, who)
        with (
            self.admission.admitted(who, record.id) as spent,
            self.requests.serving(request.state.request_id, record.id, api, caller) as live,
        ):
            spent.live = live
            async with self.supervisor.lease(record.id, ticket=live) as served:
                live.admitted_at = time.time()
                yield served, live

    def audited(self, request: Request, action: str, target: str = "", detail: str = "") -> None:
        """Notes an administrator's act; call it when it is done."""
        peer = request.client.host if request.client is not None else "socket"
        self.audit.append(principal_of(request).name, action, target, peer=peer, detail=detail)

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The body within this server's limits. Raises `ApiError`."""
        settings = self.settings
        return await read_json(request, limit_bytes=settings.body_limit_bytes, timeout_s=settings.body_timeout_s)


def principal_of(request: Request) -> Principal:
    principal = getattr(request.state, "principal", LOCAL)
    assert isinstance(principal, Principal)
    return principal


def caller_of(request: Request, who: Principal) -> Caller:
    """A client may ask to be less urgent than its key allows, never more."""
    headers = request.headers
    wants_batch = headers.get("x-inferd-lane", "").lower() == "batch"
    return Caller(
        client=who.name,
        lane="batch" if wants_batch else who.lane,
        priority=who.priority,
        salt=who.key_id,
        peer=request.client.host if request.client is not None else "",
        user_agent=headers.get("user-agent", "")[:200],
        session=next((headers[name][:100] for name in SESSION_HEADERS if name in headers), ""),
    )


def state_of(request: Request) -> AppState:
    state = request.app.state.inferd
    assert isinstance(state, AppState)
    return state
