"""A conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing

from inferd.appliance.client import Client

PROMPT = ">>> "


def chat_once(client: Client, model: str, prompt: str) -> None:
    _answer(client, model, [{"role": "user", "content": prompt}])


def chat_with_person(client: Client, model: str) -> None:
    """Until the input ends. An answer that Ctrl-C stops stays in the history as far as it came."""
    import readline  # noqa: F401 - importing it gives `input` its line editing

    messages: list[dict[str, str]] = []
    while True:
        try:
            question = input(PROMPT)
        except EOFError:
            print()
            return
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": _answer(client, model, messages, stoppable=True)})


def _answer(client: Client, model: str, messages: list[dict[str, str]], *, stoppable: bool = False) -> str:
    pieces: list[str] = []
    try:
        with closing(client.chat(model, messages)) as answer:
            for piece in answer:
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        if not stoppable:
            raise
    finally:
        print()
    return "".join(pieces)
