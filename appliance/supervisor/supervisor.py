"""Every loaded model of this daemon: asked for an outcome ("this model, ready"), not for steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Generic

from inferd.appliance.supervisor.backoff import Backoff
from inferd.appliance.supervisor.errors import ModelUnavailable
from inferd.appliance.supervisor.policy import LoadedModel, choose_victim
from inferd.appliance.supervisor.slot import EngineSlot, EngineT


class Supervisor(Generic[EngineT]):
    """`start` launches the engine of a model id; nothing here knows what an engine is beyond `Running`."""

    def __init__(
        self,
        start: Callable[[str], Awaitable[EngineT]],
        *,
        max_loaded_models: int = 1,
        load_timeout_s: float = 300.0,
        backoff: Backoff | None = None,
    ) -> None:
        self.draining = False
        self._start = start
        self._max_loaded_models = max_loaded_models
        self._load_timeout_s = load_timeout_s
        self._backoff = backoff
        self._slots: dict[str, EngineSlot[EngineT]] = {}
        self._placing = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def slots(self) -> list[EngineSlot[EngineT]]:
        return list(self._slots.values())

    @property
    def num_open(self) -> int:
        return sum(slot.num_open for slot in self._slots.values())

    def slot(self, model: str) -> EngineSlot[EngineT] | None:
        return self._slots.get(model)

    async def load(self, model: str) -> EngineSlot[EngineT]:
        """Begins loading, if that has not happened; does not wait for it. May stop an idle model to make room."""
        self._refuse_when_draining()
        if (known := self._slots.get(model)) is not None:
            return known
        async with self._placing:
            if (known := self._slots.get(model)) is not None:
                return known
            await self._make_room(model)
            self._refuse_when_draining()
            slot = EngineSlot(model, lambda: self._start(model), self._backoff)
            self._slots[model] = slot
            slot.open()
            return slot

    async def ensure_ready(self, model: str) -> EngineT:
        """Raises `ModelUnavailable` when the model cannot answer soon."""
        return await (await self.load(model)).ready(self._load_timeout_s)

    @asynccontextmanager
    async def lease(self, model: str) -> AsyncIterator[EngineT]:
        """The ready engine of a model, which is not stopped for another model while the lease is held."""
        slot = await self.load(model)
        slot.num_open += 1
        self._idle.clear()
        try:
            yield await slot.ready(self._load_timeout_s)
        finally:
            slot.num_open -= 1
            slot.last_used = time.monotonic()
            if self.num_open == 0:
                self._idle.set()

    async def drain(self, drain_s: float) -> None:
        """Refuses new work, waits up to `drain_s` for open requests, then ends every engine. Never raises for them."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        await asyncio.gather(*(slot.close() for slot in self._slots.values()))

    async def _make_room(self, model: str) -> None:
        while len(self._slots) >= self._max_loaded_models:
            loaded = [LoadedModel(slot.model, slot.num_open, slot.last_used) for slot in self._slots.values()]
            victim = choose_victim(loaded)
            if victim is None:
                busy = ", ".join(one.model for one in loaded)
                raise ModelUnavailable(f"no room to load {model}: {busy} is in use", 5.0, "model_loading")
            await self._slots.pop(victim).close()  # out of sight first, so that nobody leases what is being stopped

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise ModelUnavailable("this server is shutting down", 5.0, "draining")
