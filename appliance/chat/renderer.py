"""From chat messages to token ids, so that nothing a user types becomes a special token."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from inferd.appliance.chat.confined import ConfinedTemplate
from inferd.appliance.chat.habits import ToolHabits, probe_habits
from inferd.appliance.chat.messages import (
    ChatMessage,
    map_strings,
    merge_system_messages,
    strings_of,
    to_template,
)
from inferd.appliance.chat.template import TemplateRefused
from inferd.appliance.chat.tools.format import Tool, ToolFormat
from inferd.appliance.chat.tools.hermes import HERMES
from inferd.appliance.chat.tools.prompt import as_plain_chat, describe, with_instructions
from inferd.engine.errors import InvalidRequest
from inferd.engine.frontend.tokenizer import Tokenizer

PRIVATE_USE = range(0xE000, 0xF8FF)  # characters without a meaning of their own


class ChatRenderer:
    """One model's way from messages to a prompt; safe to use from several threads.

    `tool_format` is how the model writes calls; None: the template shows no way that is known, so tools are told, and
    calls of the history written, in our own words.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = ConfinedTemplate(tokenizer.chat_template) if tokenizer.chat_template is not None else None
        self._variables = {
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
            "tools": None,
        }
        self._is_known = tool_format is not None
        self._tool_format = tool_format or HERMES
        self._habits: ToolHabits | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Makes the first chat as fast as the others. Blocks for a part of a second."""
        if self._template is not None:
            self._template.start()

    def close(self) -> None:
        """Ends the template's process; it starts again if it is needed again."""
        if self._template is not None:
            self._template.close()

    def token_ids(
        self, messages: list[ChatMessage], options: Mapping[str, Any], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """`options` are more variables for the template. Takes milliseconds for long chats: call it off the loop.

        Raises `InvalidRequest`.
        """
        if self._template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions", param="messages")
        try:
            plain = to_template(messages)
            shown = [dict(tool.shown) for tool in tools]
            guard = _unused_character([plain, shown])
            guarded = [self._guarded(message, guard) for message in plain]
            variables = {**self._variables, **options}
            if tools or _has_calls(plain):
                guarded_tools = [self._guarded(tool, guard) for tool in shown]
                guarded, variables["tools"] = self._with_tools(self._template, guarded, guarded_tools)
            rendered = _render(self._template, guarded, variables)
        except RecursionError:
            raise InvalidRequest("the messages are nested too deeply", param="messages") from None
        ids = self._tokenizer.encode_chat(rendered, guard)
        if not ids:
            raise InvalidRequest("these messages make an empty prompt", param="messages")
        return ids

    def shows_tools(self) -> bool:
        """Whether the template itself tells the model of tools."""
        return self._template is not None and self._is_known and self._habits_of(self._template).shows_tools

    def _with_tools(
        self, template: ConfinedTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The messages as the template wants them, and its variable `tools`."""
        habits, form = self._habits_of(template), self._tool_format.form
        if habits.shows_calls and (self._is_known or not tools):
            messages = [self._with_known_ids(message) for message in messages]
            if habits.wants_text:
                messages = [_with_text_arguments(message) for message in messages]
        else:
            messages = as_plain_chat(messages, form)
        if not tools:
            return messages, None
        if habits.shows_tools and self._is_known:
            return messages, tools
        return with_instructions(messages, describe(tools, form), in_system=habits.shows_system), None

    def _habits_of(self, template: ConfinedTemplate) -> ToolHabits:
        with self._lock:
            if self._habits is None:
                self._habits = probe_habits(template, self._variables)
            return self._habits

    def _with_known_ids(self, message: dict[str, Any]) -> dict[str, Any]:
        """Calls that another model made have ids of another form, which some templates refuse."""
        pattern = self._tool_format.id_pattern
        if pattern is None:
            return message

        def known(call_id: Any) -> Any:
            if not isinstance(call_id, str) or pattern.fullmatch(call_id):
                return call_id
            return hashlib.sha256(call_id.encode()).hexdigest()[:9]

        changed = dict(message)
        if "tool_call_id" in message:
            changed["tool_call_id"] = known(message["tool_call_id"])
        if "tool_calls" in message:
            changed["tool_calls"] = [{**call, "id": known(call.get("id"))} for call in message["tool_calls"]]
        return changed

    def _guarded(self, message: dict[str, Any], guard: str) -> dict[str, Any]:
        def guarded(text: str) -> str:
            return self._tokenizer.guard_text(text, guard)

        return {key: value if key == "role" else map_strings(value, guarded) for key, value in message.items()}


def _has_calls(messages: list[dict[str, Any]]) -> bool:
    return any(message["role"] in ("tool", "function") or "tool_calls" in message for message in messages)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _render(template: ConfinedTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    try:
        return template.render(messages, variables)
    except TemplateRefused:
        merged = merge_system_messages(messages)
        if merged is None:
            raise
        return template.render(merged, variables)


def _unused_character(texts: Any) -> str:
    used = set().union(*strings_of(texts))
    free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    character = next(free, None)
    if character is None:
        raise InvalidRequest("the messages use every private-use character of Unicode", param="messages")
    return character
