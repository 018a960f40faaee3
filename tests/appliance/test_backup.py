"""Before a database changes its schema, there is a copy of what it was."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlite_utils import Database

from inferd.appliance.library.backup import NUM_KEPT, back_up, backups
from inferd.appliance.library.errors import DiskFull
from inferd.appliance.library.library import DATABASE_NAME, Library
from inferd.appliance.library.migrations import MIGRATIONS, Migration, applied, migrate


def m901_broken(db: Database) -> None:
    db["models"].drop()
    raise RuntimeError("broken")


def old_home(home: Path) -> Path:
    """A database without the last step of today, with a row."""
    home.mkdir()
    database = home / DATABASE_NAME
    with closing(sqlite3.connect(database)) as connection:
        db = Database(connection)
        migrate(db, MIGRATIONS[:-1])
        connection.execute("INSERT INTO model_options VALUES ('m', '{}')")
        connection.commit()
    return database


def options_in(database: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return connection.execute("SELECT * FROM model_options").fetchall()


def test_a_new_database_has_none_and_neither_has_a_current_one(inferd_home: Path) -> None:
    for _ in range(2):
        Library.open(inferd_home).close()
        assert backups(inferd_home / DATABASE_NAME) == []


def test_an_old_database_is_copied_before_it_is_changed(inferd_home: Path) -> None:
    database = old_home(inferd_home)
    Library.open(inferd_home).close()
    (copy,) = backups(database)
    assert copy.name == f"{DATABASE_NAME}.before-{MIGRATIONS[-1].__name__}"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert options_in(copy) == [("m", "{}")]
    with closing(sqlite3.connect(copy)) as connection:
        assert len(applied(Database(connection))) == len(MIGRATIONS) - 1
    assert sorted(path.name for path in inferd_home.iterdir() if path.is_dir()) == ["models"]  # nothing half-made


@contextmanager
def one_more_step(step: Migration) -> Iterator[None]:
    MIGRATIONS.append(step)
    try:
        yield
    finally:
        MIGRATIONS.remove(step)


def test_a_migration_that_fails_leaves_the_old_database_usable(inferd_home: Path) -> None:
    database = old_home(inferd_home)
    Library.open(inferd_home).close()
    backups(database)[0].unlink()
    with one_more_step(m901_broken):
        for _ in range(5):  # a service manager tries again and again
            with pytest.raises(RuntimeError, match="broken"):
                Library.open(inferd_home)
    assert options_in(database) == options_in(*backups(database)) == [("m", "{}")]
    with Library.open(inferd_home) as library:
        assert library.list_models() == []


def test_the_last_copies_are_kept(inferd_home: Path) -> None:
    database = old_home(inferd_home)
    with closing(sqlite3.connect(database)) as connection:
        names = [back_up(connection, database, f"m9{number:02}").name for number in range(NUM_KEPT + 2)]
    assert [path.name for path in backups(database)] == names[: -NUM_KEPT - 1 : -1]


def test_what_cannot_be_copied_is_not_changed(inferd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = old_home(inferd_home)

    def full(*_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr("inferd.appliance.library.db.back_up", full)
    with pytest.raises(DiskFull, match="make room"):
        Library.open(inferd_home)
    with closing(sqlite3.connect(database)) as connection:
        assert len(applied(Database(connection))) == len(MIGRATIONS) - 1
