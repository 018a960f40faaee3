"""One engine process and the two sockets to it: what the synchronous and the asynchronous client share."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from pathlib import Path

import msgspec
import zmq

from inferd.engine.config import EngineArgs
from inferd.engine.core.launch import EnginePaths, EngineProcess, OnLine
from inferd.engine.errors import ConfigError, EngineDeadError, EngineError, LoadError, NotSupported
from inferd.engine.messages import (
    ENGINE_DEAD,
    EngineHello,
    EngineOutputs,
    EngineReady,
    EngineStartFailed,
    Shutdown,
    ToEngine,
)

logger = logging.getLogger(__name__)

START_ERRORS: dict[str, type[EngineError]] = {kind.code: kind for kind in (ConfigError, LoadError, NotSupported)}
DYING_S = 0.5  # an engine that said its last word is given this long to end, so that its exit code can be told
IN_FLIGHT_MS = 100  # what an engine sent before it ended may still be on its way through the socket's own thread


class EngineLink:
    """Binds the output socket, then spawns the engine; an engine that is ready has bound its input.

    One thread may send while another one receives. Raises `ConfigError` for a run directory that cannot hold sockets.
    """

    def __init__(self, args: EngineArgs, run_dir: Path, on_line: OnLine | None = None) -> None:
        paths = EnginePaths.make(run_dir)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineOutputs)
        self._death: str | None = None
        self._closed = False
        self._sending = threading.Lock()
        try:
            self._input = make_socket(self._context, zmq.PUSH)
            self._output = make_socket(self._context, zmq.PULL)
            bind(self._output, paths.output_socket)
            self.process = EngineProcess(args, paths, on_line)
        except BaseException:
            self._context.destroy(linger=0)
            paths.remove()
            raise

    @property
    def death(self) -> EngineDeadError | None:
        return None if self._death is None else EngineDeadError(self._death)

    def check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def send(self, message: ToEngine) -> None:
        """Never blocks. Raises `EngineDeadError`."""
        frame = self._encoder.encode(message)
        with self._sending:  # another thread may close the socket
            self.check_alive()
            self._input.send(frame, zmq.DONTWAIT)

    def ask_to_end(self, drain_s: float) -> None:
        """Of no effect on an engine that is gone already."""
        with contextlib.suppress(EngineDeadError):
            self.send(Shutdown(drain_s))

    def wait_ready(self, timeout_s: float) -> EngineReady:
        """Raises what kept the engine from starting: `ConfigError`, `LoadError`, `EngineDeadError`."""
        frames = self._receive_frames(timeout_s)
        if frames is None:
            raise self.mark_dead(f"it was not ready after {timeout_s:g} s")
        try:
            hello = msgspec.msgpack.decode(b"".join(frames), type=EngineHello)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise self.mark_dead(f"its first message cannot be read: {error}") from error
        if isinstance(hello, EngineStartFailed):
            logger.debug("%s", hello.detail)
            kind = START_ERRORS.get(hello.code)
            raise kind(hello.message) if kind else EngineError(f"the engine could not start: {hello.message}")
        self._input.connect(f"ipc://{self.process.paths.input_socket}")
        return hello

    def receive(self, timeout_s: float | None) -> EngineOutputs | None:
        """None when time ran out, and for a message that cannot be read. Raises `EngineDeadError`."""
        frames = self._receive_frames(timeout_s)
        if frames is None:
            return None
        try:
            return self._decoder.decode(b"".join(frames))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            logger.error("a message of the engine cannot be read and is passed over: %s", error)
            return None

    def close(self) -> None:
        """Idempotent; ends the process if it still runs. Blocks for seconds at most."""
        if self._closed:
            return
        self._closed = True
        with self._sending:
            self._death = self._death or "the engine was shut down"
        self.process.close()
        self._context.destroy(linger=0)

    def _receive_frames(self, timeout_s: float | None) -> list[bytes] | None:
        self.check_alive()
        poller = zmq.Poller()
        poller.register(self._output, zmq.POLLIN)
        poller.register(self.process.exit_fd, zmq.POLLIN)
        events = dict(poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        if self._output in events or (events and self._output.poll(IN_FLIGHT_MS)):
            return self._receive_now()
        if events:
            raise self.mark_dead("it ended")
        return None

    def _receive_now(self) -> list[bytes]:
        frames = self._output.recv_multipart()
        if frames == [ENGINE_DEAD]:
            self.process.wait(DYING_S)
            raise self.mark_dead("it met a fatal error")
        return frames

    def mark_dead(self, how: str) -> EngineDeadError:
        """From now on every use raises this. The first cause stays."""
        if self._death is None:
            self._death = f"the engine is gone: {how}; {self.process.describe_exit()}"
        return EngineDeadError(self._death)


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Queues without a limit: neither side may ever wait for the other one to read."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def bind(socket: zmq.Socket[bytes], path: Path) -> None:
    socket.bind(f"ipc://{path}")
    path.chmod(0o600)
