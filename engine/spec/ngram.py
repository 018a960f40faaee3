"""Prompt lookup: what followed when the last tokens stood in the text before.

Saxena, "Prompt Lookup Decoding" (2023). It costs no model, and pays where the output repeats what was said: in edits,
quotations, code, summaries.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferd.engine.core.output import SchedulerOutput
from inferd.engine.spec.base import DraftRow

MAX_CANDIDATES = 32  # places that are compared for the longest match


class NgramIndex:
    """Where the n-grams of one growing text stand. A text of t tokens takes O(t) in all, a lookup O(1)."""

    def __init__(self, shortest: int, longest: int) -> None:
        """Lengths of the n-grams, both included."""
        self._shortest = shortest
        self._longest = longest
        self._token_ids: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # shortest n-gram → place of the token behind its last occurrence
        self._before = array("q", [0])  # by place: that of the occurrence before it, 0 for none

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text goes on with these. What it ends with is entered only when something follows on it."""
        known, size = self._token_ids, self._shortest
        first = max(len(known), 1)
        known.extend(token_ids)
        for place in range(first, len(known)):
            before = 0
            if place >= size:
                ngram = tuple(known[place - size : place])
                before = self._last.get(ngram, 0)
                self._last[ngram] = place
            self._before.append(before)

    def continuation(self, num_tokens: int) -> list[int]:
        """What followed on the longest n-gram that the text ends with, where it stood last; empty when it is new.

        Of all places only the last `MAX_CANDIDATES` are looked at. A continuation that reaches the end of the text goes
        on with itself, as a loop does.
        """
        known = self._token_ids
        place = self._last.get(tuple(known[-self._shortest :]), 0)
        best, best_length = 0, 0
        for _ in range(MAX_CANDIDATES):
            if not place or best_length == self._longest:
                break
            length = self._common_length(place)
            if length > best_length:
                best, best_length = place, length
            place = self._before[place]
        if not best:
            return []
        period = len(known) - best
        return [known[best + index % period] for index in range(num_tokens)]

    def _common_length(self, place: int) -> int:
        """How many tokens before `place` are those that the text ends with, up to the longest n-gram."""
        known, end = self._token_ids, len(self._token_ids)
        length = self._shortest
        while length < min(self._longest, place) and known[place - length - 1] == known[end - length - 1]:
            length += 1
        return length


class NgramDrafter:
    """Implements `Drafter` by an index per request, which grows with it and goes with it."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = shortest, longest
        self._indexes: dict[str, NgramIndex] = {}

    def follow(self, output: SchedulerOutput) -> None:
        for request_id in (*output.finished_ids, *output.preempted_ids):
            self._indexes.pop(request_id, None)

    def propose(self, rows: Sequence[DraftRow]) -> dict[str, list[int]]:
        found = {row.request_id: self._continue(row) for row in rows if row.num_wanted}
        return {request_id: drafts for request_id, drafts in found.items() if drafts}

    def _continue(self, row: DraftRow) -> list[int]:
        index = self._indexes.get(row.request_id)
        if index is None:
            index = self._indexes[row.request_id] = NgramIndex(*self._lengths)
        new: NDArray[np.int32] = row.token_ids[index.num_tokens :]
        index.extend(new.tolist())
        return index.continuation(row.num_wanted)
