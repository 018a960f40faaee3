"""One engine behind three transports: in this process, or another process used synchronously or from asyncio.

All three behave alike. A request that the engine refuses ends as an output with `FinishReason.ERROR`; an unknown id to
abort is passed over; a failed control call raises `EngineError` at its caller; once the engine is dead, everything
raises `EngineDeadError`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from inferd.engine.build import build_engine
from inferd.engine.config import EngineArgs
from inferd.engine.core.inbox import Inbox, InboxReader, OnFeed, pass_on
from inferd.engine.core.launch import OnLine
from inferd.engine.core.link import EngineLink
from inferd.engine.errors import EngineDeadError, EngineError, InvalidRequest
from inferd.engine.messages import (
    Abort,
    AddRequest,
    Call,
    CallReply,
    EngineOutput,
    EngineOutputs,
    EngineReady,
    FinishReason,
    KVEvent,
    SchedulerStats,
)

START_TIMEOUT_S = 600.0
SHUTDOWN_GRACE_S = 5.0  # beyond the drain, for the engine to end by itself


class EngineCoreClient(Protocol):
    """The synchronous seam. One thread uses it. `AsyncMPClient` has the same methods as coroutines."""

    ready: EngineReady
    on_feed: OnFeed | None  # gets what the engine tells of itself, once "subscribe" was called

    def add(self, request: AddRequest) -> None: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    def call(self, method: str, *args: Any) -> Any:
        """Blocks for the answer; outputs that come meanwhile are kept for `get_outputs`."""
        ...

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        """Blocks until the engine has something to say; an empty value when `timeout_s` ran out."""
        ...

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Idempotent. What still runs after `drain_s` is aborted."""
        ...


