"""The composition root: settings → library → supervisor → app → server, and the way down again."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import uvicorn
import uvloop

from inferd.appliance.api.protocol import limited
from inferd.appliance.api.state import AppState
from inferd.appliance.app import create_app
from inferd.appliance.auth.first_key import ensure_admin_key
from inferd.appliance.boot import find_model, wait_ready
from inferd.appliance.compose import build_state
from inferd.appliance.downloads.factory import build_pull_service
from inferd.appliance.downloads.progress import Report, ignore_progress
from inferd.appliance.library.library import Library
from inferd.appliance.library.lock import in_service
from inferd.appliance.listener import listen, listen_unix
from inferd.appliance.live import LiveSettings
from inferd.appliance.log_ring import log_lines_to
from inferd.appliance.reload import reload_settings
from inferd.appliance.rundir import daemon_folder
from inferd.appliance.sdnotify import Notifier
from inferd.appliance.settings import http_address
from inferd.appliance.signals import Signals

KEEP_ALIVE_S = 60
GOING_DOWN_S = 15  # what ending engines and connections may take after the drain
CLOSE_S = 3  # what answers that are already complete get to reach their clients


@dataclass(frozen=True)
class Started:
    """What a person wants to know once the first model answers."""

    address: str
    model: str
    load_s: float
    admin_key: str | None = None  # made by this start; nobody can read it again


@dataclass(frozen=True)
class Reports:
    """How the caller hears of what goes on; `pull` is called in another thread."""

    pull: Report = ignore_progress
    starting: Callable[[str], None] = lambda model: None
    ready: Callable[[Started], None] = lambda started: None


def run_daemon(live: LiveSettings, reports: Reports | None = None) -> int:
    """Serves until a signal; call it on the main thread. Returns the exit code: 0, or 130 after Ctrl-C.

    Raises what keeps it from serving: `PortTaken`, `SettingsError`, `UnknownModel`, `LibraryError`, `EngineError`,
    `OSError`.
    """
    settings = live.current
    with ExitStack() as stack:
        listener = stack.enter_context(closing(listen(settings.host, settings.port)))
        run_dir = stack.enter_context(daemon_folder(settings.run_dir))
        library = stack.enter_context(Library.open(settings.home))
        stack.enter_context(in_service(settings.home))
        pulls = stack.enter_context(closing(build_pull_service(library, os.environ)))
        state = build_state(live, library, pulls, run_dir)
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        bound = settings.model_copy(update={"port": listener.getsockname()[1]})  # 0 was any free port
        admin = stack.enter_context(closing(listen_unix(bound.admin_socket)))
        stack.callback(bound.admin_socket.unlink, missing_ok=True)
        first_key = ensure_admin_key(state.keys, settings.home)
        boot = Boot(state, address_of(listener), reports or Reports(), Notifier(os.environ), first_key)
        return runner.run(_serve(boot, [listener, admin]))


@dataclass(frozen=True)
class Boot:
    """What a daemon goes up with."""

    state: AppState
    address: str
    reports: Reports
    notifier: Notifier
    first_key: str | None


async def _serve(boot: Boot, listeners: list[socket.socket]) -> int:
    state, notifier = boot.state, boot.notifier
    signals = Signals(lambda: reload_settings(state.live, notifier))
    server = make_server(state)
    with log_lines_to(state.hub):
        state.ticker.start()
        state.downloads.resume()
        serving = asyncio.create_task(server.serve(sockets=listeners))
        watchdog = asyncio.create_task(notifier.watchdog())
        try:
            notifier.ready(f"listening on {boot.address}")
            await _until_asked_to_stop(signals, serving, _boot(boot))
        finally:
            notifier.stopping("open requests may finish", state.settings.drain_s + GOING_DOWN_S)
            await _go_down(state, server, serving, signals)
            watchdog.cancel()
    return signals.exit_code


async def _boot(boot: Boot) -> None:
    state, reports, notifier = boot.state, boot.reports, boot.notifier
    settings, address = state.settings, boot.address
    record = await find_model(settings.model, settings.default_source, state.catalog, state.pulls, reports.pull)
    reports.starting(record.id)
    notifier.status(f"loading {record.id}")
    served = await wait_ready(state.supervisor, record.id)
    notifier.status(f"serving {record.id} at {address}")
    reports.ready(Started(address, record.id, served.llm.ready.load_s, boot.first_key))


async def _until_asked_to_stop(signals: Signals, serving: asyncio.Task[None], boot: Awaitable[None]) -> None:
    """Raises what `boot` or the server raises."""
    asked = asyncio.ensure_future(signals.asked.wait())
    booting = asyncio.ensure_future(boot)
    pending = {asked, booting, serving}
    try:
        while not asked.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
            if serving in done:
                raise RuntimeError("the HTTP server ended by itself")
    finally:
        for task in (asked, booting):
            task.cancel()
        await asyncio.gather(asked, booting, return_exceptions=True)


async def _go_down(state: AppState, server: DaemonServer, serving: asyncio.Task[None], signals: Signals) -> None:
    state.pulls.stop()
    draining = asyncio.ensure_future(state.supervisor.drain(state.settings.drain_s if signals.asked.is_set() else 0.0))
    hurry = asyncio.ensure_future(signals.hurry.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await state.supervisor.drain(0.0)
    hurry.cancel()
    await state.feeds.close()
    await state.requests.close()
    await state.ticker.close()
    server.should_exit = True
    await asyncio.wait({serving})


class DaemonServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are ours: uvicorn would close the listener before open requests are through."""
        yield


def make_server(state: AppState) -> DaemonServer:
    """To be served on a socket of `listen`; `should_exit` ends it."""
    settings = state.settings
    protocol = limited(
        head_limit_bytes=settings.head_limit_bytes,
        head_timeout_s=settings.head_timeout_s,
        max_connections=settings.max_connections,
    )
    config = uvicorn.Config(
        create_app(state),
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    return DaemonServer(config)


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return http_address(host, port)
