"""Text that is read while it comes: the parsers are written as if all of it were there.

A parser is a generator that yields whenever it needs more text. What it decides depends on the text alone and never on
how it was cut, because every step here waits until it is sure. Each character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]  # each yield waits for more text
Emit: TypeAlias = Callable[[str], None]

SPACE = re.compile(r"[ \t\r\n]*")


class NotACall(Exception):
    """What began like a tool call is none."""


class Ended(NotACall):
    """The output ended in the middle of something."""


class Reader:
    """The text of one output and how far it has been read.

    `num_steps` counts the characters looked at: tests hold it to be in proportion to the text.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._text = ""
        self._at = 0
        self._is_closed = False
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        self.num_steps += len(self._text) - self._at
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """No more text comes."""
        self._is_closed = True

    def record(self, begun: str = "") -> None:
        """From here on, keep what is read, so that it can be given back as text; `begun` stands before it."""
        self._record = [begun]

    def recorded(self) -> str:
        """What was read since `record`, unless it was forgotten; recording ends."""
        record, self._record = self._record, None
        return "".join(record or ())

    def forget(self) -> None:
        self._record = None

    def peek(self) -> Steps[str]:
        """The next character, unread; empty at the end."""
        while self._at == len(self._text):
            if self._is_closed:
                return ""
            yield
        return self._text[self._at]

    def take(self, num_chars: int = 1) -> Steps[str]:
        """Raises `Ended`."""
        while len(self._text) - self._at < num_chars:
            if self._is_closed:
                self._consume(len(self._text))
                raise Ended
            yield
        return self._consume(self._at + num_chars)

    def pass_while(self, pattern: re.Pattern[str], emit: Emit) -> Steps[None]:
        """Passes on what is matched by `pattern`, which is a repeated class of characters."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            self.num_steps += 1
            if match.end() > self._at:
                emit(self._consume(match.end()))
            if self._at < len(self._text) or self._is_closed:
                return
            yield

    def take_while(self, pattern: re.Pattern[str], max_chars: int) -> Steps[str]:
        """As `pass_while`, at once. Raises `NotACall` for more than `max_chars`."""
        pieces: list[str] = []
        num_chars = 0

        def keep(piece: str) -> None:
            nonlocal num_chars
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_chars:
                raise NotACall

        yield from self.pass_while(pattern, keep)
        return "".join(pieces)

    def skip_space(self) -> Steps[None]:
        yield from self.pass_while(SPACE, _drop)

    def next_is(self, literals: Sequence[str]) -> Steps[str | None]:
        """Which of them comes next, unread."""
        longest = max(map(len, literals))
        while True:
            rest = self._text[self._at : self._at + longest]
            self.num_steps += len(rest) + 1
            found = next((literal for literal in literals if rest.startswith(literal)), None)
            if found is not None:
                return found
            if self._is_closed or not any(literal.startswith(rest) for literal in literals):
                return None
            yield

    def skip(self, *literals: str) -> Steps[str | None]:
        """Reads over the one of them that comes next, if any does."""
        found = yield from self.next_is(literals)
        if found is not None:
            self._consume(self._at + len(found))
        return found

    def expect(self, *literals: str) -> Steps[str]:
        """Raises `NotACall`, or `Ended` when the output ends first."""
        found = yield from self.skip(*literals)
        if found is not None:
            return found
        rest = self._text[self._at :]
        if self._is_closed and any(literal.startswith(rest) for literal in literals):
            self._consume(len(self._text))
            raise Ended
        raise NotACall

    def text_until(self, markers: Sequence[str], emit: Emit) -> Steps[str | None]:
        """Passes text on until one of `markers`, which is read and returned; None at the end of the output."""
        pattern = _any_of(tuple(markers))
        longest = max(map(len, markers))
        while True:
            self.num_steps += len(self._text) - self._at
            match = pattern.search(self._text, self._at)
            held = 0 if match is not None or self._is_closed else self._num_held(markers, longest)
            end = match.start() if match is not None else len(self._text) - held
            if end > self._at:
                emit(self._consume(end))
            if match is not None:
                self._consume(match.end())
                return match.group()
            if self._is_closed:
                return None
            yield

    def pass_rest(self, emit: Emit) -> Steps[None]:
        """Passes all text on, to the end of the output."""
        while True:
            if self._at < len(self._text):
                emit(self._consume(len(self._text)))
            if self._is_closed:
                return
            yield

    def read_until(self, markers: Sequence[str], max_chars: int) -> Steps[tuple[str, str]]:
        """The text before one of `markers`, and that marker. Raises `Ended`, and `NotACall` when it is too long."""
        pieces: list[str] = []
        num_chars = 0

        def keep(piece: str) -> None:
            nonlocal num_chars
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_chars:
                raise NotACall

        found = yield from self.text_until(markers, keep)
        if found is None:
            raise Ended
        return "".join(pieces), found

    def _consume(self, end: int) -> str:
        piece = self._text[self._at : end]
        self.num_steps += len(piece)
        self._at = end
        if self._record is not None:
            self._record.append(piece)
        return piece

    def _num_held(self, markers: Sequence[str], longest: int) -> int:
        """Characters at the end that may be the beginning of a marker."""
        for length in range(min(longest - 1, len(self._text) - self._at), 0, -1):
            end = self._text[-length:]
            if any(len(marker) > length and marker.startswith(end) for marker in markers):
                return length
        return 0


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """The longest of those that begin at the same place."""
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)))


def _drop(piece: str) -> None:
    """Nobody needs it."""
