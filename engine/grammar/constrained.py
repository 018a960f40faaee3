"""One request under a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferd.engine.grammar.base import Matcher, Row
from inferd.engine.grammar.gate import ReasoningGate
from inferd.engine.grammar.vocabulary import set_bits


@dataclass(frozen=True)
class Ends:
    """What may end an output: the model's ends of sequence, and the stop tokens of the request."""

    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    min_tokens: int


class ConstrainedOutput:
    """A matcher that begins where reasoning ends, and that may not end before `min_tokens`.

    An output that has nothing left but its end may end before. Errors of the matcher are the caller's to catch.
    """

    def __init__(self, matcher: Matcher, ends: Ends, gate: ReasoningGate | None, start_id: int | None) -> None:
        self._matcher = matcher
        self._ends = ends
        self._gate = gate
        self._start_id = start_id  # of reasoning
        self._num_tokens = 0

    @property
    def is_ended(self) -> bool:
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> bool:
        """False for a token that may not come here; nothing has changed then."""
        if self._gate is not None and (self._gate.is_open or self._gate.may_open):
            if self._gate.is_open and token_id in self._ends.eos_token_ids:
                return False
            if self._gate.take(token_id):
                self._num_tokens += 1
                return True
            if not self._matcher.accept(token_id):
                self._gate.rollback(1)
                return False
        elif not self._matcher.accept(token_id):
            return False
        elif self._gate is not None:
            self._gate.take(token_id)
        self._num_tokens += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens
        if self._gate is not None:
            num_tokens = self._gate.rollback(num_tokens)
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fill_bitmask(self, row: Row) -> None:
        if self._gate is not None and self._gate.is_open:
            row.fill(-1)
            set_bits(row, self._ends.eos_token_ids, False)
            return
        self._matcher.fill_bitmask(row)
        if self._gate is not None and self._gate.may_open and self._start_id is not None:
            set_bits(row, [self._start_id], True)
        if self._num_tokens < self._ends.min_tokens:
            self._keep_going(row)

    def fill_window(self, rows: Sequence[Row], draft_token_ids: Sequence[int]) -> None:
        """A row for the next token and one behind each draft, as if the drafts had come.

        Behind a draft that may not come, or that ends the output, rows allow everything: no token of theirs counts.
        """
        num_accepted = 0
        for index, row in enumerate(rows):
            self.fill_bitmask(row)
            if index == len(draft_token_ids) or not self.accept(draft_token_ids[index]):
                break
            num_accepted += 1
            if self.is_ended:
                break
        for row in rows[index + 1 :]:
            row.fill(-1)
        self.rollback(num_accepted)

    def _keep_going(self, row: Row) -> None:
        """Forbid what would end the output, unless nothing else is left."""
        rest = row.copy()
        set_bits(rest, (*self._ends.eos_token_ids, *self._ends.stop_token_ids), False)
        if np.any(rest):
            row[:] = rest
