"""A conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing

from inferd.appliance.client import Client, Refused
from inferd.appliance.log import CONTROL_CHARACTERS

PROMPT = ">>> "
# What a model writes may not steer the terminal.
UNPRINTABLE = {code: text for code, text in CONTROL_CHARACTERS.items() if code < 0xA0 and chr(code) not in "\n\t"}


def chat_once(client: Client, model: str, prompt: str) -> None:
    _answer(client, model, [{"role": "user", "content": prompt}])


def chat_with_person(client: Client, model: str) -> None:
    """Until the input ends. An answer that Ctrl-C stops stays in the history as far as it came; a question that the
    daemon refuses is forgotten. Raises `NotRunning`, and `Refused` when the model is unknown.
    """
    import readline  # noqa: F401 - importing it gives `input` its line editing

    print(f"{model} listens. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    messages: list[dict[str, str]] = []
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
            answer = _answer(client, model, messages, stoppable=True)
        except Refused as refused:
            if refused.status == 404:  # the model: no other question would be answered
                raise
            messages.pop()
            print(f"inferd: {refused}", file=sys.stderr)
        else:
            messages.append({"role": "assistant", "content": answer})


def _answer(client: Client, model: str, messages: list[dict[str, str]], *, stoppable: bool = False) -> str:
    pieces: list[str] = []
    try:
        with closing(client.chat(model, messages)) as answer:
            for piece in answer:
                pieces.append(piece)
                sys.stdout.write(piece.translate(UNPRINTABLE))
                sys.stdout.flush()
    except KeyboardInterrupt:
        if not stoppable:
            raise
    finally:
        print()
    return "".join(pieces)
