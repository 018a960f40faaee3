"""From the messages of a request to what a chat template is given: one shape of content, known roles, plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from inferd.engine.errors import InvalidRequest, NotSupported

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")


class ChatMessage(msgspec.Struct):
    """One message of a request, other keys ignored. `content` is a string, a list of parts, or null."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


def to_template(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest` naming the message, `NotSupported` for content that is not text."""
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages, got {len(messages)}", param="messages")
    return [_to_template(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _to_template(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, not {message.role[:40]!r}", param=f"{where}.role"
        )
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message.content, f"{where}.content")}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in message.tool_calls]
    return plain


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind, text = part.get("type"), part.get("text")
        if kind not in TEXT_PARTS:
            raise NotSupported(f"{where}: only text parts are supported, got {str(kind)[:40]!r}", param=where)
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}: a text part needs a string in text", param=where)
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Templates expect the arguments as an object; clients send them as a string of JSON, or empty."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}: a tool call needs a function with a name", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{where}: the arguments are not valid JSON", param=where) from None
    if isinstance(arguments, str):  # encoded twice
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{where}: the arguments are not valid JSON", param=where) from None
    return {"type": "function", **call, "function": {**function, "arguments": arguments or {}}}


def merge_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """All system messages joined into one at the front, or None when that changes nothing.

    Some templates refuse a system message that is not the first one.
    """
    system = [message for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    if not system or messages[: len(system)] == system[:1]:
        return None
    return [{"role": "system", "content": "\n\n".join(message["content"] for message in system)}, *rest]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, the keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): map_strings(item, change) for name, item in value.items()}
    return value


def strings_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_of(item)
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from strings_of(item)
