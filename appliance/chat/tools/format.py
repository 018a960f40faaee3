"""What there is to know about one way of writing tool calls, and what a request asks of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inferd.appliance.chat.events import AnswerParser
from inferd.appliance.chat.script import new_call_id

MAX_TOOLS = 256
TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


@dataclass(frozen=True)
class Tool:
    """`shown` is what the template sees, in OpenAI's form; `parameters` is a JSON schema of an object."""

    name: str
    parameters: Mapping[str, Any]
    shown: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and what is asked of their use.

    `callable_names` are those that may be called; all of `tools` are shown to the model. `named`: the client chose the
    one tool itself, which some dialects tell apart from a model's choice.
    """

    tools: tuple[Tool, ...]
    choice: Literal["auto", "required"] = "auto"
    is_parallel: bool = True
    callable_names: frozenset[str] = frozenset()
    named: bool = False

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.callable_names)


@dataclass(frozen=True)
class CallForm:
    """How a grammar makes a model write calls: `prefix`, calls with `separator` between them, `suffix`.

    A call is `begin`, where {name} stands for the tool's name as JSON and {plain_name} for it as it is, its arguments
    as JSON, `end`. Parsers read this
    form beside the one that the model was trained on, where that is no JSON. `trigger` begins every call, and marks
    calls inside free text; None where nothing does.
    """

    begin: str
    end: str
    separator: str
    prefix: str = ""
    suffix: str = ""
    trigger: str | None = None


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing tool calls; `inferd.tool_parsers` entry points are such values.

    `signatures`: a chat template that holds all texts of any of these tuples writes calls this way. `markers` must stay
    in the output's text even where the tokenizer has special tokens for them. `splits_reasoning`: the parser also tells
    reasoning from the answer. `make_parser` is given the callable tools by name.
    """

    name: str
    make_parser: Callable[[Mapping[str, Tool]], AnswerParser]
    signatures: tuple[tuple[str, ...], ...]
    form: CallForm
    markers: tuple[str, ...] = ()
    splits_reasoning: bool = False
    make_id: Callable[[], str] = field(default=new_call_id)
    id_pattern: re.Pattern[str] | None = None  # the template refuses ids of another form

    def accepts(self, template: str) -> bool:
        return any(all(text in template for text in texts) for texts in self.signatures)
