"""Engines that die under load, and daemons that are told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

Daemon = Any  # the conftest's; test folders are no packages
StartDaemon = Any

NUM_STREAMS = 16
CLEAN_END_S = 2.0
SERVED_AGAIN_S = 15.0
ENDLESS = {"ignore_eos": True, "max_tokens": 1900}


async def read_stream(daemon: Daemon, first_token: asyncio.Event) -> tuple[list[Any], str]:
    """The events of a long answer, and the last line of the stream."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "stream": True, **ENDLESS}
    events, last = [], ""
    async with daemon.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():  # raises when the chunked body has no proper end
            last = line or last
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
            if len(events) == 2:
                first_token.set()
    return events, last


async def start_streams(daemon: Daemon, count: int) -> list[asyncio.Task[tuple[list[Any], str]]]:
    flags = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(read_stream(daemon, flag)) for flag in flags]
    async with asyncio.timeout(30):
        await asyncio.gather(*(flag.wait() for flag in flags))
    return tasks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the condition is another process's state
            await asyncio.sleep(0.005)


async def kill_engine(daemon: Daemon) -> int:
    pid = (await daemon.llm()).ready.pid
    os.kill(pid, signal.SIGKILL)
    return int(pid)


async def notice_the_death(daemon: Daemon) -> None:
    await until(lambda: daemon.state.supervisor.slots[0].engine is None)


async def test_every_stream_ends_cleanly_and_the_model_comes_back(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.01})
    tasks = await start_streams(daemon, NUM_STREAMS)
    pid = await kill_engine(daemon)
    async with asyncio.timeout(CLEAN_END_S):
        ended = await asyncio.gather(*tasks)
    for events, last in ended:
        error = events[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        assert last == "data: [DONE]"
        assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])
    assert (await daemon.http.get("/health")).status_code == 200
    async with asyncio.timeout(SERVED_AGAIN_S):
        assert (await daemon.chat()).status_code == 200
    assert (await daemon.llm()).ready.pid != pid


async def test_answers_in_one_body_become_503(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.01})
    answer = asyncio.create_task(daemon.chat("go", **ENDLESS))
    llm = await daemon.llm()
    await until(lambda: llm.stats.running > 0)
    await kill_engine(daemon)
    response = await answer
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "engine_dead"


async def test_requests_wait_for_a_restart(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(scripted={"load_s": 0.3})
    await kill_engine(daemon)
    await notice_the_death(daemon)
    ready = await daemon.http.get("/ready")
    assert ready.status_code == 503
    assert "retry-after" in ready.headers
    assert "tiny does not run: its engine process ended. It is " in ready.json()["error"]["message"]
    assert (await daemon.chat()).status_code == 200


async def test_an_engine_that_keeps_dying_is_said_so(start_daemon: StartDaemon, tmp_path: Any) -> None:
    daemon = await start_daemon()
    (tmp_path / "tiny" / "scripted.json").write_text('{"fail_at_start": "the disk is on fire"}')
    await kill_engine(daemon)
    await notice_the_death(daemon)
    response: httpx.Response = await daemon.chat()
    assert response.status_code == 503
    assert "load_error" in response.json()["error"]["message"]
    assert "fire" not in response.text


async def test_drain_finishes_what_runs_and_refuses_the_rest(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.005})
    running = asyncio.create_task(daemon.chat("go", max_tokens=100, ignore_eos=True))
    await until(lambda: daemon.state.supervisor.num_open > 0)
    draining = asyncio.create_task(daemon.state.supervisor.drain(30))
    await asyncio.sleep(0.01)
    refused = await daemon.chat()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert (await daemon.http.get("/ready")).json()["error"]["code"] == "draining"
    assert (await running).json()["usage"]["completion_tokens"] == 100
    await draining


async def test_streams_that_outlast_the_drain_end_with_an_error(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.01})
    tasks = await start_streams(daemon, 2)
    await daemon.state.supervisor.drain(0.05)
    for events, last in await asyncio.gather(*tasks):
        assert events[-1]["error"]["code"] == "draining"
        assert last == "data: [DONE]"


@pytest.mark.parametrize("keepalive_s", [0.05])
async def test_a_silent_stream_sends_comments(start_daemon: StartDaemon, keepalive_s: float) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.4}, keepalive_s=keepalive_s)
    response = await daemon.chat(stream=True, max_tokens=1)
    assert ": keepalive\n\n" in response.text
    assert response.text.endswith("data: [DONE]\n\n")
