"""Llama 3.2 and 4, pythonic: the whole answer is `[name(argument="value", ...), ...]`.

Llama 4 may put `<|python_start|>` and `<|python_end|>` around it. The first name must be a tool of the request, because
answers that are lists begin alike. The form that Llama writes as JSON is read too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from inferd.appliance.chat.reader import Ended, NotACall, Steps
from inferd.appliance.chat.script import Script
from inferd.appliance.chat.tools import llama_json
from inferd.appliance.chat.tools.format import Tool, ToolFormat
from inferd.appliance.chat.tools.json_call import json_calls
from inferd.appliance.chat.tools.json_text import MAX_NAME_CHARS, quoted
from inferd.appliance.chat.tools.python_text import python_literal

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_KEY = re.compile(r"\w*")


class PythonicParser(Script):
    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._known = frozenset(tools)
        super().__init__()

    def _run(self) -> Steps[None]:
        reader = self.reader
        reader.record()
        yield from reader.skip_space()
        if (yield from reader.next_is(("[", "{", START))) is not None:
            yield from self.attempt(self._answer(), ())
        else:
            self.found.text(reader.recorded())
        while (marker := (yield from reader.text_until((START, END), self.found.text))) is not None:
            if marker == START:
                reader.record(START)
                yield from self.attempt(self._answer(), ())

    def _answer(self) -> Steps[None]:
        reader = self.reader
        yield from reader.skip(START)
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from json_calls(self, self._known)
            yield from reader.skip_space()
            while (yield from reader.skip(";")) is not None:
                yield from reader.skip_space()
                reader.record()
                yield from json_calls(self, self._known)
            return
        yield from reader.expect("[")
        while True:
            yield from reader.skip_space()
            yield from self._call()
            yield from reader.skip_space()
            if (yield from reader.skip(",")) is None:
                break
            reader.record()
        yield from reader.skip("]")

    def _call(self) -> Steps[None]:
        reader = self.reader
        name = yield from reader.take_while(_NAME, MAX_NAME_CHARS)
        if not (yield from reader.peek()):
            raise Ended
        if name not in self._known:
            raise NotACall
        yield from reader.expect("(")
        self.begin(name)
        num_arguments = 0
        while True:
            yield from reader.skip_space()
            if (yield from reader.skip(")")) is not None:
                break
            self.found.arguments("{" if not num_arguments else ", ")
            num_arguments += 1
            yield from self._argument()
            yield from reader.skip_space()
            if (yield from reader.expect(",", ")")) == ")":
                break
        if num_arguments:
            self.found.arguments("}")
        self.found.end()

    def _argument(self) -> Steps[None]:
        reader = self.reader
        key = yield from reader.take_while(_KEY, MAX_NAME_CHARS)
        yield from reader.skip_space()
        yield from reader.expect("=")
        yield from reader.skip_space()
        self.found.arguments(quoted(key) + ": ")
        yield from python_literal(reader, self.found.arguments)


PYTHONIC = ToolFormat(
    "pythonic",
    PythonicParser,
    signatures=((START,), ("func_name1(params_name1=params_value1",)),
    form=llama_json.FORM,
    markers=(START, END),
)
