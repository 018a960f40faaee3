"""A chat template rendered in a confined process: what it does wrong costs one request a second, and nobody else."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from inferd.appliance.chat.render_child import SIZE_BYTES, Render, Rendered, write_message
from inferd.appliance.chat.template import MAX_RENDER_S, TemplateRefused
from inferd.engine.errors import InvalidRequest

COMMAND = (sys.executable, "-P", "-m", "inferd.appliance.chat.render_child")
ANSWER_S = 10.0  # of the wall clock; the process stops itself after `MAX_RENDER_S` of the processor's time
MAX_ANSWER_BYTES = 32 << 20
READ_BYTES = 1 << 20


class ConfinedTemplate:
    """Safe to use from several threads, one of which renders at a time. The process starts when it is first needed."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def start(self) -> None:
        """Makes the first rendering as fast as the others."""
        with self._lock:
            self._running()

    def close(self) -> None:
        with self._lock:
            self._drop()

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Blocks for a millisecond, or until the template is stopped. Raises `TemplateRefused`, `InvalidRequest`."""
        try:
            request = msgspec.msgpack.encode(Render(messages, dict(variables)))
        except (
            OverflowError,
            UnicodeEncodeError,
        ):  # in a tool call's arguments, which clients send as JSON in a string
            text = "the messages hold a whole number of more than 64 bits, or half a surrogate pair"
            raise InvalidRequest(text, param="messages") from None
        with self._lock:
            answer = self._ask(request) or self._ask(request)  # a process that somebody else ended is no refusal
        if answer is None:
            raise TemplateRefused("the process that renders it ended")
        if answer.invalid_line is not None:
            text = f"The chat template of this model is not valid jinja (line {answer.invalid_line})"
            raise InvalidRequest(f"{text}; use /v1/completions", param="messages")
        if answer.text is None:
            raise TemplateRefused(answer.refused or "it has no answer")
        return answer.text

    def _ask(self, request: bytes) -> Rendered | None:
        """None when the process ended without having been stopped for this request."""
        child = self._running()
        assert child.stdin is not None
        try:
            write_message(child.stdin, request)
            data = _read_answer(child)
        except BrokenPipeError:
            data = None
        if data is not None:
            return msgspec.msgpack.decode(data, type=Rendered)
        status = child.poll()
        too_slow = status is None or child.wait() == -signal.SIGPROF
        self._drop()
        return Rendered(refused=f"it takes longer than {MAX_RENDER_S:g} s") if too_slow else None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._drop()
        child = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(), start_new_session=True
        )
        self._child, self._end = child, weakref.finalize(self, _end, child)
        assert child.stdin is not None
        write_message(child.stdin, msgspec.msgpack.encode(self._source))
        return child

    def _drop(self) -> None:
        if self._end is not None:
            self._end()
        self._child = self._end = None


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # of a request that it did not live to read
            stream.close()


def _read_answer(child: subprocess.Popen[bytes]) -> bytes | None:
    """One message; None when the process ends before it is complete, or takes too long, in which case it still runs."""
    assert child.stdout is not None
    deadline, received = time.monotonic() + ANSWER_S, bytearray()
    size_bytes = MAX_ANSWER_BYTES
    while len(received) < SIZE_BYTES + size_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([child.stdout], [], [], left_s)[0]:
            return None
        piece = os.read(child.stdout.fileno(), READ_BYTES)
        if not piece:
            child.wait()
            return None
        received += piece
        if len(received) >= SIZE_BYTES:
            size_bytes = min(int.from_bytes(received[:SIZE_BYTES], "big"), MAX_ANSWER_BYTES)
    return bytes(received[SIZE_BYTES:])


def _environment() -> dict[str, str]:
    """No secrets; the time zone, because templates may ask for the date."""
    kept = {name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if os.path.isabs(path)), **kept}
