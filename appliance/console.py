"""The daemon's side of the web console: sessions, the event hub, and the admin API in a visitor's own name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from http.cookies import SimpleCookie

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from inferd.appliance.admin_client import AdminClient
from inferd.appliance.api.authenticate import Lockout
from inferd.appliance.api.sse import Exchange, Wire
from inferd.appliance.api.state import AppState
from inferd.appliance.auth.sessions import COOKIE, Session
from inferd.appliance.events.messages import Delta, Snapshot
from inferd.appliance.schemas import Topic
from inferd.webui.app import Visitor

Described = Callable[[], list[tuple[str, str, str]]]


class ConsoleBackend:
    """Implements `webui.app.Backend`."""

    cookie = COOKIE

    def __init__(self, state: AppState, app: ASGIApp, described: Described) -> None:
        self.version = state.version
        self._state = state
        self._app = app
        self._described = described
        self._lockout = Lockout()

    def subscribe(self, topics: Iterable[Topic]) -> AsyncGenerator[Snapshot | Delta, None]:
        return self._state.hub.subscribe(topics)

    def visitor(self, request: Request) -> Visitor | None:
        session = getattr(request.state, "session", None)
        return Visitor(session.principal.name, session.csrf) if isinstance(session, Session) else None

    def log_in(self, request: Request, key: str) -> str | None:
        """With a key that may at least look, or a link of `inferd console`."""
        peer = request.client.host if request.client is not None else ""
        if self._lockout.wait_s(peer) > 0:
            return None
        principal = self._state.sessions.redeem(key) or self._state.keys.find(key)
        if principal is None or not principal.may("read"):
            self._lockout.count(peer)
            return None
        self._state.audit.append(principal.name, "console.login", peer=peer)
        return self._state.sessions.begin(principal)

    def log_out(self, request: Request) -> None:
        if token := request.cookies.get(COOKIE):
            self._state.sessions.end(token)

    def client(self, request: Request) -> AdminClient:
        host = request.headers.get("host", "127.0.0.1")
        cookies = SimpleCookie()
        cookies[COOKIE] = request.cookies.get(COOKIE, "")
        headers = {"cookie": cookies.output(header="", sep="; ").strip(), "host": host}
        return AdminClient(f"http://{host}", transport=httpx.ASGITransport(self._app), headers=headers)

    def stream(self, events: AsyncGenerator[bytes, None]) -> Response:
        async def work(wire: Wire) -> None:
            await wire.stream(events, {}, for_clients=False)

        return Exchange(work, self._state.settings.keepalive_s)

    def settings(self) -> list[tuple[str, str, str]]:
        return self._described()
