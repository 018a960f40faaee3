"""Mistral: `[TOOL_CALLS]` and a list of calls in JSON, or before each call, `[TOOL_CALLS]name[ARGS]{...}`.

The later form may have `[CALL_ID]` and an id behind the name. Templates want ids of nine letters and digits.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from inferd.appliance.chat.reader import Ended, NotACall, Steps
from inferd.appliance.chat.script import LETTERS_AND_DIGITS, Script
from inferd.appliance.chat.tools.format import CallForm, Tool, ToolFormat
from inferd.appliance.chat.tools.json_call import json_calls
from inferd.appliance.chat.tools.json_text import MAX_NAME_CHARS, arguments

BEGIN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_CHARS = 9
FORM = CallForm(
    prefix=BEGIN + "[", begin='{"name": {name}, "arguments": ', end="}", separator=", ", suffix="]", trigger=None
)
_NAME = re.compile(r"[A-Za-z0-9_.\-]*")


def make_id() -> str:
    return "".join(secrets.choice(LETTERS_AND_DIGITS) for _ in range(ID_CHARS))


class MistralParser(Script):
    def __init__(self) -> None:
        super().__init__(make_id)

    def _run(self) -> Steps[None]:
        while (yield from self.reader.text_until((BEGIN,), self.found.text)) is not None:
            self.reader.record(BEGIN)
            yield from self.attempt(self._calls(), ())

    def _calls(self) -> Steps[None]:
        reader = self.reader
        yield from reader.skip_space()
        if (yield from reader.next_is(("[{", "[ ", "[\n", "{"))) is not None:
            yield from json_calls(self)
            return
        name = yield from reader.take_while(_NAME, MAX_NAME_CHARS)
        if not name:
            raise NotACall if (yield from reader.peek()) else Ended
        call_id: str | None = None
        yield from reader.skip_space()
        if (yield from reader.skip(ID)) is not None:
            yield from reader.skip_space()
            call_id = yield from reader.take_while(_NAME, MAX_NAME_CHARS)
            yield from reader.skip_space()
        if (yield from reader.skip(ARGS)) is not None:
            yield from reader.skip_space()
        if (following := (yield from reader.peek())) != "{":
            raise NotACall if following else Ended
        self.begin(name, call_id)
        yield from arguments(reader, self.found.arguments)
        self.found.end()


def _make(tools: Mapping[str, Tool]) -> MistralParser:
    return MistralParser()


MISTRAL = ToolFormat(
    "mistral",
    _make,
    signatures=((BEGIN,),),
    form=FORM,
    markers=(BEGIN, ID, ARGS),
    make_id=make_id,
    id_pattern=re.compile(rf"[A-Za-z0-9]{{{ID_CHARS}}}"),
)
