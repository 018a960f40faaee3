"""Engines that live and do not answer: a stopped process, and a step that never ends."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil

Daemon = Any  # the conftest's; test folders are no packages
StartDaemon = Any

HUNG_S = 5.0
ENDLESS = {"ignore_eos": True, "max_tokens": 1900}


async def ended(daemon: Daemon, pid: int) -> None:
    async with asyncio.timeout(60):
        while psutil.pid_exists(pid):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)


async def test_a_stopped_engine_is_killed_and_started_again(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.01}, hang_timeout_s=HUNG_S)
    llm = await daemon.llm()
    answer = asyncio.create_task(daemon.chat("go", **ENDLESS))
    while not llm.stats.running:  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.01)
    os.kill(llm.ready.pid, signal.SIGSTOP)
    await ended(daemon, llm.ready.pid)
    response = await answer
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
    assert (await daemon.chat()).status_code == 200
    assert (await daemon.llm()).ready.pid != llm.ready.pid


async def test_a_step_without_an_end_silences_the_engine(start_daemon: StartDaemon) -> None:
    engine = {"step_timeout_s": 0.5}
    daemon = await start_daemon(scripted={"delay_s": 600.0}, hang_timeout_s=HUNG_S, engine=engine)
    pid = (await daemon.llm()).ready.pid
    response = await daemon.chat("go")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
    assert not psutil.pid_exists(pid)


async def test_a_long_step_is_no_hang(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(scripted={"delay_s": HUNG_S + 2.0}, hang_timeout_s=HUNG_S)
    pid = (await daemon.llm()).ready.pid
    assert (await daemon.chat("hello", max_tokens=1)).status_code == 200
    assert (await daemon.llm()).ready.pid == pid
