"""Everything that crosses between the front and the engine process, as msgspec structs.

Arrays on the wire, no pickle. Front → engine is one of `ToEngine`; engine → front is an `EngineOutputs`, or a single
frame equal to `ENGINE_DEAD` as the last word of a dying engine.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
from msgspec import field

from inferd.engine.insight.histogram import no_counts
from inferd.engine.insight.records import Fields, StepRecord
from inferd.engine.logprobs import TokenLogprobs
from inferd.engine.params import SamplingParams
from inferd.engine.pooling.config import PoolingTask
from inferd.engine.pooling.params import PoolingInput

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
    pooling: PoolingInput | None = None  # asks for a vector instead of tokens; then `params` say nothing
    lora: str | None = None  # the name of an adapter that was loaded
    name: str = ""  # the id that the client knows; shown, and of no other use


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Idempotent: unknown and finished ids are ignored."""

    request_ids: list[str]


class Call(msgspec.Struct, tag="call", array_like=True):
    """A control call by name (`EngineCore` lists them); answered by a `CallReply` with the same id."""

    call_id: int
    method: str
    args: list[Any] = []


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Finish what runs within `drain_s` seconds, abort the rest, exit."""

    drain_s: float = 0.0


ToEngine = AddRequest | Abort | Call | Shutdown


class RequestStart(msgspec.Struct, array_like=True, frozen=True):
    """By the engine's clock."""

    queued_at: float
    first_scheduled_at: float
    first_token_at: float


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
    pooled: bytes | None = None  # f32 in the machine's byte order, the one output of a request that pools
    start: RequestStart | None = None  # with the first tokens


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
    deferred: int = 0  # of `waiting`: those who wait for something of their own and are passed by
    paused: int = 0  # by themselves; they are not among `waiting`
    blocks_cached: int = 0  # of `blocks_free`: those whose content can be found
    evictions: int = 0  # of content that could be found, to make room
    corrupted: int = 0  # requests that ended because their logits were no numbers
    step_tokens_sum: int = 0
    step_tokens: list[int] = field(default_factory=no_counts)  # steps by their tokens: see `STEP_TOKENS_BUCKETS`
    drafted: list[int] = []  # by place in a draft: tokens that were checked there
    accepted: list[int] = []  # by place in a draft: those of them that stood


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


class FeedUpdate(msgspec.Struct, array_like=True):
    """What has changed in an engine since the update before, for whoever has subscribed to it."""

    at: float  # by the engine's clock
    is_snapshot: bool  # it replaces everything known before
    requests: list[Fields] = []  # changed fields with their `id`; of one that has ended, for the last time
    steps: list[StepRecord] = []  # the newest last
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    interval_s: float = 0.0  # at least until the next one; longer where looking takes the engine long
    took_s: float = 0.0  # to look


class EngineOutputs(msgspec.Struct, array_like=True):
    """One message of the engine: a step's outputs, a reply, or (all empty) a heartbeat."""

    outputs: list[EngineOutput] = []
    stats: SchedulerStats | None = None
    reply: CallReply | None = None
    kv_events: list[KVEvent] = []  # since the last message that had any, in order; with `enable_kv_events` only
    feed: FeedUpdate | None = None  # for subscribers
    at: float = 0.0  # of a step's outputs: when they were there, by the engine's clock


class PoolingInfo(msgspec.Struct, frozen=True):
    """What an engine that pools can be asked for."""

    tasks: list[PoolingTask]
    size: int  # of an embedding, or the number of labels
    labels: list[str]  # of a classification head
    num_token_types: int  # of a pair's texts; 1: tokens have none
    lower_case: bool  # texts, before they become tokens
    matryoshka_sizes: list[int] | None  # to which embeddings may be cut; empty: any; None: not trained for it


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
    pooling: PoolingInfo | None = None  # of an engine that pools; None: it generates
    kv_max_concurrency: float = 0.0  # requests of the longest context that fit at once; 0: requests take no blocks

    @property
    def kv_cache_tokens(self) -> int:
        """That all KV memory holds when every request is as long as it may be."""
        return int(self.kv_max_concurrency * self.max_model_len)


WEIGHTS, KV_CACHE = "weights", "kv_cache"  # tags of memory that an engine can give back


class MemoryRecord(msgspec.Struct):
    """What one rank holds, in bytes."""

    rank: int = 0
    weights: int = 0
    kv: int = 0
    graphs: int = 0  # captured steps
    workspace: int = 0  # of the largest step: measured on an accelerator, an upper estimate on a processor
    sleeping_host: int = 0  # main memory that a sleeping rank keeps to wake from; the system may take what is mapped
    resident: int = 0  # as the system counts it: of the process on a processor, else what the device has less


class SleepReport(msgspec.Struct):
    """What a sleep did. `level` 0: nothing, since the engine was woken first."""

    level: int = 0
    seconds: float = 0.0  # from the moment on at which nothing ran any more
    released_bytes: dict[str, int] = {}  # by tag, all ranks together; 0 for what was not there


class WakeReport(msgspec.Struct):
    """What a wake did."""

    is_awake: bool = False
    seconds: float = 0.0
    restored_bytes: dict[str, int] = {}  # by tag, all ranks together
    restored_s: dict[str, float] = {}  # by tag, of the slowest rank
    still_asleep: list[str] = []  # tags of what is still missing


class EngineStartFailed(msgspec.Struct, tag="start_failed"):
    """The engine could not start. `code` is that of an `EngineError`, or "internal"."""

    message: str
    code: str
    detail: str = ""  # traceback, for the log


EngineHello = EngineReady | EngineStartFailed
