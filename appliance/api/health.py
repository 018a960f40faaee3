"""Whether the daemon lives and whether a model answers: cheap, open, and no reason to load anything."""

from __future__ import annotations

import math

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.errors import ApiError, server_error
from inferd.appliance.api.state import AppState, state_of
from inferd.appliance.supervisor.failure import Failure
from inferd.appliance.supervisor.states import ModelState

router = APIRouter()
GET_AND_HEAD = ["GET", "HEAD"]
ANSWERS = frozenset({ModelState.READY, ModelState.ON_DISK, ModelState.SLEEPING_1, ModelState.SLEEPING_2})


@router.api_route("/", methods=GET_AND_HEAD)
async def root(request: Request) -> Response:
    return _json({"name": "inferd", "version": state_of(request).version, "openai_base_path": "/v1"})


@router.api_route("/health", methods=GET_AND_HEAD)
@router.api_route("/ping", methods=[*GET_AND_HEAD, "POST"])
async def health(request: Request) -> Response:
    """200 while the daemon lives; whether a model answers is another question."""
    return Response()


@router.api_route("/ready", methods=GET_AND_HEAD)
@router.api_route("/readyz", methods=GET_AND_HEAD)
async def ready(request: Request) -> Response:
    """200 when a model answers, or would be loaded or woken for whoever asks; 503 while the daemon drains."""
    state = state_of(request)
    if (refusal := _not_ready(state)) is not None:
        raise refusal
    return _json({"status": "ready"})


@router.api_route("/version", methods=GET_AND_HEAD)
async def version(request: Request) -> Response:
    return _json({"version": state_of(request).version})


def _not_ready(state: AppState) -> ApiError | None:
    supervisor = state.supervisor
    if supervisor.draining:
        return server_error(503, "This server is shutting down.", "draining", 5)
    known = {slot.model: slot for slot in supervisor.slots}
    models = [record.id for record in state.catalog.list_models()]
    if any(model not in known or known[model].state in ANSWERS for model in models):
        return None
    failed = [(slot, slot.failure) for slot in known.values() if slot.failure is not None]
    if failed:
        slot, failure = min(failed, key=lambda pair: pair[1].retry_in_s)
        text = f"{slot.model} does not run: {failure.reason}. {_what_follows(slot.state, failure)}"
        return server_error(503, text, "engine_dead", max(failure.retry_in_s, 1.0))
    return server_error(503, "No model is loaded yet.", "model_loading", 2)


def _what_follows(state: ModelState, failure: Failure) -> str:
    if state is not ModelState.FAILED:
        return "It is being started again."
    if failure.by_itself:
        return f"It is started again in {math.ceil(failure.retry_in_s)} s."
    return f"It may be asked for again in {math.ceil(failure.retry_in_s)} s."


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
