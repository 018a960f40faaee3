"""The reader's side of the event stream: the same tables and journals as the daemon has."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec

from inferd.appliance.events.messages import Delta, Fields, Snapshot
from inferd.appliance.schemas import (
    DeviceStatus,
    DownloadRecord,
    IncidentRecord,
    ModelStatus,
    RequestRecord,
    StepRecord,
)

JOURNAL_LENGTH = 1000
RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class Mirror:
    """Apply every event in order. `seq` is the last one's; 0 before the first."""

    def __init__(self) -> None:
        self.seq = 0
        self.at = 0.0  # the daemon's clock at the last event
        self._tables: dict[str, dict[str, Fields]] = {}
        self._journals: dict[str, deque[Fields]] = {}

    def apply(self, event: Snapshot | Delta) -> frozenset[str]:
        """Returns the topics that changed."""
        self.seq, self.at = event.seq, event.at
        if isinstance(event, Snapshot):
            self._tables = {topic: {row["id"]: row for row in rows} for topic, rows in event.tables.items()}
            self._journals = {topic: deque(rows, JOURNAL_LENGTH) for topic, rows in event.journals.items()}
            return frozenset({*event.tables, *event.journals})
        for topic, change in event.tables.items():
            table = self._tables.setdefault(topic, {})
            for key in change.gone:
                table.pop(key, None)
            for fields in change.set:
                table[fields["id"]] = {**table.get(fields["id"], {}), **fields}
        for topic, added in event.journals.items():
            self._journals.setdefault(topic, deque(maxlen=JOURNAL_LENGTH)).extend(added.add)
        return frozenset({*event.tables, *event.journals})

    @property
    def requests(self) -> list[RequestRecord]:
        return self._table("requests", RequestRecord)

    @property
    def models(self) -> list[ModelStatus]:
        return self._table("models", ModelStatus)

    @property
    def devices(self) -> list[DeviceStatus]:
        return self._table("devices", DeviceStatus)

    @property
    def downloads(self) -> list[DownloadRecord]:
        return self._table("downloads", DownloadRecord)

    @property
    def steps(self) -> list[StepRecord]:
        return self.journal("steps", StepRecord)

    @property
    def incidents(self) -> list[IncidentRecord]:
        return self.journal("incidents", IncidentRecord)

    def journal(self, topic: str, kind: type[RecordT]) -> list[RecordT]:
        """The newest last."""
        return [msgspec.convert(row, kind) for row in self._journals.get(topic, ())]

    def _table(self, topic: str, kind: type[RecordT]) -> list[RecordT]:
        return [msgspec.convert(row, kind) for row in self._tables.get(topic, {}).values()]
