"""Waiting for the end of an engine, and of tasks."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from inferd.appliance.supervisor.failure import FailureKind

log = logging.getLogger(__name__)

OVERSLEPT_S = 1.0
KILLED_S = 10.0  # what the kernel needs at the most to take a killed process away


class Watched(Protocol):
    @property
    def last_heartbeat(self) -> float:
        """Monotonic time of its last sign of life; even an idle engine gives one every few seconds."""
        ...

    async def wait_dead(self) -> object:
        """Returns once the engine process is gone: an exception that says why, or None."""
        ...

    def kill(self) -> None:
        """Ends the process without a word to it."""
        ...


async def until_lost(model: str, engine: Watched, hung_after_s: float) -> tuple[FailureKind, object]:
    """Returns when the engine is dead. One that has not been heard of for too long is killed."""
    death = asyncio.ensure_future(engine.wait_dead())
    heard_from = 0.0  # silence before this is not the engine's
    try:
        while True:
            looked_at = time.monotonic()
            silent_s = looked_at - max(engine.last_heartbeat, heard_from)
            if silent_s > hung_after_s:
                log.error("the engine of %s has been silent for %.0f s and is killed", model, silent_s)
                engine.kill()
                await asyncio.wait({death}, timeout=KILLED_S)
                return "engine_hung", None
            wait_s = max(hung_after_s - silent_s, 0.05)
            done, _ = await asyncio.wait({death}, timeout=wait_s)
            if done:
                return "engine_died", death.result()
            if time.monotonic() - looked_at > wait_s + OVERSLEPT_S:  # we were stopped, and have not listened since
                heard_from = time.monotonic()
    finally:
        await cancelled(death)


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Ends a task that nobody waits for any longer; an error that it ends with concerns nobody."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
