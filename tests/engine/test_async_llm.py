"""Many streams over one engine process: they come out as they would alone, and nothing is left of those that go."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.config import EngineArgs
from inferd.engine.errors import ContextLengthExceeded, EngineDeadError, InvalidRequest, RequestFailed
from inferd.engine.frontend.async_llm import AsyncLLM
from inferd.engine.frontend.detokenize import ByteLevelDecoder
from inferd.engine.frontend.inputs import PreparedRequest, Prompt
from inferd.engine.frontend.outputs import RequestOutput
from inferd.engine.frontend.processor import OutputProcessor
from inferd.engine.messages import FinishReason
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.testing.model_folder import make_model_folder

StartLLM = Callable[..., Awaitable[AsyncLLM]]


@pytest.fixture
def run_dir() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"])


@pytest.fixture
async def start_llm(tmp_path: Path, run_dir: Path) -> AsyncIterator[StartLLM]:
    started: list[AsyncLLM] = []

    async def start(*, max_num_seqs: int = 64, **scripted: Any) -> AsyncLLM:
        folder = make_model_folder(tmp_path / "model", **scripted)
        args = EngineArgs(
            model=str(folder),
            executor="scripted",
            device="cpu",
            block_size=4,
            max_model_len=256,
            max_num_seqs=max_num_seqs,
        )
        started.append(await AsyncLLM.start(args, run_dir))
        return started[-1]

    yield start
    for llm in started:
        await llm.shutdown()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 20, "output_kind": OutputKind.DELTA} | fields))


async def collect(llm: AsyncLLM, prompt: Prompt | PreparedRequest, *args: Any, **fields: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, *args, **fields)]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs)


async def until(condition: Callable[[], bool]) -> None:
    """For what has no event to wait for. A hang here fails by the test's time limit."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def wait_until_idle(llm: AsyncLLM) -> None:
    """Nothing runs or waits in the engine, and every block is free."""
    while True:
        stats = await llm.call("stats")
        if stats["running"] == stats["waiting"] == 0:
            assert stats["blocks_free"] == stats["blocks_total"]
            return
        await asyncio.sleep(0.01)


async def test_streamed_text_is_the_whole_text(start_llm: StartLLM) -> None:
    llm = await start_llm(replies={"hello": "Grüße 😀 你好!"})
    streamed = await collect(llm, "hello", params(max_tokens=50))
    (whole,) = await collect(llm, "hello", params(max_tokens=50, output_kind=OutputKind.FINAL_ONLY))
    assert text_of(streamed) == whole.outputs[0].text == "Grüße 😀 你好!"
    assert all("\ufffd" not in output.outputs[0].text for output in streamed)
    assert whole.outputs[0].finish_reason is FinishReason.STOP
    assert [output.finished for output in streamed] == [False] * (len(streamed) - 1) + [True]


async def test_text_and_ids_are_the_same_prompt(start_llm: StartLLM) -> None:
    llm = await start_llm()
    assert text_of(await collect(llm, "abc", params())) == text_of(await collect(llm, [97, 98, 99], params()))


async def test_cached_tokens_are_reported_and_salts_do_not_share(start_llm: StartLLM) -> None:
    llm = await start_llm()
    for salt, expected in (("one", 0), ("one", 8), ("two", 0)):
        outputs = await collect(llm, "nine char", params(), cache_salt=salt)
        assert outputs[-1].num_cached_tokens == expected


@pytest.mark.parametrize("kv_blocks", [512, 70])
async def test_half_of_a_hundred_streams_go_away(start_llm: StartLLM, kv_blocks: int) -> None:
    """The others come out as they do alone, also when blocks are so few that requests are preempted."""
    llm = await start_llm(delay_s=0.001, kv_blocks=kv_blocks, max_num_seqs=16)
    chance = random.Random(7)
    prompts = [f"prompt {number} " * chance.randint(1, 6) for number in range(100)]
    alone = [text_of(await collect(llm, prompt, params())) for prompt in prompts[::2]]
    tasks = [asyncio.create_task(collect(llm, prompt, params())) for prompt in prompts]
    for task in chance.sample(tasks[1::2], 50):
        await asyncio.sleep(chance.random() * 0.01)
        task.cancel()
    assert [text_of(await task) for task in tasks[::2]] == alone
    await asyncio.gather(*tasks[1::2], return_exceptions=True)
    await wait_until_idle(llm)
    assert llm.num_unfinished == 0
    assert (llm.stats.preemptions > 0) == (kv_blocks == 70)


