"""Whose silence it is when nothing is heard of an engine."""

from __future__ import annotations

import asyncio
import time

import pytest

from inferd.appliance.supervisor import watch
from inferd.appliance.supervisor.watch import until_lost


class Engine:
    def __init__(self) -> None:
        self.last_heartbeat = time.monotonic()
        self.dead: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.killed = False

    async def wait_dead(self) -> object:
        return await asyncio.shield(self.dead)

    def kill(self) -> None:
        self.killed = True
        self.dead.set_result("killed")


async def test_a_death_is_told_with_its_reason() -> None:
    engine = Engine()
    engine.dead.set_result("out of memory")
    assert await until_lost("m", engine, 60.0) == ("engine_died", "out of memory")
    assert not engine.killed


async def test_a_silent_engine_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.last_heartbeat -= 61.0
    assert await until_lost("m", engine, 60.0) == ("engine_hung", None)
    assert engine.killed
    assert "the engine of m has been silent for 61 s and is killed" in caplog.text


async def test_a_daemon_that_was_stopped_itself_listens_before_it_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z: what the engine said meanwhile has not been read yet."""
    monkeypatch.setattr(watch, "OVERSLEPT_S", 0.05)
    engine = Engine()
    watching = asyncio.create_task(until_lost("m", engine, 0.3))
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251 - this is what being stopped looks like from inside
    await asyncio.sleep(0.05)
    assert not engine.killed
    assert await watching == ("engine_hung", None)  # it stays silent
