"""gpt-oss harmony: an answer is several messages, each in a channel, and calls are messages to a tool.

`<|channel|>analysis<|message|>` is reasoning, `final` the answer, `commentary to=functions.name` a call, with JSON
behind `<|message|>`; `commentary` to nobody is text beside calls. They end in `<|end|>`, `<|call|>` or `<|return|>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from inferd.appliance.chat.reader import NotACall, Steps
from inferd.appliance.chat.script import Script
from inferd.appliance.chat.tools.format import CallForm, Tool, ToolFormat
from inferd.appliance.chat.tools.json_text import arguments

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEAD_CHARS = 1024
FORM = CallForm(
    begin=CHANNEL + "commentary to=functions.{plain_name} <|constrain|>json" + MESSAGE,
    end="<|call|>",
    separator=START + "assistant",
)
_TO = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.\-]+)")
_CHANNEL = re.compile(r"[a-z]*")


class HarmonyParser(Script):
    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        super().__init__()

    def _run(self) -> Steps[None]:
        reader = self.reader
        while (marker := (yield from reader.text_until((CHANNEL, START, MESSAGE, *ENDS), self.found.text))) is not None:
            if marker == START:
                reader.record(START)
                yield from self.attempt(self._message_after_start(), ())
            elif marker == CHANNEL:
                reader.record(CHANNEL)
                yield from self.attempt(self._message(""), ())

    def _message_after_start(self) -> Steps[None]:
        """The recipient may stand before the channel: `assistant to=functions.name<|channel|>...`."""
        head, marker = yield from self.reader.read_until((CHANNEL, MESSAGE), MAX_HEAD_CHARS)
        yield from self._body(head, "final") if marker == MESSAGE else self._message(head)

    def _message(self, before: str) -> Steps[None]:
        head, _ = yield from self.reader.read_until((MESSAGE,), MAX_HEAD_CHARS)
        match = _CHANNEL.match(head.strip())
        assert match is not None
        yield from self._body(f"{before} {head}", match[0])

    def _body(self, head: str, channel: str) -> Steps[None]:
        to = _TO.search(head)
        if to is not None and self._has_tools:
            yield from self._call(to[1])
            return
        self.reader.forget()
        self.is_reasoning = channel == "analysis"
        tell = self.found.reasoning if self.is_reasoning else self.found.text
        marker = yield from self.reader.text_until((*ENDS, START), tell)
        self.is_reasoning = False
        if marker == START:
            self.reader.record(START)
            yield from self._message_after_start()

    def _call(self, name: str) -> Steps[None]:
        self.begin(name)
        yield from self.reader.skip_space()
        if (yield from self.reader.next_is(ENDS)) is None:
            if not (yield from self.reader.peek()):
                self.found.end()
                return
            try:
                yield from arguments(self.reader, self.found.arguments)
            except NotACall:
                yield from self._rest_of_call()
                return
        self.found.end()

    def _rest_of_call(self) -> Steps[None]:
        """As the model wrote it."""
        if (yield from self.reader.text_until((*ENDS, START), self.found.arguments)) is not None:
            self.found.end()


def _make(tools: Mapping[str, Tool]) -> HarmonyParser:
    return HarmonyParser(has_tools=bool(tools))


HARMONY = ToolFormat(
    "harmony",
    _make,
    signatures=((CHANNEL, START), ("<|channel|>analysis",)),
    form=FORM,
    markers=(START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS),
    splits_reasoning=True,
)
