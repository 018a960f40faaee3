"""Every old database is brought to the newest schema with its rows, or stays as it was."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlite_utils import Database

from inferd.appliance.library.errors import SchemaTooNew
from inferd.appliance.library.library import Library
from inferd.appliance.library.migrations import MIGRATIONS, applied, migrate

ROW = {
    "id": "tiny",
    "source": "file:/x",
    "revision": None,
    "format": "gguf",
    "architecture": "LlamaForCausalLM",
    "path": "models/tiny-0123456789ab",
    "size_bytes": 1,
    "quantisation": None,
    "context_limit": 8,
    "created_at": 5,
}


def open_database(path: Path | str = ":memory:") -> Database:
    return Database(sqlite3.connect(path))


def schema_of(db: Database) -> list[tuple[str, str]]:
    return db.conn.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()


def test_steps_are_numbered_without_gaps() -> None:
    assert [step.__name__[:4] for step in MIGRATIONS] == [f"m{number:03}" for number in range(1, len(MIGRATIONS) + 1)]


@pytest.mark.parametrize("num_old_steps", range(len(MIGRATIONS) + 1))
def test_from_every_old_version(inferd_home: Path, num_old_steps: int) -> None:
    inferd_home.mkdir()
    old = open_database(inferd_home / "library.db")
    migrate(old, MIGRATIONS[:num_old_steps])
    if num_old_steps:
        old["models"].insert(ROW)
    old.close()
    with Library.open(inferd_home) as library:
        assert [record.id for record in library.list_models()] == (["tiny"] if num_old_steps else [])
    upgraded, fresh = open_database(inferd_home / "library.db"), open_database()
    migrate(fresh)
    assert schema_of(upgraded) == schema_of(fresh)
    assert applied(upgraded) == [step.__name__ for step in MIGRATIONS]
    upgraded.close()
    fresh.close()


def test_a_step_that_fails_leaves_nothing_of_itself() -> None:
    def m001_good(db: Database) -> None:
        db["good"].create({"a": int})

    def m002_bad(db: Database) -> None:
        db["half"].create({"a": int})
        db["half"].insert({"a": 1})
        raise RuntimeError("broken")

    db = open_database()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            migrate(db, [m001_good, m002_bad])
        assert applied(db) == ["m001_good"]
        assert set(db.table_names()) == {"good", "migrations"}
    db.close()


def test_a_newer_database_is_refused_and_untouched(inferd_home: Path) -> None:
    Library.open(inferd_home).close()
    newer = open_database(inferd_home / "library.db")
    with newer.conn:
        newer.conn.execute("INSERT INTO migrations VALUES ('m999_future', 0)")
    newer.close()
    with pytest.raises(SchemaTooNew, match="m999_future"):
        Library.open(inferd_home)


OPEN_LIBRARY = "import sys; from pathlib import Path; from inferd.appliance.library.library import Library; "


def test_processes_that_open_a_new_library_at_once_all_succeed(inferd_home: Path) -> None:
    code = OPEN_LIBRARY + "Library.open(Path(sys.argv[1])).close()"
    children = [subprocess.Popen([sys.executable, "-P", "-c", code, str(inferd_home)]) for _ in range(4)]
    assert [child.wait() for child in children] == [0, 0, 0, 0]
