"""The daemon's own pull: progress as lines, owned by the daemon, for this machine only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from fastapi import FastAPI

from inferd.appliance.api.admin_pull import make_pull_router
from inferd.appliance.api.middleware import CatchErrors, Gate, RequestId
from inferd.appliance.downloads.jobs import DownloadJobs
from inferd.appliance.downloads.progress import PullProgress, ignore_progress
from inferd.appliance.downloads.remote import pull_by_daemon
from inferd.appliance.downloads.source import parse_source
from inferd.appliance.downloads.wire import PULL_PATH, PullEvent
from inferd.appliance.events.hub import EventHub
from inferd.appliance.library.errors import LibraryError, NetworkFailure
from inferd.appliance.library.library import Library
from inferd.engine.testing.model_folder import make_model_folder

GGUF = b"GGUF" + bytes(5000)


class Daemon:
    """The pull router behind the daemon's own middleware, on a port of its own."""

    def __init__(self, service: Any) -> None:
        app = FastAPI()
        jobs = DownloadJobs(service, service.library.database, EventHub())
        app.include_router(make_pull_router(jobs, service.library.home))
        app.add_middleware(Gate, allowed_hosts=["proxy.example"], body_limit_bytes=1 << 20)
        app.add_middleware(CatchErrors)
        app.add_middleware(RequestId)
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()

    @property
    def address(self) -> str:
        while not self._server.started:
            threading.Event().wait(0.01)
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def start_daemon(library: Library, make_service: Callable[..., Any]) -> Iterator[Callable[..., str]]:
    daemons: list[Daemon] = []

    def start(**options: Any) -> str:
        daemons.append(Daemon(make_service(library, **options)))
        return daemons[-1].address

    yield start
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(GGUF)
    return path


def post(address: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(address + PULL_PATH, json=body, headers=headers, trust_env=False)


def test_a_pull_ends_with_the_model(library: Library, start_daemon: Callable[..., str], original: Path) -> None:
    seen: list[PullProgress] = []
    record = pull_by_daemon(start_daemon(), library.home, parse_source(str(original)), "mine", seen.append)
    assert record == library.find("mine")
    assert seen


def test_the_stream_is_one_json_object_a_line(
    library: Library, start_daemon: Callable[..., str], original: Path
) -> None:
    response = post(start_daemon(), {"source": f"file:{original}"})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
    events = [msgspec.json.decode(line, type=PullEvent) for line in response.text.splitlines() if line]
    assert events[-1].model == library.find("tiny")
    assert all(event.model is None and event.error is None for event in events[:-1])


def test_a_pull_that_fails_ends_with_its_own_error(
    library: Library, start_daemon: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(LibraryError, match="no file or folder") as caught:
        pull_by_daemon(
            start_daemon(), library.home, parse_source(f"file:{tmp_path}/absent.gguf"), None, ignore_progress
        )
    assert (caught.value.exit_code, caught.value.code) == (4, "source_not_found")


def test_an_unexpected_failure_is_told_without_its_text(
    library: Library, start_daemon: Callable[..., str], original: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken_import(gguf: Path, folder: Path) -> None:
        raise RuntimeError("a secret of the inside")

    address = start_daemon(import_gguf=broken_import)
    with pytest.raises(LibraryError) as caught:
        pull_by_daemon(address, library.home, parse_source(str(original)), None, ignore_progress)
    assert caught.value.code == "internal_error"
    assert "secret" not in str(caught.value)
    assert "a secret of the inside" in caplog.text


def test_the_pull_goes_on_when_the_caller_leaves(
    library: Library, start_daemon: Callable[..., str], original: Path
) -> None:
    caller_left, done = threading.Event(), threading.Event()

    def slow_import(gguf: Path, folder: Path) -> None:
        assert caller_left.wait(30)
        make_model_folder(folder)
        done.set()

    address = start_daemon(import_gguf=slow_import)
    with httpx.stream("POST", address + PULL_PATH, json={"source": str(original)}, trust_env=False) as response:
        next(response.iter_raw())
    caller_left.set()
    assert done.wait(30)
    record = pull_by_daemon(address, library.home, parse_source(str(original)), None, ignore_progress)  # joins it
    assert record == library.find("tiny")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"source": "nonsense"}, "source"),
        ({"source": "hf:../.."}, "source"),
        ({"source": "pypi:a", "name": "../x"}, "name"),
        ({}, "source"),
        ({"source": 1}, "source"),
        ({"source": "pypi:a", "unknown": 1}, "unknown"),
    ],
)
def test_a_bad_request_is_refused_before_anything_starts(
    start_daemon: Callable[..., str], body: Any, param: str | None
) -> None:
    response = post(start_daemon(), body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_another_home_is_another_daemons_business(
    library: Library, start_daemon: Callable[..., str], original: Path, tmp_path: Path
) -> None:
    address = start_daemon()
    assert post(address, {"source": str(original), "home": "/elsewhere"}).status_code == 409
    assert pull_by_daemon(address, tmp_path, parse_source(str(original)), None, ignore_progress) is None
    assert library.list_models() == []


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"content-type": "text/plain"},
    ],
)
def test_strangers_and_web_pages_may_not_pull(
    library: Library, start_daemon: Callable[..., str], original: Path, headers: dict[str, str]
) -> None:
    response = post(start_daemon(), {"source": str(original)}, **headers)
    assert response.status_code in (403, 415)
    assert library.list_models() == []


def test_where_nobody_or_somebody_else_listens_there_is_no_daemon(mean_server: Any, tmp_path: Path) -> None:
    source = parse_source("pypi:tiny")
    assert pull_by_daemon(mean_server.url, tmp_path, source, None, ignore_progress) is None
    url = mean_server.url
    mean_server.close()
    mean_server.close = lambda: None
    assert pull_by_daemon(url, tmp_path, source, None, ignore_progress) is None


@pytest.mark.parametrize("body", [b"", b"\n\n", b"{", b'{"progress": 1}\n'])
def test_a_daemon_that_goes_away_is_said_so(
    mean_server: Any, make_reply: Callable[..., Any], tmp_path: Path, body: bytes
) -> None:
    mean_server.answer = lambda request: make_reply(200, body, {"content-type": "application/x-ndjson"})
    with pytest.raises(NetworkFailure, match="daemon"):
        pull_by_daemon(mean_server.url, tmp_path, parse_source("pypi:tiny"), None, ignore_progress)


def test_a_cancelled_caller_leaves_the_pull_alone(
    library: Library, make_service: Callable[..., Any], original: Path
) -> None:
    importing, caller_left = threading.Event(), threading.Event()

    def slow_import(gguf: Path, folder: Path) -> None:
        importing.set()
        assert caller_left.wait(30)
        make_model_folder(folder)

    service = make_service(library, import_gguf=slow_import)

    async def cancel() -> None:
        task = asyncio.create_task(service.pull_async(str(original)))
        await asyncio.to_thread(importing.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        caller_left.set()

    asyncio.run(cancel())
    service.close()  # waits for the pulls that go on
    assert library.find("tiny").id == "tiny"
