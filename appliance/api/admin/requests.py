"""`/admin/v1/requests`: the requests there are, and what can be done to one."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.errors import ApiError
from inferd.appliance.api.state import state_of
from inferd.appliance.requests.live import LiveRequest

router = APIRouter()
REQUESTS_PATH = "/admin/v1/requests"


@router.get(REQUESTS_PATH)
async def list_requests(request: Request) -> Response:
    """Live ones, in order of arrival."""
    registry = state_of(request).requests
    registry.refresh()
    return _json([live.record() for live in registry.live])


@router.get(REQUESTS_PATH + "/{request_id}")
async def show_request(request: Request, request_id: str) -> Response:
    return _json(_find(request, request_id).record())


@router.post(REQUESTS_PATH + "/{request_id}/cancel")
async def cancel_request(request: Request, request_id: str) -> Response:
    """One that is over already is told as it ended."""
    live = _find(request, request_id)
    await live.cancel("an administrator")
    state_of(request).audited(request, "request.cancel", live.id, detail=f"of {live.caller.client}")
    return _json(live.record())


def _find(request: Request, request_id: str) -> LiveRequest:
    live = state_of(request).requests.find(request_id)
    if live is None:
        raise ApiError(404, f"There is no request {request_id[:128]!r}.", code="not_found", param="request_id")
    return live


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
