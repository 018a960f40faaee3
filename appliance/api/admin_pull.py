"""`POST /admin/v1/downloads`: the daemon pulls a model and tells how far it is, one JSON object a line.

The pull belongs to the daemon: it goes on when the caller leaves, and a second call for the same model joins it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from inferd.appliance.api.body import read_json
from inferd.appliance.api.errors import INTERNAL, bad_request
from inferd.appliance.api.homes import refuse_other_home
from inferd.appliance.api.wording import in_plain_words
from inferd.appliance.downloads.manager import PullService
from inferd.appliance.downloads.progress import PullProgress
from inferd.appliance.downloads.remote import NDJSON
from inferd.appliance.downloads.source import Source, parse_source
from inferd.appliance.downloads.wire import PULL_PATH, PullEvent, PullFailure, PullRequest
from inferd.appliance.library.errors import InvalidName, InvalidSource, LibraryError
from inferd.appliance.library.names import check_name

BODY_LIMIT_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0
EVENT_GAP_S = 0.1  # at most ten progress lines a second
STILL_HERE_S = 5.0
log = logging.getLogger(__name__)


def make_pull_router(service: PullService) -> APIRouter:
    """Errors that are known before the pull starts are plain `ApiError`s; later ones are the stream's last line."""
    router = APIRouter()
    running: set[asyncio.Task[None]] = set()  # the event loop alone would let go of a task nobody holds

    @router.post(PULL_PATH)
    async def pull(request: Request) -> Response:
        wanted = _decode(await read_json(request, limit_bytes=BODY_LIMIT_BYTES, timeout_s=BODY_TIMEOUT_S))
        refuse_other_home(wanted.home, str(service.library.home))
        watch = _Watch(service, _source(wanted), wanted.name)
        task = asyncio.create_task(watch.run())
        running.add(task)
        task.add_done_callback(running.discard)
        return StreamingResponse(watch.lines(), media_type=NDJSON)

    return router


class _Watch:
    """One pull and the latest that is known of it. A reader that is slow, or gone, holds up nothing."""

    def __init__(self, service: PullService, source: Source, name: str | None) -> None:
        self._service = service
        self._source = source
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._latest = PullEvent()
        self._news = asyncio.Event()
        self._ended = False

    async def run(self) -> None:
        try:
            last = PullEvent(model=await self._service.pull_async(self._source, self._report, name=self._name))
        except LibraryError as error:
            last = PullEvent(error=PullFailure.of(error))
        except Exception:
            log.exception("the pull of %s failed", self._source)
            last = PullEvent(error=PullFailure("internal_error", INTERNAL, 1, False))
        self._show(last, ended=True)

    async def lines(self) -> AsyncIterator[bytes]:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STILL_HERE_S):
                    await self._news.wait()
            ended, fresh = self._ended, self._news.is_set()
            self._news.clear()
            yield (msgspec.json.encode(self._latest) if fresh else b"") + b"\n"
            if ended:
                return
            await asyncio.sleep(EVENT_GAP_S)

    def _report(self, progress: PullProgress) -> None:
        """Called in the pull's thread. A daemon that is going down has closed its loop before its threads end."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._show, PullEvent(progress=progress), False)

    def _show(self, event: PullEvent, ended: bool) -> None:
        if self._ended:
            return
        self._latest = event
        self._ended = ended
        self._news.set()


def _decode(body: dict[str, object]) -> PullRequest:
    try:
        return msgspec.convert(body, PullRequest)
    except msgspec.ValidationError as error:
        text, param = in_plain_words(error)
        raise bad_request(f"This is not a request to pull: {text}.", param=param) from None


def _source(wanted: PullRequest) -> Source:
    try:
        if wanted.name is not None:
            check_name(wanted.name)
        return parse_source(wanted.source)
    except InvalidName as error:
        raise bad_request(f"{error}.", param="name", code=error.code) from None
    except InvalidSource as error:
        raise bad_request(f"{error}.", param="source", code=error.code) from None
