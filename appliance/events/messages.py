"""What travels on `/admin/v1/events`, and how it looks as server-sent events.

A `Snapshot` holds everything of the topics asked for; each `Delta` after it what has changed. In a delta's
`TableChange`, `gone` happens before `set`, and a record of `set` holds its `id` and the changed fields alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from inferd.appliance.schemas import Topic

Fields = dict[str, Any]  # a record, or the changed part of one, as JSON has it


class TableChange(msgspec.Struct, omit_defaults=True):
    gone: list[str] = []
    set: list[Fields] = []


class JournalChange(msgspec.Struct, omit_defaults=True):
    add: list[Fields] = []  # the newest last


class Snapshot(msgspec.Struct):
    seq: int
    at: float
    tables: dict[str, list[Fields]]
    journals: dict[str, list[Fields]]


class Delta(msgspec.Struct):
    seq: int
    at: float
    tables: dict[str, TableChange] = {}
    journals: dict[str, JournalChange] = {}

    def only(self, topics: frozenset[Topic]) -> Delta:
        """The part that concerns `topics`; empty when nothing does."""
        return Delta(
            self.seq,
            self.at,
            {topic: change for topic, change in self.tables.items() if topic in topics},
            {topic: change for topic, change in self.journals.items() if topic in topics},
        )

    @property
    def is_empty(self) -> bool:
        return not (self.tables or self.journals)


class EventId(msgspec.Struct, frozen=True):
    """`epoch` names one run of the daemon: sequence numbers of different runs have nothing in common."""

    epoch: str
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"

    @classmethod
    def parse(cls, text: str) -> EventId | None:
        """None for anything that is not one of ours."""
        epoch, _, seq = text.rpartition("-")
        return cls(epoch, int(seq)) if epoch and seq.isascii() and seq.isdigit() and len(seq) < 16 else None


def encode_sse(event: Snapshot | Delta, epoch: str) -> bytes:
    """One server-sent event; JSON holds no line feeds, so one `data` line is enough."""
    name = b"snapshot" if isinstance(event, Snapshot) else b"delta"
    identity = str(EventId(epoch, event.seq)).encode()
    return b"event: %s\nid: %s\ndata: %s\n\n" % (name, identity, msgspec.json.encode(event))


def decode_event(name: str, data: bytes | str) -> Snapshot | Delta | None:
    """None for an event of a kind that this client does not know. Raises `msgspec.DecodeError`."""
    kinds: dict[str, type[Snapshot] | type[Delta]] = {"snapshot": Snapshot, "delta": Delta}
    kind = kinds.get(name)
    return None if kind is None else msgspec.json.decode(data, type=kind)
