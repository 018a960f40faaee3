"""The daemon as it comes, over the bundled model: what a newcomer sees, and what the promises are about."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
NUM_STREAMS = 16
CLEAN_END_S = 2.0
SERVED_AGAIN_S = 15.0
# Each test has a HOME of its own, and an engine that starts again there would compile its kernels again.
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
Daemon = Any  # the conftest's; test folders are no packages


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(
    run_daemon_over_folder: Any, bundled_model: Path, short_run_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Daemon]:
    home = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", CACHE)
        async with run_daemon_over_folder(bundled_model, home, short_run_dir) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(daemon: Daemon) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{daemon.address}/v1", api_key="-", max_retries=0) as made:
        yield made


async def test_the_capital_of_france(daemon: Daemon, client: openai.AsyncOpenAI) -> None:
    """Twice: the second prompt comes from the prefix cache."""
    for _ in range(2):
        ask: dict[str, Any] = {"model": daemon.model, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(**ask, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content
        assert "Paris" in text
        assert whole.choices[0].finish_reason == "stop"


async def test_a_seed_repeats_itself_streamed_and_not(daemon: Daemon, client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": daemon.model, "messages": QUESTION, "seed": 7, "temperature": 0.8, "max_tokens": 24}
    whole = await client.chat.completions.create(**ask)
    stream = await client.chat.completions.create(**ask, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == whole.choices[0].message.content


async def test_sixteen_streams_end_cleanly_when_the_engine_is_killed(daemon: Daemon) -> None:
    first = [asyncio.Event() for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(last_event(daemon, number, event)) for number, event in enumerate(first)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in first))
    os.kill((await daemon.llm()).ready.pid, signal.SIGKILL)
    async with asyncio.timeout(CLEAN_END_S):
        ended = await asyncio.gather(*tasks)
    assert {error["code"] for error in ended} == {"engine_dead"}
    async with asyncio.timeout(SERVED_AGAIN_S):
        assert (await ask_shortly(daemon)).status_code == 200


async def last_event(daemon: Daemon, number: int, started: asyncio.Event) -> Any:
    """The error of a long stream, which ends with [DONE]."""
    body = {"model": daemon.model, "prompt": f"Number {number}", "stream": True, "max_tokens": 4000, "ignore_eos": True}
    lines = []
    async with daemon.http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():  # raises when the chunked body has no proper end
            lines += [line] if line else []
            started.set()
    assert lines[-1] == "data: [DONE]"
    return json.loads(lines[-2].removeprefix("data: "))["error"]


async def ask_shortly(daemon: Daemon, **fields: Any) -> httpx.Response:
    body = {"model": daemon.model, "messages": QUESTION, "max_tokens": 2, **fields}
    response: httpx.Response = await daemon.http.post("/v1/chat/completions", json=body)
    return response


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_model_cannot_do_is_refused_and_it_goes_on(daemon: Daemon, stream: bool) -> None:
    words = [{"role": "user", "content": "word " * 9000}]
    refused = await ask_shortly(daemon, messages=words, stream=stream)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    body = {"model": daemon.model, "prompt": [49152], "stream": stream}
    outside = await daemon.http.post("/v1/completions", json=body)
    assert (outside.status_code, outside.json()["error"]["param"]) == (400, "prompt")
    assert (await ask_shortly(daemon)).status_code == 200
