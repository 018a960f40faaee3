"""The HTTP application: routes, and the order in which a request passes the middleware."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response

from inferd.appliance.api import admin_models, health, metrics
from inferd.appliance.api.admin import events as admin_events
from inferd.appliance.api.admin import models as admin_model_acts
from inferd.appliance.api.admin import people as admin_people
from inferd.appliance.api.admin import requests as admin_requests
from inferd.appliance.api.admin_pull import make_pull_router
from inferd.appliance.api.authenticate import Authenticate
from inferd.appliance.api.errors import ApiError, bad_request, to_api_error
from inferd.appliance.api.middleware import AccessLog, CatchErrors, Gate, RequestId
from inferd.appliance.api.openai import chat, completions, embeddings, models, scoring
from inferd.appliance.api.state import AppState
from inferd.appliance.auth.admission import TooMany
from inferd.appliance.console import ConsoleBackend
from inferd.appliance.requests.errors import RequestCancelled
from inferd.appliance.supervisor.errors import ModelUnavailable, UnknownModel
from inferd.engine.errors import EngineError
from inferd.webui.app import make_routes


def create_app(state: AppState) -> FastAPI:
    settings = state.settings
    middleware = [  # outermost first
        Middleware(RequestId),
        Middleware(AccessLog, metrics=state.metrics),
        Middleware(Gate, allowed_hosts=settings.allowed_hosts, body_limit_bytes=settings.body_limit_bytes),
        Middleware(
            Authenticate,
            keys=state.keys,
            sessions=state.sessions,
            loopback_inference=settings.loopback_inference,
        ),
        Middleware(CatchErrors),
    ]
    app = FastAPI(
        title="inferd",
        version=state.version,
        openapi_url=None,
        redirect_slashes=False,  # a redirected POST loses its body or its headers in many clients
        middleware=middleware,
        exception_handlers=_exception_handlers(),
    )
    app.state.inferd = state
    generating, pooling = (chat.router, completions.router), (embeddings.router, scoring.router)
    for router in (health.router, metrics.router, models.router, *generating, *pooling, admin_models.router):
        app.include_router(router)
    for admin in (admin_events.router, admin_requests.router, admin_model_acts.router, admin_people.router):
        app.include_router(admin)
    app.include_router(make_pull_router(state.downloads, state.settings.home))
    app.router.routes.extend(make_routes(ConsoleBackend(state, app, state.live.described)))
    return app


def _exception_handlers() -> dict[Any, Any]:
    async def known(_: Request, error: Exception) -> Response:
        return to_api_error(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _http_error(request, error).response()

    async def invalid(_: Request, error: Exception) -> Response:
        return bad_request("The request's path or query is not valid.").response()

    kinds = (ApiError, EngineError, UnknownModel, ModelUnavailable, RequestCancelled, TooMany)
    return {HTTPException: http, RequestValidationError: invalid, **dict.fromkeys(kinds, known)}


def _http_error(request: Request, error: HTTPException) -> ApiError:
    if error.status_code == 404:
        text = f"There is no such route. The base URL of the OpenAI API is {_base_url(request)}."
        return ApiError(404, text, code="not_found")
    if error.status_code == 405:
        return ApiError(
            405, "This route does not know that method.", code="method_not_allowed", headers=error.headers or {}
        )
    return ApiError(error.status_code, "The request was refused.", headers=error.headers or {})


def _base_url(request: Request) -> str:
    """From the socket, not from the Host header: a client may be told only what is true."""
    host, port = request.scope.get("server") or ("127.0.0.1", None)
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/v1" if port else f"http://{name}/v1"
