"""What parsers of a model's output have in common: a generator that reads, and a sink that says what it found."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence

from inferd.appliance.chat.events import (
    AnswerEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    joined,
)
from inferd.appliance.chat.reader import Ended, NotACall, Reader, Steps

LETTERS_AND_DIGITS = string.ascii_letters + string.digits
WHITESPACE = " \t\r\n"


def new_call_id() -> str:
    return "call_" + "".join(secrets.choice(LETTERS_AND_DIGITS) for _ in range(24))


class Found:
    """What has been found in one output, in order. Blanks beside calls belong to nothing and are left out."""

    def __init__(self, make_id: Callable[[], str] = new_call_id) -> None:
        self._make_id = make_id
        self._events: list[AnswerEvent] = []
        self._blanks: list[str] = []
        self._num_calls = 0
        self._is_open = False
        self._has_arguments = False
        self._last_is_call = False

    @property
    def is_open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._is_open

    def text(self, piece: str) -> None:
        body = piece.rstrip(WHITESPACE)
        if self._last_is_call:
            body = body.lstrip(WHITESPACE)
            piece = piece.lstrip(WHITESPACE)
        if body:
            self._events.append(TextDelta("".join([*self._blanks, body])))
            self._blanks.clear()
            self._last_is_call = False
        if len(piece) > len(body):
            self._blanks.append(piece[len(body) :])

    def reasoning(self, piece: str) -> None:
        self._events.append(ReasoningDelta(piece))

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._blanks.clear()
        self._is_open, self._has_arguments, self._last_is_call = True, False, True
        self._events.append(ToolCallBegin(self._num_calls, call_id or self._make_id(), name))

    def arguments(self, piece: str) -> None:
        if piece:
            self._has_arguments = True
            self._events.append(ToolCallArguments(self._num_calls, piece))

    def end(self) -> None:
        """A call without arguments gets an empty object of them."""
        if not self._has_arguments:
            self.arguments("{}")
        self._events.append(ToolCallEnd(self._num_calls))
        self._num_calls += 1
        self._is_open = False

    def cut(self) -> None:
        """The output is over."""
        if self._blanks and not self._last_is_call:
            self._events.append(TextDelta("".join(self._blanks)))
        self._blanks.clear()

    def take(self) -> list[AnswerEvent]:
        """What is new since the last time."""
        events, self._events = self._events, []
        return joined(events)


class Script:
    """Implements `AnswerParser` over a generator, `_run`, that reads `self.reader` and tells `self.found`."""

    def __init__(self, make_id: Callable[[], str] = new_call_id) -> None:
        self.is_reasoning = False
        self.reader = Reader()
        self.found = Found(make_id)
        self._steps: Steps[None] | None = self._run()
        self._advance()

    def push(self, text: str) -> list[AnswerEvent]:
        self.reader.feed(text)
        self._advance()
        return self.found.take()

    def finish(self) -> list[AnswerEvent]:
        self.reader.close()
        self._advance()
        self.found.cut()
        return self.found.take()

    def _run(self) -> Steps[None]:
        """The whole output from its beginning to its end."""
        raise NotImplementedError

    def _advance(self) -> None:
        if self._steps is not None and next(self._steps, _OVER) is _OVER:
            self._steps = None

    def attempt(self, call: Steps[None], end_markers: Sequence[str]) -> Steps[None]:
        """Reads a call whose recording has begun; what turns out to be none is text.

        Where a call breaks off inside its arguments they are passed on as the model wrote them, until an end marker.
        """
        try:
            yield from call
        except NotACall as error:
            if not self.found.is_open:
                self.found.text(self.reader.recorded())
            elif not isinstance(error, Ended) and end_markers:
                if (yield from self.reader.text_until(end_markers, self.found.arguments)) is not None:
                    self.found.end()
            elif not isinstance(error, Ended):
                self.found.end()
        finally:
            self.reader.forget()

    def begin(self, name: str, call_id: str | None = None) -> None:
        """From here on it is a call for sure."""
        self.reader.forget()
        self.found.begin(name, call_id)


_OVER = object()
