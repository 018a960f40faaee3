"""GLM 4.5: `<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` each, `</tool_call>`.

Strings are plain text, other values JSON. The block may also hold JSON, as Hermes writes it.
"""

from __future__ import annotations

from collections.abc import Mapping

from inferd.appliance.chat.reader import Ended, NotACall, Steps
from inferd.appliance.chat.script import Script
from inferd.appliance.chat.tools import hermes
from inferd.appliance.chat.tools.format import TOOL_NAME, Tool, ToolFormat
from inferd.appliance.chat.tools.hermes import tagged_json
from inferd.appliance.chat.tools.json_text import MAX_NAME_CHARS
from inferd.appliance.chat.tools.tagged import TaggedArguments

BEGIN, END = hermes.BEGIN, hermes.END
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class GlmParser(Script):
    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        super().__init__()

    def _run(self) -> Steps[None]:
        while (yield from self.reader.text_until((BEGIN,), self.found.text)) is not None:
            self.reader.record(BEGIN)
            yield from self.attempt(self._block(), (END,))

    def _block(self) -> Steps[None]:
        reader = self.reader
        yield from reader.skip_space()
        if (yield from reader.next_is(("{", "["))) is not None:
            yield from tagged_json(self)
            return
        name, marker = yield from reader.read_until((KEY, END), MAX_NAME_CHARS)
        name = name.strip()
        if TOOL_NAME.fullmatch(name) is None:
            raise NotACall
        self.begin(name)
        tool = self._tools.get(name)
        arguments = TaggedArguments(self.found, tool.parameters if tool is not None else {}, own_lines=False)
        while marker == KEY:
            arguments.begin((yield from self._key()))
            if (yield from reader.text_until((VALUE_END, END), arguments.text)) is None:
                raise Ended
            arguments.end()
            found = yield from reader.text_until((KEY, END), _drop)
            if found is None:
                raise Ended
            marker = found
        arguments.close()

    def _key(self) -> Steps[str]:
        pieces: list[str] = []
        if (yield from self.reader.text_until((KEY_END,), pieces.append)) is None:
            raise Ended
        if (yield from self.reader.text_until((VALUE,), _drop)) is None:
            raise Ended
        return "".join(pieces).strip()


def _drop(piece: str) -> None:
    """Blanks between arguments, and what a model writes there by mistake."""


GLM = ToolFormat(
    "glm45",
    GlmParser,
    signatures=((KEY, VALUE),),
    form=hermes.FORM,
    markers=(BEGIN, END, KEY, KEY_END, VALUE, VALUE_END),
)
