"""The one connection that a process has to `library.db`."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlite_utils import Database

from inferd.appliance.library.backup import back_up
from inferd.appliance.library.errors import DiskFull, LibraryUnreadable
from inferd.appliance.library.migrations import applied, migrate, pending

BUSY_TIMEOUT_MS = 5000


class LibraryDatabase:
    """Any thread may use it, one at a time: every read and write holds its lock.

    Write-ahead logging lets other processes read while this one writes. `synchronous=FULL`, because a row that was
    acknowledged must survive a power cut.
    """

    def __init__(self, path: Path) -> None:
        """Raises `LibraryUnreadable`, `DiskFull` and `SchemaTooNew`."""
        try:
            connection = sqlite3.connect(path, check_same_thread=False)
            try:
                self._db = _prepare(connection, path)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise DiskFull(f"the disk of {path.parent} is full; make room, or set another home") from error
            raise LibraryUnreadable(
                f"{path} cannot be used: {error}. Check its permissions; if it is damaged, move it away and pull again"
            ) from error
        self._lock = threading.RLock()

    @contextmanager
    def reading(self) -> Iterator[Database]:
        with self._lock:
            yield self._db

    @contextmanager
    def writing(self) -> Iterator[Database]:
        """One transaction; an exception inside rolls it back."""
        with self._lock:
            self._db.conn.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.conn.execute("COMMIT")
            except BaseException:
                if self._db.conn.in_transaction:
                    self._db.conn.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _prepare(connection: sqlite3.Connection, path: Path) -> Database:
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    db = Database(connection)
    if applied(db) and (waiting := pending(db)):
        back_up(connection, path, waiting[0])
    migrate(db)
    return db
