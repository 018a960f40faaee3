"""What each template is given: one dataclass a template, made from the mirror of the event stream alone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferd.appliance.events.mirror import Mirror
from inferd.appliance.schemas import (
    AuditEntry,
    DeviceStatus,
    DownloadRecord,
    IncidentRecord,
    LogLine,
    ModelStatus,
    RequestRecord,
    Topic,
)
from inferd.webui.pictures import Cell, Line, Segment, StepBar, block_cells, line, memory_segments, step_bars

STATE_ORDER = ("decode", "prefill", "preempted", "paused", "waiting", "queued", "failed", "cancelled", "finished")
NEWS_S = 3600.0
LONG_ID = re.compile(r"\b[0-9a-f]{32}\b")
MESSAGES = [{"role": "user", "content": "…"}]


@dataclass(frozen=True)
class Page:
    name: str
    title: str
    topics: frozenset[Topic]


PAGES: dict[str, Page] = {
    name: Page(name, title, frozenset(topics))  # type: ignore[arg-type]
    for name, title, topics in (
        ("overview", "Overview", ("models", "devices", "requests", "incidents", "steps")),
        ("models", "Models", ("models", "devices")),
        ("requests", "Requests", ("requests",)),
        ("scheduler", "Scheduler", ("steps", "requests", "models")),
        ("playground", "Playground", ()),
        ("downloads", "Downloads", ("downloads",)),
        ("keys", "Keys and usage", ()),
        ("incidents", "Incidents and log", ("incidents", "logs", "audit")),
        ("settings", "Settings", ()),
    )
}


@dataclass(frozen=True)
class DeviceView:
    device: DeviceStatus
    segments: list[Segment]


@dataclass(frozen=True)
class Overview:
    devices: list[DeviceView]
    models: list[ModelStatus]
    running: int
    waiting: int
    tokens_per_s: float
    throughput: Line
    kv: Line
    batch: Line
    incidents: list[IncidentRecord]


def overview(mirror: Mirror, query: Mapping[str, str]) -> Overview:
    live = [request for request in mirror.requests if request.finished_at is None]
    waiting = sum(request.state in ("queued", "waiting") for request in live)
    steps = mirror.steps[-120:]
    rates = [1000 * (step.tokens.decode + step.tokens.prefill) / max(step.duration_ms, 1e-3) for step in steps]
    return Overview(
        devices=device_views(mirror),
        models=sorted_models(mirror),
        running=len(live) - waiting,
        waiting=waiting,
        tokens_per_s=sum(model.tokens_per_s for model in mirror.models),
        throughput=line(rates),
        kv=line([step.kv_used for step in steps], top=1.0),
        batch=line([float(step.running) for step in steps]),
        incidents=list(reversed(mirror.incidents))[:3],
    )


@dataclass(frozen=True)
class Models:
    devices: list[DeviceView]
    models: list[ModelStatus]


def models(mirror: Mirror, query: Mapping[str, str]) -> Models:
    return Models(device_views(mirror), sorted_models(mirror))


@dataclass(frozen=True)
class Requests:
    rows: list[RequestRecord]
    total: int
    filter: dict[str, str] = field(default_factory=dict)


def requests(mirror: Mirror, query: Mapping[str, str]) -> Requests:
    everything = mirror.requests
    wanted = {name: query[name] for name in ("model", "client", "state", "lane", "text") if query.get(name)}
    rows = [request for request in everything if matches(request, wanted)]
    rows.sort(key=lambda request: (STATE_ORDER.index(request.state), request.arrived_at))
    return Requests(rows, len(everything), wanted)


def matches(request: RequestRecord, wanted: Mapping[str, str]) -> bool:
    for name in ("model", "client", "state", "lane"):
        if name in wanted and wanted[name].lower() not in getattr(request, name).lower():
            return False
    text = wanted.get("text", "").lower()
    everything = " ".join(
        (request.id, request.model, request.client, request.state, request.api, request.session, why(request))
    )
    return all(word in everything.lower() for word in text.split())


def why(request: RequestRecord) -> str:
    """What it does, or why it does not."""
    if request.reason_text:
        return LONG_ID.sub(lambda found: found.group()[:12], request.reason_text)
    if request.state == "decode":
        return f"{request.tokens_per_s:.0f} tokens a second"
    if request.state == "prefill":
        return f"{request.computed_tokens:,} of {request.prompt_tokens:,} prompt tokens"
    if request.state == "finished":
        return request.finish_reason or ""
    return request.error or (f"number {request.position}" if request.position else "")


@dataclass(frozen=True)
class Phase:
    name: str
    seconds: float
    start: float  # in thousandths of the whole life
    length: float


@dataclass(frozen=True)
class Life:
    request: RequestRecord | None
    request_id: str
    phases: list[Phase]
    mates: list[str]
    curl: str


def life(mirror: Mirror, request_id: str, mates: Sequence[str] = ()) -> Life:
    request = next((one for one in mirror.requests if one.id == request_id), None)
    return Life(request, request_id, phases(request) if request is not None else [], list(mates), curl(request))


def phases(request: RequestRecord, now: float | None = None) -> list[Phase]:
    """Before the engine, in its queue, prefill, decode; each as long as it took."""
    end_of_all = request.finished_at or (time.time() if now is None else now)
    ends = (
        ("waits for its model", request.admitted_at),
        ("waits in the queue", request.first_scheduled_at or request.first_token_at),
        ("prefill", request.first_token_at),
        ("decode", end_of_all),
    )
    begin, whole, found = request.arrived_at, max(end_of_all - request.arrived_at, 1e-6), []
    for name, end in ends:
        seconds = max((end_of_all if end is None else end) - begin, 0.0)
        start = 1000 * (begin - request.arrived_at) / whole
        found.append(Phase(name, seconds, round(start, 1), round(1000 * seconds / whole, 1)))
        if end is None:
            break
        begin = max(end, begin)
    return found


def curl(request: RequestRecord | None) -> str:
    """What it was, without what it said: prompts are not kept."""
    if request is None:
        return ""
    body = json.dumps(
        {"model": request.model, "max_tokens": request.max_tokens, "messages": MESSAGES}, ensure_ascii=False
    )
    return f"curl $INFERD/v1/chat/completions -H 'content-type: application/json' -d '{body}'"


@dataclass(frozen=True)
class Scheduler:
    bars: list[StepBar]
    last: StepBar | None
    kv: Line
    cached: Line
    running: Line
    waiting: Line
    evictions: int
    preemptions: int
    cells: list[Cell]
    model: str
    num_blocks: int


def scheduler(
    mirror: Mirror, query: Mapping[str, str], blocks: dict[str, Any] | None = None, model: str = ""
) -> Scheduler:
    steps = mirror.steps[-120:]
    bars = step_bars(steps)
    return Scheduler(
        bars=bars,
        last=bars[-1] if bars else None,
        kv=line([step.kv_used for step in steps], top=1.0, width=960, height=60),
        cached=line([step.kv_used + step.kv_cached for step in steps], top=1.0, width=960, height=60),
        running=line([float(step.running) for step in steps], width=960, height=60),
        waiting=line([float(step.waiting) for step in steps], width=960, height=60),
        evictions=sum(step.evictions for step in steps),
        preemptions=sum(len(step.preempted) for step in steps),
        cells=block_cells(blocks or {}),
        model=model,
        num_blocks=(blocks or {}).get("num_blocks", 0),
    )


@dataclass(frozen=True)
class Downloads:
    downloads: list[DownloadRecord]


def downloads(mirror: Mirror, query: Mapping[str, str]) -> Downloads:
    return Downloads(sorted(mirror.downloads, key=lambda one: -one.started_at))


@dataclass(frozen=True)
class Incidents:
    incidents: list[IncidentRecord]
    audit: list[AuditEntry]
    lines: list[LogLine]


def incidents(mirror: Mirror, query: Mapping[str, str]) -> Incidents:
    return Incidents(
        list(reversed(mirror.incidents)),
        list(reversed(mirror.journal("audit", AuditEntry)))[:50],
        list(reversed(mirror.journal("logs", LogLine)))[:300],
    )


@dataclass(frozen=True)
class Keys:
    keys: list[dict[str, Any]]
    usage: list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    options: list[tuple[str, str, str]]  # name, value, where it comes from


@dataclass(frozen=True)
class Strip:
    """The line on top of every page; failure outranks progress."""

    trouble: str
    progress: str
    link: str


def strip(mirror: Mirror) -> Strip:
    failed = [model for model in mirror.models if model.state == "failed"]
    news = [one for one in mirror.incidents if mirror.at - one.at < NEWS_S]
    trouble = "; ".join(f"{model.id}: {model.last_error or 'failed'}" for model in failed)
    if not trouble and news:
        trouble = f"{len(news)} incident{'s' if len(news) > 1 else ''} in the last hour: {news[-1].summary}"
    moving = [model for model in mirror.models if model.state in ("loading", "waking", "downloading", "importing")]
    progress = "; ".join(f"{model.id} is {model.state}" for model in moving)
    return Strip(trouble, progress, "incidents")


def device_views(mirror: Mirror) -> list[DeviceView]:
    return [DeviceView(device, memory_segments(device.memory)) for device in mirror.devices]


def sorted_models(mirror: Mirror) -> list[ModelStatus]:
    return sorted(mirror.models, key=lambda model: (model.state == "on_disk", model.id))
