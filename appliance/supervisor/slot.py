"""One model's engine process and the one task that owns its life."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from inferd.appliance.supervisor.backoff import Backoff
from inferd.appliance.supervisor.errors import ModelUnavailable
from inferd.appliance.supervisor.states import ModelState, check_transition
from inferd.engine.errors import EngineError

PATIENCE_S = 2.0  # a request waits through a pause that is shorter than this; else it is told to come back
log = logging.getLogger(__name__)


class Running(Protocol):
    """What the supervisor needs of a started engine."""

    @property
    def is_alive(self) -> bool: ...

    async def wait_dead(self) -> object:
        """Returns once the engine process is gone."""
        ...

    async def shutdown(self, drain_s: float) -> None:
        """Idempotent; returns once the process is gone, whether it was alive or not."""
        ...


EngineT = TypeVar("EngineT", bound=Running)
StartEngine = Callable[[], Awaitable[EngineT]]


@dataclass(frozen=True)
class Failure:
    reason: str
    retryable: bool  # False: the same start fails again, so the next try waits until somebody asks
    retry_at: float  # monotonic seconds
    error: Exception | None = None

    @property
    def retry_in_s(self) -> float:
        return max(self.retry_at - time.monotonic(), 0.0)


class EngineSlot(Generic[EngineT]):
    """Starts an engine, watches it, and starts it again after it died.

    `start` may raise any `EngineError`; it is cancelled when the slot is stopped meanwhile. Everyone but the slot's
    own task reads `state` and awaits `ready`.
    """

    def __init__(self, model: str, start: StartEngine[EngineT], backoff: Backoff | None = None) -> None:
        self.model = model
        self.state = ModelState.ON_DISK
        self.since = time.monotonic()
        self.failure: Failure | None = None
        self.num_starts = 0
        self.num_open = 0  # requests that hold a lease
        self.last_used = time.monotonic()
        self._start = start
        self._backoff = backoff or Backoff()
        self._engine: EngineT | None = None
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._stop = asyncio.Event()
        self._drain_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> EngineT | None:
        return self._engine if self.state is ModelState.READY else None

    @property
    def is_down(self) -> bool:
        """Failed, and not about to be started again within moments."""
        return self.failure is not None and self.state is ModelState.FAILED and self.failure.retry_in_s > PATIENCE_S

    def open(self) -> None:
        """Begins loading."""
        self._task = asyncio.create_task(self._run(), name=f"engine {self.model}")

    async def close(self, drain_s: float = 0.0) -> None:
        """Lets open requests finish within `drain_s`, then ends the engine. Idempotent."""
        self._drain_s = drain_s
        self._stop.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def ready(self, timeout_s: float) -> EngineT:
        """The engine, once it answers. Raises `ModelUnavailable` when that is not to be expected soon."""
        self._wanted.set()
        num_starts = self.num_starts
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if self._engine is not None and self.state is ModelState.READY and self._engine.is_alive:
                        self.last_used = time.monotonic()
                        return self._engine
                    self._refuse_if_hopeless(num_starts)
                    await self._changed.wait()
        except TimeoutError:
            raise ModelUnavailable(
                f"{self.model} is still loading after {timeout_s:.0f} s", 10.0, "model_loading"
            ) from None

    def _refuse_if_hopeless(self, num_starts: int) -> None:
        if self._stop.is_set():
            raise ModelUnavailable(f"{self.model} is being stopped", 5.0, "draining")
        if self.state is not ModelState.FAILED or self.failure is None:
            return
        failed_for_us = not self.failure.retryable and self.num_starts > num_starts
        if failed_for_us or self.failure.retry_in_s > PATIENCE_S:
            wait_s = self.failure.retry_in_s
            text = f"{self.model} is not running: {self.failure.reason}. Next try in {wait_s:.0f} s"
            raise ModelUnavailable(text, max(wait_s, 1.0), "engine_dead")

    async def _run(self) -> None:
        num_failures = 0
        while not self._stop.is_set():
            self._wanted.clear()
            self._move(ModelState.LOADING)
            self.num_starts += 1
            error, lived_s = await self._live_once()
            if self._stop.is_set():
                break
            num_failures = self._backoff.count_failure(num_failures, lived_s)
            await self._cool_down(error, self._backoff.delay_s(num_failures))
        if self.state is not ModelState.STOPPING:
            self._move(ModelState.STOPPING)
        self._move(ModelState.ON_DISK)

    async def _live_once(self) -> tuple[Exception | None, float]:
        """One engine from its start to its end: the error that ended its start, and the seconds it was ready."""
        starting = asyncio.ensure_future(self._start())
        try:
            await self._until_stop_or(starting)
            if not starting.done():
                return None, 0.0
            engine = starting.result()
        except Exception as error:
            level = logging.ERROR if isinstance(error, EngineError) else logging.CRITICAL
            log.log(level, "%s did not start: %s", self.model, error, exc_info=not isinstance(error, EngineError))
            return error, 0.0
        finally:
            await _cancelled(starting)
        return None, await self._watch(engine)

    async def _watch(self, engine: EngineT) -> float:
        self._engine, began = engine, time.monotonic()
        self.failure = None
        self._move(ModelState.READY)
        log.info("%s is ready", self.model)
        death = asyncio.ensure_future(engine.wait_dead())
        try:
            await self._until_stop_or(death)
            if self._stop.is_set():
                self._move(ModelState.STOPPING)
            else:
                log.error("the engine of %s died after %.1f s", self.model, time.monotonic() - began)
        finally:
            await _cancelled(death)
            await engine.shutdown(self._drain_s if self._stop.is_set() else 0.0)
            self._engine = None
        return time.monotonic() - began

    async def _cool_down(self, error: Exception | None, delay_s: float) -> None:
        reason = _reason(error)
        retryable = not isinstance(error, EngineError) or error.retryable
        self.failure = Failure(reason, retryable, time.monotonic() + delay_s, error)
        self._move(ModelState.FAILED)
        log.info("%s is started again in %.1f s%s", self.model, delay_s, "" if retryable else " or when asked for")
        await _event_within(self._stop, delay_s)
        if not retryable and not self._stop.is_set():
            wanted = asyncio.ensure_future(self._wanted.wait())
            try:
                await self._until_stop_or(wanted)
            finally:
                await _cancelled(wanted)

    async def _until_stop_or(self, other: asyncio.Future[Any]) -> None:
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({stop, other}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(stop)

    def _move(self, after: ModelState) -> None:
        check_transition(self.model, self.state, after)
        self.state, self.since = after, time.monotonic()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _reason(error: Exception | None) -> str:
    """What a client may know: the error itself names files of this machine, and the log has it."""
    if error is None:
        return "its engine process ended"
    code = error.code if isinstance(error, EngineError) else "internal"
    return f"its last start failed ({code}, the server's log has the cause)"


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Ends a task that nobody waits for any longer; an error that it ends with concerns nobody."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


async def _event_within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
