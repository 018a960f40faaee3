"""Events of an answer in the form of OpenAI's chats: one message, or deltas.

Reasoning has two names among clients, so it is told under both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inferd.appliance.api.openai.schemas import (
    AnswerMessage,
    CalledFunction,
    Delta,
    Finish,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from inferd.appliance.chat.answer import AnswerReader
from inferd.appliance.chat.events import (
    AnswerEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
)


def message_of(events: Iterable[AnswerEvent], *, with_reasoning: bool = True) -> AnswerMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    pieces: list[list[str]] = []  # of the arguments of each call
    for event in events:
        match event:
            case TextDelta(text):
                texts.append(text)
            case ReasoningDelta(text):
                thoughts.append(text)
            case ToolCallBegin(_, call_id, name):
                calls.append(ToolCall(call_id, CalledFunction(name, "")))
                pieces.append([])
            case ToolCallArguments(index, text):
                pieces[index].append(text)
    for call, arguments in zip(calls, pieces, strict=True):
        call.function.arguments = "".join(arguments)
    message = AnswerMessage("".join(texts) if texts or not calls else None)
    if thoughts and with_reasoning:
        message.reasoning = message.reasoning_content = "".join(thoughts)
    if calls:
        message.tool_calls = calls
    return message


def deltas_of(events: Iterable[AnswerEvent], *, with_reasoning: bool = True) -> list[Delta]:
    deltas = []
    for event in events:
        match event:
            case TextDelta(text):
                deltas.append(Delta(content=text))
            case ReasoningDelta(text) if with_reasoning:
                deltas.append(Delta(reasoning=text, reasoning_content=text))
            case ToolCallBegin(index, call_id, name):
                begun = ToolCallDelta(index, FunctionDelta("", name), call_id, "function")
                deltas.append(Delta(tool_calls=[begun]))
            case ToolCallArguments(index, text):
                deltas.append(Delta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))]))
    return deltas


def finish_of_chat(reader: AnswerReader, *, named: bool) -> Finish | None:
    """A call that the client named itself ends like an answer, as OpenAI has it."""
    return "stop" if named and reader.finish == "tool_calls" else reader.finish


def num_reasoning_tokens(readers: Sequence[AnswerReader]) -> int:
    return sum(reader.num_reasoning_tokens for reader in readers)
