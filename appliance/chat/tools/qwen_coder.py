"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, values as text.

The block may also hold JSON, as Hermes writes it, and `<tool_call>` may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from inferd.appliance.chat.reader import Ended, NotACall, Steps
from inferd.appliance.chat.script import Script
from inferd.appliance.chat.tools import hermes
from inferd.appliance.chat.tools.format import Tool, ToolFormat
from inferd.appliance.chat.tools.hermes import tagged_json
from inferd.appliance.chat.tools.json_text import MAX_NAME_CHARS
from inferd.appliance.chat.tools.tagged import TaggedArguments

BEGIN, END = hermes.BEGIN, hermes.END
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenCoderParser(Script):
    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        super().__init__()

    def _run(self) -> Steps[None]:
        while (marker := (yield from self.reader.text_until((BEGIN, FUNCTION), self.found.text))) is not None:
            self.reader.record(marker)
            yield from self.attempt(self._block() if marker == BEGIN else self._function(), ())

    def _block(self) -> Steps[None]:
        reader = self.reader
        yield from reader.skip_space()
        if (yield from reader.next_is(("{", "["))) is not None:
            yield from tagged_json(self)
            return
        yield from reader.expect(FUNCTION)
        yield from self._function()
        while True:
            yield from reader.skip_space()
            if (yield from reader.skip(FUNCTION)) is None:
                break
            reader.record(FUNCTION)
            yield from self._function()
        yield from reader.skip(END)

    def _function(self) -> Steps[None]:
        """Behind `<function=`."""
        reader = self.reader
        name, _ = yield from reader.read_until((">",), MAX_NAME_CHARS)
        if not name.strip() or "\n" in name.strip():
            raise NotACall
        name = name.strip()
        self.begin(name)
        tool = self._tools.get(name)
        arguments = TaggedArguments(self.found, tool.parameters if tool is not None else {}, own_lines=True)
        while True:
            marker = yield from reader.text_until((PARAMETER, FUNCTION_END, END), _drop)
            if marker != PARAMETER:
                break
            arguments.begin((yield from self._key()))
            end = yield from reader.text_until((PARAMETER_END, FUNCTION_END), arguments.text)
            if end is None:
                return
            arguments.end()
            if end == FUNCTION_END:
                break
        if marker is not None:
            arguments.close()
            yield from reader.skip_space()
            yield from reader.skip(END)

    def _key(self) -> Steps[str]:
        """However long it is: the call has begun, and its arguments are to stay an object."""
        pieces: list[str] = []
        if (yield from self.reader.text_until((">",), pieces.append)) is None:
            raise Ended
        return "".join(pieces).strip()


def _drop(piece: str) -> None:
    """Blanks between parameters, and what a model writes there by mistake."""


QWEN_CODER = ToolFormat(
    "qwen3_coder",
    QwenCoderParser,
    signatures=((FUNCTION, PARAMETER),),
    form=hermes.FORM,
    markers=(BEGIN, END, FUNCTION_END, PARAMETER_END),
)
