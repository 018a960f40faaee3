"""`inferd run`: one question, or a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from inferd.appliance.client import Client, Refused
from inferd.appliance.log import CONTROL_CHARACTERS

PROMPT = ">>> "
# What a model writes may not steer the terminal.
UNPRINTABLE = {code: text for code, text in CONTROL_CHARACTERS.items() if code < 0xA0 and chr(code) not in "\n\t"}

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class ChatOptions:
    """What holds for every answer. `params` are fields of the request that were given."""

    system: str | None = None
    params: Mapping[str, float | int] = field(default_factory=dict)

    def opening(self) -> Messages:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def chat_once(client: Client, model: str, prompt: str, options: ChatOptions) -> None:
    _answer(client, model, [*options.opening(), {"role": "user", "content": prompt}], options)


def chat_with_person(client: Client, model: str, options: ChatOptions) -> None:
    """Until the input ends. An answer that Ctrl-C stops stays in the history as far as it came; a question that the
    daemon refuses is forgotten. Raises `NotRunning`, and `Refused` when the model is unknown.
    """
    import readline  # noqa: F401 - importing it gives `input` its line editing

    print(f"{model} listens. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    messages = options.opening()
    while True:
        try:
            question = input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # takes back what was being typed
            print()
            continue
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            answer = _answer(client, model, messages, options, stoppable=True)
        except Refused as refused:
            if refused.status == 404:  # the model: no other question would be answered
                raise
            messages.pop()
            print(f"inferd: {refused}", file=sys.stderr)
        else:
            messages.append({"role": "assistant", "content": answer})


def _answer(client: Client, model: str, messages: Messages, options: ChatOptions, *, stoppable: bool = False) -> str:
    pieces: list[str] = []
    try:
        with client.chat(model, messages, options.params) as answer:
            _note(answer.warnings)
            for piece in answer:
                pieces.append(piece)
                sys.stdout.write(piece.translate(UNPRINTABLE))
                sys.stdout.flush()
        print(flush=True)
        if answer.finish_reason == "length":
            _note([_what_cut_it(options, answer.warnings)])
    except (KeyboardInterrupt, Refused) as stop:
        if pieces or stoppable:
            print(flush=True)  # what comes next begins a line of its own
        if isinstance(stop, Refused) or not stoppable:
            raise
    return "".join(pieces)


def _what_cut_it(options: ChatOptions, warnings: tuple[str, ...]) -> str:
    """The limit that was given, unless the context had even less room."""
    limit = options.params.get("max_tokens")
    if limit is not None and not any(warning.startswith("max_tokens ") for warning in warnings):
        return f"the answer was cut after {limit} tokens; a larger --max-tokens, or none, lets it go on"
    return (
        "the answer was cut because the conversation fills the model's context; begin a new one, or, if the model "
        "knows longer ones, serve it with --set engine.max_model_len=TOKENS"
    )


def _note(lines: tuple[str, ...] | list[str]) -> None:
    for line in lines:
        print(f"inferd: {line}", file=sys.stderr)
