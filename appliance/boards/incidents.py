"""Keeps what went wrong, with what is needed to understand it: the engine's last lines, and who had the memory."""

from __future__ import annotations

import re
import secrets
import time

import msgspec

from inferd.appliance.events.hub import EventHub
from inferd.appliance.library.db import LibraryDatabase
from inferd.appliance.schemas import DeviceMemory, IncidentRecord
from inferd.appliance.supervisor.failure import Failure

KEPT = 200
EXIT_CODE = re.compile(r"exit code (-?\d+)")
SIGNAL = re.compile(r"\b(SIG[A-Z]+[0-9+]*)\b")
LAST_LINES = "its last lines:"
REMEDIES = {
    "load_failed": "The text above names the file or option. It is tried again when the next request comes.",
    "wake_failed": "It is loaded from disk with the next request.",
    "sleep_failed": "It is loaded from disk with the next request.",
    "engine_died": "It is started again by itself. SIGKILL often means that memory ran out: `inferd show --fit` tells.",
    "engine_hung": "It is started again by itself. A step that needs long by right: raise engine.step_timeout_s.",
}


class IncidentLog:
    """Safe to use on the event loop; one incident is one small row."""

    def __init__(self, database: LibraryDatabase, hub: EventHub) -> None:
        self._database = database
        self._hub = hub
        for incident in self.latest(KEPT):
            hub.append("incidents", incident)

    def record(self, incident: IncidentRecord) -> None:
        with self._database.writing() as db:
            body = msgspec.json.encode(incident).decode()
            db.conn.execute(
                "INSERT INTO incidents (id, at, incident) VALUES (?, ?, ?)", [incident.id, incident.at, body]
            )
            db.conn.execute(
                "DELETE FROM incidents WHERE id NOT IN (SELECT id FROM incidents ORDER BY at DESC LIMIT ?)", [KEPT]
            )
        self._hub.append("incidents", incident)

    def latest(self, limit: int) -> list[IncidentRecord]:
        """The newest last."""
        with self._database.reading() as db:
            rows = db.conn.execute("SELECT incident FROM incidents ORDER BY at DESC LIMIT ?", [limit]).fetchall()
        return [msgspec.json.decode(row[0], type=IncidentRecord) for row in reversed(rows)]


def incident_of(
    model: str, failure: Failure, memory: dict[str, DeviceMemory], num_requests_lost: int
) -> IncidentRecord:
    """`memory`: who had what at that moment, by device."""
    text = str(failure.error) if failure.error is not None else failure.reason
    summary, _, last_lines = text.partition(LAST_LINES)
    exit_code, signal = EXIT_CODE.search(summary), SIGNAL.search(summary)
    return IncidentRecord(
        id=secrets.token_hex(4),
        at=time.time(),
        model=model,
        kind=failure.kind,
        summary=summary.strip().rstrip(";")[:500],
        exit_code=int(exit_code.group(1)) if exit_code else None,
        signal=signal.group(1) if signal else None,
        last_lines=tuple(line.strip("\n")[:500] for line in last_lines.splitlines() if line.strip())[-40:],
        ledger=memory,
        requests_lost=num_requests_lost,
        remedy=REMEDIES[failure.kind],
    )
