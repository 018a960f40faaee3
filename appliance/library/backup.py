"""Copies of the database as it was before its schema changed, beside it."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path

NUM_KEPT = 3
INFIX = ".before-"  # library.db → library.db.before-m011_lanes


def back_up(connection: sqlite3.Connection, database: Path, next_step: str) -> Path:
    """Writes all of the database into one file that is named after the migration to come; older copies go.

    A copy of the same name is replaced at once or not at all, so an upgrade that is tried again and again costs one
    copy. The copy is on disk when this returns. Raises `sqlite3.Error` (of a full disk among them) and `OSError`.
    """
    target = database.with_name(f"{database.name}{INFIX}{next_step}")
    with tempfile.TemporaryDirectory(prefix=f"{database.name}.", dir=database.parent) as folder:
        fresh = Path(folder) / "copy"
        connection.execute("VACUUM INTO ?", [str(fresh)])
        fresh.chmod(0o600)  # digests of keys are in it
        _sync(fresh)
        os.replace(fresh, target)
    _sync(database.parent)
    for old in backups(database)[NUM_KEPT:]:
        old.unlink(missing_ok=True)
    return target


def backups(database: Path) -> list[Path]:
    """The newest first."""
    found = database.parent.glob(f"{database.name}{INFIX}*")
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
