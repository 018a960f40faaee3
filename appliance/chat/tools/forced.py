"""What a grammar can make of a request's tools: calls that must come, and arguments that must fit their schema."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from inferd.appliance.chat.tools.format import CallForm, Tool, ToolFormat, ToolUse
from inferd.appliance.chat.tools.json_text import quoted
from inferd.engine.errors import InvalidRequest, NotSupported
from inferd.engine.grammar.spec import StructuredOutput

ANY_OBJECT: dict[str, Any] = {"type": "object"}
Pair = tuple[int, int]


@dataclass(frozen=True)
class CallGrammar:
    """`output` is None where the model writes freely. `warnings` say what was asked for and cannot be held."""

    output: StructuredOutput | None = None
    warnings: tuple[str, ...] = ()


def call_grammar(
    use: ToolUse,
    known: ToolFormat,
    special_tokens: Collection[str],
    reasoning: Pair | None,
    answer: StructuredOutput | None,
) -> CallGrammar:
    """`answer` is the form that was asked of an answer without calls; `reasoning` as in `StructuredOutput`.

    A required call is always held to its tool and schema, a call that the model is free to make to the schemas of
    strict tools. Raises `InvalidRequest` for a strict tool's schema that is none, `NotSupported` for a form of the
    answer that calls cannot stand beside.
    """
    if use.choice == "required":
        if answer is not None:
            raise InvalidRequest(
                "a tool must be called, so there is no answer whose form could be asked for; leave one of them out",
                param="tool_choice",
            )
        return _exact(use, known.form, reasoning, None)
    if answer is not None:
        return _exact(use, known.form, reasoning, _schema_of(answer))
    if not any(tool.is_strict for tool in use.callable):
        return CallGrammar()
    trigger = known.form.trigger
    if trigger is None or trigger in special_tokens:
        text = f"strict tools are not enforced unless a call is required: {known.name} calls have no mark in plain text"
        return CallGrammar(warnings=(text,))
    structures = [
        _structure(known.form, tool, tool.parameters if tool.is_strict else ANY_OBJECT) for tool in use.callable
    ]
    tag = {"triggers": [trigger], "structures": structures}
    return CallGrammar(StructuredOutput(structural_tag=json.dumps(tag, ensure_ascii=False), reasoning=reasoning))


def _exact(use: ToolUse, form: CallForm, reasoning: Pair | None, or_schema: Any) -> CallGrammar:
    """Nothing but calls, or else an answer."""
    warnings: list[str] = []
    structures = []
    for tool in use.callable:
        schema = tool.parameters
        if not tool.is_strict and not _is_usable(schema):
            warnings.append(f"the parameters of the tool {tool.name} are not enforced: their schema cannot be")
            schema = ANY_OBJECT
        structures.append(_structure(form, tool, schema))
    tag: dict[str, Any] = {"structures": structures, "separator": form.separator}
    tag |= {name: text for name, text in (("prefix", form.prefix), ("suffix", form.suffix)) if text}
    if use.named or not use.is_parallel:
        tag["once"] = True
    if or_schema is not None:
        tag["or_schema"] = or_schema
    output = StructuredOutput(structural_tag=json.dumps(tag, ensure_ascii=False), reasoning=reasoning)
    return CallGrammar(output, tuple(warnings))


def _structure(form: CallForm, tool: Tool, schema: Any) -> dict[str, Any]:
    begin = form.begin.replace("{name}", quoted(tool.name)).replace("{plain_name}", tool.name)
    return {"begin": begin, "schema": dict(schema), "end": form.end}


def _is_usable(schema: Any) -> bool:
    try:
        StructuredOutput(json_schema=json.dumps(dict(schema)))
    except InvalidRequest:
        return False
    return True


def _schema_of(answer: StructuredOutput) -> Any:
    if answer.json_object:
        return ANY_OBJECT
    if answer.json_schema is not None:
        return json.loads(answer.json_schema)
    raise NotSupported(
        f"{answer.kind.value} cannot be asked for beside tools; ask for a JSON schema, or send tool_choice: none",
        param="tools",
    )
