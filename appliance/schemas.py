"""The records of the admin API: what the event stream carries and what every face shows.

Shared by the daemon and its clients, so they hold no behaviour. Sizes are bytes, durations seconds, and times seconds
since the epoch. A field may be added; it is never renamed.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Topic = Literal["requests", "models", "devices", "downloads", "steps", "incidents", "audit", "logs"]
TOPICS: tuple[Topic, ...] = get_args(Topic)
TABLES: frozenset[Topic] = frozenset({"requests", "models", "devices", "downloads"})  # the others are journals

Lane = Literal["interactive", "batch"]
RequestState = Literal[
    "queued",  # in the daemon: its model is not ready, or its key or its model's queue is full
    "waiting",  # in the engine's queue
    "prefill",
    "decode",
    "preempted",
    "paused",
    "finished",
    "failed",
    "cancelled",
]
ENDED: frozenset[RequestState] = frozenset({"finished", "failed", "cancelled"})
ModelStateName = Literal[
    "absent",
    "downloading",
    "importing",
    "on_disk",
    "loading",
    "ready",
    "draining",
    "sleeping_1",
    "sleeping_2",
    "waking",
    "stopping",
    "failed",
]


class RequestRecord(msgspec.Struct, kw_only=True, frozen=True):
    """One API request. Nothing of its prompt, and nothing of its answer."""

    id: str
    client: str = "local"  # the key's name
    lane: Lane = "interactive"
    model: str = ""
    api: str = ""  # chat, completions, responses, messages, embeddings, …
    peer: str = ""
    user_agent: str = ""
    session: str = ""
    state: RequestState = "queued"
    reason: str | None = None
    reason_text: str = ""  # a sentence that names the thing
    position: int | None = None  # 1 is the next of its queue
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int | None = None
    context_limit: int | None = None
    diverged_at: int | None = None  # index of the first prompt token that was not cached although its beginning was
    diverged_from: str | None = None  # the request that cached the common beginning
    kv_blocks: int = 0
    kv_blocks_peak: int = 0
    preemptions: int = 0
    batch_size: int = 0
    spec_accepted: int = 0
    spec_drafted: int = 0
    tokens_per_s: float = 0.0
    priority: int = 0
    arrived_at: float = 0.0
    admitted_at: float | None = None
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    eta_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()


class KvUse(msgspec.Struct, kw_only=True, frozen=True):
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    hit_rate: float = 0.0
    evictions_per_s: float = 0.0


class ModelMemory(msgspec.Struct, kw_only=True, frozen=True):
    weights: int = 0
    kv: int = 0
    graphs: int = 0
    workspace: int = 0
    sleeping_host: int = 0


class MemoryEstimate(msgspec.Struct, kw_only=True, frozen=True):
    bytes: int = 0
    error_ratio: float | None = None  # measured over estimated, minus one; None before the first load


class ModelStatus(msgspec.Struct, kw_only=True, frozen=True):
    """One model of the library, or one that is on its way into it."""

    id: str
    aliases: tuple[str, ...] = ()
    source: str = ""
    revision: str | None = None
    size_bytes: int = 0
    format: str = ""
    quantisation: str | None = None
    architecture: str = ""
    context_limit: int = 0
    capabilities: tuple[str, ...] = ()
    state: ModelStateName = "on_disk"
    stage: str = ""
    progress: float | None = None  # 0 to 1 within a load, a wake or a download
    why: str = ""  # what brought it into this state
    since: float = 0.0
    devices: tuple[str, ...] = ()
    tensor_parallel: int = 1
    pid: int | None = None
    pinned: bool = False
    keep_alive_s: float | None = None  # None: for ever
    expires_at: float | None = None
    expected_load_s: float | None = None
    expected_wake_s: float | None = None
    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    kv: KvUse = KvUse()
    memory: ModelMemory = ModelMemory()
    estimate: MemoryEstimate = MemoryEstimate()
    last_error: str | None = None
    retry_at: float | None = None


class DeviceMemory(msgspec.Struct, kw_only=True, frozen=True):
    """The parts add up to the total."""

    total: int = 0
    weights: int = 0
    kv: int = 0
    graphs: int = 0
    workspace: int = 0
    sleeping: int = 0
    other: int = 0  # what is not ours
    free: int = 0


class OtherProcess(msgspec.Struct, kw_only=True, frozen=True):
    pid: int
    name: str
    bytes: int


class DeviceStatus(msgspec.Struct, kw_only=True, frozen=True):
    """One GPU, or main memory (`id` "host")."""

    id: str
    index: int | None = None
    uuid: str = ""
    name: str = ""
    util: float | None = None  # 0 to 1
    power_w: float | None = None
    temperature_c: float | None = None
    fan: float | None = None
    memory: DeviceMemory = DeviceMemory()
    processes_other: tuple[OtherProcess, ...] = ()
    xid_errors: tuple[str, ...] = ()
    throttle: str = ""


class StepTokens(msgspec.Struct, kw_only=True, frozen=True):
    prefill: int = 0
    decode: int = 0
    spec: int = 0


class StepShare(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    tokens: int


class StepRecord(msgspec.Struct, kw_only=True, frozen=True):
    """One step of one model's engine, sampled."""

    model: str
    step: int
    at: float
    duration_ms: float = 0.0
    tokens: StepTokens = StepTokens()
    budget: int = 0
    requests: tuple[StepShare, ...] = ()
    graph: str = ""
    preempted: tuple[str, ...] = ()
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    kv_cached: float = 0.0
    evictions: int = 0


class DownloadRecord(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    source: str
    model: str = ""
    phase: str = ""  # waiting, resolving, downloading, verifying, importing, done, failed, cancelled, paused
    file: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None
    bytes_per_s: float = 0.0
    eta_s: float | None = None
    started_at: float = 0.0
    ended_at: float | None = None
    error: str | None = None
    hint: str = ""


class IncidentRecord(msgspec.Struct, kw_only=True, frozen=True):
    """Something that went wrong, with what is needed to understand it later."""

    id: str
    at: float
    model: str = ""
    kind: str = ""  # engine_died, load_failed, engine_hung, device_lost, …
    summary: str = ""
    exit_code: int | None = None
    signal: str | None = None
    last_lines: tuple[str, ...] = ()
    ledger: dict[str, DeviceMemory] = {}
    requests_lost: int = 0
    remedy: str = ""


class AuditEntry(msgspec.Struct, kw_only=True, frozen=True):
    """One act of an administrator. `digest` chains it to the entry before."""

    id: int
    at: float
    actor: str
    peer: str = ""
    action: str = ""
    target: str = ""
    detail: str = ""
    outcome: str = "ok"
    digest: str = ""


class LogLine(msgspec.Struct, kw_only=True, frozen=True):
    at: float
    level: str
    source: str  # "daemon" or a model's id
    text: str


TABLE_RECORDS: dict[Topic, type[msgspec.Struct]] = {
    "requests": RequestRecord,
    "models": ModelStatus,
    "devices": DeviceStatus,
    "downloads": DownloadRecord,
}
JOURNAL_RECORDS: dict[Topic, type[msgspec.Struct]] = {
    "steps": StepRecord,
    "incidents": IncidentRecord,
    "audit": AuditEntry,
    "logs": LogLine,
}
