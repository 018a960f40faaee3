"""Who asks, decided once for every request, before anything of it is read."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inferd.appliance.api.errors import ApiError
from inferd.appliance.api.protocol import PEER_UID
from inferd.appliance.auth.access import READING, Denied, decide, needed
from inferd.appliance.auth.keys import KEY_PREFIX, KeyStore
from inferd.appliance.auth.limiter import Bucket
from inferd.appliance.auth.principal import LOCAL_ADMIN, Principal
from inferd.appliance.auth.sessions import COOKIE, CSRF_HEADER, Session, Sessions, is_csrf_right
from inferd.appliance.settings import is_loopback

WRONG_KEYS_PER_MINUTE = 10
MAX_PEERS = 4096
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
log = logging.getLogger(__name__)


class Authenticate:
    """Puts the `Principal` into the request's state, or answers 401, 403, 404 or 429 itself."""

    def __init__(self, app: ASGIApp, *, keys: KeyStore, sessions: Sessions, loopback_inference: bool) -> None:
        self._app = app
        self._keys = keys
        self._sessions = sessions
        self._loopback_inference = loopback_inference
        self._lockout = Lockout()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        verdict = self._verdict(scope)
        if isinstance(verdict, ApiError):
            await _answer(verdict, scope)(scope, receive, send)
            return
        scope["state"]["principal"] = verdict
        await self._app(scope, receive, send)

    def _verdict(self, scope: Scope) -> Principal | ApiError:
        if PEER_UID in scope:
            return _over_socket(scope[PEER_UID])
        need = needed(scope["method"], scope["path"])
        if need is None:
            return no_such_route(scope)
        headers, peer = Headers(scope=scope), _peer(scope)
        sent = keys_sent(headers)
        if sent and (wait_s := self._lockout.wait_s(peer)) > 0:
            text = "Too many wrong API keys came from this address."
            retry = {"retry-after": str(int(wait_s) + 1)}
            return ApiError(429, text, type="rate_limit_error", code="rate_limit_exceeded", headers=retry)
        session = None if sent else self._session(headers)
        if session is not None:
            if (refusal := _forged(scope, headers, session)) is not None:
                return refusal
            scope["state"]["session"] = session
            principal: Principal | None = session.principal
        else:
            principal = self._keys.find(sent[0]) if len(sent) == 1 else None
        has_wrong_key = bool(sent) and principal is None and need != "open"
        if has_wrong_key:
            self._lockout.count(peer)
        verdict = decide(
            need,
            principal,
            has_wrong_key=has_wrong_key,
            is_loopback=is_local(scope, headers),
            loopback_inference=self._loopback_inference,
        )
        return _as_error(verdict) if isinstance(verdict, Denied) else verdict

    def _session(self, headers: Headers) -> Session | None:
        cookies = SimpleCookie()
        with suppress(CookieError):
            cookies.load(headers.get("cookie", ""))
        morsel = cookies.get(COOKIE)
        return self._sessions.find(morsel.value) if morsel is not None else None


def _answer(error: ApiError, scope: Scope) -> Response:
    """A browser that may not see a page of the console yet is led to where it can."""
    is_page = scope["path"].startswith("/console/") and not scope["path"].startswith("/console/stream/")
    if error.status == 401 and is_page and scope["method"] in READING:
        return RedirectResponse("/console/login", 303)
    return error.response()


class Lockout:
    """Slows down whoever guesses: ten wrong keys a minute from one address, then none is looked at."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def wait_s(self, peer: str) -> float:
        bucket = self._buckets.get(peer)
        return 0.0 if bucket is None else bucket.wait_s(1, time.monotonic())

    def count(self, peer: str) -> None:
        now = time.monotonic()
        if peer not in self._buckets and len(self._buckets) >= MAX_PEERS:
            self._buckets.pop(next(iter(self._buckets)))
        bucket = self._buckets.setdefault(peer, Bucket(WRONG_KEYS_PER_MINUTE, WRONG_KEYS_PER_MINUTE, now))
        bucket.settle(now)
        bucket.level -= 1
        if bucket.level < 1:
            log.warning("ten wrong API keys from %s within a minute", peer)


def keys_sent(headers: Headers) -> list[str]:
    """The different keys of ours that a request carries. OpenAI's clients send the first form, Anthropic's may send
    both, and all of them insist on some key: what does not look like one of ours counts as none.
    """
    found = []
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        found.append(key.strip() if scheme.lower() == "bearer" else value)
    found += [value.strip() for value in headers.getlist("x-api-key")]
    return [key for key in dict.fromkeys(found) if key.startswith(KEY_PREFIX)]


def is_local(scope: Scope, headers: Headers) -> bool:
    """From this machine, and asked under its own name: behind a proxy, everybody comes from here."""
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return (
        is_loopback(_peer(scope))
        and is_loopback(name.strip("[]"))
        and not any(header in headers for header in FORWARDED)
    )


def no_such_route(scope: Scope) -> ApiError:
    """Names the base URL from the socket, not from the Host header: a client may be told only what is true."""
    host, port = scope.get("server") or ("127.0.0.1", None)
    name = f"[{host}]" if ":" in host else host
    base = f"http://{name}:{port}/v1" if port else f"http://{name}/v1"
    return ApiError(404, f"There is no such route. The base URL of the OpenAI API is {base}.", code="not_found")


def _forged(scope: Scope, headers: Headers, session: Session) -> ApiError | None:
    """A browser sends a cookie along whoever asks: an act must also show that it comes from a page of ours."""
    if scope["method"] in READING or scope["path"].startswith("/console/login"):
        return None
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return _forbidden("This act came from another site.")
    if not is_csrf_right(session, headers.get(CSRF_HEADER, "")):
        return _forbidden("This act did not come from a page of the console; reload the page.")
    return None


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, type="permission_error", code="forbidden")


def _over_socket(uid: int) -> Principal | ApiError:
    """The system says who is at the other end."""
    if uid in (0, os.getuid()):
        return LOCAL_ADMIN
    return _forbidden("This user may not administer inferd.")


def _as_error(denied: Denied) -> ApiError:
    if denied.status == 401:
        headers = {"www-authenticate": "Bearer"}
        return ApiError(401, denied.reason, type="authentication_error", code="invalid_api_key", headers=headers)
    return _forbidden(denied.reason)


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""
