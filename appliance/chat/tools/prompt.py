"""Tools for models whose chat template knows none: told in a system message, calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferd.appliance.chat.tools.format import CallForm
from inferd.appliance.chat.tools.json_text import quoted

RESULT, RESULT_END = "<tool_response>", "</tool_response>"


def describe(tools: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    """`tools` in OpenAI's form."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    example = written_calls([{"function": {"name": "TOOL_NAME", "arguments": {"ARGUMENT": "VALUE"}}}], form)
    return "\n".join(
        [
            "You can call tools. Each line describes one, with a JSON schema of its arguments:",
            *lines,
            "",
            "To call a tool, write nothing but this, with the tool's name and arguments in it:",
            example,
            f"What the tool answers comes in the next message, between {RESULT} and {RESULT_END}.",
        ]
    )


def written_calls(calls: Sequence[dict[str, Any]], form: CallForm) -> str:
    """Calls of the history in the form in which the model is asked to write them."""
    written = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        begin = form.begin.replace("{name}", quoted(name)).replace("{plain_name}", name)
        written.append(begin + json.dumps(arguments, ensure_ascii=False) + form.end)
    return form.prefix + form.separator.join(written) + form.suffix


def with_instructions(messages: list[dict[str, Any]], text: str, *, in_system: bool) -> list[dict[str, Any]]:
    """At the end of the first system message, or, where the template has none, at the beginning of the first user's."""
    role = "system" if in_system else "user"
    index = next((index for index, message in enumerate(messages) if message["role"] == role), None)
    if index is None:
        return [{"role": role, "content": text}, *messages]
    content = messages[index]["content"]
    joined = f"{content}\n\n{text}" if in_system else f"{text}\n\n{content}"
    return [*messages[:index], {**messages[index], "content": joined.strip()}, *messages[index + 1 :]]


def as_plain_chat(messages: list[dict[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """Calls as the assistant's text, results that follow one another as one message of the user."""
    plain: list[dict[str, Any]] = []
    last_is_result = False
    for message in messages:
        is_result = message["role"] in ("tool", "function")
        if is_result:
            text = f"{RESULT}\n{message['content']}\n{RESULT_END}"
            if last_is_result:
                plain[-1]["content"] += "\n" + text
            else:
                plain.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = written_calls(message["tool_calls"], form)
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**kept, "content": f"{message['content']}\n{calls}".strip()})
        else:
            plain.append(message)
        last_is_result = is_result
    return plain
