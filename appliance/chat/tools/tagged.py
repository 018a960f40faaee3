"""Arguments as they come one by one, each a name and a text, told as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferd.appliance.chat.script import Found
from inferd.appliance.chat.tools.json_text import quoted, string_body
from inferd.appliance.chat.tools.values import as_json, is_text, types_of


class TaggedArguments:
    """Of one call. For each argument: `begin`, its text in pieces to `text`, `end`; after the last one, `close`.

    Line breaks around a text are left out if they only set it apart from its tags.
    """

    def __init__(self, found: Found, parameters: Mapping[str, Any], *, own_lines: bool) -> None:
        self._found = found
        self._parameters = parameters
        self._own_lines = own_lines
        self._names: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._pieces: list[str] = []
        self._is_first_piece = True
        self._has_break = False  # held back: it may be the one before the closing tag

    def begin(self, name: str) -> None:
        self._found.arguments(("{" if not self._names else ", ") + quoted(name) + ": ")
        self._names.add(name)
        self._types = types_of(self._parameters, name)
        self._is_first_piece, self._has_break = True, False
        if is_text(self._types):
            self._found.arguments('"')

    def text(self, piece: str) -> None:
        if self._own_lines:
            piece = self._without_edges(piece)
        if is_text(self._types):
            self._found.arguments(string_body(piece))
        elif piece:
            self._pieces.append(piece)

    def end(self) -> None:
        if is_text(self._types):
            self._found.arguments('"')
        else:
            self._found.arguments(as_json("".join(self._pieces), self._types))
            self._pieces.clear()

    def close(self) -> None:
        if self._names:
            self._found.arguments("}")
        self._found.end()

    def _without_edges(self, piece: str) -> str:
        if self._is_first_piece and piece:
            self._is_first_piece = False
            piece = piece.removeprefix("\n")
        if not piece:
            return ""
        piece = ("\n" if self._has_break else "") + piece
        self._has_break = piece.endswith("\n")
        return piece[:-1] if self._has_break else piece
