"""What a chat template makes of tools, found out by rendering short chats with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferd.appliance.chat.confined import ConfinedTemplate
from inferd.engine.errors import InvalidRequest

_NAME, _KEY, _RESULT, _SYSTEM = "probed_tool", "probed_key", "probed_result", "probed system"
_ASK = {"role": "user", "content": "probe"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "probe"}},
            "required": [],
        },
    },
}


@dataclass(frozen=True)
class ToolHabits:
    """Without `shows_tools` the template passes them over; without `shows_calls` it does so with calls and results of
    the history. `wants_text`: it takes the arguments of a call as JSON text, not as an object.
    """

    shows_tools: bool = False
    shows_calls: bool = False
    wants_text: bool = False
    shows_system: bool = True


def probe_habits(template: ConfinedTemplate, variables: Mapping[str, Any]) -> ToolHabits:
    """Blocks for some milliseconds."""

    def render(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        try:
            return template.render(messages, {**variables, "tools": tools})
        except InvalidRequest:
            return ""

    as_object = render(_history({_KEY: "value"}))
    object_is_shown = _KEY in as_object and f"'{_KEY}'" not in as_object  # an object as Python prints it is no JSON
    as_text = "" if object_is_shown else render(_history(f'{{"{_KEY}": "value"}}'))
    shown = as_text or as_object
    return ToolHabits(
        shows_tools=_NAME in render([_ASK], [_TOOL]),
        shows_calls=_RESULT in shown and _NAME in shown and _KEY in shown,
        wants_text=_KEY in as_text,
        shows_system=_SYSTEM in render([{"role": "system", "content": _SYSTEM}, _ASK]),
    )


def _history(arguments: dict[str, str] | str) -> list[dict[str, Any]]:
    call = {"id": "probed123", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        _ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": "probed123", "name": _NAME},
    ]
