"""`POST /admin/v1/downloads`: the daemon pulls a model and tells how far it is, one JSON object a line.

The pull belongs to the daemon: it goes on when the caller leaves, and a second call for the same model joins it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from inferd.appliance.api.body import read_json
from inferd.appliance.api.errors import ApiError, bad_request
from inferd.appliance.api.homes import refuse_other_home
from inferd.appliance.api.wording import in_plain_words
from inferd.appliance.downloads.jobs import DownloadJobs, Job
from inferd.appliance.downloads.remote import NDJSON
from inferd.appliance.downloads.source import Source, parse_source
from inferd.appliance.downloads.wire import PULL_PATH, PullEvent, PullFailure, PullRequest
from inferd.appliance.library.errors import InvalidName, InvalidSource
from inferd.appliance.library.names import check_name

BODY_LIMIT_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0
EVENT_GAP_S = 0.1  # at most ten progress lines a second
STILL_HERE_S = 5.0


def make_pull_router(jobs: DownloadJobs, home: Path) -> APIRouter:
    """Errors that are known before the pull starts are plain `ApiError`s; later ones are the stream's last line."""
    router = APIRouter()

    @router.post(PULL_PATH)
    async def pull(request: Request) -> Response:
        """`?wait=false` answers with the job at once; else its progress, one JSON object a line."""
        wanted = _decode(await read_json(request, limit_bytes=BODY_LIMIT_BYTES, timeout_s=BODY_TIMEOUT_S))
        refuse_other_home(wanted.home, str(home))
        job = jobs.begin(_source(wanted), wanted.name)
        if request.query_params.get("wait") == "false":
            return _json(job.record)
        return StreamingResponse(_lines(job), media_type=NDJSON)

    @router.get(PULL_PATH)
    async def list_downloads(request: Request) -> Response:
        return _json([job.record for job in jobs.jobs])

    @router.post(PULL_PATH + "/{job_id}/cancel")
    async def cancel(request: Request, job_id: str) -> Response:
        """Answers when it has ended and its bytes are free again; one that has ended already is told as it did."""
        job = jobs.find(job_id)
        if job is None:
            raise ApiError(404, f"There is no download {job_id[:40]!r}.", code="not_found", param="job_id")
        await jobs.cancel(job)
        return _json(job.record)

    return router


async def _lines(job: Job) -> AsyncIterator[bytes]:
    """The latest that is known, at most ten times a second. A reader that is slow, or gone, holds up nothing."""
    shown, silent_s, is_over = None, 0.0, False
    while not is_over:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVENT_GAP_S):
                await job.done.wait()
        is_over = job.done.is_set()
        silent_s += EVENT_GAP_S
        if job.progress is not None and job.progress is not shown:
            shown, silent_s = job.progress, 0.0
            yield msgspec.json.encode(PullEvent(progress=shown)) + b"\n"
        elif silent_s >= STILL_HERE_S:
            silent_s = 0.0
            yield b"\n"
    error = None if job.error is None else PullFailure.of(job.error)
    yield msgspec.json.encode(PullEvent(model=job.model, error=error)) + b"\n"


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


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
