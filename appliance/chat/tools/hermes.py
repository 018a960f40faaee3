"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block a call."""

from __future__ import annotations

from collections.abc import Mapping

from inferd.appliance.chat.reader import Steps
from inferd.appliance.chat.script import Script
from inferd.appliance.chat.tools.format import CallForm, Tool, ToolFormat
from inferd.appliance.chat.tools.json_call import close_objects, json_calls

BEGIN, END = "<tool_call>", "</tool_call>"
FORM = CallForm(begin=BEGIN + '\n{"name": {name}, "arguments": ', end="}\n" + END, separator="\n", trigger=BEGIN)


class HermesParser(Script):
    def _run(self) -> Steps[None]:
        while (yield from self.reader.text_until((BEGIN,), self.found.text)) is not None:
            self.reader.record(BEGIN)
            yield from self.attempt(tagged_json(self), (END,))


def tagged_json(script: Script) -> Steps[None]:
    """What stands behind `<tool_call>`, up to the end of the block. Raises as `json_call` does."""
    reader = script.reader
    yield from json_calls(script)
    while True:
        yield from close_objects(reader)
        if (yield from reader.peek()) != "{":
            break
        reader.record()
        yield from json_calls(script)
    yield from reader.skip(END)


def _make(tools: Mapping[str, Tool]) -> HermesParser:
    return HermesParser()


HERMES = ToolFormat("hermes", _make, signatures=(("<tool_call>",),), form=FORM, markers=(BEGIN, END))
