"""Python literals inside a model's output, told as JSON while they come. Nothing is ever evaluated."""

from __future__ import annotations

import re

from inferd.appliance.chat.reader import Emit, NotACall, Reader, Steps
from inferd.appliance.chat.tools.json_text import quoted, string_body

MAX_DEPTH = 64
MAX_WORD_CHARS = 256
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD = re.compile(r"[0-9A-Za-z_.+\-]*")
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_PLAIN = {"'": re.compile(r"[^'\\\n]*"), '"': re.compile(r'[^"\\\n]*')}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {
    "'": "'", '"': '"', "\\": "\\", "\n": "",
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0",
}  # fmt: skip


def python_literal(reader: Reader, emit: Emit, depth: int = 0) -> Steps[None]:
    """One string, number, True, False, None, list, tuple or dict with strings for keys.

    Raises `NotACall` for anything else, `Ended` when the output ends.
    """
    if depth > MAX_DEPTH:
        raise NotACall
    char = yield from reader.peek()
    if char and char in "'\"":
        emit('"')
        yield from _string(reader, lambda text: emit(string_body(text)))
        emit('"')
    elif char and char in "[(":
        yield from reader.take()
        emit("[")
        yield from _items(reader, emit, "]" if char == "[" else ")", depth, is_dict=False)
        emit("]")
    elif char == "{":
        yield from reader.take()
        emit("{")
        yield from _items(reader, emit, "}", depth, is_dict=True)
        emit("}")
    else:
        emit((yield from _word(reader)))


def _items(reader: Reader, emit: Emit, closer: str, depth: int, *, is_dict: bool) -> Steps[None]:
    is_first = True
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip(closer)) is not None:
            return
        if not is_first:
            emit(", ")
        is_first = False
        if is_dict:
            yield from _key(reader, emit)
        yield from python_literal(reader, emit, depth + 1)
        yield from reader.skip_space()
        if (yield from reader.expect(",", closer)) == closer:
            return


def _key(reader: Reader, emit: Emit) -> Steps[None]:
    pieces: list[str] = []
    if (yield from reader.next_is(("'", '"'))) is None:
        raise NotACall
    yield from _string(reader, pieces.append)
    emit(quoted("".join(pieces)) + ": ")
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()


def _string(reader: Reader, emit: Emit) -> Steps[None]:
    quote = yield from reader.take()
    while True:
        yield from reader.pass_while(_PLAIN[quote], emit)
        char = yield from reader.take()
        if char == quote:
            return
        emit(char if char == "\n" else (yield from _escaped(reader)))  # models break lines inside of strings


def _escaped(reader: Reader) -> Steps[str]:
    """An escape that Python does not know stands for itself."""
    kind = yield from reader.take()
    if kind not in _HEX_LENGTHS:
        return _ESCAPES.get(kind, "\\" + kind)
    digits = yield from reader.take(_HEX_LENGTHS[kind])
    if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        raise NotACall
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise NotACall
    return chr(code)


def _word(reader: Reader) -> Steps[str]:
    word = yield from reader.take_while(_WORD, MAX_WORD_CHARS)
    if not word:
        yield from reader.take()  # raises when the output ends here
        raise NotACall
    if word in WORDS:
        return WORDS[word]
    if _INTEGER.fullmatch(word):
        return word.removeprefix("+")
    if _NUMBER.fullmatch(word) and any(digit.isdigit() for digit in word):
        value = float(word)
        if value in (float("inf"), float("-inf")):
            raise NotACall
        return repr(value)
    raise NotACall
