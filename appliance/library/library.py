"""Which models this machine has: the database and the folders that its rows point to."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from sqlite_utils import Database
from sqlite_utils.db import Table

from inferd.appliance.library.db import LibraryDatabase
from inferd.appliance.library.errors import ModelNotFound, NameTaken
from inferd.appliance.library.names import check_name
from inferd.appliance.library.records import ModelFile, ModelRecord

DATABASE_NAME = "library.db"
MODELS_FOLDER = "models"
NUM_NEAR_NAMES = 3


class Library:
    """Safe to use from any thread. Rows are the truth: a folder that no row points to is no model."""

    def __init__(self, home: Path, database: LibraryDatabase) -> None:
        self.home = home
        self._database = database

    @classmethod
    def open(cls, home: Path) -> Library:
        """Makes the home where there is none. Raises `SchemaTooNew`, `LibraryUnreadable`, `DiskFull`, `OSError`."""
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        (home / MODELS_FOLDER).mkdir(exist_ok=True, mode=0o700)
        return cls(home, LibraryDatabase(home / DATABASE_NAME))

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def database(self) -> LibraryDatabase:
        """For the stores of other tables."""
        return self._database

    @property
    def models_folder(self) -> Path:
        return self.home / MODELS_FOLDER

    def list_models(self) -> list[ModelRecord]:
        """Oldest first."""
        with self._database.reading() as db:
            return [_record(db, row) for row in _rows(db, "SELECT * FROM models ORDER BY created_at, id")]

    def find(self, name: str) -> ModelRecord:
        """By id or alias; upper and lower case are the same. Raises `ModelNotFound`, which holds near names."""
        wanted = name.lower()
        with self._database.reading() as db:
            rows = _rows(
                db,
                "SELECT * FROM models WHERE id = ? OR id = (SELECT model_id FROM aliases WHERE alias = ?)"
                " ORDER BY id = ? DESC",
                [wanted, wanted, wanted],
            )
            if rows:
                return _record(db, rows[0])
            raise ModelNotFound(name, near_names(wanted, _names(db)))

    def id_of(self, name: str) -> str | None:
        """The id that a name or alias stands for, if any."""
        try:
            return self.find(name).id
        except ModelNotFound:
            return None

    def folder(self, record: ModelRecord) -> Path:
        """The absolute folder with the model's files."""
        return self.home / record.path

    def add(self, record: ModelRecord) -> ModelRecord:
        """Adds the model or replaces the one of that id, in one transaction. Returns what was stored.

        The aliases of a replaced model stay. An alias that is another model's name or alias is left out: it keeps
        meaning what it meant. The folder of a replaced model is discarded.
        Raises `InvalidName`, and `NameTaken` when the id is an alias of another model.
        """
        check_name(record.id)
        with self._database.writing() as db:
            owner = db.conn.execute("SELECT model_id FROM aliases WHERE alias = ?", [record.id]).fetchone()
            if owner is not None and owner[0] != record.id:
                raise NameTaken(f"{record.id} is an alias of {owner[0]}; remove that alias or choose another name")
            aliases = {check_name(alias) for alias in record.aliases} | set(_aliases(db, record.id))
            db.conn.execute("INSERT OR IGNORE INTO discarded_folders SELECT path FROM models WHERE id = ?", [record.id])
            db.conn.execute("DELETE FROM discarded_folders WHERE path = ?", [record.path])
            db.conn.execute("DELETE FROM models WHERE id = ?", [record.id])
            stored = msgspec.structs.replace(record, aliases=tuple(sorted(aliases - _names(db) - {record.id})))
            _insert(db, stored)
        return stored

    def owns(self, record: ModelRecord) -> bool:
        """Whether the model's folder is one that the library made: no other is ever deleted."""
        folder = self.folder(record)
        return folder.parent == self.models_folder and not folder.is_symlink()

    def remove(self, name: str) -> ModelRecord:
        """Takes the model out, then deletes its folder if that is the library's own. Raises `ModelNotFound`."""
        record = self.find(name)
        with self._database.writing() as db:
            if self.owns(record):
                _discard(db, record.path)
            db.conn.execute("DELETE FROM models WHERE id = ?", [record.id])
        if self.owns(record):
            self.erase(record.path)
        return record

    def discard(self, path: str) -> None:
        """Notes that the folder (relative to the home) is to be deleted, unless a model with that path is added."""
        with self._database.writing() as db:
            _discard(db, path)

    def discarded(self) -> list[str]:
        """The folders to delete. Those of a pull that is just putting its model in place are among them."""
        with self._database.reading() as db:
            return [row["path"] for row in _rows(db, "SELECT path FROM discarded_folders ORDER BY path")]

    def erase(self, path: str) -> None:
        """Deletes a discarded folder; what cannot be deleted stays discarded."""
        folder = self.home / path
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            with self._database.writing() as db:
                db.conn.execute("DELETE FROM discarded_folders WHERE path = ?", [path])


def near_names(wanted: str, names: Iterable[str]) -> list[str]:
    """At most three names that look like `wanted`, best first; the part after "org/" counts by itself too."""
    by_tail = {name.rpartition("/")[2]: name for name in sorted(names)}
    close = difflib.get_close_matches(wanted, [*by_tail.values(), *by_tail], n=2 * NUM_NEAR_NAMES, cutoff=0.5)
    return list(dict.fromkeys(by_tail.get(name, name) for name in close))[:NUM_NEAR_NAMES]


def _rows(db: Database, sql: str, values: list[Any] | None = None) -> list[dict[str, Any]]:
    return list(db.query(sql, values or []))


def _names(db: Database) -> set[str]:
    return {row["name"] for row in _rows(db, "SELECT id AS name FROM models UNION SELECT alias FROM aliases")}


def _record(db: Database, row: dict[str, Any]) -> ModelRecord:
    files = _rows(db, "SELECT name, size_bytes, sha256 FROM files WHERE model_id = ? ORDER BY name", [row["id"]])
    return ModelRecord(**row, aliases=_aliases(db, row["id"]), files=tuple(ModelFile(**file) for file in files))


def _aliases(db: Database, model_id: str) -> tuple[str, ...]:
    rows = _rows(db, "SELECT alias FROM aliases WHERE model_id = ? ORDER BY alias", [model_id])
    return tuple(row["alias"] for row in rows)


def _discard(db: Database, path: str) -> None:
    db.conn.execute("INSERT OR IGNORE INTO discarded_folders VALUES (?)", [path])


def _insert(db: Database, record: ModelRecord) -> None:
    row = msgspec.structs.asdict(record)
    aliases, files = row.pop("aliases"), row.pop("files")
    Table(db, "models").insert(row)
    Table(db, "files").insert_all({"model_id": record.id, **msgspec.structs.asdict(file)} for file in files)
    Table(db, "aliases").insert_all({"alias": alias, "model_id": record.id} for alias in aliases)
