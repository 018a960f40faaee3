"""The engine process: a socket thread on either side of one loop that steps the core."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import zmq

from inferd.engine.core.heartbeat import Heartbeat
from inferd.engine.core.link import bind, make_socket
from inferd.engine.core.step import EngineCore
from inferd.engine.errors import EngineError, InvalidRequest, RequestFailed
from inferd.engine.messages import (
    ENGINE_DEAD,
    Abort,
    AddRequest,
    Call,
    CallReply,
    EngineHello,
    EngineOutput,
    EngineOutputs,
    EngineReady,
    FinishReason,
    Shutdown,
    ToEngine,
)
from inferd.engine.request import Request

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
HELD_S = 0.001  # until requests are looked at again when all of them wait for something that is not ours
LONGEST_CALL_S = 600.0  # a control call that takes longer hangs, and the engine falls silent
LAST_WORDS_S = 5.0  # how long an ending engine tries to hand over what it still has to say


class OutputChannel:
    """Sends on a thread of its own, so that any thread may put. Connects at once."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._context = context
        self._path = path
        self._thread = threading.Thread(target=self._send_all, name="engine-output", daemon=True)
        self._thread.start()

    def put(self, message: EngineOutputs | EngineHello | bytes) -> None:
        """Bytes go out as they are. What cannot be encoded raises here, where it is noticed."""
        self._queue.put(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def close(self) -> None:
        """Sends what is queued, then ends the thread."""
        self._queue.put(None)
        self._thread.join(LAST_WORDS_S)

    def _send_all(self) -> None:
        with make_socket(self._context, zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, int(LAST_WORDS_S * 1000))
            socket.connect(f"ipc://{self._path}")
            while (frame := self._queue.get()) is not None:
                socket.send(frame)


@dataclass(frozen=True)
class _Added:
    request: Request


@dataclass(frozen=True)
class _Aborted:
    """`number` counts aborts in the order of their arrival."""

    number: int
    request_ids: list[str]


@dataclass(frozen=True)
class _Wake:
    """Makes an idle loop look at its flags."""


@dataclass(frozen=True)
class _ExecutorFailed:
    """Ends an engine that is idle too."""

    error: Exception


class EngineCoreProc:
    """Runs one `EngineCore` until it is told to stop. Constructed, it can be sent to; `run` blocks the main thread.

    Requests are decoded, checked and hashed in the input thread. Whatever is wrong with one of them ends that request;
    a frame that cannot be read is logged and passed over.
    """

    def __init__(
        self,
        core: EngineCore,
        context: zmq.Context[zmq.Socket[bytes]],
        input_socket: Path,
        output: OutputChannel,
        *,
        step_timeout_s: float = 300.0,
    ) -> None:
        """A step that takes longer than `step_timeout_s` hangs: the engine falls silent."""
        self._core = core
        self._step_timeout_s = step_timeout_s
        self._heartbeat = Heartbeat(lambda: output.put(EngineOutputs()), HEARTBEAT_S)
        self._output = output
        self._input = make_socket(context, zmq.PULL)  # from here on the input thread's
        bind(self._input, input_socket)
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._ordered: queue.SimpleQueue[_Added | _Aborted | Call | Shutdown | _Wake | _ExecutorFailed] = (
            queue.SimpleQueue()
        )
        self._eager_aborts: queue.SimpleQueue[_Aborted] = queue.SimpleQueue()
        self._num_aborts_read = 0  # the input thread's
        self._num_aborts_done = 0  # in their order
        self._handlers: dict[type, Any] = {
            _Added: self._add,
            _Aborted: self._abort,
            Call: self._call,
            Shutdown: self._begin_shutdown,
            _Wake: lambda _: None,
            _ExecutorFailed: self._fail,
        }
        core.on_failure(lambda error: self._ordered.put(_ExecutorFailed(error)))
        self._terminated = False
        self._stop_at_s: float | None = None  # monotonic; None while in service
        self._last_sent_s = 0.0

    def run(self, ready: EngineReady) -> int:
        """Says hello, serves, and returns the exit code of the process."""
        threading.Thread(target=self._read_input, name="engine-input", daemon=True).start()
        gc.collect()
        gc.freeze()  # what start-up left is never garbage, and walking it would be a pause in every stream
        try:
            with self._terminate_on_signal():
                self._output.put(ready)
                self._heartbeat.start()
                self._loop()
        except Exception:
            logger.critical("the engine failed and ends; %s", self._core.stats(), exc_info=True)
            self._output.put(ENGINE_DEAD)
            return 1
        return 0

    def _loop(self) -> None:
        while not self._has_stopped():
            self._take_messages()
            if self._core.has_work:
                with self._heartbeat.busy("a step", self._step_timeout_s):
                    outputs = self._core.step(self._drain_aborts)
                self._send(outputs)

    def _has_stopped(self) -> bool:
        if self._terminated and self._stop_at_s is None:
            self._begin_shutdown(Shutdown(0.0))
        if self._stop_at_s is None:
            return False
        has_nothing_to_do = not self._core.has_work and self._ordered.empty()
        if not has_nothing_to_do and time.monotonic() < self._stop_at_s:
            return False
        self._send(EngineOutputs(self._core.abort_all(), self._core.stats()))  # a paused engine has some left too
        return True

    def _take_messages(self) -> None:
        """All that wait; an idle engine blocks for one, and looks up from time to time for what it has to tell."""
        has_work = self._core.has_work
        due_in_s = self._core.insight.due_in_s
        idle_s = HEARTBEAT_S if due_in_s is None else min(due_in_s, HEARTBEAT_S)
        try:
            message = self._ordered.get(
                block=not has_work or self._core.is_held, timeout=HELD_S if has_work else idle_s
            )
        except queue.Empty:
            self._send(EngineOutputs(feed=self._core.insight.take_update()))
            return
        while True:
            self._handlers[type(message)](message)
            try:
                message = self._ordered.get_nowait()
            except queue.Empty:
                return

    def _send(self, outputs: EngineOutputs) -> None:
        """An empty message goes out only as a heartbeat."""
        now_s = time.monotonic()
        has_content = outputs.outputs or outputs.reply or outputs.kv_events or outputs.feed
        if has_content or now_s - self._last_sent_s >= HEARTBEAT_S:
            self._output.put(outputs)
            self._last_sent_s = now_s

    def _add(self, message: _Added) -> None:
        request = message.request
        if self._stop_at_s is not None:
            self._send(EngineOutputs([EngineOutput(request.request_id, [], FinishReason.ABORT)]))
            return
        try:
            self._core.add_request(request)
        except EngineError as error:
            self._refuse(request.request_id, error)

    def _abort(self, message: _Aborted) -> None:
        self._num_aborts_done = message.number
        self._send(EngineOutputs(self._core.abort(message.request_ids), self._core.stats()))

    def _call(self, message: Call) -> None:
        if self._stop_at_s is None:
            with self._heartbeat.busy(message.method, LONGEST_CALL_S):
                reply = self._core.call(message)
        else:
            reply = CallReply(message.call_id, error="the engine is shutting down")
        if reply is not None:
            feed = self._core.insight.take_update()
            self._send(EngineOutputs(reply=reply, kv_events=self._core.take_kv_events(), feed=feed))

    def _fail(self, message: _ExecutorFailed) -> None:
        raise message.error

    def _begin_shutdown(self, message: Shutdown) -> None:
        self._stop_at_s = time.monotonic() + message.drain_s

    def _drain_aborts(self) -> Iterator[str]:
        """Of aborts that came during this step. Earlier ones are done, and must not meet requests that came later."""
        while True:
            try:
                message = self._eager_aborts.get_nowait()
            except queue.Empty:
                return
            if message.number > self._num_aborts_done:
                yield from message.request_ids

    def _refuse(self, request_id: str, error: Exception) -> None:
        param = error.param if isinstance(error, InvalidRequest) else None
        refused = EngineOutput(request_id, [], FinishReason.ERROR, error=str(error), error_param=param)
        self._output.put(EngineOutputs([refused]))

    # The input thread.

    def _read_input(self) -> None:
        with self._input:
            while True:
                try:
                    frames = self._input.recv_multipart()
                except zmq.ContextTerminated:
                    return
                try:
                    self._accept(frames)
                except Exception:  # a thread that ended here would leave a deaf engine
                    logger.exception("a message of %d bytes is passed over", sum(map(len, frames)))

    def _accept(self, frames: list[bytes]) -> None:
        try:
            message = self._decoder.decode(b"".join(frames))
        except (msgspec.DecodeError, ValueError) as error:
            self._reject_frame(frames[0], error)
            return
        if isinstance(message, AddRequest):
            self._accept_request(message)
            return
        if isinstance(message, Abort):
            self._num_aborts_read += 1
            aborted = _Aborted(self._num_aborts_read, message.request_ids)
            self._eager_aborts.put(aborted)  # for the step that runs now; the ordered one is for the rest
            self._ordered.put(aborted)
            return
        self._ordered.put(message)

    def _accept_request(self, add: AddRequest) -> None:
        try:
            self._ordered.put(_Added(self._core.make_request(add)))
        except EngineError as error:
            self._refuse(add.request_id, error)
        except Exception as error:
            logger.exception("request %s could not be taken in", add.request_id)
            self._refuse(add.request_id, RequestFailed(f"it could not be taken in: {type(error).__name__}: {error}"))

    def _reject_frame(self, frame: bytes, error: Exception) -> None:
        """Ends the request that the frame wanted to add, if it can still be seen which that was."""
        logger.error("a message of %d bytes cannot be read and is passed over: %s", len(frame), error)
        try:
            fields = msgspec.msgpack.decode(frame)
        except (msgspec.DecodeError, ValueError):
            return
        if isinstance(fields, list) and len(fields) > 1 and fields[0] == "add" and isinstance(fields[1], str):
            self._refuse(fields[1], error)

    @contextmanager
    def _terminate_on_signal(self) -> Iterator[None]:
        """SIGTERM sets a flag; a helper thread wakes the loop, since a handler must not touch a queue."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        old_wakeup = signal.set_wakeup_fd(write_fd)
        old_handler = signal.signal(signal.SIGTERM, self._note_termination)
        threading.Thread(target=self._wake_at, args=(read_fd,), name="engine-signals", daemon=True).start()
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, old_handler)
            signal.set_wakeup_fd(old_wakeup)
            os.close(write_fd)

    def _note_termination(self, _signal: int, _frame: FrameType | None) -> None:
        self._terminated = True

    def _wake_at(self, read_fd: int) -> None:
        while os.read(read_fd, 1):
            self._ordered.put(_Wake())
        os.close(read_fd)
