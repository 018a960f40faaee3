"""From chat messages to token ids, so that nothing a user types becomes a special token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferd.appliance.chat.confined import ConfinedTemplate
from inferd.appliance.chat.messages import (
    ChatMessage,
    map_strings,
    merge_system_messages,
    strings_of,
    to_template,
)
from inferd.appliance.chat.template import TemplateRefused
from inferd.engine.errors import InvalidRequest
from inferd.engine.frontend.tokenizer import Tokenizer

PRIVATE_USE = range(0xE000, 0xF8FF)  # characters without a meaning of their own


class ChatRenderer:
    """One model's way from messages to a prompt; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = ConfinedTemplate(tokenizer.chat_template) if tokenizer.chat_template is not None else None
        self._variables = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}

    def start(self) -> None:
        """Makes the first chat as fast as the others. Blocks for a part of a second."""
        if self._template is not None:
            self._template.start()

    def close(self) -> None:
        """Ends the template's process; it starts again if it is needed again."""
        if self._template is not None:
            self._template.close()

    def token_ids(self, messages: list[ChatMessage], options: Mapping[str, Any]) -> list[int]:
        """`options` are more variables for the template. Takes milliseconds for long chats: call it off the loop.

        Raises `InvalidRequest`.
        """
        if self._template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions", param="messages")
        try:
            plain = to_template(messages)
            guard = _unused_character(plain)
            guarded = [self._guarded(message, guard) for message in plain]
            rendered = _render(self._template, guarded, {**self._variables, **options})
        except RecursionError:
            raise InvalidRequest("the messages are nested too deeply", param="messages") from None
        ids = self._tokenizer.encode_chat(rendered, guard)
        if not ids:
            raise InvalidRequest("these messages make an empty prompt", param="messages")
        return ids

    def _guarded(self, message: dict[str, Any], guard: str) -> dict[str, Any]:
        def guarded(text: str) -> str:
            return self._tokenizer.guard_text(text, guard)

        return {key: value if key == "role" else map_strings(value, guarded) for key, value in message.items()}


def _render(template: ConfinedTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    try:
        return template.render(messages, variables)
    except TemplateRefused:
        merged = merge_system_messages(messages)
        if merged is None:
            raise
        return template.render(merged, variables)


def _unused_character(messages: list[dict[str, Any]]) -> str:
    used = set().union(*strings_of(messages))
    free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    character = next(free, None)
    if character is None:
        raise InvalidRequest("the messages use every private-use character of Unicode", param="messages")
    return character
