"""From chat messages to token ids, so that nothing a user types becomes a special token."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jinja2

from inferd.appliance.chat.messages import (
    ChatMessage,
    map_strings,
    merge_system_messages,
    strings_of,
    to_template,
)
from inferd.appliance.chat.template import ChatTemplate, TemplateRefused
from inferd.engine.errors import InvalidRequest
from inferd.engine.frontend.tokenizer import Tokenizer

PRIVATE_USE = range(0xE000, 0xF8FF)  # characters without a meaning of their own
log = logging.getLogger(__name__)


class ChatRenderer:
    """One model's way from messages to a prompt; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template, self._problem = _compile(tokenizer.chat_template)
        self._variables = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}

    def token_ids(self, messages: list[ChatMessage], options: Mapping[str, Any]) -> list[int]:
        """`options` are more variables for the template. Takes milliseconds for long chats: call it off the loop.

        Raises `InvalidRequest`.
        """
        if self._template is None:
            raise InvalidRequest(f"{self._problem}; use /v1/completions", param="messages")
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


def _compile(source: str | None) -> tuple[ChatTemplate | None, str]:
    if source is None:
        return None, "This model has no chat template"
    try:
        return ChatTemplate(source), ""
    except jinja2.TemplateSyntaxError as error:
        log.warning("the chat template cannot be used: line %s: %s", error.lineno, error.message)
        return None, f"The chat template of this model is not valid jinja (line {error.lineno})"


def _render(template: ChatTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
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
