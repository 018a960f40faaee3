"""DeepSeek V3 and R1: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, each with marks of its own.

V3 and R1 write the word `function`, the name, and the arguments as a block of code; V3.1 the name and the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from inferd.appliance.chat.reader import NotACall, Steps
from inferd.appliance.chat.script import Script
from inferd.appliance.chat.tools.format import TOOL_NAME, CallForm, Tool, ToolFormat
from inferd.appliance.chat.tools.json_text import MAX_NAME_CHARS, arguments

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"
FORM = CallForm(
    prefix=BEGIN, begin=CALL + "{plain_name}" + SEPARATOR, end=CALL_END, separator="\n", suffix=END, trigger=None
)


class DeepSeekParser(Script):
    def _run(self) -> Steps[None]:
        reader = self.reader
        while (marker := (yield from reader.text_until((BEGIN, CALL), self.found.text))) is not None:
            reader.record(marker)
            yield from self.attempt(self._calls() if marker == BEGIN else self._call(), (CALL_END,))

    def _calls(self) -> Steps[None]:
        reader = self.reader
        yield from reader.skip_space()
        yield from reader.expect(CALL)
        yield from self._call()

    def _call(self) -> Steps[None]:
        """Behind the mark that begins it; the end of all calls is read with that of the last one."""
        reader = self.reader
        name, _ = yield from reader.read_until((SEPARATOR,), MAX_NAME_CHARS)
        if name.strip() == "function":
            name, _ = yield from reader.read_until(("\n",), MAX_NAME_CHARS)
        name = name.strip()
        if TOOL_NAME.fullmatch(name) is None:
            raise NotACall
        yield from reader.skip_space()
        fenced = (yield from reader.skip(FENCE)) is not None
        if fenced:
            yield from reader.skip("json")
            yield from reader.skip_space()
        self.begin(name)
        if (yield from reader.next_is((CALL_END,))) is None:
            yield from arguments(reader, self.found.arguments)
        self.found.end()
        yield from reader.skip_space()
        if fenced:
            yield from reader.skip(FENCE)
            yield from reader.skip_space()
        yield from reader.skip(CALL_END)
        yield from reader.skip_space()
        yield from reader.skip(END)


def _make(tools: Mapping[str, Tool]) -> DeepSeekParser:
    return DeepSeekParser()


DEEPSEEK = ToolFormat(
    "deepseek_v3", _make, signatures=((BEGIN,),), form=FORM, markers=(BEGIN, END, CALL, CALL_END, SEPARATOR)
)
