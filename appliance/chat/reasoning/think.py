"""Reasoning between two marks, in front of the answer: `<think>`, `[THINK]` and their like."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.appliance.chat.reader import Emit, Steps
from inferd.appliance.chat.script import Script


class ThinkParser(Script):
    """Only the very beginning of an output opens a block, so the mark may be spoken of later on.

    `is_open`: the prompt has opened the block. `interrupts` are marks that end reasoning and belong to the answer.
    Line breaks that set the block apart are left out. What follows the block is told as text.
    """

    def __init__(self, start: str, end: str, *, is_open: bool, interrupts: Sequence[str] = ()) -> None:
        self._start = start
        self._end = end
        self._begins_open = is_open
        self._interrupts = tuple(interrupts)
        super().__init__()
        self.is_reasoning = is_open

    def _run(self) -> Steps[None]:
        reader, found = self.reader, self.found
        reader.record()
        yield from reader.skip_space()
        if (yield from reader.skip(self._start)) is None and not self._begins_open:
            found.text(reader.recorded())
            yield from reader.pass_rest(found.text)
            return
        reader.forget()
        self.is_reasoning = True
        yield from reader.skip_space()
        marker = yield from reader.text_until((self._end, *self._interrupts), _WithoutLastBreaks(found.reasoning))
        self.is_reasoning = False
        if marker == self._end:
            yield from reader.skip_space()
        elif marker is not None:
            found.text(marker)
        yield from reader.pass_rest(found.text)


class _WithoutLastBreaks:
    """Holds line breaks back until something follows them."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: list[str] = []

    def __call__(self, piece: str) -> None:
        body = piece.rstrip("\n")
        if body:
            self._emit("".join([*self._held, body]))
            self._held.clear()
        if len(body) < len(piece):
            self._held.append(piece[len(body) :])
