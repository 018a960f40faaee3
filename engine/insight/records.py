"""What an engine tells of itself: its requests, its steps, its blocks. Values only; nothing of a prompt is in them.

Times are seconds since the epoch by the engine's clock, durations are seconds unless their name says otherwise.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

Fields = dict[str, Any]
"""The changed fields of a `RequestRecord`, by name, with its `id`."""


class RequestState(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"  # computes what is known of it: its prompt, or after a preemption also its output so far
    DECODE = "decode"
    PREEMPTED = "preempted"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self in (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)


class Reason(StrEnum):
    """Why a request does not go on, as far as an engine can be the cause."""

    QUEUE_ORDER = "queue_order"
    LANE_SHARE = "lane_share"  # later requests of another lane or client go first: these were served less
    KV_FULL = "kv_full"
    SEQ_LIMIT = "seq_limit"
    TOKEN_BUDGET = "token_budget"
    PREEMPTED = "preempted"
    GRAMMAR_COMPILING = "grammar_compiling"
    ADAPTER_SLOTS = "adapter_slots"
    PAUSED_BY = "paused_by"
    MODEL_WAKING = "model_waking"  # the engine sleeps, or is not awake yet


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request inside an engine. The n answers to one prompt are n requests."""

    id: str  # unique in the engine; what its control calls ask for
    name: str = ""  # as the caller named it; names may repeat
    client: str = "local"
    lane: str = "interactive"
    state: RequestState = RequestState.WAITING
    reason: Reason | None = None
    reason_text: str = ""  # a sentence that names the thing
    blocked_by: str | None = None  # id of the request that the sentence names
    position: int | None = None  # 1 is the next of the queue; None for who waits for something of its own
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    computed_tokens: int = 0  # of prompt and output; falls back with a preemption
    output_tokens: int = 0
    max_tokens: int | None = None
    context_limit: int | None = None
    diverged_at: int | None = None
    """Index of the first prompt token that differs from everything cached after the same beginning, or goes beyond it;
    None: the whole prompt was cached, or nothing of it."""
    diverged_from: str | None = None
    """The request that computed that beginning, and with it what differs. Only requests with the same cache salt are
    compared, so whoever may see what this group shares may see the name."""
    adapter: str | None = None
    salted: bool = False  # it has a cache salt: its group is those with the same, not all others without
    kv_blocks: int = 0
    kv_blocks_peak: int = 0
    preemptions: int = 0
    batch_size: int = 0  # requests in the last step, when this one was among them
    spec_accepted: int = 0  # draft tokens
    spec_drafted: int = 0
    tokens_per_s: float = 0.0  # over the last one to two seconds of output; over all of it at the end
    priority: int = 0
    arrived_at: float = 0.0  # at the front
    admitted_at: float = 0.0  # to the engine's queue
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None  # the newest one's
    finished_at: float | None = None
    eta_s: float | None = None
    """Until a request that waits for another's end can start; until the end of one that runs, at the latest at its
    present speed. None where neither is known."""
    finish_reason: str | None = None
    error: str | None = None


class StepTokens(msgspec.Struct, array_like=True, frozen=True):
    prefill: int = 0
    decode: int = 0
    spec: int = 0  # drafts that the step verifies


class StepShare(msgspec.Struct, array_like=True, frozen=True):
    id: str
    tokens: int


class StepRecord(msgspec.Struct, array_like=True, frozen=True):
    """One step, as one of ten a second at most."""

    step: int
    at: float  # when its result was there
    duration_ms: float  # of the workers: from its launch, or from the end of the step before it
    tokens: StepTokens
    budget: int
    requests: list[StepShare]
    graph_mode: str  # empty: it ran eagerly
    graph_size: int  # rows that the replayed graph was captured for
    preempted: list[str]
    running: int
    waiting: int
    kv_used: float  # share of all blocks, 0 to 1, with a user
    kv_cached: float  # without a user, but with content that can be found
    evictions: int  # cached blocks given away since the step that was told of before


class BlockOwner(StrEnum):
    NULL = "null"  # padding; nobody's
    FREE = "free"
    CACHED = "cached"  # free, and its content can be found
    USED = "used"


class BlockRun(msgspec.Struct, array_like=True, frozen=True):
    """Blocks that follow each other and are alike."""

    owner: BlockOwner
    count: int
    request_id: str | None = None  # of used blocks: the longest running of their users
    users: int = 0  # requests that share each of these
    age_s: int | None = None  # of cached blocks: whole seconds since the last user left


class BlockMap(msgspec.Struct, frozen=True):
    """The runs in the order of block ids; their counts sum to `num_blocks`, the null block included."""

    at: float
    num_blocks: int
    runs: list[BlockRun]


def changed_fields(before: RequestRecord, after: RequestRecord) -> Fields:
    """Empty when nothing has changed."""
    changed = {
        name: value
        for name in RequestRecord.__struct_fields__
        if (value := getattr(after, name)) != getattr(before, name)
    }
    return {"id": after.id, **changed} if changed else {}


def as_fields(record: RequestRecord) -> Fields:
    """Everything of it but what has its default: the change from nothing."""
    return changed_fields(RequestRecord(id=record.id), record) or {"id": record.id}


def apply_fields(before: RequestRecord | None, fields: Fields) -> RequestRecord:
    """Raises `msgspec.ValidationError` for a field of a wrong type."""
    known = {} if before is None else {name: getattr(before, name) for name in RequestRecord.__struct_fields__}
    return msgspec.convert({**known, **fields}, RequestRecord)
