"""Screens that are one table: incidents, downloads, keys, the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Static

from inferd.appliance.events.follow import Follower
from inferd.appliance.schemas import DownloadRecord, IncidentRecord, LogLine
from inferd.tui.format import FANCY, Glyphs, amount, bar, span
from inferd.tui.rows import Column, Row
from inferd.tui.widgets.header import Header
from inferd.tui.widgets.record_table import RecordTable

MakeRows = Callable[[Follower], Sequence[Row]]
INCIDENT_COLUMNS = (Column("AGO", 6, right=True), Column("MODEL", 20), Column("KIND", 12), Column("WHAT HAPPENED", 0))
DOWNLOAD_COLUMNS = (
    Column("MODEL", 0),
    Column("PHASE", 12),
    Column("DONE", 14),
    Column("SIZE", 10, right=True),
    Column("SPEED", 12, right=True),
    Column("LEFT", 6, right=True),
)
LOG_COLUMNS = (Column("AGO", 6, right=True), Column("LEVEL", 8), Column("FROM", 16), Column("LINE", 0))
KEY_COLUMNS = (
    Column("NAME", 0),
    Column("ID", 9),
    Column("SCOPES", 18),
    Column("MODELS", 18),
    Column("LANE", 12),
    Column("STATE", 12),
)


class Listing(Screen[None]):
    def __init__(
        self, address: str, columns: tuple[Column, ...], empty: str, make_rows: MakeRows, glyphs: Glyphs = FANCY
    ) -> None:
        super().__init__()
        self._address = address
        self._columns = columns
        self._empty = empty
        self._make_rows = make_rows
        self._glyphs = glyphs

    def compose(self) -> ComposeResult:
        yield Header(self._address, self._glyphs)
        yield RecordTable(self._columns, self._empty, glyphs=self._glyphs, id="list")
        yield Static(id="detail", markup=False)
        yield Static(" 1 overview  ? help  ⏎ details  q quit", id="hints", markup=False)

    def show(self, follower: Follower) -> None:
        self.query_one(Header).show(follower)
        self.query_one("#list", RecordTable).show(self._make_rows(follower))

    def show_detail(self, text: str) -> None:
        self.query_one("#detail", Static).update(text)


def incident_rows(follower: Follower) -> list[Row]:
    mirror = follower.mirror
    return [_incident_row(one, mirror.at) for one in reversed(mirror.incidents)]


def incident_detail(incident: IncidentRecord) -> str:
    lines = "\n   ".join(incident.last_lines)
    memory = "; ".join(
        f"{name}: weights {amount(held.weights)}, KV {amount(held.kv)}, other {amount(held.other)}, "
        f"free {amount(held.free)}"
        for name, held in incident.ledger.items()
    )
    return f" {incident.summary}\n {incident.remedy}\n requests lost: {incident.requests_lost} · {memory}" + (
        f"\n its last lines:\n   {lines}" if lines else ""
    )


def download_rows(follower: Follower) -> list[Row]:
    return [_download_row(one) for one in follower.mirror.downloads]


def log_rows(follower: Follower) -> list[Row]:
    mirror = follower.mirror
    lines = mirror.journal("logs", LogLine)
    return [_log_row(index, line, mirror.at) for index, line in reversed(list(enumerate(lines)))]


def _incident_row(incident: IncidentRecord, now: float) -> Row:
    cells = (span(now - incident.at), incident.model, incident.kind.replace("_", " "), incident.summary)
    return Row(incident.id, cells, "bad" if now - incident.at < 3600 else "dim")


def _download_row(one: DownloadRecord) -> Row:
    share = one.done_bytes / one.total_bytes if one.total_bytes else 0.0
    cells = (
        one.model or one.source,
        one.phase,
        f"{bar(share, 8)} {100 * share:3.0f}%",
        amount(one.total_bytes) if one.total_bytes else "",
        f"{amount(one.bytes_per_s)}/s" if one.bytes_per_s else "",
        span(one.eta_s) if one.eta_s is not None else "",
    )
    return Row(one.id, cells, "bad" if one.error else "dim" if one.ended_at else "good")


def _log_row(index: int, line: LogLine, now: float) -> Row:
    tones = {"ERROR": "bad", "CRITICAL": "bad", "WARNING": "warn"}
    return Row(str(index), (span(now - line.at), line.level, line.source, line.text), tones.get(line.level.upper(), ""))
