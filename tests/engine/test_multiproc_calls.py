"""Futures of calls to workers: in order, each once, and none forgotten. And what travels in a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from inferd.engine.config import EngineArgs
from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup, KVSpec, SlidingWindowSpec
from inferd.engine.core.output import GrammarBitmask, ModelRunnerOutput
from inferd.engine.errors import WorkerError
from inferd.engine.executor.calls import FAILURE_GRACE_S, PendingCall, PendingCalls
from inferd.engine.executor.shm import Ring
from inferd.engine.executor.wire import (
    Done,
    RankCall,
    Sample,
    Sampled,
    WorkerStart,
    decode_start,
    encode_start,
    from_worker_decoder,
    make_encoder,
    pack,
    to_worker_decoder,
    unpack,
)
from inferd.engine.resolve import resolve
from inferd.engine.testing.model_folder import make_model_folder

LONG_S = 1000.0


def add(calls: PendingCalls, *ranks: int, limit_s: float = LONG_S) -> PendingCall:
    return calls.add("call", ranks, limit_s, dict)


def test_a_call_is_done_when_all_its_ranks_have_answered() -> None:
    calls = PendingCalls()
    call = add(calls, 0, 1)
    calls.answer(call.number, 1, "b")
    assert not call.future.done()
    calls.answer(call.number, 1, "again")
    assert not call.future.done()
    calls.answer(call.number, 0, "a")
    assert call.future.result() == {0: "a", 1: "b"}


def test_futures_resolve_in_the_order_of_calls() -> None:
    calls = PendingCalls()
    first, second = add(calls, 0, 1), add(calls, 0)
    order: list[int] = []
    for call in (second, first):
        call.future.add_done_callback(lambda _, number=call.number: order.append(number))
    calls.answer(first.number, 0)
    calls.answer(second.number, 0)
    assert order == []
    calls.answer(first.number, 1)
    assert order == [first.number, second.number]


def test_a_rank_that_fails_fails_the_call_and_shortens_the_wait_for_the_others() -> None:
    calls = PendingCalls()
    call = add(calls, 0, 1)
    calls.answer(call.number, 1, error=ValueError("one"))
    left_s = calls.seconds_left()
    assert left_s is not None
    assert left_s <= FAILURE_GRACE_S
    calls.answer(call.number, 0, error=ValueError("two"))
    with pytest.raises(ValueError, match="one"):
        call.future.result()


def test_closing_fails_what_is_pending_and_what_comes() -> None:
    calls = PendingCalls()
    pending = [add(calls, 0), add(calls, 0, 1)]
    assert calls.close(WorkerError("first cause"))
    assert not calls.close(WorkerError("second cause"))
    for call in pending:
        with pytest.raises(WorkerError, match="first cause"):
            call.future.result()
        calls.answer(call.number, 0, "late")
    with pytest.raises(WorkerError, match="first cause"):
        add(calls, 0)


def test_only_the_oldest_can_be_overdue() -> None:
    calls = PendingCalls()
    assert calls.seconds_left() is None
    assert calls.overdue() is None
    patient, hasty = add(calls, 0), add(calls, 0, limit_s=0.0)
    assert calls.overdue() is None
    calls.answer(patient.number, 0)
    assert calls.overdue() is hasty


def test_what_a_worker_is_started_with(tmp_path: Path) -> None:
    config = resolve(EngineArgs(str(make_model_folder(tmp_path / "model")), device="cpu", load_format="dummy"))
    ring = Ring(3, [4], [5], 64, 4)
    start = WorkerStart(config, 1, 2, ring, ring, 6, 7, 8, True)
    assert decode_start(encode_start(start)) == start


FULL = KVSpec(16, 2, 8, "float32")
WINDOW = SlidingWindowSpec(16, 2, 8, "float32", window=32)


@pytest.mark.parametrize(
    "value",
    [
        {"layers.0": FULL, "layers.1": WINDOW},
        [KVCacheConfig(9, (KVCacheGroup(("layers.0",), FULL), KVCacheGroup(("layers.1",), WINDOW)))],
        ["a sentence"],
        7,
        None,
    ],
    ids=["specs", "plan", "decisions", "bytes", "nothing"],
)
def test_arguments_and_results(value: Any) -> None:
    encoder = make_encoder()
    done = from_worker_decoder().decode(encoder.encode(Done(1, pack(value))))
    assert isinstance(done, Done)
    assert unpack(done.value) == value
    call = to_worker_decoder().decode(encoder.encode(RankCall(2, "method", pack([value]))))
    assert isinstance(call, RankCall)
    assert unpack(call.args) == [value]


@pytest.mark.parametrize("shape", [(2, 3), (0, 4)])
def test_a_bitmask_travels_as_its_bytes(shape: tuple[int, ...]) -> None:
    words = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    sample = to_worker_decoder().decode(make_encoder().encode(Sample(1, GrammarBitmask(["a"], words))))
    assert isinstance(sample, Sample)
    assert sample.bitmask is not None
    assert sample.bitmask.words.dtype == np.int32
    np.testing.assert_array_equal(sample.bitmask.words, words, strict=True)


def test_results_of_a_step() -> None:
    answer = Sampled(3, ModelRunnerOutput({"a": [1, 2], "b": []}, {"c": "broken"}))
    assert from_worker_decoder().decode(make_encoder().encode(answer)) == answer


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="object cannot be sent"):
        make_encoder().encode(RankCall(1, "method", [object()]))
    foreign = msgspec.msgpack.encode(["done", 1, msgspec.msgpack.Ext(5, b"x")])
    with pytest.raises(ValueError, match="extension type 5"):
        from_worker_decoder().decode(foreign)
