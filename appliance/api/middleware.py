"""What every request passes, as plain ASGI: a middleware that wraps `receive` in tasks of its own hides disconnects."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferd.appliance.api.body import too_large
from inferd.appliance.api.errors import ApiError, is_expected, to_api_error
from inferd.appliance.settings import is_loopback
from inferd.appliance.telemetry.metrics import Metrics

FORMS = ("/console/login",)  # the only place that a form is sent to
UNCOUNTED = ("/metrics", "/health", "/ping", "/ready", "/readyz", "/version")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
access_log = logging.getLogger("inferd.access")
log = logging.getLogger(__name__)


class RequestId:
    """Gives every request an id (the client's own, if it is harmless) and sends it back on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class AccessLog:
    """One line a request, when it is over, and its count by route. 499: the client left first."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status, complete = time.monotonic(), 499, False

        async def watched_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            self._count(scope, status if complete else 499, time.monotonic() - began)
            access_log.info(
                "%s %r %d %.1f ms %s",
                scope["method"],
                scope["path"][:200],
                status if complete else 499,
                (time.monotonic() - began) * 1000,
                scope["state"]["request_id"],
            )

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        handler = getattr(route, "path", "none")  # the template: never what a client wrote
        if handler not in UNCOUNTED:
            self._metrics.answered(scope["method"] if route is not None else "none", handler, status, seconds)


class CatchErrors:
    """The last resort: any exception becomes an error object, and a bug of ours also a traceback in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if not is_expected(error):
                log.error("request %s failed", scope["state"]["request_id"], exc_info=error)
            if started:
                raise
            await to_api_error(error).response()(scope, receive, send)


class Gate:
    """Refuses what no client of ours sends: foreign hosts and origins, bodies that are not JSON or too large.

    A web page that resolves its own name to 127.0.0.1 is stopped by the Host check, one that posts a form by the
    content type, and any other page by its Origin.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Iterable[str], body_limit_bytes: int) -> None:
        self._app = app
        self._allowed_hosts = frozenset(name.lower() for name in allowed_hosts)
        self._body_limit_bytes = body_limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            return await refusal.response()(scope, receive, send)
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(f"//{hosts[0]}"):
            return _forbidden("The Host header names another server; use http://127.0.0.1 or http://localhost.")
        origin = headers.get("origin")
        if origin is not None and not self._is_ours(origin):
            return _forbidden("Web pages of other sites may not call this server.")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            return self._body_refusal(headers, scope["path"])
        return None

    def _body_refusal(self, headers: Headers, path: str) -> ApiError | None:
        length = headers.get("content-length", "0")
        if length == "0" and "transfer-encoding" not in headers:
            return None
        content_type = headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type != ("application/x-www-form-urlencoded" if path in FORMS else "application/json"):
            return _unsupported_media("The content type must be application/json.")
        if headers.get("content-encoding", "identity").lower() != "identity":
            return _unsupported_media("Compressed bodies are not supported.")
        if length.isdecimal() and int(length[:20]) > self._body_limit_bytes:
            return too_large(self._body_limit_bytes)
        return None

    def _is_ours(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname
        except ValueError:
            return False
        return name is not None and (is_loopback(name) or name in self._allowed_hosts)


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, type="permission_error", code="forbidden")


def _unsupported_media(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")
