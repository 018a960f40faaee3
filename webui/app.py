"""The web console: pages rendered here, kept fresh by one stream a page, acts sent straight to the admin API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from inferd.appliance.admin_client import ActFailed, AdminClient, NotAllowed, Unreachable
from inferd.appliance.events.messages import Delta, Snapshot
from inferd.appliance.events.mirror import Mirror
from inferd.appliance.schemas import Topic
from inferd.webui import contexts
from inferd.webui.contexts import PAGES, Page, why
from inferd.webui.filters import FILTERS

FOLDER = Path(__file__).parent
REDRAW_S = 0.25  # a page is drawn at most four times a second
EVERYWHERE: frozenset[Topic] = frozenset({"models", "incidents"})  # what the strip on top of each page is made of
MAX_FORM_BYTES = 4096
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # without one, a form of ours would come from nowhere
    "cache-control": "no-store",
}
LIVE: dict[str, Callable[..., object]] = {
    "overview": contexts.overview,
    "models": contexts.models,
    "requests": contexts.requests,
    "scheduler": contexts.scheduler,
    "downloads": contexts.downloads,
    "incidents": contexts.incidents,
}
Stream = Callable[[AsyncGenerator[bytes, None]], Response]


@dataclass(frozen=True)
class Visitor:
    """Who looks: `csrf` goes into each page, to be sent back with each act."""

    name: str
    csrf: str


class Backend(Protocol):
    """What the console needs of the daemon that it is part of."""

    def subscribe(self, topics: Iterable[Topic]) -> AsyncGenerator[Snapshot | Delta, None]: ...

    def visitor(self, request: Request) -> Visitor | None:
        """None for who has not logged in."""
        ...

    def log_in(self, request: Request, key: str) -> str | None:
        """A cookie's value; None for a key that does not open the console."""
        ...

    def log_out(self, request: Request) -> None: ...

    def client(self, request: Request) -> AdminClient:
        """Asks the admin API in the visitor's own name."""
        ...

    def stream(self, events: AsyncGenerator[bytes, None]) -> Response:
        """Server-sent events, with comments in silence; given up when the browser leaves."""
        ...

    def settings(self) -> list[tuple[str, str, str]]:
        """Name, value, origin."""
        ...

    @property
    def cookie(self) -> str: ...

    @property
    def version(self) -> str: ...


def make_routes(backend: Backend) -> list[Route]:
    console = Console(backend)
    return [
        Route("/console", console.front, methods=["GET"]),
        Route("/console/login", console.login, methods=["GET", "POST"]),
        Route("/console/logout", console.logout, methods=["POST"]),
        Route("/console/static/{name}", console.static, methods=["GET"]),
        Route("/console/stream/{page}", console.stream, methods=["GET"]),
        Route("/console/life/{request_id}", console.life, methods=["GET"]),
        Route("/console/{page}", console.page, methods=["GET"]),
    ]


