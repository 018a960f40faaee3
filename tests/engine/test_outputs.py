"""What a caller sees of the engine's outputs: deltas or all of it, stops, failures, slow consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.errors import EngineDeadError, RequestFailed
from inferd.engine.frontend.detokenize import ByteLevelDecoder
from inferd.engine.frontend.inputs import InputProcessor, PreparedRequest
from inferd.engine.frontend.outputs import RequestOutput, RequestOutputCollector
from inferd.engine.frontend.processor import OutputProcessor
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.messages import EngineOutput, FinishReason
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.testing.model_folder import IM_END_ID, make_model_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def prepare(tokenizer: Tokenizer) -> Callable[..., PreparedRequest]:
    def make(kind: OutputKind = OutputKind.DELTA, request_id: str = "mine", **params: Any) -> PreparedRequest:
        inputs = InputProcessor(tokenizer, max_model_len=1000, vocab_size=272)
        params.setdefault("max_tokens", 100)
        return inputs.process("hi", SamplingParams(output_kind=kind, **params), request_id=request_id)

    return make


@pytest.fixture
def processor(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer)


def output(request: PreparedRequest, text: str, reason: FinishReason | None = None, **fields: Any) -> EngineOutput:
    token_ids = list(text.encode()) + ([IM_END_ID] if reason is FinishReason.STOP else [])
    return EngineOutput(request.add.request_id, token_ids, reason, **fields)


def texts(reports: list[RequestOutput]) -> list[str]:
    return [report.outputs[0].text for report in reports]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (OutputKind.DELTA, [("a", 1), ("bc", 2), ("", 1)]),
        (OutputKind.CUMULATIVE, [("a", 1), ("abc", 3), ("abc", 4)]),
        (OutputKind.FINAL_ONLY, [("abc", 4)]),
    ],
)
def test_output_kinds(
    processor: OutputProcessor,
    prepare: Callable[..., PreparedRequest],
    kind: OutputKind,
    expected: list[tuple[str, int]],
) -> None:
    request = prepare(kind)
    processor.add(request)
    parts = [output(request, "a"), output(request, "bc"), output(request, "", FinishReason.STOP)]
    reports = [report for part in parts for report in processor.process([part]).reports]
    assert [(report.outputs[0].text, len(report.outputs[0].token_ids)) for report in reports] == expected
    assert [report.finished for report in reports] == [False] * (len(reports) - 1) + [True]
    assert reports[-1].outputs[0].finish_reason is FinishReason.STOP
    assert reports[-1].num_output_tokens == 4
    assert processor.num_unfinished == 0


def test_half_a_character_waits(processor: OutputProcessor, prepare: Callable[..., PreparedRequest]) -> None:
    request = prepare()
    processor.add(request)
    emoji = list("😀".encode())
    told = [processor.process([EngineOutput(request.add.request_id, [byte])]).reports for byte in emoji]
    assert [texts(reports) for reports in told] == [[""], [""], [""], ["😀"]]


def test_a_stop_string_ends_the_request_here_and_in_the_engine(
    processor: OutputProcessor, prepare: Callable[..., PreparedRequest]
) -> None:
    request = prepare(stop="END")
    processor.add(request)
    processed = processor.process([output(request, "one EN"), output(request, "D two")])
    assert texts(processed.reports) == ["one ", ""]
    last = processed.reports[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "END")
    assert last.token_ids == list(b"D")  # tokens after the stop string are not part of the output
    assert processed.ids_to_abort == [request.add.request_id]
    assert processor.process([output(request, "late")]).reports == []


def test_a_stop_string_in_the_last_step_needs_no_abort(
    processor: OutputProcessor, prepare: Callable[..., PreparedRequest]
) -> None:
    request = prepare(stop="END")
    processor.add(request)
    processed = processor.process([output(request, "END", FinishReason.LENGTH)])
    assert processed.reports[0].outputs[0].finish_reason is FinishReason.STOP
    assert processed.ids_to_abort == []


def test_held_back_text_comes_with_the_end(processor: OutputProcessor, prepare: Callable[..., PreparedRequest]) -> None:
    request = prepare(stop="END")
    processor.add(request)
    processed = processor.process([output(request, "one EN"), output(request, "", FinishReason.LENGTH)])
    assert texts(processed.reports) == ["one ", "EN"]


def test_a_stop_token_is_reported_and_not_shown(
    processor: OutputProcessor, prepare: Callable[..., PreparedRequest]
) -> None:
    request = prepare(stop_token_ids=[120])
    processor.add(request)
    done = EngineOutput(request.add.request_id, list(b"abx"), FinishReason.STOP, stop_reason=120)
    (report,) = processor.process([done]).reports
    assert (report.outputs[0].text, report.outputs[0].token_ids) == ("ab", list(b"abx"))
    assert report.outputs[0].stop_reason == 120


def test_equal_names_are_separate_requests(processor: OutputProcessor, prepare: Callable[..., PreparedRequest]) -> None:
    first, second = prepare(), prepare()
    processor.add(first)
    processor.add(second)
    assert texts(processor.process([output(first, "1"), output(second, "2")]).reports) == ["1", "2"]
    assert processor.internal_ids("mine") == [first.add.request_id, second.add.request_id]
    assert processor.internal_ids("other") == []


def test_abort_gives_what_there_is(processor: OutputProcessor, prepare: Callable[..., PreparedRequest]) -> None:
    request = prepare(OutputKind.CUMULATIVE, stop="END")
    processor.add(request)
    processor.process([output(request, "one EN")])
    processed = processor.abort([request.add.request_id, "unknown"])
    assert processed.ids_to_abort == [request.add.request_id]
    assert [(report.outputs[0].text, report.outputs[0].finish_reason) for report in processed.reports] == [
        ("one EN", FinishReason.ABORT)
    ]
    assert processor.abort([request.add.request_id]).ids_to_abort == []


def test_a_failed_request_says_why(processor: OutputProcessor, prepare: Callable[..., PreparedRequest]) -> None:
    request = prepare()
    processor.add(request)
    (report,) = processor.process([output(request, "", FinishReason.ERROR, error="no such adapter")]).reports
    assert (report.finished, report.error) == (True, "no such adapter")


def test_times_run_forward(processor: OutputProcessor, prepare: Callable[..., PreparedRequest]) -> None:
    request = prepare()
    processor.add(request)
    first, last = processor.process([output(request, "a"), output(request, "", FinishReason.STOP)]).reports
    assert first.times.first_token_s is not None
    assert last.times.finished_s is not None
    assert first.times.arrival_s <= first.times.first_token_s <= last.times.finished_s
    assert first.times.finished_s is None


async def test_a_slow_consumer_gets_merged_deltas(
    processor: OutputProcessor, prepare: Callable[..., PreparedRequest]
) -> None:
    request = prepare()
    collector = RequestOutputCollector(OutputKind.DELTA)
    processor.add(request, collector)
    processor.process([output(request, "a"), output(request, "b")])
    merged = await collector.get()
    processor.process([output(request, "c", FinishReason.LENGTH)])
    last = await collector.get()
    assert texts([merged, last]) == ["ab", "c"]
    assert merged.outputs[0].token_ids == list(b"ab")
    assert last.finished


async def test_a_waiting_consumer_is_woken(processor: OutputProcessor, prepare: Callable[..., PreparedRequest]) -> None:
    request = prepare()
    collector = RequestOutputCollector(OutputKind.DELTA)
    processor.add(request, collector)
    waiting = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    processor.process([output(request, "a")])
    assert texts([await waiting]) == ["a"]


async def test_death_reaches_every_collector_after_what_was_said(
    processor: OutputProcessor, prepare: Callable[..., PreparedRequest]
) -> None:
    collectors = [RequestOutputCollector(OutputKind.DELTA) for _ in range(2)]
    requests = [prepare(), prepare()]
    for request, collector in zip(requests, collectors, strict=True):
        processor.add(request, collector)
    processor.process([output(requests[0], "a")])
    processor.fail_all(EngineDeadError("gone"))
    assert texts([await collectors[0].get()]) == ["a"]
    for collector in collectors:
        with pytest.raises(EngineDeadError, match="gone"):
            await collector.get()
    assert processor.num_unfinished == 0


async def test_a_failed_request_raises_at_its_collector(
    processor: OutputProcessor, prepare: Callable[..., PreparedRequest]
) -> None:
    request = prepare()
    collector = RequestOutputCollector(OutputKind.DELTA)
    processor.add(request, collector)
    processor.process([output(request, "", FinishReason.ERROR, error="no such adapter")])
    with pytest.raises(RequestFailed, match="no such adapter"):
        await collector.get()


def test_text_that_cannot_be_made_fails_one_request(
    processor: OutputProcessor, prepare: Callable[..., PreparedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = prepare(request_id="good"), prepare(request_id="bad")
    for request in (good, bad):
        processor.add(request)
    feed = ByteLevelDecoder.feed

    def fail(decoder: ByteLevelDecoder, token_id: int) -> str:
        if token_id == ord("~"):
            raise ValueError("planted")
        return feed(decoder, token_id)

    monkeypatch.setattr(ByteLevelDecoder, "feed", fail)
    processed = processor.process([output(bad, "a~"), output(good, "a")])
    assert processed.ids_to_abort == [bad.add.request_id]
    failed, fine = processed.reports
    assert (failed.finished, failed.outputs[0].finish_reason) == (True, FinishReason.ERROR)
    assert "ValueError: planted" in str(failed.error)
    assert texts([fine]) == ["a"]
    assert processor.num_unfinished == 1


def test_without_a_tokenizer_there_are_only_ids(tmp_path: Path) -> None:
    inputs = InputProcessor(None, max_model_len=100, vocab_size=272)
    request = inputs.process([1, 2], SamplingParams())
    processor = OutputProcessor(None)
    processor.add(request)
    (report,) = processor.process([EngineOutput(request.add.request_id, [7], FinishReason.LENGTH)]).reports
    assert (report.outputs[0].text, report.outputs[0].token_ids) == ("", [7])
