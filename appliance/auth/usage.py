"""How many tokens each key used, by model and day."""

from __future__ import annotations

import time

import msgspec

from inferd.appliance.library.db import LibraryDatabase

DAY_S = 86400


class KeyUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`day`: days since the epoch, UTC."""

    key: str
    model: str
    day: int
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class UsageStore:
    """Collects in memory; `flush` writes. What was not written is lost with the process, and nothing else is."""

    def __init__(self, database: LibraryDatabase) -> None:
        self._database = database
        self._fresh: dict[tuple[str, str, int], KeyUsage] = {}
        self._today: dict[tuple[str, int], int] = {}

    def add(self, key: str, model: str, *, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        day = today()
        before = self._fresh.get((key, model, day)) or KeyUsage(key=key, model=model, day=day)
        self._fresh[key, model, day] = KeyUsage(
            key=key,
            model=model,
            day=day,
            requests=before.requests + 1,
            prompt_tokens=before.prompt_tokens + prompt_tokens,
            cached_tokens=before.cached_tokens + cached_tokens,
            output_tokens=before.output_tokens + output_tokens,
        )
        self._today[key, day] = self.tokens_today(key) + prompt_tokens + output_tokens

    def tokens_today(self, key: str) -> int:
        day = today()
        if (key, day) not in self._today:
            with self._database.reading() as db:
                row = db.conn.execute(
                    "SELECT SUM(prompt_tokens + output_tokens) FROM usage WHERE key = ? AND day = ?", [key, day]
                ).fetchone()
            self._today = {entry: tokens for entry, tokens in self._today.items() if entry[1] == day}
            self._today[key, day] = row[0] or 0
        return self._today[key, day]

    def flush(self) -> None:
        fresh, self._fresh = self._fresh, {}
        if not fresh:
            return
        with self._database.writing() as db:
            db.conn.executemany(
                "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key, model, day) DO UPDATE SET"
                " requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
                " cached_tokens = cached_tokens + excluded.cached_tokens,"
                " output_tokens = output_tokens + excluded.output_tokens",
                [msgspec.structs.astuple(usage) for usage in fresh.values()],
            )

    def since(self, day: int) -> list[KeyUsage]:
        """What was used on that day and later, oldest first."""
        self.flush()
        with self._database.reading() as db:
            rows = db.conn.execute("SELECT * FROM usage WHERE day >= ? ORDER BY day, key, model", [day]).fetchall()
        return [KeyUsage(**dict(zip(KeyUsage.__struct_fields__, row, strict=True))) for row in rows]


def today() -> int:
    return int(time.time()) // DAY_S