class Console:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._templates = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=select_autoescape(default_for_string=True, default=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(FILTERS)
        self._templates.globals.update(why=why, pages=PAGES, version=backend.version)

    async def front(self, request: Request) -> Response:
        return RedirectResponse("/console/overview" if self._backend.visitor(request) else "/console/login", 303)

    async def login(self, request: Request) -> Response:
        if request.method == "GET":
            return self._html("login.html", error="")
        token = self._backend.log_in(request, await _field(request, "key"))
        if token is None:
            return self._html("login.html", error="That key does not open the console.", status=403)
        response = RedirectResponse("/console/overview", 303)
        secure = request.url.scheme == "https"
        response.set_cookie(self._backend.cookie, token, path="/", httponly=True, samesite="strict", secure=secure)
        return response

    async def logout(self, request: Request) -> Response:
        self._backend.log_out(request)
        response = RedirectResponse("/console/login", 303)
        response.delete_cookie(self._backend.cookie, path="/")
        return response

    async def static(self, request: Request) -> Response:
        path = FOLDER / "static" / request.path_params["name"]
        if path.parent != FOLDER / "static" or not path.is_file():
            return Response(status_code=404)
        return FileResponse(path, headers={"cache-control": "max-age=3600", "x-content-type-options": "nosniff"})

    async def page(self, request: Request) -> Response:
        page, visitor = PAGES.get(request.path_params["page"]), self._backend.visitor(request)
        if visitor is None:
            return RedirectResponse("/console/login", 303)
        if page is None:
            return self._html("missing.html", visitor=visitor, page=PAGES["overview"], status=404)
        mirror = await self._mirror(page.topics | EVERYWHERE)
        context = await self._context(page, mirror, request)
        query = str(request.url.query)
        return self._html(
            f"{page.name}.html",
            visitor=visitor,
            page=page,
            context=context,
            strip=contexts.strip(mirror),
            stream=f"/console/stream/{page.name}{'?' + query if query else ''}",
        )

    async def stream(self, request: Request) -> Response:
        page = PAGES.get(request.path_params["page"])
        if page is None or page.name not in LIVE:
            return Response(status_code=404)
        return self._backend.stream(self._fresh(page, request))

    async def life(self, request: Request) -> Response:
        mirror = await self._mirror(frozenset({"requests"}))
        request_id = request.path_params["request_id"]
        mates = await quietly(self._backend.client(request).mates(request_id)) or []
        return self._html("partials/life.html", context=contexts.life(mirror, request_id, mates))

    async def _fresh(self, page: Page, request: Request) -> AsyncGenerator[bytes, None]:
        """The page's inner part, whenever what it shows has changed, and the same text never twice."""
        mirror, last, drawn_at = Mirror(), "", 0.0
        loop = asyncio.get_running_loop()
        async with aclosing(self._backend.subscribe(page.topics | EVERYWHERE)) as events:
            async for event in events:
                mirror.apply(event)
                if loop.time() - drawn_at < REDRAW_S and not isinstance(event, Snapshot):
                    await asyncio.sleep(REDRAW_S - (loop.time() - drawn_at))
                drawn_at = loop.time()
                context = await self._context(page, mirror, request)
                text = self._render(f"partials/{page.name}.html", context=context)
                text += self._render("partials/strip.html", strip=contexts.strip(mirror), oob=True)
                if text != last:
                    last = text
                    yield as_event(text)

    async def _context(self, page: Page, mirror: Mirror, request: Request) -> object:
        client = self._backend.client(request)
        query = dict(request.query_params)
        match page.name:
            case "scheduler":
                model = query.get("model") or _busiest(mirror)
                blocks = await quietly(client.blocks(model)) if model else None
                return contexts.scheduler(mirror, query, blocks, model)
            case "keys":
                return contexts.Keys(await quietly(client.keys()) or [], await quietly(client.usage()) or [])
            case "settings":
                return contexts.Settings(self._backend.settings())
            case "playground":
                return contexts.models(await self._mirror(frozenset({"models"})), query)
        return LIVE[page.name](mirror, query)

    async def _mirror(self, topics: frozenset[Topic]) -> Mirror:
        mirror = Mirror()
        async with aclosing(self._backend.subscribe(topics)) as events:
            mirror.apply(await anext(events))
        return mirror

    def _html(self, template: str, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(self._render(template, **values), status, headers=SECURITY_HEADERS)

    def _render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(now=time.time(), **values)


async def _field(request: Request, name: str) -> str:
    """Of a small form; empty when it is not there."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_FORM_BYTES:
            return ""
    return parse_qs(body.decode("latin-1")).get(name, [""])[0].strip()


def as_event(text: str) -> bytes:
    """One server-sent event of several lines."""
    return "".join(f"data: {line}\n" for line in text.splitlines()).encode() + b"\n"


async def quietly(asking: Awaitable[Any]) -> Any:
    """None where the daemon does not say: a page shows what there is."""
    try:
        return await asking
    except (ActFailed, NotAllowed, Unreachable):
        return None


def _busiest(mirror: Mirror) -> str:
    ready = [model for model in mirror.models if model.state == "ready"]
    return max(ready, key=lambda model: model.kv.blocks_used).id if ready else ""
