"""Everything that crosses between the front and the engine process, as msgspec structs.

Arrays on the wire, no pickle. Front → engine is one of `ToEngine`; engine → front is an `EngineOutputs`, or a single
frame equal to `ENGINE_DEAD` as the last word of a dying engine.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from inferd.engine.logprobs import TokenLogprobs
from inferd.engine.params import SamplingParams

ENGINE_DEAD = b"ENGINE_DEAD"
LANES = ("interactive", "batch")  # the better first


class FinishReason(enum.Enum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens or the context ran out
    REPETITION = "repetition"  # the output repeats itself, as `repetition_detection` says
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
    lane: str = LANES[0]  # one of `LANES`
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
    error_param: str | None = None  # the field of the request that is to blame; without it, the engine is
    logprobs: TokenLogprobs | None = None  # of `new_token_ids`
    prompt_logprobs: TokenLogprobs | None = None  # of all prompt tokens but the first; once, with the first output


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


class KVBlocksStored(msgspec.Struct, tag="stored", array_like=True):
    """Full blocks of one request, one after the other, can be found in the prefix cache from now on.

    A block's content is named by its hash, which also names everything before it. Told again when another request
    computes the same.
    """

    group: int  # KV group
    block_hashes: list[bytes]
    parent_hash: bytes | None  # of the block before the first; None at a request's beginning
    token_ids: list[int]  # of all these blocks, equally many each


class KVBlocksRemoved(msgspec.Struct, tag="removed", array_like=True):
    """These cannot be found any longer: their memory was given away, or what they hold is not to be trusted."""

    group: int
    block_hashes: list[bytes]


class KVCacheCleared(msgspec.Struct, tag="cleared", array_like=True):
    """Nothing can be found any longer, in any group."""


KVEvent = KVBlocksStored | KVBlocksRemoved | KVCacheCleared


class EngineOutputs(msgspec.Struct, array_like=True):
    """One message of the engine: a step's outputs, a reply, or (all empty) a heartbeat."""

    outputs: list[EngineOutput] = []
    stats: SchedulerStats | None = None
    reply: CallReply | None = None
    kv_events: list[KVEvent] = []  # since the last message that had any, in order; with `enable_kv_events` only


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
