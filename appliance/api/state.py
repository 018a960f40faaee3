"""What every route works on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from inferd.appliance.api.body import read_json
from inferd.appliance.downloads.manager import PullService
from inferd.appliance.memory.planner import MemoryPlanner
from inferd.appliance.settings import Settings
from inferd.appliance.supervisor.catalog import Catalog
from inferd.appliance.supervisor.served import ServedModel
from inferd.appliance.supervisor.supervisor import Supervisor


@dataclass(frozen=True)
class AppState:
    settings: Settings
    version: str
    catalog: Catalog
    pulls: PullService
    supervisor: Supervisor[ServedModel]
    planner: MemoryPlanner

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[ServedModel]:
        """The ready model of that id or alias. Raises `UnknownModel`, `ModelUnavailable`."""
        record = self.catalog.find(name)
        async with self.supervisor.lease(record.id) as served:
            yield served

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The body within this server's limits. Raises `ApiError`."""
        settings = self.settings
        return await read_json(request, limit_bytes=settings.body_limit_bytes, timeout_s=settings.body_timeout_s)


def state_of(request: Request) -> AppState:
    state = request.app.state.inferd
    assert isinstance(state, AppState)
    return state
