"""From a model's output to what every dialect tells of it: text, reasoning, tool calls, as typed events.

`AnswerFormat` is what one model does, `AnswerPlan` what one request asks of it, `AnswerReader` reads one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from inferd.appliance.chat.events import (
    AnswerEvent,
    AnswerParser,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from inferd.appliance.chat.reasoning import format as reasoning_formats
from inferd.appliance.chat.reasoning.format import ReasoningFormat
from inferd.appliance.chat.tools.forced import call_grammar
from inferd.appliance.chat.tools.format import Tool, ToolFormat, ToolUse
from inferd.appliance.chat.tools.hermes import HERMES
from inferd.appliance.chat.tools.registry import format_of
from inferd.engine.frontend.detokenize import make_decoder
from inferd.engine.frontend.outputs import CompletionOutput
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.messages import FinishReason

AnswerFinish = Literal["stop", "length", "tool_calls"]
PROMPT_END_TOKENS = 16  # enough for a mark that a template writes last, however it is cut into tokens


class AnswerFormat:
    """How one model writes tool calls and reasoning; found by its chat template unless it is named.

    Raises `ValueError` for a name that nobody knows.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self._tokenizer = tokenizer
        found = format_of(tokenizer.chat_template, tool_parser)
        self.knows_tools = found is not None
        self.tools: ToolFormat = found or HERMES
        self.reasoning: ReasoningFormat | None = None
        if found is None or not found.splits_reasoning:
            vocabulary = tokenizer.backend.get_added_tokens_decoder().values()
            tokens = {token.content for token in vocabulary}
            self.reasoning = reasoning_formats.format_of(tokenizer.chat_template, tokens, reasoning_parser)

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning is not None or self.tools.splits_reasoning

    def plan(
        self, prompt_token_ids: Sequence[int], use: ToolUse | None, answer: StructuredOutput | None = None
    ) -> AnswerPlan:
        """For one request: `answer` is the form that was asked of its answer. Raises `InvalidRequest`."""
        prompt_end = self._tokenizer.decode(list(prompt_token_ids[-PROMPT_END_TOKENS:]), skip_special_tokens=False)
        reasoning = self.reasoning
        if reasoning is not None and reasoning.is_closed_by(prompt_end):
            reasoning = None
        pair = self._pair(reasoning)
        output, warnings = answer, tuple[str, ...]()
        if answer is not None:
            output = msgspec.structs.replace(answer, reasoning=pair)
        if use is not None:
            grammar = call_grammar(use, self.tools, self._tokenizer.special_tokens, pair, answer)
            output, warnings = grammar.output, grammar.warnings
        if output is not None and pair is None:
            reasoning = None  # the form begins with the first token
        return AnswerPlan(self._tokenizer, self.tools, reasoning, use, prompt_end, output, warnings)

    def _pair(self, reasoning: ReasoningFormat | None) -> tuple[int, int] | None:
        if reasoning is None:
            return None
        start, end = (self._tokenizer.backend.token_to_id(marker) for marker in reasoning.markers)
        return None if start is None or end is None else (start, end)


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers to one request are held to a form and read. `structured_output` and `shown_special_token_ids`
    go into its sampling params; `warnings` say what was asked for and will not be done.
    """

    _tokenizer: Tokenizer
    _tools: ToolFormat
    _reasoning: ReasoningFormat | None
    use: ToolUse | None
    _prompt_end: str
    structured_output: StructuredOutput | None
    warnings: tuple[str, ...]

    @property
    def shown_special_token_ids(self) -> list[int]:
        markers = set(self._reasoning.markers if self._reasoning is not None else ())
        if self.use is not None or self._tools.splits_reasoning:
            markers.update(self._tools.markers)
        special = self._tokenizer.special_tokens
        return sorted(special[marker] for marker in markers if marker in special)

    def reader(self) -> AnswerReader:
        """One for each answer."""
        counter = None
        if self._reasoning is not None or self._tools.splits_reasoning:
            counter = ReasoningTokens(self._tokenizer, self.shown_special_token_ids, self._make_parser)
        is_parallel = self.use is None or self.use.is_parallel
        return AnswerReader(self._make_parser(), counter, one_call=not is_parallel)

    def _make_parser(self) -> AnswerParser:
        tools: dict[str, Tool] = {} if self.use is None else {tool.name: tool for tool in self.use.callable}
        if self._tools.splits_reasoning:
            return self._tools.make_parser(tools)
        answer = self._tools.make_parser(tools) if tools else PlainParser()
        if self._reasoning is None:
            return answer
        is_open = self._reasoning.is_opened_by(self._prompt_end)
        return Stages(self._reasoning.make_parser(self._reasoning, is_open), answer)


class AnswerReader:
    """Reads one answer from the outputs of its request, all of it or piece by piece."""

    def __init__(self, parser: AnswerParser, counter: ReasoningTokens | None, *, one_call: bool) -> None:
        self._parser = parser
        self._counter = counter
        self._one_call = one_call
        self.num_calls = 0
        self.num_complete_calls = 0
        self.finish: AnswerFinish | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return self._counter.count if self._counter is not None else 0

    def read(self, completion: CompletionOutput) -> list[AnswerEvent]:
        """What is new. With its finish reason, everything that was held back."""
        if self._counter is not None:
            self._counter.add(completion.token_ids)
        events = self._parser.push(completion.text)
        if completion.finish_reason is not None:
            events += self._parser.finish()
        events = [event for event in events if not self._is_unwanted(event)]
        self.num_calls += sum(isinstance(event, ToolCallBegin) for event in events)
        self.num_complete_calls += sum(isinstance(event, ToolCallEnd) for event in events)
        if completion.finish_reason is not None:
            self.finish = self._finish(completion.finish_reason)
        return events

    def _is_unwanted(self, event: AnswerEvent) -> bool:
        """Only one call was asked for: the others are as if they had not been made."""
        is_call = isinstance(event, ToolCallBegin | ToolCallArguments | ToolCallEnd)
        return self._one_call and is_call and event.index > 0  # type: ignore[union-attr] # mypy loses the first test

    def _finish(self, reason: FinishReason) -> AnswerFinish:
        if reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.num_complete_calls else "stop"


class ReasoningTokens:
    """Counts the tokens of one answer that are reasoning, its marks included."""

    def __init__(self, tokenizer: Tokenizer, shown: Sequence[int], make_parser: Callable[[], AnswerParser]) -> None:
        self._decoder = make_decoder(tokenizer, skip_special_tokens=True, shown=shown)
        self._parser = make_parser()
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            was_reasoning = self._parser.is_reasoning
            self._parser.push(self._decoder.feed(token_id))
            self.count += was_reasoning or self._parser.is_reasoning


class PlainParser:
    """Implements `AnswerParser` for an answer that is nothing but text."""

    is_reasoning = False

    def push(self, text: str) -> list[AnswerEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[AnswerEvent]:
        return []


class Stages:
    """Implements `AnswerParser`: what one parser takes for text is read by another."""

    def __init__(self, reasoning: AnswerParser, answer: AnswerParser) -> None:
        self._reasoning = reasoning
        self._answer = answer

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning.is_reasoning

    def push(self, text: str) -> list[AnswerEvent]:
        return self._passed_on(self._reasoning.push(text))

    def finish(self) -> list[AnswerEvent]:
        return self._passed_on(self._reasoning.finish()) + self._answer.finish()

    def _passed_on(self, events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
        found: list[AnswerEvent] = []
        for event in events:
            found += self._answer.push(event.text) if isinstance(event, TextDelta) else [event]
        return found
