"""Whether the daemon lives and whether a model answers: cheap, open, and no reason to load anything."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.errors import ApiError, server_error
from inferd.appliance.api.state import AppState, state_of
from inferd.appliance.supervisor.states import ModelState

router = APIRouter()
GET_AND_HEAD = ["GET", "HEAD"]


@router.api_route("/", methods=GET_AND_HEAD)
async def root(request: Request) -> Response:
    return _json({"name": "inferd", "version": state_of(request).version, "openai_base_path": "/v1"})


@router.api_route("/health", methods=GET_AND_HEAD)
@router.api_route("/ping", methods=[*GET_AND_HEAD, "POST"])
async def health(request: Request) -> Response:
    """200 while the daemon can answer or is about to again; 503 when an engine stays down."""
    down = [slot.model for slot in state_of(request).supervisor.slots if slot.is_down]
    if down:
        raise server_error(503, f"{', '.join(down)} does not run; the server's log has the cause.", "engine_dead", 5)
    return Response()


@router.api_route("/ready", methods=GET_AND_HEAD)
@router.api_route("/readyz", methods=GET_AND_HEAD)
async def ready(request: Request) -> Response:
    """200 when a model answers and the daemon does not drain."""
    state = state_of(request)
    if (refusal := _not_ready(state)) is not None:
        raise refusal
    return _json({"status": "ready"})


@router.api_route("/version", methods=GET_AND_HEAD)
async def version(request: Request) -> Response:
    return _json({"version": state_of(request).version})


def _not_ready(state: AppState) -> ApiError | None:
    if state.supervisor.draining:
        return server_error(503, "This server is shutting down.", "draining", 5)
    states = {slot.state for slot in state.supervisor.slots}
    if ModelState.READY in states:
        return None
    if ModelState.FAILED in states:
        return server_error(503, "The model does not run; it is started again.", "engine_dead", 2)
    return server_error(503, "No model is loaded yet.", "model_loading", 2)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
