"""Every model of this daemon: asked for an outcome ("this model, ready"), not for steps.

One task looks at all models whenever something changes, asks the policy (`residency.decide`) what to do, and sets the
goals of the slots. Requests wait before their model's door meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Generic, Protocol

from inferd.appliance.supervisor.backoff import Backoff
from inferd.appliance.supervisor.errors import ModelUnavailable
from inferd.appliance.supervisor.failure import Failure
from inferd.appliance.supervisor.residency import decide
from inferd.appliance.supervisor.slot import EngineSlot, EngineT, StartEngine
from inferd.appliance.supervisor.states import ModelState
from inferd.appliance.supervisor.world import (
    SLOTS,
    Act,
    Hold,
    Holding,
    Limits,
    Load,
    ModelView,
    Refuse,
    Release,
    Sleep,
    Unload,
    World,
)

log = logging.getLogger(__name__)
PATIENCE_S = 2.0  # a request waits through a pause that is shorter than this; else it is told to come back
CRASHES = Backoff()
FAILED_LOADS = Backoff(first_s=10.0, longest_s=300.0)


class Needs(Protocol):
    """What is known of a model before and while it is loaded; see `ModelView` for the terms."""

    @property
    def options(self) -> tuple[Holding, ...]: ...
    @property
    def asleep(self) -> tuple[Holding, Holding] | None: ...
    @property
    def load_s(self) -> float: ...
    @property
    def wake_s(self) -> float: ...
    @property
    def keep_alive_s(self) -> float | None: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def hint(self) -> str:
        """What would make it fit, if it does not."""
        ...


class Planner(Protocol):
    """Knows memory: what each model needs, and what there is."""

    def needs(self, model: str) -> Needs: ...

    def capacity(self) -> Mapping[str, int]: ...


class Supervisor(Generic[EngineT]):
    """`start` launches the engine of a model id; nothing here knows what an engine is beyond `Running`."""

    def __init__(
        self,
        start: StartEngine[EngineT],
        planner: Planner,
        *,
        limits: Callable[[], Limits] = Limits,
        hung_after_s: float = 300.0,
        crashes: Backoff = CRASHES,
        failed_loads: Backoff = FAILED_LOADS,
    ) -> None:
        self.draining = False
        self.on_failure: Callable[[str, Failure], None] = lambda model, failure: None
        self.waits_for: Mapping[str, tuple[str, ...]] = {}
        self._start = start
        self._planner = planner
        self._limits = limits
        self._hung_after_s = hung_after_s
        self._backoffs = (crashes, failed_loads)
        self._listeners: list[Callable[[str], None]] = []
        self._slots: dict[str, EngineSlot[EngineT]] = {}
        self._look_again = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def slots(self) -> list[EngineSlot[EngineT]]:
        """Of every model that was asked for since the start, loaded or not."""
        return list(self._slots.values())

    @property
    def num_open(self) -> int:
        return sum(slot.door.num_open + slot.door.num_waiting for slot in self._slots.values())

    def num_open_of(self, model: str) -> int:
        slot = self._slots.get(model)
        return 0 if slot is None else slot.door.num_open + slot.door.num_waiting

    def slot(self, model: str) -> EngineSlot[EngineT] | None:
        return self._slots.get(model)

    @asynccontextmanager
    async def lease(self, model: str, *, ticket: object = None) -> AsyncIterator[EngineT]:
        """The ready engine of a model, which is not moved while the lease is held.

        Loads or wakes the model, and waits for that. `ticket` finds the place in `door.position`.
        Raises `ModelUnavailable` when the model cannot answer soon.
        """
        slot = self._opened(model)
        engine = await self._admitted(slot, ticket or object())
        try:
            yield engine
        finally:
            slot.left()

    async def ensure_ready(self, model: str) -> EngineT:
        async with self.lease(model) as engine:
            return engine

    async def sleep(self, model: str, level: int, why: str = "asked to") -> None:
        """Once nobody is inside. Raises `ModelUnavailable` when it is not loaded or cannot sleep."""
        slot = self._loaded(model)
        asleep = self._planner.needs(model).asleep
        if asleep is None:
            raise ModelUnavailable(f"{model} cannot sleep: its engine does not support it", None, "not_supported")
        slot.sleep(level, asleep[level - 1], why)
        await self._until(slot, lambda: slot.state in (ModelState.SLEEPING_1, ModelState.SLEEPING_2))

    async def unload(self, model: str, why: str = "asked to") -> None:
        """Once nobody is inside; a model that is not loaded is let be."""
        slot = self._slots.get(model)
        if slot is not None and slot.state is not ModelState.ON_DISK:
            slot.unload(why)
            await self._until(slot, lambda: slot.state is ModelState.ON_DISK)

    async def forget(self, model: str) -> None:
        """Unloads it; it is about to leave the library."""
        await self.unload(model, "removed")
        self._slots.pop(model, None)

    async def drain(self, drain_s: float) -> None:
        """Refuses new work, waits up to `drain_s` for open requests, then ends every engine. Never raises for them."""
        self.draining = True
        for slot in self._slots.values():
            slot.hold(slot.door.held_for)  # those who wait look again and are told
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while any(slot.door.num_open for slot in self._slots.values()):
                    self._look_again.clear()
                    await self._look_again.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await asyncio.gather(*(slot.close() for slot in self._slots.values()))

    def on_change(self, listener: Callable[[str], None]) -> None:
        """`listener` is called with a model's id whenever anything about it has changed."""
        self._listeners.append(listener)

    def look_again(self) -> None:
        """Something that the planner knows has changed."""
        self._look_again.set()

    def _opened(self, model: str) -> EngineSlot[EngineT]:
        self._refuse_when_draining()
        if (slot := self._slots.get(model)) is None:
            crashes, failed_loads = self._backoffs
            slot = EngineSlot(
                model,
                self._start,
                on_change=lambda: self._changed(model),
                on_failure=lambda failure: self.on_failure(model, failure),
                crashes=crashes,
                failed_loads=failed_loads,
                hung_after_s=self._hung_after_s,
            )
            self._slots[model] = slot
        if self._task is None:
            self._task = asyncio.create_task(self._arrange(), name="supervisor")
        return slot

    def _loaded(self, model: str) -> EngineSlot[EngineT]:
        slot = self._slots.get(model)
        if slot is None or slot.process is None:
            raise ModelUnavailable(f"{model} is not loaded", None, "not_loaded")
        return slot

    async def _admitted(self, slot: EngineSlot[EngineT], ticket: object) -> EngineT:
        num_failures = slot.num_failures
        slot.refusal = ""
        try:
            with slot.door.waiting(ticket):
                self._changed(slot.model)
                async with asyncio.timeout(self._limits().load_timeout_s):
                    while not slot.is_open:
                        self._refuse_when_draining()
                        _refuse_if_hopeless(slot, num_failures)
                        await slot.changed()
                    engine = slot.engine
                    assert engine is not None
                    slot.door.enter()
                    return engine
        except TimeoutError:
            raise ModelUnavailable(self._why_not_yet(slot), 10.0, "model_loading") from None
        finally:
            self._changed(slot.model)

    async def _until(self, slot: EngineSlot[EngineT], reached: Callable[[], bool]) -> None:
        num_failures = slot.num_failures
        while not reached():
            if slot.num_failures > num_failures and slot.failure is not None:
                raise ModelUnavailable(f"{slot.model}: {slot.failure.reason}", None, "engine_dead")
            await slot.changed()

    def _why_not_yet(self, slot: EngineSlot[EngineT]) -> str:
        waited = f"after {self._limits().load_timeout_s:.0f} s"
        if blockers := self.waits_for.get(slot.model):
            return f"{slot.model} still waits {waited} for room that {', '.join(blockers)} has"
        return f"{slot.model} is still {slot.state.value} {waited}"

    async def _arrange(self) -> None:
        while True:
            self._look_again.clear()
            decision = decide(self.world())
            self.waits_for = decision.waits_for
            for act in decision.acts:
                self._do(act)
            timeout_s = None if decision.look_again_at is None else decision.look_again_at - time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._look_again.wait()

    def _do(self, act: Act) -> None:
        slot = self._slots[act.model]
        match act:
            case Load(placement=placement):
                slot.load(placement)
            case Sleep(level=level, why=why):
                asleep = self._planner.needs(act.model).asleep
                slot.sleep(level, asleep[level - 1] if asleep is not None else {}, why)
            case Unload(why=why):
                slot.unload(why)
            case Hold(other=other):
                log.info("%s lets nobody in any more: %s waits for its room", act.model, other)
                slot.hold(other)
            case Release():
                slot.hold(None)
            case Refuse(why=why):
                slot.refuse(why + self._planner.needs(act.model).hint)

    def world(self) -> World:
        """As the policy sees it now."""
        views = tuple(self._view(slot) for slot in self._slots.values())
        return World(time.monotonic(), self._planner.capacity(), views, self._limits().rules)

    def _view(self, slot: EngineSlot[EngineT]) -> ModelView:
        needs, door = self._planner.needs(slot.model), slot.door
        comes_back = slot.state is ModelState.FAILED and slot.failure is not None and slot.failure.by_itself
        sleeps = slot.state in (ModelState.SLEEPING_1, ModelState.SLEEPING_2)
        return ModelView(
            model=slot.model,
            state=slot.state,
            options=needs.options,
            holds=_most(slot.placement, slot.asleep),
            asleep=needs.asleep,
            num_open=door.num_open,
            num_waiting=0 if slot.is_closing else door.num_waiting + comes_back,
            waiting_since=min(door.waiting_since or slot.since, slot.since) if comes_back else door.waiting_since,
            last_used=door.last_used,
            since=slot.since,
            load_s=needs.wake_s if sleeps else needs.load_s,
            keep_alive_s=needs.keep_alive_s,
            pinned=needs.pinned,
            held=door.held,
            retry_at=slot.failure.retry_at if slot.failure is not None else 0.0,
        )

    def _changed(self, model: str) -> None:
        self._look_again.set()
        for listener in self._listeners:
            listener(model)

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise ModelUnavailable("this server is shutting down", 5.0, "draining")


