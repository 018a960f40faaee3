"""Every message between processes comes back from its bytes as it was."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inferd.engine.core.output import (
    KnownRequests,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    SharedPrefix,
)
from inferd.engine.insight.records import StepRecord, StepShare, StepTokens
from inferd.engine.logprobs import PromptChunk, TokenLogprobs
from inferd.engine.messages import (
    Abort,
    AddRequest,
    Call,
    CallReply,
    EngineHello,
    EngineOutput,
    EngineOutputs,
    EngineReady,
    EngineStartFailed,
    FeedUpdate,
    FinishReason,
    MultimodalFeature,
    PoolingInfo,
    RequestStart,
    SchedulerStats,
    Shutdown,
    ToEngine,
)
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.pooling.params import PoolingInput, PoolingParams

PARAMS = SamplingParams(temperature=0.5, stop=["a", "b"], stop_token_ids=[3], output_kind=OutputKind.DELTA)

LOGPROBS = TokenLogprobs(2, b"\x01\0\0\0" * 2, b"\0\0\x80\xbf" * 2, b"\x01\0\0\0")

TO_ENGINE = [
    AddRequest("r-1", [1, 2], PARAMS, 12.5, priority=3, cache_salt="s", features=[MultimodalFeature("d", 1, 2)]),
    AddRequest("r-2", [1, 2], PARAMS, 0.0, pooling=PoolingInput(PoolingParams(dimensions=2), [0, 1])),
    Abort(["r-1", "r-2"]),
    Call(7, "stats", [1, "x"]),
    Shutdown(2.5),
]
STEP = StepRecord(4, 9.5, 12.5, StepTokens(3, 1), 8, [StepShare("r-1", 4)], "decode", 8, ["r-2"], 1, 2, 0.5, 0.25, 6)
FEED = FeedUpdate(9.5, False, [{"id": "r-1", "output_tokens": 4, "eta_s": None}], [STEP], SchedulerStats(step=4), 0.1)

OTHERS: list[tuple[Any, Any]] = [
    (EngineOutputs([EngineOutput("r-1", [5], start=RequestStart(1.0, 2.0, 3.5))], feed=FEED, at=3.5), EngineOutputs),
    (
        EngineOutputs(
            [
                EngineOutput(
                    "r-1",
                    [5],
                    FinishReason.STOP,
                    stop_reason=5,
                    num_cached_tokens=16,
                    logprobs=LOGPROBS,
                    prompt_logprobs=LOGPROBS,
                )
            ],
            SchedulerStats(step=9, running=2),
            CallReply(7, {"a": [1]}),
        ),
        EngineOutputs,
    ),
    (EngineReady(1, 2048, 100, 16, 50, "float32", 0.5, ["because"]), EngineHello),
    (
        EngineReady(
            1, 2048, 100, 16, 0, "float32", 0.5, [], pooling=PoolingInfo(["embed"], 384, [], 2, False, [8, 16])
        ),
        EngineHello,
    ),
    (EngineOutputs([EngineOutput("r-2", [], FinishReason.STOP, pooled=b"\0\0\x80\xbf")]), EngineOutputs),
    (ModelRunnerOutput({}, pooled={"r-2": b"\0\0\x80\xbf"}), ModelRunnerOutput),
    (EngineStartFailed("no", "load_error", "trace"), EngineHello),
    (
        SchedulerOutput(
            step=3,
            new=[NewRequest("r-1", [1, 2, 3], 3, PARAMS, 42, ([1, 2],), 0)],
            known=KnownRequests(["r-2"], [([4],)], [7]),
            num_scheduled_tokens={"r-1": 3, "r-2": 1},
            total_num_scheduled_tokens=4,
            shared_prefixes=[SharedPrefix(1, ["r-1", "r-2"])],
            finished_ids=["r-0"],
            preempted_ids=[],
        ),
        SchedulerOutput,
    ),
    (
        ModelRunnerOutput(
            {"r-1": [5], "r-2": []}, {"r-3": "no logits"}, {"r-1": LOGPROBS}, {"r-2": PromptChunk(4, LOGPROBS)}
        ),
        ModelRunnerOutput,
    ),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_to_engine(message: ToEngine) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine) == message


@pytest.mark.parametrize(("message", "kind"), OTHERS, ids=lambda value: type(value).__name__)
def test_from_engine(message: Any, kind: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message


@pytest.mark.parametrize("frame", [b"", b"\x80", b"\xc1", b"cos\nsystem\n(S'touch canary'\ntR."])
def test_foreign_frames_are_a_typed_error(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(frame, type=ToEngine)