class InprocClient:
    """Steps the engine in this process, whenever outputs are asked for."""

    def __init__(self, args: EngineArgs) -> None:
        self._core, self.ready = build_engine(args)
        self.on_feed: OnFeed | None = None
        self._kv_events: list[KVEvent] = []
        self._pending: list[EngineOutput] = []
        self._death: str | None = None
        self._is_shut_down = False

    def add(self, request: AddRequest) -> None:
        self._check_alive()
        try:
            self._core.add(request)
        except Exception as error:  # whatever it is, it is this request's
            param = error.param if isinstance(error, InvalidRequest) else None
            said = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            refused = EngineOutput(request.request_id, [], FinishReason.ERROR, error=said, error_param=param)
            self._pending.append(refused)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._check_alive()
        self._pending += self._core.abort(request_ids)

    def call(self, method: str, *args: Any) -> Any:
        self._check_alive()
        reply = self._core.call(Call(0, method, list(args)))
        pass_on(EngineOutputs(feed=self._core.insight.take_update()), self.on_feed)
        while reply is None:
            outputs = self._step()
            self._pending += outputs.outputs
            self._kv_events += outputs.kv_events
            pass_on(outputs, self.on_feed)
            reply = outputs.reply
        return _result_of(reply)

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        """One step; an idle engine answers at once with an empty value."""
        self._check_alive()
        pending, self._pending = self._pending, []
        kv_events, self._kv_events = self._kv_events, []
        if pending or not self._core.has_work:
            kv_events += self._core.take_kv_events()
            feed = self._core.insight.take_update()
            outputs = EngineOutputs(pending, self._core.stats(), kv_events=kv_events, feed=feed)
        else:
            outputs = self._step()
            outputs.kv_events = kv_events + outputs.kv_events
        pass_on(outputs, self.on_feed)
        return outputs

    def _step(self) -> EngineOutputs:
        try:
            return self._core.step()
        except Exception as error:
            self._death = f"the engine is gone: {type(error).__name__}: {error}"
            raise EngineDeadError(self._death) from error

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Nothing can be drained: outputs come only when they are asked for."""
        self._death = self._death or "the engine was shut down"
        if not self._is_shut_down:
            self._is_shut_down = True
            self._core.shutdown()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)


class MPClient:
    """An engine process used from ordinary code. Constructing it waits until the engine is ready."""

    def __init__(
        self,
        args: EngineArgs,
        run_dir: Path,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        on_line: OnLine | None = None,
    ) -> None:
        """Raises what kept the engine from starting: `ConfigError`, `LoadError`, `EngineDeadError`."""
        self._link = EngineLink(args, run_dir, on_line)
        self._close = weakref.finalize(self, self._link.close)
        self._call_ids = itertools.count()
        self._kept: deque[EngineOutputs] = deque()
        self.on_feed: OnFeed | None = None
        try:
            self.ready = self._link.wait_ready(start_timeout_s)
        except BaseException:
            self._close()
            raise

    def add(self, request: AddRequest) -> None:
        self._link.send(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._link.send(Abort(list(request_ids)))

    def call(self, method: str, *args: Any) -> Any:
        call_id = next(self._call_ids)
        self._link.send(Call(call_id, method, list(args)))
        while True:
            outputs = self._receive(None)
            if outputs is None:
                continue
            if outputs.outputs or outputs.kv_events:
                self._kept.append(outputs)
            if outputs.reply is not None and outputs.reply.call_id == call_id:
                return _result_of(outputs.reply)

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        if self._kept:
            return self._kept.popleft()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            outputs = self._receive(left_s)
            if outputs is not None and (outputs.outputs or outputs.kv_events):
                return outputs
            if left_s == 0.0:
                return EngineOutputs()

    def _receive(self, timeout_s: float | None) -> EngineOutputs | None:
        outputs = self._link.receive(timeout_s)
        if outputs is not None:
            pass_on(outputs, self.on_feed)
        return outputs

    def shutdown(self, drain_s: float = 0.0) -> None:
        if self._link.death is None:
            self._link.ask_to_end(drain_s)
            self._link.process.wait(drain_s + SHUTDOWN_GRACE_S)
        self._close()


class AsyncMPClient:
    """An engine process used from one event loop; a thread reads its socket for as long as it lives."""

    def __init__(self, link: EngineLink, inbox: Inbox) -> None:
        """For `start`."""
        self._link = link
        self._inbox = inbox
        self._call_ids = itertools.count()
        self._abandon = weakref.finalize(self, link.process.kill)  # then the reading thread clears up

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        run_dir: Path,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        on_line: OnLine | None = None,
    ) -> AsyncMPClient:
        """To be called on the main thread. Raises what kept the engine from starting; cancelling it ends the engine."""
        link = EngineLink(args, run_dir, on_line)
        inbox = Inbox()
        reader = InboxReader(link, inbox, asyncio.get_running_loop())
        threading.Thread(target=reader.run, args=(start_timeout_s,), name="engine-reader", daemon=True).start()
        try:
            await asyncio.shield(inbox.ready)
        except BaseException:
            link.process.kill()
            await inbox.closed.wait()
            inbox.ready.exception()  # when cancelled, nobody else looks at it, and asyncio would complain
            raise
        return cls(link, inbox)

    @property
    def ready(self) -> EngineReady:
        return self._inbox.ready.result()

    @property
    def death(self) -> EngineDeadError | None:
        return self._link.death

    @property
    def last_heartbeat_s(self) -> float:
        """Monotonic time of the engine's last message of any kind."""
        return self._inbox.last_heartbeat_s

    @property
    def on_feed(self) -> OnFeed | None:
        """Called on the event loop."""
        return self._inbox.on_feed

    @on_feed.setter
    def on_feed(self, on_feed: OnFeed | None) -> None:
        self._inbox.on_feed = on_feed

    @property
    def stats(self) -> SchedulerStats:
        """The newest that the engine sent, which it does with every output."""
        return self._inbox.stats

    async def add(self, request: AddRequest) -> None:
        self._link.send(request)

    async def abort(self, request_ids: Iterable[str]) -> None:
        self._link.send(Abort(list(request_ids)))

    async def call(self, method: str, *args: Any) -> Any:
        call_id = next(self._call_ids)
        self._link.send(Call(call_id, method, list(args)))
        reply = self._inbox.expect(call_id)
        try:
            return _result_of(await reply)
        finally:
            self._inbox.replies.pop(call_id, None)

    async def get_outputs(self) -> EngineOutputs:
        """The next message that carries outputs. One caller at a time."""
        return await self._inbox.get()

    async def wait_dead(self) -> EngineDeadError:
        """Returns once the engine is gone, however it went."""
        await self._inbox.closed.wait()
        return self._link.death or EngineDeadError("the engine is gone")

    def kill(self) -> None:
        self._link.process.kill()

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Idempotent. Outputs go on arriving during the drain."""
        if self._abandon.detach() is not None and self._link.death is None:
            self._link.ask_to_end(drain_s)
            try:
                async with asyncio.timeout(drain_s + SHUTDOWN_GRACE_S):
                    await self._inbox.closed.wait()
            except TimeoutError:
                self._link.process.kill()
            except BaseException:  # who waits no longer must not leave an engine that drains on
                self._link.process.kill()
                raise
        await self._inbox.closed.wait()


def _result_of(reply: CallReply) -> Any:
    if reply.error is not None:
        raise EngineError(reply.error)
    return reply.result