async def test_closing_a_stream_aborts_it(start_llm: StartLLM) -> None:
    llm = await start_llm(delay_s=0.005)
    async with contextlib.aclosing(llm.generate("hello", params(max_tokens=200))) as stream:
        async for _ in stream:
            break
    assert llm.num_unfinished == 0
    await wait_until_idle(llm)
    assert (await llm.call("stats"))["generated_tokens"] < 200


async def test_a_stop_string_ends_the_request_in_the_engine(start_llm: StartLLM) -> None:
    llm = await start_llm(delay_s=0.005, replies={"": "one two ENDING " * 20})
    outputs = await collect(llm, "hello", params(max_tokens=200, stop="END"))
    assert text_of(outputs) == "one two "
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == (FinishReason.STOP, "END")
    await wait_until_idle(llm)
    assert (await llm.call("stats"))["generated_tokens"] < 200


async def test_one_name_for_two_requests(start_llm: StartLLM) -> None:
    llm = await start_llm(delay_s=0.005)
    streams = [
        asyncio.create_task(collect(llm, text, params(max_tokens=200), request_id="mine")) for text in ("one", "two")
    ]
    await until(lambda: llm.stats.running == 2)
    await llm.abort("mine")
    for stream in streams:
        outputs = await stream
        assert outputs[-1].request_id == "mine"
        assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
    await wait_until_idle(llm)


async def test_a_slow_consumer_misses_nothing(start_llm: StartLLM) -> None:
    llm = await start_llm()
    expected = text_of(await collect(llm, "hello", params(max_tokens=60)))
    outputs = []
    async for output in llm.generate("hello", params(max_tokens=60)):
        outputs.append(output)
        await asyncio.sleep(0.01)
    assert text_of(outputs) == expected
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 60
    assert len(outputs) < 60


async def test_bad_requests_raise_before_anything_is_sent(start_llm: StartLLM) -> None:
    llm = await start_llm()
    with pytest.raises(ContextLengthExceeded):
        await collect(llm, "x" * 256, params())
    with pytest.raises(InvalidRequest, match="empty"):
        llm.prepare("", params())
    with pytest.raises(InvalidRequest, match="unknown lane 'fast'"):  # only the engine knows
        await collect(llm, "hello", params(), lane="fast")
    assert llm.num_unfinished == 0
    assert len(await collect(llm, "hello", params())) > 0


async def test_a_prepared_request_knows_its_warnings(start_llm: StartLLM) -> None:
    llm = await start_llm()
    request = llm.prepare("x" * 250, params(max_tokens=100))
    assert request.warnings == ["max_tokens lowered from 100 to 6: the context has no more room"]
    outputs = await collect(llm, request)
    assert outputs[-1].num_output_tokens == 6
    assert outputs[-1].warnings == request.warnings


async def test_long_text_becomes_tokens_off_the_loop(start_llm: StartLLM) -> None:
    llm = await start_llm()
    with pytest.raises(ContextLengthExceeded):
        await collect(llm, "word " * 10_000, params())


async def test_shutdown_lets_streams_finish_within_the_drain(start_llm: StartLLM) -> None:
    llm = await start_llm(delay_s=0.01)
    stream = asyncio.create_task(collect(llm, "hello", params()))
    await until(lambda: llm.stats.running == 1)
    await llm.shutdown(drain_s=30.0)
    assert (await stream)[-1].outputs[0].finish_reason is FinishReason.LENGTH
    assert not llm.is_alive
    with pytest.raises(EngineDeadError):
        await collect(llm, "hello", params())


