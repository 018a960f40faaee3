"""What was compiled, and what could not be, as long as there is room."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from inferd.engine.grammar.base import CompiledGrammar

_ENTRY_BYTES = 512  # of the objects around what is kept


@dataclass(frozen=True)
class Failure:
    """A grammar that nobody can compile: not worth another try before `until_s`, on the monotonic clock."""

    error: str
    until_s: float


class GrammarCache:
    """Compiled grammars and failures by key; those not used for longest go when `max_bytes` is exceeded.

    One that is larger than all the room is kept alone, until the next comes. A running request keeps its grammar
    whether it is in here or not.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[CompiledGrammar | Failure, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> CompiledGrammar | Failure | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: str, outcome: CompiledGrammar | Failure) -> None:
        held = len(outcome.error) if isinstance(outcome, Failure) else outcome.size_bytes
        size = held + len(key) + _ENTRY_BYTES
        self._drop(key)
        self._entries[key] = (outcome, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry[1]
