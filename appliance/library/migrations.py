"""The database's schema, one numbered step after another. A step that has been released is never edited."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqlite_utils import Database
from sqlite_utils.db import Table

from inferd.appliance.library.errors import SchemaTooNew

Migration = Callable[[Database], None]
MIGRATIONS: list[Migration] = []


def migration(step: Migration) -> Migration:
    MIGRATIONS.append(step)
    return step


def migrate(db: Database, steps: Sequence[Migration] = MIGRATIONS) -> None:
    """Brings `db` to the newest schema: each missing step and the note that it ran are one transaction.

    Raises `SchemaTooNew`, and whatever a step raises; the steps before that one stay.
    """
    while pending(db, steps):
        _apply_next(db, steps)


def pending(db: Database, steps: Sequence[Migration] = MIGRATIONS) -> list[str]:
    """The steps that are still to be made, in order. Raises `SchemaTooNew`."""
    done, known = applied(db), [step.__name__ for step in steps]
    newer = [name for name in done if name not in known]
    if newer:
        raise SchemaTooNew(f"the library was changed by a newer inferd (step {newer[0]}); use that one or a newer one")
    return [name for name in known if name not in done]


def applied(db: Database) -> list[str]:
    if "migrations" not in db.table_names():
        return []
    return [row[0] for row in db.conn.execute("SELECT name FROM migrations ORDER BY rowid")]


def _apply_next(db: Database, steps: Sequence[Migration]) -> None:
    """The write lock comes before the question what is missing: two processes may open a new library at once."""
    db.conn.execute("BEGIN IMMEDIATE")
    try:
        done = applied(db)
        step = next((step for step in steps if step.__name__ not in done), None)
        if step is not None:
            step(db)
            db.conn.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied_at INTEGER)")
            db.conn.execute("INSERT INTO migrations VALUES (?, ?)", [step.__name__, int(time.time())])
        db.conn.execute("COMMIT")
    except BaseException:
        if db.conn.in_transaction:
            db.conn.execute("ROLLBACK")
        raise


@migration
def m001_models(db: Database) -> None:
    Table(db, "models").create(
        {
            "id": str,
            "source": str,
            "revision": str,
            "format": str,
            "architecture": str,
            "path": str,  # relative to the home, so that a home can be moved
            "size_bytes": int,
            "quantisation": str,
            "context_limit": int,
            "created_at": int,
        },
        pk="id",
        not_null={"source", "format", "architecture", "path", "size_bytes", "context_limit", "created_at"},
    )


@migration
def m002_files(db: Database) -> None:
    """Digests of what was put in place, so that a damaged disk can be told from a bad model."""
    db.execute(
        "CREATE TABLE files (model_id TEXT NOT NULL REFERENCES models(id) ON DELETE CASCADE, name TEXT NOT NULL,"
        " size_bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, PRIMARY KEY (model_id, name))"
    )


@migration
def m003_aliases(db: Database) -> None:
    """A table of its own: one alias points to one model, whoever asks for it."""
    db.execute(
        "CREATE TABLE aliases (alias TEXT PRIMARY KEY, model_id TEXT NOT NULL REFERENCES models(id) ON DELETE CASCADE)"
    )


@migration
def m004_discarded_folders(db: Database) -> None:
    """Folders to delete, noted before they stop or have yet to be a model's: whoever is killed in between, the next
    one knows. A folder that is not noted is never deleted, even when this database is lost and made anew.
    """
    db.execute("CREATE TABLE discarded_folders (path TEXT PRIMARY KEY)")


@migration
def m005_model_facts(db: Database) -> None:
    """JSON, because a new thing to measure is no new schema. A folder that is served where it lies has facts too."""
    db.execute("CREATE TABLE model_facts (model_id TEXT PRIMARY KEY, facts TEXT NOT NULL)")
    db.execute(
        "CREATE TRIGGER facts_leave_with_model AFTER DELETE ON models"
        " BEGIN DELETE FROM model_facts WHERE model_id = OLD.id; END"
    )


@migration
def m006_model_options(db: Database) -> None:
    """No reference to the models: what a person decided outlives a pull that replaces the model."""
    db.execute("CREATE TABLE model_options (model_id TEXT PRIMARY KEY, options TEXT NOT NULL)")


@migration
def m007_api_keys(db: Database) -> None:
    db.execute("CREATE TABLE api_keys (id TEXT PRIMARY KEY, digest TEXT NOT NULL, info TEXT NOT NULL)")


@migration
def m008_audit(db: Database) -> None:
    db.execute("CREATE TABLE audit (id INTEGER PRIMARY KEY, digest TEXT NOT NULL, entry TEXT NOT NULL)")


@migration
def m009_usage(db: Database) -> None:
    """Tokens by key, model and day (days since the epoch, UTC)."""
    db.execute(
        "CREATE TABLE usage (key TEXT NOT NULL, model TEXT NOT NULL, day INTEGER NOT NULL,"
        " requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,"
        " output_tokens INTEGER NOT NULL, PRIMARY KEY (key, model, day))"
    )


@migration
def m010_incidents(db: Database) -> None:
    db.execute("CREATE TABLE incidents (id TEXT PRIMARY KEY, at REAL NOT NULL, incident TEXT NOT NULL)")


@migration
def m011_downloads(db: Database) -> None:
    """Those that have not ended: a daemon that starts goes on with them."""
    db.execute("CREATE TABLE downloads (id TEXT PRIMARY KEY, source TEXT NOT NULL, name TEXT)")
