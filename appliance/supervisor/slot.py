"""One model's engine process and the one task that owns its life.

The supervisor sets a goal; the task brings the model there, one step after the other, and reports every change. Nobody
else moves `state`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from inferd.appliance.supervisor.backoff import Backoff
from inferd.appliance.supervisor.door import Door
from inferd.appliance.supervisor.failure import Failure, FailureKind
from inferd.appliance.supervisor.states import RESTING, ModelState, check_transition
from inferd.appliance.supervisor.watch import Watched, cancelled, until_lost
from inferd.appliance.supervisor.world import Holding
from inferd.engine.errors import EngineError

log = logging.getLogger(__name__)


class Running(Watched, Protocol):
    """What the supervisor needs of a started engine."""

    @property
    def is_alive(self) -> bool: ...

    async def sleep(self, level: int) -> None: ...

    async def wake(self) -> None: ...

    async def shutdown(self, drain_s: float) -> None:
        """Idempotent; returns once the process is gone, whether it was alive or not."""
        ...


EngineT = TypeVar("EngineT", bound=Running)
StartEngine = Callable[[str, Holding], Awaitable[EngineT]]
SLEEP_STATES = {1: ModelState.SLEEPING_1, 2: ModelState.SLEEPING_2}


class EngineSlot(Generic[EngineT]):
    """`start` may raise any `EngineError`; it is cancelled when the slot is closed meanwhile."""

    def __init__(
        self,
        model: str,
        start: StartEngine[EngineT],
        *,
        on_change: Callable[[], None] = lambda: None,
        on_failure: Callable[[Failure], None] = lambda failure: None,
        crashes: Backoff,
        failed_loads: Backoff,
        hung_after_s: float = 300.0,
    ) -> None:
        self.model = model
        self.state = ModelState.ON_DISK
        self.since = time.monotonic()
        self.why = ""
        self.door = Door()
        self.failure: Failure | None = None
        self.refusal = ""  # why it cannot be loaded at all, as things are
        self.num_starts = 0
        self.num_failures = 0  # since the slot was made
        self.placement: Holding = {}
        self.asleep: Holding = {}  # what it holds, or is about to hold, in its sleep
        self.took_s: dict[
            ModelState, float
        ] = {}  # what the last load and the last wake took, by the state they led from
        self._start = start
        self._on_change = on_change
        self._on_failure = on_failure
        self._crashes = crashes
        self._failed_loads = failed_loads
        self._hung_after_s = hung_after_s
        self._crashes_in_a_row = 0
        self._failures_in_a_row = 0  # to load, wake or sleep
        self._engine: EngineT | None = None
        self._goal: ModelState | None = None
        self._goal_set = asyncio.Event()
        self._changed = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> EngineT | None:
        """While it answers."""
        return self._engine if self.state is ModelState.READY else None

    @property
    def process(self) -> EngineT | None:
        """While there is a process, in whatever state."""
        return self._engine

    @property
    def is_open(self) -> bool:
        return (
            self.state is ModelState.READY and not self.door.held and self._engine is not None and self._engine.is_alive
        )

    @property
    def is_closing(self) -> bool:
        return self._closing

    def load(self, placement: Holding, why: str = "") -> None:
        """From disk, or out of its sleep."""
        self.placement = placement
        self._aim(ModelState.READY, why)

    def sleep(self, level: int, holding: Holding, why: str = "") -> None:
        """`holding`: what it will hold then. One that sleeps deeper already stays as it is."""
        if self.state is not ModelState.SLEEPING_2:
            self.asleep = holding
            self._aim(SLEEP_STATES[level], why)

    def unload(self, why: str = "") -> None:
        """Once nobody is inside."""
        self._aim(ModelState.ON_DISK, why)

    def refuse(self, why: str) -> None:
        """Everyone who waits is told so, once."""
        if self.refusal != why:
            self.refusal = why
            self._tell()

    def hold(self, other: str | None) -> None:
        """Lets nobody in, for the sake of another model; None: lets them in again."""
        self.door.held_for = other
        self._tell()

    async def close(self) -> None:
        """Ends the engine, whoever is inside. Idempotent; nothing is loaded after it."""
        self._closing = True
        if self._task is not None:
            self.unload("the daemon is stopping")
            self._tell()
            await asyncio.wait({self._task})

    async def changed(self) -> None:
        """Returns at the next change of anything a waiter looks at."""
        await self._changed.wait()

    def _aim(self, goal: ModelState, why: str) -> None:
        self._goal, self.why = goal, why
        self._goal_set.set()
        if self._task is None:
            self._task = asyncio.create_task(self._live(), name=f"engine {self.model}")

    async def _live(self) -> None:
        while not (self._closing and self.state is ModelState.ON_DISK):
            try:
                await self._next_step()
            except Exception:
                log.critical("%s: the supervisor failed; the engine is ended", self.model, exc_info=True)
                await self._end_process()
                self.state = ModelState.LOADING  # wherever the mistake left it, from here the way on is open
                self._fail("load_failed", None)

    async def _next_step(self) -> None:
        """One step towards the goal; waits for another goal, or the engine's death, where there is none."""
        goal, state = self._goal, self.state
        if goal in (None, state) or (goal is ModelState.READY and self._closing):
            self._goal = None
            await self._rest()
        elif goal is ModelState.READY:
            await (self._wake() if state in SLEEP_STATES.values() else self._load())
        elif goal is ModelState.ON_DISK or state in (ModelState.FAILED, ModelState.ON_DISK):
            self._goal = ModelState.ON_DISK
            await self._unload()
        else:
            await self._fall_asleep(goal)

    async def _rest(self) -> None:
        self._goal_set.clear()
        await self._unless_dead(self._goal_set.wait())

    async def _unless_dead(self, act: Awaitable[object]) -> bool:
        """Does `act` while the engine, if there is one, is watched; False: it died and is buried. Raises as `act`."""
        engine, doing = self._engine, asyncio.ensure_future(act)
        if engine is None:
            await doing
            return True
        watching = asyncio.ensure_future(until_lost(self.model, engine, self._hung_after_s))
        try:
            await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
                return True
            await self._bury(*watching.result())
            return False
        finally:
            await cancelled(doing)
            await cancelled(watching)

    async def _load(self) -> None:
        began = time.monotonic()
        self._move(ModelState.LOADING)
        self.num_starts += 1
        self.refusal = ""
        starting = asyncio.ensure_future(self._start(self.model, self.placement))
        try:
            await self._unless_redirected(starting)
            if starting.done():
                self._engine = starting.result()
                self._arrive(ModelState.LOADING, began)
        except Exception as error:
            self._fail("load_failed", error)
        finally:
            await cancelled(starting)
        if self.state is ModelState.LOADING:
            self._move(ModelState.STOPPING)
            self._move(ModelState.ON_DISK)

    async def _wake(self) -> None:
        engine, before, began = self._engine, self.state, time.monotonic()
        assert engine is not None
        self._move(ModelState.WAKING)
        if await self._with_engine(engine.wake(), "wake_failed"):
            self._arrive(before, began)

    def _arrive(self, before: ModelState, began: float) -> None:
        self.took_s[before] = time.monotonic() - began
        self.failure = None
        self._failures_in_a_row = 0
        self.asleep = {}
        self.door.held_for = None
        self._move(ModelState.READY)
        log.info("%s is ready after %.1f s", self.model, self.took_s[before])

    async def _fall_asleep(self, goal: ModelState) -> None:
        if self.state is ModelState.READY and not await self._drain():
            return
        if self._goal is not goal:  # asked for something else meanwhile
            self._move(ModelState.READY)
            return
        engine, level = self._engine, 1 if goal is ModelState.SLEEPING_1 else 2
        assert engine is not None
        if await self._with_engine(engine.sleep(level), "sleep_failed"):
            self._move(goal)
            log.info("%s sleeps at level %d: %s", self.model, level, self.why)

    async def _with_engine(self, act: Awaitable[None], kind: FailureKind) -> bool:
        """False: it failed, died, or is not wanted any more. One that fails is ended: in what state is it?"""
        doing = asyncio.ensure_future(act)
        try:
            if await self._unless_dead(self._unless_redirected(doing)) and doing.done():
                doing.result()
                return True
        except Exception as error:
            await self._end_process()
            self._fail(kind, error)
        finally:
            await cancelled(doing)
        return False

    async def _unload(self) -> None:
        if self.state is ModelState.READY and not await self._drain():
            return
        if self.state is not ModelState.ON_DISK:
            self._move(ModelState.STOPPING)
            await self._end_process()
            self._move(ModelState.ON_DISK)
            log.info("%s is unloaded: %s", self.model, self.why)

    async def _drain(self) -> bool:
        """Until nobody is inside; nobody goes in meanwhile. False: the engine died."""
        self._move(ModelState.DRAINING)
        return await self._unless_dead(self._empty())

    async def _empty(self) -> None:
        while self.door.num_open and not self._closing:
            await self._changed.wait()

    async def _bury(self, kind: FailureKind, death: object) -> None:
        lived_s = time.monotonic() - self.since
        log.error("the engine of %s ended after %.1f s in state %s", self.model, lived_s, self.state.value)
        engine, self._engine = self._engine, None
        self._crashes_in_a_row = self._crashes.count_failure(self._crashes_in_a_row, lived_s)
        delay_s = self._crashes.delay_s(self._crashes_in_a_row)
        self._stand_failed(Failure(kind, time.monotonic() + delay_s, True, _as_error(death)))
        if engine is not None:  # clearing up takes a while, and nobody is to take it for ready meanwhile
            await engine.shutdown(0.0)

    def _fail(self, kind: FailureKind, error: BaseException | None) -> None:
        known = isinstance(error, EngineError)
        log.error("%s: %s: %s", self.model, kind.replace("_", " "), error, exc_info=None if known else error)
        self._failures_in_a_row += 1
        delay_s = self._failed_loads.delay_s(self._failures_in_a_row)
        retryable = not isinstance(error, EngineError) or error.retryable
        was_served = self.failure is not None and self.failure.by_itself
        self._stand_failed(Failure(kind, time.monotonic() + delay_s, was_served and retryable, error))

    def _stand_failed(self, failure: Failure) -> None:
        self.failure = failure
        self.num_failures += 1
        self._on_failure(failure)
        self._goal = ModelState.ON_DISK if self._closing else None
        self._move(ModelState.FAILED)
        log.info("%s may be tried again in %.1f s", self.model, failure.retry_in_s)

    async def _end_process(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown(0.0)

    async def _unless_redirected(self, task: asyncio.Future[Any]) -> None:
        """Until the task is done, or somebody wants the model gone."""
        while not task.done() and self._goal is not ModelState.ON_DISK:
            self._goal_set.clear()
            asked = asyncio.ensure_future(self._goal_set.wait())
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            await cancelled(asked)

    def _move(self, after: ModelState) -> None:
        check_transition(self.model, self.state, after)
        self.state, self.since = after, time.monotonic()
        if after in RESTING:
            self.placement = {}
        if after in (ModelState.ON_DISK, ModelState.FAILED):
            self.asleep = {}
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_change()

    def left(self) -> None:
        """A request is through."""
        self.door.leave()
        self._tell()


def _as_error(death: object) -> BaseException | None:
    return death if isinstance(death, BaseException) else None
