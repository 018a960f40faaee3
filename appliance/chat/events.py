"""What a model's answer consists of, whatever dialect it is told in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer itself; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of the tool `name`; `index` counts 0, 1, 2 within one answer, and calls follow one another."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments: all of them joined are the text of a JSON object, unless the model wrote none."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete. It is missing when the output ended before the call did."""

    index: int


AnswerEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments | ToolCallEnd


class AnswerParser(Protocol):
    """Reads one output in the pieces in which it comes. How it is cut changes nothing but the cuts of the events.

    Takes time in proportion to the text, whatever the text is.
    """

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        ...

    def push(self, text: str) -> list[AnswerEvent]: ...

    def finish(self) -> list[AnswerEvent]:
        """The rest; to be called once, at the end of the output."""
        ...


def joined(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """The same events with neighbouring pieces of one thing as one piece."""
    merged: list[AnswerEvent] = []
    for event in events:
        match merged[-1] if merged else None, event:
            case TextDelta(before), TextDelta(text):
                merged[-1] = TextDelta(before + text)
            case ReasoningDelta(before), ReasoningDelta(text):
                merged[-1] = ReasoningDelta(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(_, text):
                merged[-1] = ToolCallArguments(index, before + text)
            case _:
                merged.append(event)
    return merged
