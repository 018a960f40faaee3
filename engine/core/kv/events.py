"""What becomes findable in the prefix cache and what goes, in order, for those who follow it from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inferd.engine.core.kv.hashing import BlockKey, split_block_key
from inferd.engine.messages import KVBlocksRemoved, KVBlocksStored, KVCacheCleared, KVEvent


class CacheListener(Protocol):
    """Hears what can no longer be found in the prefix cache."""

    def removed(self, key: BlockKey) -> None: ...

    def cleared(self) -> None:
        """Nothing can be found any longer, in any group."""
        ...


class Listeners:
    """Several as one."""

    def __init__(self, listeners: Sequence[CacheListener]) -> None:
        self._listeners = tuple(listeners)

    def removed(self, key: BlockKey) -> None:
        for listener in self._listeners:
            listener.removed(key)

    def cleared(self) -> None:
        for listener in self._listeners:
            listener.cleared()


class KVEventLog:
    """Collects events until somebody takes them. Removals that follow each other become one event a group."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def stored(
        self, group: int, block_hashes: Sequence[bytes], parent_hash: bytes | None, token_ids: Sequence[int]
    ) -> None:
        """Blocks that follow each other in one request. One that was findable already may be told again."""
        self._events.append(KVBlocksStored(group, list(block_hashes), parent_hash, list(token_ids)))

    def removed(self, key: BlockKey) -> None:
        block_hash, group = split_block_key(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, KVBlocksRemoved) and last.group == group:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(KVBlocksRemoved(group, [block_hash]))

    def cleared(self) -> None:
        self._events.append(KVCacheCleared())

    def take(self) -> list[KVEvent]:
        """Everything since the last call."""
        events, self._events = self._events, []
        return events