async def test_shutdown_without_a_drain_aborts(start_llm: StartLLM) -> None:
    llm = await start_llm(delay_s=0.05)
    stream = asyncio.create_task(collect(llm, "hello", params(max_tokens=200)))
    await until(lambda: llm.stats.running == 1)
    await llm.shutdown()
    assert (await stream)[-1].outputs[0].finish_reason is FinishReason.ABORT


async def test_an_engine_that_is_dropped_ends(start_llm: StartLLM, tmp_path: Path, run_dir: Path) -> None:
    args = EngineArgs(model=str(make_model_folder(tmp_path / "other")), executor="scripted", device="cpu")
    llm = await AsyncLLM.start(args, run_dir)
    await collect(llm, "hello", params())
    del llm
    gc.collect()
    await until(lambda: not os.listdir(run_dir))


async def test_cancelled_at_any_await_nothing_stays(start_llm: StartLLM) -> None:
    """A consumer is cancelled after so many turns of the loop: before its request is sent, while it waits, between
    outputs, and after the end."""
    llm = await start_llm()
    for num_turns in range(40):
        tasks = [
            asyncio.create_task(collect(llm, "hello", params(max_tokens=200))),
            asyncio.create_task(collect(llm, "hello", params(max_tokens=2))),
            asyncio.create_task(collect(llm, "word " * 5_000, params())),  # prepared on a thread, and refused
        ]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert llm.num_unfinished == 0
    await wait_until_idle(llm)
    assert text_of(await collect(llm, "again", params())) != ""


async def test_a_request_that_breaks_in_the_engine_fails_alone(start_llm: StartLLM) -> None:
    llm = await start_llm(breaks="broken")
    good, bad = await asyncio.gather(
        collect(llm, "hello", params()), collect(llm, "broken", params()), return_exceptions=True
    )
    assert isinstance(good, list)
    assert isinstance(bad, RequestFailed)
    assert "scripted failure of one request" in str(bad)
    await wait_until_idle(llm)


async def test_text_that_cannot_be_made_ends_one_stream(start_llm: StartLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = await start_llm(replies={"bad": "~" * 200})
    feed = ByteLevelDecoder.feed

    def fail(decoder: ByteLevelDecoder, token_id: int) -> str:
        if token_id == ord("~"):
            raise ValueError("planted")
        return feed(decoder, token_id)

    monkeypatch.setattr(ByteLevelDecoder, "feed", fail)
    good, bad = await asyncio.gather(
        collect(llm, "hello", params()), collect(llm, "bad", params(max_tokens=190)), return_exceptions=True
    )
    assert isinstance(good, list)
    assert isinstance(bad, RequestFailed)
    assert "planted" in str(bad)
    await wait_until_idle(llm)
    assert (await llm.call("stats"))["generated_tokens"] < 190


class Panic(BaseException):
    """What a library in Rust raises when it gives up."""


async def test_even_a_panic_in_the_front_reaches_every_stream(
    start_llm: StartLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = await start_llm(delay_s=0.005)

    def process(self: OutputProcessor, outputs: Any) -> None:
        raise Panic("planted")

    streams = [asyncio.create_task(collect(llm, "hello", params(max_tokens=200))) for _ in range(4)]
    await until(lambda: llm.stats.running == 4)
    monkeypatch.setattr(OutputProcessor, "process", process)
    async with asyncio.timeout(20):
        results = await asyncio.gather(*streams, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 4


async def test_a_failure_in_the_front_reaches_every_stream(
    start_llm: StartLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = await start_llm(delay_s=0.005)

    def process(self: OutputProcessor, outputs: Any) -> None:
        raise RuntimeError("planted")

    streams = [asyncio.create_task(collect(llm, "hello", params(max_tokens=200))) for _ in range(4)]
    await asyncio.sleep(0.05)
    monkeypatch.setattr(OutputProcessor, "process", process)
    for stream in streams:
        with pytest.raises(EngineDeadError):
            await stream
    assert not llm.is_alive
