"""A tool call written as a JSON object: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import re
from collections.abc import Collection

from inferd.appliance.chat.reader import Ended, NotACall, Reader, Steps
from inferd.appliance.chat.script import Script
from inferd.appliance.chat.tools.json_text import arguments, json_string, json_value

ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id", "function")  # that a call may have, and an answer in JSON seldom begins with
_CLOSING = re.compile(r"[\s}]*")


def json_call(script: Script, known: Collection[str] | None = None) -> Steps[None]:
    """Reads one call. Given the `known` tools, it must be one of those, and have no keys that calls do not have.

    A call is complete with its arguments: what is missing of the object around them is made up for.
    Raises `NotACall` when nothing of it has been told or the arguments break off, `Ended` when the output ends.
    """
    reader = script.reader
    early: list[str] = []  # arguments that came before the name
    has_name = has_arguments = False
    yield from reader.expect("{")
    while (key := (yield from _next_key(reader))) is not None:
        if key == "name" and not has_name:
            name = yield from json_string(reader)
            if not name or (known is not None and name not in known):
                raise NotACall
            has_name = True
            script.begin(name)
            script.found.arguments("".join(early))
        elif key in ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            yield from arguments(reader, script.found.arguments if has_name else early.append)
        elif known is not None and key not in OTHER_KEYS and not has_name:
            raise NotACall
        else:
            yield from json_value(reader, _drop)
        if not (yield from _goes_on(reader, is_complete=has_name and has_arguments)):
            break
    if not has_name:
        raise NotACall
    script.found.end()


def json_calls(script: Script, known: Collection[str] | None = None) -> Steps[None]:
    """One call, or a list of them. Raises as `json_call` does; what comes after the last is left unread."""
    reader = script.reader
    yield from reader.skip_space()
    is_list = (yield from reader.skip("[")) is not None
    yield from reader.skip_space()
    yield from json_call(script, known)
    while is_list:
        yield from reader.skip_space()
        if (yield from reader.skip(",")) is None:
            yield from reader.skip("]")
            return
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from json_call(script, known)


def close_objects(reader: Reader) -> Steps[None]:
    """Reads over brackets and blanks that are left of a call."""
    yield from reader.pass_while(_CLOSING, _drop)


def _next_key(reader: Reader) -> Steps[str | None]:
    """Up to its value; None at the end of the object."""
    yield from reader.skip_space()
    if (yield from reader.skip("}")) is not None:
        return None
    key = yield from json_string(reader)
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    return key


def _goes_on(reader: Reader, *, is_complete: bool) -> Steps[bool]:
    """Whether another key follows."""
    yield from reader.skip_space()
    found = yield from reader.skip(",", "}")
    if found is None and not is_complete:
        raise NotACall if (yield from reader.peek()) else Ended
    return found == ","


def _drop(piece: str) -> None:
    """Not a part of the call."""
