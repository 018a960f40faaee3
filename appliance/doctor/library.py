"""The database, and the folders that its rows point to. Looked at without changing anything."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlite_utils import Database

from inferd.appliance.doctor.finding import Finding, failure, fine, warning
from inferd.appliance.downloads.disk import format_bytes
from inferd.appliance.downloads.stagings import UnfinishedPull, unfinished_pulls
from inferd.appliance.library.backup import backups
from inferd.appliance.library.errors import SchemaTooNew
from inferd.appliance.library.library import DATABASE_NAME, MODELS_FOLDER
from inferd.appliance.library.migrations import pending

SOUND = ("ok",)


@dataclass(frozen=True)
class LibraryFacts:
    database: Path = Path(DATABASE_NAME)
    exists: bool = False
    error: str = ""  # why it cannot be read
    integrity: tuple[str, ...] = SOUND
    schema_error: str = ""
    pending: tuple[str, ...] = ()
    num_models: int = 0
    lost: tuple[str, ...] = ()  # models whose folder is gone
    unfinished: tuple[UnfinishedPull, ...] = ()
    backups: tuple[Path, ...] = ()


def check_library(facts: LibraryFacts) -> Iterator[Finding]:
    if not facts.exists:
        yield fine("database", "none yet: the first start makes it")
    else:
        yield _database(facts)
        if not facts.error:
            yield _schema(facts)
            yield _models(facts)
    yield _downloads(facts)


def _database(facts: LibraryFacts) -> Finding:
    newest = f"`cp {facts.backups[0]} {facts.database}`" if facts.backups else "move it away and pull again"
    remedy = f"Stop the daemon, keep a copy of what is there, then go back to an older state: {newest}."
    if facts.error:
        return failure("database", f"{facts.database} cannot be read: {facts.error}", remedy)
    if facts.integrity != SOUND:
        return failure("database", f"{facts.database} is damaged: {facts.integrity[0]}", remedy)
    return fine("database", f"{facts.database} is sound")


def _schema(facts: LibraryFacts) -> Finding:
    if facts.schema_error:
        return failure(
            "schema", facts.schema_error, "Install the newer inferd again, or restore the copy from before it."
        )
    if facts.pending:
        text = f"{len(facts.pending)} steps behind, which the next start makes after a backup"
        return warning("schema", text, "Start the daemon of this version: `inferd serve`.")
    return fine("schema", "current")


def _models(facts: LibraryFacts) -> Finding:
    if facts.lost:
        names = ", ".join(facts.lost)
        remedy = f"Bring them back with `inferd pull`, or take them out with `inferd rm {facts.lost[0]}`."
        return failure("models", f"the files are gone of {names}", remedy)
    return fine("models", f"{facts.num_models} in the library")


def _downloads(facts: LibraryFacts) -> Finding:
    if not facts.unfinished:
        return fine("downloads", "none is unfinished")
    shown = ", ".join(f"{pull.model} ({format_bytes(pull.num_bytes)})" for pull in facts.unfinished)
    first = facts.unfinished[0]
    again = f"`inferd pull {first.source}` goes on, " if first.source else ""
    return warning(
        "downloads", f"unfinished: {shown}", f"For {first.model}: {again}`inferd rm {first.model}` drops it."
    )


def read_library(home: Path) -> LibraryFacts:
    database = home / DATABASE_NAME
    try:
        unfinished = tuple(unfinished_pulls(home / MODELS_FOLDER))
        if not database.is_file():
            return LibraryFacts(database, unfinished=unfinished)
    except OSError as error:
        return LibraryFacts(database, exists=True, error=error.strerror or str(error))
    copies = tuple(backups(database))
    facts = LibraryFacts(database, exists=True, unfinished=unfinished, backups=copies)
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5)) as connection:
            return _read(facts, connection, home)
    except sqlite3.Error as error:
        return LibraryFacts(database, exists=True, error=str(error), unfinished=unfinished, backups=copies)


def _read(facts: LibraryFacts, connection: sqlite3.Connection, home: Path) -> LibraryFacts:
    integrity = tuple(str(row[0]) for row in connection.execute("PRAGMA integrity_check(5)"))
    waiting: list[str] = []
    schema_error = ""
    try:
        waiting = pending(Database(connection))
    except SchemaTooNew as error:
        schema_error = str(error)
    has_models = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'models'").fetchone()
    rows = connection.execute("SELECT id, path FROM models ORDER BY id").fetchall() if has_models else []
    return LibraryFacts(
        facts.database,
        exists=True,
        integrity=integrity,
        schema_error=schema_error,
        pending=tuple(waiting),
        num_models=len(rows),
        lost=tuple(name for name, path in rows if not (home / path).is_dir()),
        unfinished=facts.unfinished,
        backups=facts.backups,
    )
