"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat, checked, as what the engine's side knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferd.appliance.api.openai.schemas import ChatRequest
from inferd.appliance.chat.tools.format import MAX_TOOLS, TOOL_NAME, Tool, ToolUse
from inferd.engine.errors import InvalidRequest, NotSupported, check_unicode

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_MODES = ("none", "auto", "required")


def tool_use(ask: ChatRequest) -> ToolUse | None:
    """None when no tool may be called: the model is not told of any then, because it could not be kept from it.

    Raises `InvalidRequest` naming the field.
    """
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(_limited(ask.tools or [])))
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools: {twice!r} stands there twice; names must differ", param="tools")
    choice = "auto" if ask.tool_choice is None else ask.tool_choice
    if isinstance(choice, str):
        if choice not in _MODES:
            raise _wrong_choice(f"{choice[:40]!r} is none of {', '.join(_MODES)}")
        mode, allowed, named = choice, names, False
    else:
        mode, allowed, named = _chosen(choice)
    if unknown := next((name for name in allowed if name not in names), None):
        raise _wrong_choice(f"there is no tool {unknown[:80]!r} in tools")
    if mode == "required" and not allowed:
        raise _wrong_choice("a tool must be called, and tools is empty")
    if mode == "none" or not allowed:
        return None
    shown = tools if mode == "required" else tuple(tool for tool in tools if tool.name in allowed)
    return ToolUse(
        shown,
        "required" if mode == "required" else "auto",
        is_parallel=ask.parallel_tool_calls is not False,
        callable_names=frozenset(allowed),
        named=named,
    )


def _limited(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    return tools


def _tool(given: Mapping[str, Any], where: str) -> Tool:
    kind, function = given.get("type"), given.get("function")
    if kind != "function":
        raise NotSupported(f"{where}: type {str(kind)[:40]!r} is not supported; only function is", param=where)
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object with a name", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
        text = f"{where}.function.name must be 1 to 128 letters, digits, dots, dashes and underscores"
        raise InvalidRequest(text, param=f"{where}.function.name")
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.function.description must be a string", param=f"{where}.function.description")
    check_unicode(f"{where}.function.description", description)
    if parameters is not None and not isinstance(parameters, dict):
        text = f"{where}.function.parameters must be a JSON schema, an object"
        raise InvalidRequest(text, param=f"{where}.function.parameters")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{where}.function.strict must be true or false", param=f"{where}.function.strict")
    schema = parameters or NO_PARAMETERS
    # Templates look for these three keys, and some for nothing else.
    shown = {"name": name, "description": description or "", "parameters": schema}
    return Tool(name, schema, {"type": "function", "function": shown}, bool(strict))


def _chosen(choice: Mapping[str, Any]) -> tuple[str, list[str], bool]:
    """The mode, the names that may be called, and whether the client chose the one."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", [name], True
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            names = [_allowed(tool) for tool in tools]
            if not names:
                raise _wrong_choice("allowed_tools.tools is empty")
            return mode, names, False
    raise _wrong_choice(
        f"it must be one of {', '.join(_MODES)}, or an object of type function with a function.name, or of the type "
        "allowed_tools with a mode and tools"
    )


def _allowed(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise _wrong_choice("allowed_tools.tools must be objects of the type function with a function.name")


def _wrong_choice(why: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice: {why}", param="tool_choice")
