"""Everything that crosses between the front and the engine process, as msgspec structs.

Arrays on the wire, no pickle. Front → engine is one of `ToEngine`; engine → front is an `EngineOutputs`, or a single
frame equal to `ENGINE_DEAD` as the last word of a dying engine.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from inferd.engine.params import SamplingParams

ENGINE_DEAD = b"ENGINE_DEAD"


class FinishReason(enum.Enum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens or the context ran out
    ABORT = "abort"  # the client left or asked
    ERROR = "error"  # this request alone failed; `EngineOutput.error` says why


class MultimodalFeature(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A non-text input that stands at prompt positions [offset, offset + length)."""

    digest: str
    offset: int
    length: int


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    request_id: str  # internal: unique per process, not the id the client chose
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time_s: float  # wall clock of the front
    priority: int = 0  # smaller runs sooner
    client: str = "local"
    lane: str = "interactive"  # or "batch"
    cache_salt: str | None = None  # requests share cached prefixes only under the same salt
    features: list[MultimodalFeature] | None = None


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Idempotent: unknown and finished ids are ignored."""

    request_ids: list[str]


class Call(msgspec.Struct, tag="call", array_like=True):
    """A control call by name (`EngineCore.CALLS` lists them); answered by a `CallReply` with the same id."""

    call_id: int
    method: str
    args: list[Any] = []


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Finish what runs within `drain_s` seconds, abort the rest, exit."""

    drain_s: float = 0.0


ToEngine = AddRequest | Abort | Call | Shutdown


class EngineOutput(msgspec.Struct, array_like=True):
    """What one request gained in one step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token, when it was not the model's own end of sequence
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    error: str | None = None


class SchedulerStats(msgspec.Struct, array_like=True):
    """A snapshot after a step; counters run from the engine's start."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0  # without the null block
    blocks_free: int = 0  # free or cached without a user
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class CallReply(msgspec.Struct, array_like=True):
    call_id: int
    result: Any = None
    error: str | None = None


class EngineOutputs(msgspec.Struct, array_like=True):
    """One message of the engine: a step's outputs, a reply, or (all empty) a heartbeat."""

    outputs: list[EngineOutput] = []
    stats: SchedulerStats | None = None
    reply: CallReply | None = None


class EngineReady(msgspec.Struct, tag="ready"):
    """What was learnt while loading; the front needs it before the first request."""

    pid: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    dtype: str
    load_s: float
    decisions: list[str]


class EngineStartFailed(msgspec.Struct, tag="start_failed"):
    """The engine could not start. `code` is that of an `EngineError`, or "internal"."""

    message: str
    code: str
    detail: str = ""  # traceback, for the log


EngineHello = EngineReady | EngineStartFailed
