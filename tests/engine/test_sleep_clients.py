"""Sleep and wake over every transport, and under streams."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import AsyncMPClient, EngineCoreClient, InprocClient, MPClient
from inferd.engine.core.proc import HEARTBEAT_S
from inferd.engine.errors import EngineDeadError, EngineError, RequestFailed
from inferd.engine.frontend.async_llm import AsyncLLM
from inferd.engine.messages import AddRequest, FinishReason, KVCacheCleared, KVEvent
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.testing.model_folder import make_model_folder

FINAL = SamplingParams(max_tokens=20, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)


@pytest.fixture
def run_dir() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"])


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., EngineArgs]:
    def make(**scripted: Any) -> EngineArgs:
        folder = make_model_folder(tmp_path / "model", **scripted)
        return EngineArgs(str(folder), executor="scripted", device="cpu", block_size=4, max_model_len=64)

    return make


@pytest.mark.parametrize("transport", [InprocClient, MPClient])
def test_ordinary_code(
    transport: Callable[..., EngineCoreClient], make_args: Callable[..., EngineArgs], run_dir: Path
) -> None:
    args = replace(make_args(), enable_kv_events=True)
    client = transport(args) if transport is InprocClient else transport(args, run_dir)
    client.add(AddRequest("a", list(b"hello there"), FINAL, 0.0))
    report = client.call("sleep", 1, "wait")
    assert report["level"] == 1
    assert client.call("is_sleeping")
    assert [record["weights"] for record in client.call("memory")] == [0]
    client.add(AddRequest("b", list(b"good night"), FINAL, 0.0))
    assert client.call("wake")["is_awake"]
    tokens: dict[str, int] = {"a": 0, "b": 0}
    events: list[KVEvent] = []
    while tokens != {"a": 20, "b": 20}:
        outputs = client.get_outputs()
        events += outputs.kv_events
        for output in outputs.outputs:
            tokens[output.request_id] += len(output.new_token_ids)
    assert sum(isinstance(event, KVCacheCleared) for event in events) == 1
    client.call("sleep")
    with pytest.raises(EngineError, match="resume is refused"):
        client.call("resume")
    client.shutdown()


async def test_the_asynchronous_client(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    """News of cached blocks come even when there is nothing else to say."""
    client = await AsyncMPClient.start(replace(make_args(), enable_kv_events=True), run_dir)
    assert (await client.call("sleep", 2))["level"] == 2
    assert [type(event) for event in (await client.get_outputs()).kv_events] == [KVCacheCleared]
    assert (await client.call("wake", ["kv_cache"]))["still_asleep"] == ["weights"]
    assert await client.call("sleep_state") == "waking"
    await client.shutdown()


async def answer(llm: AsyncLLM, prompt: str) -> list[int]:
    async for output in llm.generate(prompt, FINAL):
        tokens = output.outputs[0].token_ids
    return list(tokens)


async def test_streams_are_held_over_the_night(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    llm = await AsyncLLM.start(make_args(delay_s=0.002), run_dir)
    prompts = [f"prompt {number}" for number in range(8)]
    expected = [await answer(llm, prompt) for prompt in prompts]
    streams = [asyncio.create_task(answer(llm, prompt)) for prompt in prompts]
    while (await llm.call("stats"))["running"] < 8:
        pass
    assert (await llm.sleep(1, "keep")).level == 1
    assert await llm.is_sleeping()
    late = asyncio.create_task(answer(llm, prompts[0]))
    for _ in range(3):
        assert (await llm.call("stats"))["running"] == 0
    assert not any(stream.done() for stream in [*streams, late])
    assert (await llm.wake()).is_awake
    assert await asyncio.gather(*streams) == expected
    assert await late == expected[0]
    assert (await llm.memory())[0].weights > 0
    await llm.shutdown()


async def test_an_engine_that_wakes_for_long_shows_that_it_is_alive(
    make_args: Callable[..., EngineArgs], run_dir: Path
) -> None:
    """Its one thread is busy with loading meanwhile."""
    llm = await AsyncLLM.start(make_args(load_s=HEARTBEAT_S + 1.5), run_dir)
    await llm.sleep(2)
    asleep_at = llm.last_heartbeat
    waking = asyncio.create_task(llm.wake())
    beats = set()
    while not waking.done():
        beats.add(llm.last_heartbeat)
        await asyncio.sleep(0.01)
    assert len(beats - {asleep_at}) >= 1
    assert waking.result().restored_s["weights"] >= HEARTBEAT_S
    await llm.shutdown()


async def test_streams_that_are_refused(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    llm = await AsyncLLM.start(make_args(), run_dir)
    await llm.sleep(requests="refuse")
    with pytest.raises(RequestFailed, match="the engine is sleeping_1"):
        await answer(llm, "hello")
    await llm.wake()
    assert len(await answer(llm, "hello")) == 20
    await llm.shutdown()


async def test_a_held_stream_that_is_closed_leaves_nothing(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    llm = await AsyncLLM.start(make_args(), run_dir)
    await llm.sleep()
    stream = asyncio.create_task(answer(llm, "hello"))
    while (await llm.call("stats"))["waiting"] + (await llm.call("stats")).get("paused", 0) < 1:
        pass
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    await llm.wake()
    assert len(await answer(llm, "good morning")) == 20
    assert (await llm.call("stats"))["waiting"] == 0
    await llm.shutdown()


@pytest.mark.parametrize("drain_s", [0.0, 5.0])
async def test_an_engine_may_end_in_its_sleep(
    make_args: Callable[..., EngineArgs], run_dir: Path, drain_s: float
) -> None:
    """Who was held hears of it at once: there is nothing that a drain could wait for."""
    llm = await AsyncLLM.start(make_args(), run_dir)
    await llm.sleep(2)
    held = llm.generate("hello", FINAL)
    waiting = asyncio.create_task(anext(held))
    await asyncio.sleep(0)
    await llm.call("stats")
    await llm.shutdown(drain_s)
    assert (await waiting).outputs[0].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineDeadError):
        await llm.wake()
    assert os.listdir(run_dir) == []
