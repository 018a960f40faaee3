"""Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several of them with semicolons between.

`<|python_tag|>` may stand before it. Without that mark an answer in JSON looks alike, so only the tools of the request
count as calls there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from inferd.appliance.chat.reader import Steps
from inferd.appliance.chat.script import Script
from inferd.appliance.chat.tools.format import CallForm, Tool, ToolFormat
from inferd.appliance.chat.tools.json_call import close_objects, json_calls

TAG = "<|python_tag|>"
BEGINNING = '{"name": '
FORM = CallForm(begin=BEGINNING + '{name}, "parameters": ', end="}", separator="; ", trigger=BEGINNING)


class LlamaJsonParser(Script):
    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        super().__init__()

    def _run(self) -> Steps[None]:
        self.reader.record()
        yield from self.reader.skip_space()
        if (yield from self.reader.peek()) == "{":
            yield from self.attempt(self._calls(self._known), ())
        else:
            self.found.text(self.reader.recorded())
        while (yield from self.reader.text_until((TAG,), self.found.text)) is not None:
            self.reader.record(TAG)
            yield from self.attempt(self._calls(None), ())

    def _calls(self, known: Collection[str] | None) -> Steps[None]:
        """Calls with semicolons between, which are read over even where no call follows."""
        reader = self.reader
        yield from json_calls(self, known)
        while True:
            yield from close_objects(reader)
            if (yield from reader.skip(";", ",")) is not None:
                yield from reader.skip_space()
            if (yield from reader.peek()) != "{":
                return
            reader.record()
            yield from json_calls(self, known)


def _make(tools: Mapping[str, Tool]) -> LlamaJsonParser:
    return LlamaJsonParser(frozenset(tools))


LLAMA_JSON = ToolFormat(
    "llama3_json",
    _make,
    signatures=((TAG,), ("<|start_header_id|>", '"parameters"'), ("<|start_header_id|>", '\\"parameters\\"')),
    form=FORM,
    markers=(TAG,),
)
