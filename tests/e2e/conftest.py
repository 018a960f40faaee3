"""Whole daemons: real sockets and real processes, most of them over the scripted engine, without a model or torch."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from inferd.appliance.api.state import AppState
from inferd.appliance.compose import build_state
from inferd.appliance.downloads.factory import build_pull_service
from inferd.appliance.library.library import Library
from inferd.appliance.listener import listen
from inferd.appliance.live import LiveSettings
from inferd.appliance.main import address_of, make_server
from inferd.appliance.settings import Settings
from inferd.engine.frontend.async_llm import AsyncLLM
from inferd.engine.testing.model_folder import make_model_folder

MODEL = "tiny"
REPLIES = {
    "France": "The capital of France is Paris. \N{FRENCH FRIES} é \N{SMILING FACE WITH SUNGLASSES}",
    "hello": "hi there",
}


@dataclass
class Daemon:
    """A daemon inside this process; its engine is a process of its own."""

    state: AppState
    address: str
    http: httpx.AsyncClient
    model: str

    async def llm(self) -> AsyncLLM:
        return (await self.state.supervisor.ensure_ready(self.model)).llm

    async def chat(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": self.model, "prompt": prompt, **fields})


StartDaemon = Callable[..., Awaitable[Daemon]]


def settings_for(folder: Path, run_dir: Path, **overrides: Any) -> Settings:
    engine = {"executor": "scripted", "block_size": 4} | overrides.pop("engine", {})
    values = {
        "port": 0,
        "home": folder / "home",
        "run_dir": run_dir,
        "model": str(folder / MODEL),
        "log_level": "warning",
        "engine": engine,
    }
    return Settings(**(values | overrides))


@asynccontextmanager
async def running_daemon(
    folder: Path, run_dir: Path, *, scripted: dict[str, Any] | None = None, **overrides: Any
) -> AsyncIterator[Daemon]:
    make_model_folder(folder / MODEL, **({"replies": REPLIES, "kv_blocks": 1025} | (scripted or {})))
    async with serving(settings_for(folder, run_dir, **overrides)) as daemon:
        yield daemon


@asynccontextmanager
async def daemon_over_folder(model_folder: Path, folder: Path, run_dir: Path) -> AsyncIterator[Daemon]:
    """A daemon as it comes, with a real engine over a real model."""
    settings = Settings(port=0, home=folder / "home", run_dir=run_dir, model=str(model_folder), log_level="warning")
    async with serving(settings) as daemon:
        yield daemon


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Daemon]:
    run_dir = settings.run_dir
    with Library.open(settings.home) as library, listen("127.0.0.1", 0) as listener:
        state = build_state(LiveSettings(settings), library, build_pull_service(library, {}), run_dir)
        server = make_server(state)
        state.ticker.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        address = address_of(listener)
        try:
            admin = {"authorization": f"Bearer {state.keys.reset_admin()}"}
            async with httpx.AsyncClient(base_url=address, timeout=60, trust_env=False, headers=admin) as http:
                model = state.catalog.list_models()[0].id
                await state.supervisor.ensure_ready(model)
                yield Daemon(state, address, http, model)
        finally:
            await state.supervisor.drain(0)
            await state.feeds.close()
            await state.requests.close()
            await state.ticker.close()
            server.should_exit = True
            await serving


@pytest.fixture(scope="module")
def short_run_dir() -> Iterator[Path]:
    """Unix socket paths have at most 107 bytes, and pytest's own folders use most of them."""
    folder = Path(tempfile.mkdtemp(prefix="inferd-e2e-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def start_daemon(tmp_path: Path, short_run_dir: Path) -> AsyncIterator[StartDaemon]:
    """Starts a daemon in this process, stopped at the end; keyword arguments are settings and `scripted`."""
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> Daemon:
            return await stack.enter_async_context(running_daemon(tmp_path, short_run_dir, **options))

        yield start


@pytest.fixture(scope="module")
def run_daemon_in_module() -> Any:
    """For modules that share one daemon: the context manager behind `start_daemon`."""
    return running_daemon


@pytest.fixture(scope="module")
def run_daemon_over_folder() -> Any:
    return daemon_over_folder


@pytest.fixture
def inferd_environment(tmp_path: Path, short_run_dir: Path) -> dict[str, str]:
    """The environment of an `inferd` command: a home and a run directory of this test."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return kept | {
        "HOME": str(tmp_path),
        "INFERD_HOME": str(tmp_path / "home"),
        "INFERD_RUN_DIR": str(short_run_dir / "run"),
    }


INFERD = str(Path(sys.executable).parent / "inferd")
SCRIPTED = ["--set", "engine.executor=scripted", "--set", "engine.block_size=4"]


@dataclass
class Served:
    process: subprocess.Popen[str]
    port: int
    greeting: str

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "tiny", replies={"France": "Paris."}, kv_blocks=1025)


@pytest.fixture
def serve(model_folder: Path, inferd_environment: dict[str, str]) -> Iterator[Callable[..., Served]]:
    """Starts `inferd serve` and waits until it says that it serves. `log`: the file that gets its standard error."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str, log: Path | None = None) -> Served:
        command = [INFERD, "serve", "--port", "0", *SCRIPTED, "--model", str(model_folder), *options]
        with ExitStack() as stack:
            errors = stack.enter_context(log.open("wb")) if log is not None else None
            process = subprocess.Popen(
                command, env=inferd_environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        started.append(process)
        assert process.stdout is not None
        greeting = ""
        while "inferd run" not in greeting:
            line = process.stdout.readline()
            assert line, "inferd serve ended before it served"
            greeting += line
        port = re.search(r"http://127\.0\.0\.1:(\d+)/v1", greeting)
        assert port is not None
        return Served(process, int(port[1]), greeting)

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def inferd(inferd_environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs one command to its end; `text` is its standard input."""

    def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [INFERD, *words],
            env=inferd_environment,
            capture_output=True,
            text=True,
            timeout=60,
            input=text,
            check=False,
        )

    return run