def _refuse_if_hopeless(slot: EngineSlot[EngineT], num_failures: int) -> None:
    if slot.refusal:
        raise ModelUnavailable(slot.refusal, None, "insufficient_memory")
    failure = slot.failure
    if failure is None or slot.state is not ModelState.FAILED:
        return
    failed_for_us = slot.num_failures > num_failures and not failure.by_itself
    if failed_for_us or failure.retry_in_s > PATIENCE_S:
        raise ModelUnavailable(_cool_down(slot.model, failure), max(failure.retry_in_s, 1.0), "engine_dead")


def _cool_down(model: str, failure: Failure) -> str:
    return f"{model} is not running: {failure.reason}. Next try in {failure.retry_in_s:.0f} s"


def _most(one: Holding, other: Holding) -> dict[str, int]:
    return {pool: max(one.get(pool, 0), other.get(pool, 0)) for pool in {*one, *other}}


class FixedNeeds:
    """A planner for models that all need one place and nothing else."""

    options: tuple[Holding, ...] = ({SLOTS: 1},)
    asleep: tuple[Holding, Holding] | None = None
    load_s = 1.0
    wake_s = 1.0
    keep_alive_s: float | None = None
    pinned = False
    hint = ""

    def __init__(self, max_loaded_models: int = 1) -> None:
        self._capacity = {SLOTS: max_loaded_models}

    def needs(self, model: str) -> Needs:
        return self

    def capacity(self) -> Mapping[str, int]:
        return self._capacity
