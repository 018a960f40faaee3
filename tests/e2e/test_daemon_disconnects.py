"""Clients that vanish cost nothing: whatever their request was doing, it is gone and its blocks are free."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import pytest

from inferd.engine.frontend.async_llm import AsyncLLM

Daemon = Any  # the conftest's; test folders are no packages
StartDaemon = Any

NUM_ROUNDS = 50  # in each of four tests
GONE_S = 1.0  # what an abandoned request may still be running or waiting
LONG_PROMPT = "p" * 1500  # several steps of prefill at 64 tokens a step
SLOW = {"scripted": {"delay_s": 0.005}, "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 64}}


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition is another process's state
            await asyncio.sleep(0.005)


async def send_and_leave(daemon: Daemon, prompt: str, stream: bool, leave: Callable[[], bool], *, reset: bool) -> None:
    """A request on a connection of its own, which is cut once `leave` says so."""
    host, port = daemon.address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "tiny", "prompt": prompt, "stream": stream, "max_tokens": 400, "ignore_eos": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    await until(leave)
    if reset:
        writer.transport.abort()
    else:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def is_running(llm: AsyncLLM) -> bool:
    return llm.stats.running > 0


def is_decoding(llm: AsyncLLM, generated_before: int) -> bool:
    return llm.stats.generated_tokens > generated_before + 2


@pytest.mark.parametrize("stream", [True, False])
async def test_vanishing_while_prefilling_and_decoding(start_daemon: StartDaemon, stream: bool) -> None:
    daemon = await start_daemon(**SLOW)
    llm = await daemon.llm()
    for number in range(NUM_ROUNDS):
        enough = partial(is_decoding, llm, llm.stats.generated_tokens) if number % 2 else partial(is_running, llm)
        await send_and_leave(daemon, f"{number} {LONG_PROMPT}", stream, enough, reset=number % 3 == 0)
        await until(lambda: llm.stats.running == llm.stats.waiting == 0, GONE_S)
    await check_nothing_is_left(daemon)


@pytest.mark.parametrize("stream", [True, False])
async def test_vanishing_from_the_queue(start_daemon: StartDaemon, stream: bool) -> None:
    daemon = await start_daemon(**SLOW)
    llm = await daemon.llm()
    blockers = [asyncio.create_task(daemon.complete(f"block {n}", max_tokens=1500, ignore_eos=True)) for n in range(2)]
    await until(lambda: llm.stats.running == 2)
    for number in range(NUM_ROUNDS):
        await send_and_leave(daemon, f"queued {number}", stream, lambda: llm.stats.waiting == 1, reset=number % 2 == 0)
        await until(lambda: llm.stats.waiting == 0, GONE_S)
    for task in blockers:
        task.cancel()
    await asyncio.gather(*blockers, return_exceptions=True)
    await check_nothing_is_left(daemon)


async def test_vanishing_while_the_model_loads(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(scripted={"load_s": 0.3})
    os.kill((await daemon.llm()).ready.pid, signal.SIGKILL)
    await until(lambda: daemon.state.supervisor.slots[0].engine is None)
    flags = itertools.count()
    await send_and_leave(daemon, "x", True, lambda: next(flags) > 3, reset=False)
    await until(lambda: daemon.state.supervisor.num_open == 0)
    await check_nothing_is_left(daemon)


async def check_nothing_is_left(daemon: Daemon) -> None:
    llm = await daemon.llm()
    await until(lambda: llm.stats.running == llm.stats.waiting == 0, GONE_S)
    await until(lambda: llm.stats.blocks_free == llm.stats.blocks_total, GONE_S)
    await until(lambda: daemon.state.supervisor.num_open == 0, GONE_S)
    assert llm.num_unfinished == 0
    response: httpx.Response = await daemon.chat()
    assert response.status_code == 200
