"""`/admin/v1/requests`: the requests there are, and what can be done to one."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.errors import ApiError, bad_request
from inferd.appliance.api.state import principal_of, state_of
from inferd.appliance.requests.live import LiveRequest

router = APIRouter()
REQUESTS_PATH = "/admin/v1/requests"
MAX_PRIORITY = 1000


@router.get(REQUESTS_PATH)
async def list_requests(request: Request) -> Response:
    """Live ones, in order of arrival."""
    registry = state_of(request).requests
    registry.refresh()
    return _json([live.record() for live in registry.live])


@router.get(REQUESTS_PATH + "/{request_id}")
async def show_request(request: Request, request_id: str) -> Response:
    return _json(_find(request, request_id).record())


@router.get(REQUESTS_PATH + "/{request_id}/mates")
async def batch_mates(request: Request, request_id: str) -> Response:
    """The requests that its last step computed together with it."""
    live, registry = _find(request, request_id), state_of(request).requests
    mates = await live.batch_mates()
    return _json([other.id for other in registry.live if other is not live and mates & set(other.parts)])


@router.post(REQUESTS_PATH + "/{request_id}/pause")
async def pause_request(request: Request, request_id: str) -> Response:
    live = _find(request, request_id)
    return _done(request, live, "pause", await live.pause(principal_of(request).name))


@router.post(REQUESTS_PATH + "/{request_id}/resume")
async def resume_request(request: Request, request_id: str) -> Response:
    live = _find(request, request_id)
    return _done(request, live, "resume", await live.resume())


@router.post(REQUESTS_PATH + "/{request_id}/priority")
async def set_priority(request: Request, request_id: str) -> Response:
    """`{"priority": -1}`: smaller runs sooner."""
    live = _find(request, request_id)
    priority = (await state_of(request).read_json(request)).get("priority")
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
        raise bad_request(f"priority is a whole number up to {MAX_PRIORITY}.", param="priority")
    return _done(request, live, "priority", await live.set_priority(priority), f"to {priority}")


@router.post(REQUESTS_PATH + "/{request_id}/cancel")
async def cancel_request(request: Request, request_id: str) -> Response:
    """One that is over already is told as it ended."""
    live = _find(request, request_id)
    await live.cancel(f"an administrator ({principal_of(request).name})")
    state_of(request).audited(request, "request.cancel", live.id, detail=f"of {live.caller.client}")
    return _json(live.record())


def _find(request: Request, request_id: str) -> LiveRequest:
    live = state_of(request).requests.find(request_id)
    if live is None:
        raise ApiError(404, f"There is no request {request_id[:128]!r}.", code="not_found", param="request_id")
    return live


def _done(request: Request, live: LiveRequest, act: str, was_done: bool, detail: str = "") -> Response:
    if not was_done:
        raise ApiError(409, f"The request {live.id} is not in its engine.", code="not_running", param="request_id")
    state_of(request).audited(request, f"request.{act}", live.id, detail)
    state_of(request).requests.publish(live)
    return _json(live.record())


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
