"""What the owner of this machine has decided for one model."""

from __future__ import annotations

from typing import Any

import msgspec

from inferd.appliance.library.db import LibraryDatabase


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`keep_alive` in the grammar of `keepalive.parse_keep_alive`; None: the daemon's own."""

    pinned: bool = False
    keep_alive: str | None = None
    context_limit: int | None = None
    sampling: dict[str, Any] = {}  # defaults for requests, stronger than what the model's authors recommend
    chat_template: str | None = None
    tool_parser: str | None = None  # the name of a way of writing tool calls; None: the daemon's setting
    reasoning_parser: str | None = None  # the same of reasoning; "none": none of the output is
    engine: dict[str, Any] = {}  # fields of `EngineArgs`


class OptionsStore:
    """Safe to use from any thread."""

    def __init__(self, database: LibraryDatabase) -> None:
        self._database = database

    def find(self, model: str) -> ModelOptions:
        with self._database.reading() as db:
            row = db.conn.execute("SELECT options FROM model_options WHERE model_id = ?", [model]).fetchone()
        return msgspec.json.decode(row[0], type=ModelOptions) if row is not None else ModelOptions()

    def put(self, model: str, options: ModelOptions) -> None:
        with self._database.writing() as db:
            db.conn.execute(
                "INSERT OR REPLACE INTO model_options (model_id, options) VALUES (?, ?)",
                [model, msgspec.json.encode(options).decode()],
            )
