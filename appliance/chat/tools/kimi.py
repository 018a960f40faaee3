"""Kimi K2: a section of calls, each `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}`.

What stands before the arguments is also the call's id, which the model wants to see again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from inferd.appliance.chat.reader import NotACall, Steps
from inferd.appliance.chat.script import Script
from inferd.appliance.chat.tools.format import CallForm, Tool, ToolFormat
from inferd.appliance.chat.tools.json_text import MAX_NAME_CHARS, arguments

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
FORM = CallForm(
    prefix=BEGIN,
    begin=CALL + "functions.{plain_name}:0" + ARGUMENTS,
    end=CALL_END,
    separator="\n",
    suffix=END,
    trigger=None,
)
_ID = re.compile(r"(?:functions\.)?([A-Za-z0-9_.\-]{1,128})(:\d{1,9})?")


class KimiParser(Script):
    def __init__(self) -> None:
        self._ids: set[str] = set()
        super().__init__()

    def _run(self) -> Steps[None]:
        reader = self.reader
        while (marker := (yield from reader.text_until((BEGIN, CALL), self.found.text))) is not None:
            reader.record(marker)
            yield from self.attempt(self._calls() if marker == BEGIN else self._call(), (CALL_END,))

    def _calls(self) -> Steps[None]:
        yield from self.reader.skip_space()
        yield from self.reader.expect(CALL)
        yield from self._call()

    def _call(self) -> Steps[None]:
        reader = self.reader
        written, _ = yield from reader.read_until((ARGUMENTS,), MAX_NAME_CHARS)
        match = _ID.fullmatch(written.strip())
        if match is None:
            raise NotACall
        self.begin(match[1], self._unused(match[0]) if match[2] else None)
        yield from reader.skip_space()
        if (yield from reader.next_is((CALL_END,))) is None:
            yield from arguments(reader, self.found.arguments)
        self.found.end()
        yield from reader.skip_space()
        yield from reader.skip(CALL_END)
        yield from reader.skip_space()
        yield from reader.skip(END)

    def _unused(self, call_id: str) -> str:
        """Models count wrong: the same id twice would make one call of two."""
        body, number = call_id.rsplit(":", 1)
        count = int(number)
        while call_id in self._ids:
            count += 1
            call_id = f"{body}:{count}"
        self._ids.add(call_id)
        return call_id


def _make(tools: Mapping[str, Tool]) -> KimiParser:
    return KimiParser()


KIMI = ToolFormat("kimi_k2", _make, signatures=((BEGIN,),), form=FORM, markers=(BEGIN, END, CALL, CALL_END, ARGUMENTS))
