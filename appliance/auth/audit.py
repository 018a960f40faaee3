"""What administrators did, each entry chained to the one before: a line that is changed or taken out shows.

`digest` is SHA-256 over the digest before it and the entry's own fields.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import msgspec

from inferd.appliance.library.db import LibraryDatabase
from inferd.appliance.schemas import AuditEntry

FIRST = "0" * 64
MAX_DETAIL_CHARS = 500


class AuditLog:
    """Safe to use from any thread; an entry is on disk before `append` returns."""

    def __init__(self, database: LibraryDatabase, on_entry: Callable[[AuditEntry], None] = lambda entry: None) -> None:
        self._database = database
        self._on_entry = on_entry

    def append(
        self, actor: str, action: str, target: str = "", *, peer: str = "", detail: str = "", outcome: str = "ok"
    ) -> AuditEntry:
        with self._database.writing() as db:
            last = db.conn.execute("SELECT id, digest FROM audit ORDER BY id DESC LIMIT 1").fetchone() or (0, FIRST)
            entry = AuditEntry(
                id=last[0] + 1,
                at=time.time(),
                actor=actor,
                peer=peer,
                action=action,
                target=target[:200],
                detail=detail[:MAX_DETAIL_CHARS],
                outcome=outcome,
            )
            entry = msgspec.structs.replace(entry, digest=chained(last[1], entry))
            body = msgspec.json.encode(entry).decode()
            db.conn.execute("INSERT INTO audit (id, digest, entry) VALUES (?, ?, ?)", [entry.id, entry.digest, body])
        self._on_entry(entry)
        return entry

    def latest(self, limit: int = 200) -> list[AuditEntry]:
        """The newest last."""
        with self._database.reading() as db:
            rows = db.conn.execute("SELECT entry FROM audit ORDER BY id DESC LIMIT ?", [limit]).fetchall()
        return [msgspec.json.decode(row[0], type=AuditEntry) for row in reversed(rows)]

    def first_broken(self) -> int | None:
        """The id at which the chain does not hold; None: it holds."""
        before, number = FIRST, 0
        with self._database.reading() as db:
            for entry_id, digest, body in db.conn.execute("SELECT id, digest, entry FROM audit ORDER BY id"):
                number += 1
                entry = msgspec.json.decode(body, type=AuditEntry)
                if entry_id != number or entry.digest != digest or chained(before, entry) != digest:
                    return int(entry_id)
                before = digest
        return None


def chained(before: str, entry: AuditEntry) -> str:
    fields = msgspec.json.encode(msgspec.structs.replace(entry, digest=""))
    return hashlib.sha256(before.encode() + fields).hexdigest()
