"""JSON inside a model's output: where a value ends, and what the strings in it say, while it comes.

Values are passed on as they are written, so a client gets the model's own text. Only line breaks and other control
characters inside strings, which models write and JSON forbids, are escaped.
"""

from __future__ import annotations

import json
import re

from inferd.appliance.chat.reader import Emit, Ended, NotACall, Reader, Steps

MAX_NAME_CHARS = 256
MAX_DEPTH = 512
_PLAIN = re.compile(r"[\s,:0-9A-Za-z+.\-]*")  # between the brackets and strings of an object or list
_SCALAR = re.compile(r"[0-9A-Za-z+.\-]*")
_IN_STRING = re.compile(r'[^"\\]*')
_CONTROL = re.compile(r"[\x00-\x1f]")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def json_value(reader: Reader, emit: Emit) -> Steps[None]:
    """Passes one value on. Raises `NotACall` where it cannot go on as JSON, `Ended` when the output does."""
    closers: list[str] = []
    while True:
        yield from reader.pass_while(_PLAIN if closers else _SCALAR, emit)
        char = yield from reader.peek()
        if char == '"':
            yield from _string(reader, emit)
        elif char and char in "{[":
            closers.append("}" if char == "{" else "]")
            if len(closers) > MAX_DEPTH:
                raise NotACall
            emit((yield from reader.take()))
        elif char and closers and char == closers[-1]:
            closers.pop()
            emit((yield from reader.take()))
        elif not char and closers:
            raise Ended
        elif closers or not char:
            raise NotACall if closers else Ended
        if not closers:
            return


def json_string_text(reader: Reader, emit: Emit) -> Steps[None]:
    """Passes on what a string says. Raises as `json_value` does."""
    yield from reader.expect('"')
    high: str | None = None  # the first half of a surrogate pair
    while True:
        if high is None:
            yield from reader.pass_while(_IN_STRING, emit)
        char = yield from reader.take()
        if char == '"' and high is None:
            return
        if char != "\\":
            raise NotACall
        code = yield from _escaped(reader)
        if high is not None:
            if not "\udc00" <= code <= "\udfff":
                raise NotACall
            code, high = (high + code).encode("utf-16", "surrogatepass").decode("utf-16"), None
        if "\ud800" <= code <= "\udbff":
            high = code
        elif "\udc00" <= code <= "\udfff":
            raise NotACall
        else:
            emit(code)


def json_string(reader: Reader, max_chars: int = MAX_NAME_CHARS) -> Steps[str]:
    """A whole string, which must be short. Raises as `json_value` does."""
    pieces: list[str] = []
    num_chars = 0

    def keep(piece: str) -> None:
        nonlocal num_chars
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise NotACall

    yield from json_string_text(reader, keep)
    return "".join(pieces)


def arguments(reader: Reader, emit: Emit) -> Steps[None]:
    """Passes on the arguments of a call, which some models write as JSON in a string. Null stands for none.

    Raises as `json_value` does.
    """
    char = yield from reader.peek()
    if char == '"':
        yield from json_string_text(reader, emit)
    elif char == "n":
        yield from reader.expect("null")
    else:
        yield from json_value(reader, emit)


def quoted(text: str) -> str:
    """As a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def string_body(text: str) -> str:
    """As a part of a JSON string, without its quotes."""
    return quoted(text)[1:-1]


def _string(reader: Reader, emit: Emit) -> Steps[None]:
    emit((yield from reader.take()))
    while True:
        yield from reader.pass_while(_IN_STRING, lambda piece: emit(_CONTROL.sub(_escape, piece)))
        char = yield from reader.take()
        if char == "\\":
            char += yield from reader.take()
        emit(char)
        if char == '"':
            return


def _escape(match: re.Match[str]) -> str:
    return string_body(match.group())


def _escaped(reader: Reader) -> Steps[str]:
    """What stands behind a backslash, as one character."""
    kind = yield from reader.take()
    if kind != "u":
        if kind not in _ESCAPES:
            raise NotACall
        return _ESCAPES[kind]
    digits = yield from reader.take(4)
    if _HEX.fullmatch(digits) is None:
        raise NotACall
    return chr(int(digits, 16))
