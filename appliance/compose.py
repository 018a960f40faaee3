"""Puts the daemon's parts together: the only place that knows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from inferd.appliance.api.state import AppState
from inferd.appliance.auth.admission import Admission
from inferd.appliance.auth.audit import AuditLog
from inferd.appliance.auth.keys import KeyStore
from inferd.appliance.auth.sessions import Sessions
from inferd.appliance.auth.usage import UsageStore
from inferd.appliance.boards.devices import DeviceBoard
from inferd.appliance.boards.incidents import IncidentLog, incident_of
from inferd.appliance.boards.models import ModelBoard
from inferd.appliance.boards.ticker import BoardTicker
from inferd.appliance.boot import folder_records
from inferd.appliance.downloads.jobs import DownloadJobs
from inferd.appliance.downloads.manager import PullService
from inferd.appliance.downloads.pins import recommended_sampling
from inferd.appliance.events.hub import EventHub
from inferd.appliance.library.facts import FactsStore
from inferd.appliance.library.library import Library
from inferd.appliance.library.options import OptionsStore
from inferd.appliance.live import LiveSettings
from inferd.appliance.log_ring import lines_of
from inferd.appliance.memory.devices import HostOnly
from inferd.appliance.memory.nvml import find_devices
from inferd.appliance.memory.planner import MemoryPlanner, Resident
from inferd.appliance.requests.engine_feed import EngineFeeds
from inferd.appliance.requests.registry import RequestRegistry
from inferd.appliance.requests.waits import WaitReasons
from inferd.appliance.supervisor.catalog import Catalog
from inferd.appliance.supervisor.failure import Failure
from inferd.appliance.supervisor.served import ServedModel
from inferd.appliance.supervisor.supervisor import Supervisor
from inferd.appliance.supervisor.world import Holding, Limits, Rules
from inferd.appliance.telemetry.metrics import Metrics
from inferd.engine.frontend.stats import LatencyObserver


def build_state(live: LiveSettings, library: Library, pulls: PullService, run_dir: Path) -> AppState:
    hub = EventHub()
    catalog = Catalog(library, folder_records(live.current.model))
    options = OptionsStore(library.database)
    planner = MemoryPlanner(live, catalog, FactsStore(library.database), options, find_devices() or HostOnly())
    ticker = BoardTicker(hub)
    launcher = EngineLauncher(live, catalog, planner, options, run_dir)
    supervisor: Supervisor[ServedModel] = Supervisor(
        launcher.start,
        planner,
        limits=lambda: Limits(Rules(sleep_s=live.current.sleep_s), live.current.load_timeout_s),
        hung_after_s=live.current.hang_timeout_s,
    )
    live.on_change(supervisor.look_again)
    planner.residents = lambda: residents(supervisor)
    models = ModelBoard(hub, catalog, supervisor, planner)
    ticker.boards = {
        "models": models.refresh,
        "devices": DeviceBoard(hub, planner).refresh,
    }
    requests = RequestRegistry(hub, WaitReasons(supervisor, planner))
    feeds = EngineFeeds(hub, requests, supervisor)
    supervisor.on_change(lambda model: ticker.changed())
    supervisor.on_change(lambda model: feeds.look())
    metrics = Metrics(supervisor, planner)
    launcher.observe = metrics.latency_of
    incidents = IncidentLog(library.database, hub)

    def on_failure(model: str, failure: Failure) -> None:
        metrics.incident(failure.kind)
        lost = supervisor.num_open_of(model)
        incidents.record(incident_of(model, failure, {"host": planner.host_ledger()}, lost))

    supervisor.on_failure = on_failure
    usage = UsageStore(library.database)
    return AppState(
        live=live,
        version=version("inferd"),
        catalog=catalog,
        options=options,
        pulls=pulls,
        downloads=DownloadJobs(pulls, library.database, hub, lambda model: ticker.changed()),
        supervisor=supervisor,
        planner=planner,
        models=models,
        hub=hub,
        ticker=ticker,
        requests=requests,
        feeds=feeds,
        keys=KeyStore(library.database),
        sessions=Sessions(),
        incidents=incidents,
        admission=Admission(usage, supervisor.num_open_of, lambda: live.current.max_open_requests),
        usage=usage,
        metrics=metrics,
        audit=AuditLog(library.database, lambda entry: hub.append("audit", entry)),
    )


class EngineLauncher:
    """Starts the engine of a model of the catalog, and tells the planner what that took."""

    def __init__(
        self, live: LiveSettings, catalog: Catalog, planner: MemoryPlanner, options: OptionsStore, run_dir: Path
    ) -> None:
        self._live = live
        self._catalog = catalog
        self._planner = planner
        self._options = options
        self._run_dir = run_dir
        self.observe: Callable[[str], LatencyObserver | None] = lambda model: None

    async def start(self, model: str, placement: Holding) -> ServedModel:
        """Raises `EngineError`."""
        record, began, settings = self._catalog.find(model), time.monotonic(), self._live.current
        kv_cache_bytes = self._planner.kv_cache_bytes(model)
        args = settings.engine.to_args(self._catalog.folder(record), kv_cache_bytes=kv_cache_bytes)
        recommended = recommended_sampling([file.sha256 for file in record.files])
        options = self._options.find(model)
        served = await ServedModel.start(
            args,
            self._run_dir,
            settings.load_timeout_s,
            recommended,
            on_line=lines_of(record.id),
            tool_parser=options.tool_parser or settings.tool_parser,
            reasoning_parser=options.reasoning_parser or settings.reasoning_parser,
        )
        if (observer := self.observe(model)) is not None:
            served.llm.observe(observer)
        self._planner.loaded(model, served.memory, time.monotonic() - began)
        return served


def residents(supervisor: Supervisor[ServedModel]) -> list[Resident]:
    return [
        Resident(slot.model, slot.process.pid, slot.process.memory)
        for slot in supervisor.slots
        if slot.process is not None
    ]
