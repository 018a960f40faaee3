"""One owner of what every face shows: records come in, snapshots and merged deltas go out.

    put / drop / append  →  tables, journals and what is pending
                         →  at most ten times a second one `Delta`, kept in a ring
                         →  each subscription: a cursor into that ring

A subscription that falls out of the ring gets a new snapshot: it loses what lay between, never the last state.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from inferd.appliance.events.messages import Delta, EventId, Fields, JournalChange, Snapshot, TableChange
from inferd.appliance.schemas import TABLES, TOPICS, Topic

INTERVAL_S = 0.1
RING_LENGTH = 300  # half a minute at full rate
JOURNAL_LENGTHS: dict[Topic, int] = {"steps": 600, "incidents": 100, "audit": 200, "logs": 1000}
_MISSING = object()


class EventHub:
    """Everything is called on one event loop; other threads go through `call_soon_threadsafe`."""

    def __init__(self, interval_s: float = INTERVAL_S, ring_length: int = RING_LENGTH) -> None:
        self.epoch = uuid.uuid4().hex[:12]
        self._interval_s = interval_s
        self._seq = 0
        self._tables: dict[str, dict[str, Fields]] = {topic: {} for topic in TABLES}
        self._journals: dict[str, deque[Fields]] = {
            topic: deque(maxlen=length) for topic, length in JOURNAL_LENGTHS.items()
        }
        self._pending = _Pending()
        self._ring: deque[Delta] = deque(maxlen=ring_length)
        self._flushed_at = -1e9
        self._flush: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._readers: dict[Topic, int] = dict.fromkeys(TOPICS, 0)
        self._on_demand: list[Callable[[], None]] = []

    def put(self, topic: Topic, record: msgspec.Struct) -> None:
        """Adds the record to its table, or replaces the one of the same id. Unchanged fields cost nothing."""
        fields: Fields = msgspec.to_builtins(record)
        key = fields["id"]
        before = self._tables[topic].get(key, {})
        changed = {name: value for name, value in fields.items() if before.get(name, _MISSING) != value}
        if changed:
            self._tables[topic][key] = fields
            self._pending.set(topic, key, changed)
            self._schedule_flush()

    def drop(self, topic: Topic, key: str) -> None:
        if self._tables[topic].pop(key, None) is not None:
            self._pending.drop(topic, key)
            self._schedule_flush()

    def append(self, topic: Topic, record: msgspec.Struct) -> None:
        fields: Fields = msgspec.to_builtins(record)
        self._journals[topic].append(fields)
        self._pending.append(topic, fields, JOURNAL_LENGTHS[topic])
        self._schedule_flush()

    def records(self, topic: Topic) -> list[Fields]:
        """As they stand now, of a table or a journal."""
        return list(self._tables[topic].values()) if topic in TABLES else list(self._journals[topic])

    def is_wanted(self, topic: Topic) -> bool:
        """Whether anybody reads it: what is expensive to know is asked for only then."""
        return self._readers[topic] > 0

    def on_demand(self, callback: Callable[[], None]) -> None:
        """`callback` is called when the first reader of a topic comes or its last one goes."""
        self._on_demand.append(callback)

    async def subscribe(
        self, topics: Iterable[Topic], last_id: EventId | None = None
    ) -> AsyncGenerator[Snapshot | Delta, None]:
        """First a snapshot, or what came after `last_id` if that is still known; then deltas, for ever."""
        wanted = frozenset(topics)
        self._count_readers(wanted, 1)
        try:
            cursor = last_id.seq if last_id is not None and self._can_resume(last_id) else None
            while True:
                if cursor is None or not self._reaches(cursor):
                    snapshot = self.snapshot(wanted)
                    cursor = snapshot.seq
                    yield snapshot
                elif cursor == self._seq:
                    await self._news.wait()
                else:
                    for delta in [delta for delta in self._ring if delta.seq > cursor]:
                        cursor = delta.seq
                        if not (part := delta.only(wanted)).is_empty:
                            yield part
        finally:
            self._count_readers(wanted, -1)

    def snapshot(self, topics: frozenset[Topic]) -> Snapshot:
        self._flush_now()
        return Snapshot(
            self._seq,
            time.time(),
            {topic: list(table.values()) for topic, table in self._tables.items() if topic in topics},
            {topic: list(journal) for topic, journal in self._journals.items() if topic in topics},
        )

    def _reaches(self, cursor: int) -> bool:
        """Whether every delta after `cursor` is in the ring."""
        return cursor == self._seq or (bool(self._ring) and self._ring[0].seq <= cursor + 1)

    def _can_resume(self, last_id: EventId) -> bool:
        return last_id.epoch == self.epoch and last_id.seq <= self._seq and self._reaches(last_id.seq)

    def _schedule_flush(self) -> None:
        if self._flush is not None:
            return
        with suppress(RuntimeError):  # before the loop runs nobody reads; the first snapshot has it all
            loop = asyncio.get_running_loop()
            self._flush = loop.call_at(max(self._flushed_at + self._interval_s, loop.time()), self._flush_now)

    def _flush_now(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self._pending.is_empty:
            return
        self._flushed_at = asyncio.get_running_loop().time()
        self._seq += 1
        self._ring.append(self._pending.take(self._seq))
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _count_readers(self, topics: frozenset[Topic], change: int) -> None:
        before = {topic for topic in topics if self._readers[topic] > 0}
        for topic in topics:
            self._readers[topic] += change
        if before != {topic for topic in topics if self._readers[topic] > 0}:
            for callback in self._on_demand:
                callback()


class _Pending:
    """Changes since the last delta, merged by record."""

    def __init__(self) -> None:
        self._set: dict[str, dict[str, Fields]] = {}
        self._gone: dict[str, dict[str, None]] = {}
        self._added: dict[str, deque[Fields]] = {}

    @property
    def is_empty(self) -> bool:
        return not (self._set or self._gone or self._added)

    def set(self, topic: str, key: str, changed: Fields) -> None:
        self._set.setdefault(topic, {}).setdefault(key, {"id": key}).update(changed)

    def drop(self, topic: str, key: str) -> None:
        self._set.get(topic, {}).pop(key, None)
        self._gone.setdefault(topic, {})[key] = None

    def append(self, topic: str, fields: Fields, max_length: int) -> None:
        self._added.setdefault(topic, deque(maxlen=max_length)).append(fields)

    def take(self, seq: int) -> Delta:
        tables = {
            topic: TableChange(list(self._gone.get(topic, {})), list(self._set.get(topic, {}).values()))
            for topic in {*self._set, *self._gone}
        }
        journals: dict[str, Any] = {topic: JournalChange(list(fields)) for topic, fields in self._added.items()}
        self._set, self._gone, self._added = {}, {}, {}
        return Delta(seq, time.time(), tables, journals)
