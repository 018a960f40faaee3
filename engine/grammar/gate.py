"""Reasoning comes first: while a block of it is open, the grammar has not begun."""

from __future__ import annotations

from collections.abc import Sequence


class ReasoningGate:
    """Follows one output through its block of reasoning, if it has one. `rollback` takes tokens back."""

    def __init__(self, start_id: int, end_id: int, prompt_token_ids: Sequence[int]) -> None:
        self._start_id = start_id
        self._end_id = end_id
        self._num_tokens = 0
        self._opened_at: int | None = None  # in tokens of the output
        self._closed_at: int | None = None
        for token_id in reversed(prompt_token_ids):
            if token_id == end_id:
                break
            if token_id == start_id:
                self._opened_at = 0
                break

    @property
    def is_open(self) -> bool:
        """Whether the next token is reasoning, or closes it."""
        return self._opened_at is not None and self._closed_at is None

    @property
    def may_open(self) -> bool:
        """Whether the next token may open a block: only the very first one."""
        return self._num_tokens == 0 and self._opened_at is None

    def take(self, token_id: int) -> bool:
        """Whether the token belongs to the reasoning, its markers included: the grammar does not see it then."""
        opens = self.may_open and token_id == self._start_id
        inside = self.is_open
        self._num_tokens += 1
        if opens:
            self._opened_at = self._num_tokens
        elif inside and token_id == self._end_id:
            self._closed_at = self._num_tokens
        return opens or inside

    def rollback(self, num_tokens: int) -> int:
        """Of the last tokens, how many the grammar has seen."""
        before = self._num_tokens
        self._num_tokens -= num_tokens
        reasoned_until = self._closed_at if self._closed_at is not None else before if self.is_open else 0
        if self._closed_at is not None and self._closed_at > self._num_tokens:
            self._closed_at = None
        if self._opened_at is not None and self._opened_at > self._num_tokens:
            self._opened_at = None
        return min(num_tokens, before - min(reasoned_until, before))
