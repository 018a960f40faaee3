"""API keys: made once, shown once, kept as digests.

A key is `ifd_<id>_<secret>`: the id finds the row, the secret has 256 random bits, and only its SHA-256 is stored. A
fast hash is enough for a secret that nobody can guess.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from typing import Any

import msgspec

from inferd.appliance.auth.principal import SCOPES, Limits, Principal, Scope
from inferd.appliance.library.db import LibraryDatabase
from inferd.appliance.schemas import Lane

KEY = re.compile(r"ifd_([a-z0-9]{8})_([A-Za-z0-9_-]{43})")
KEY_PREFIX = "ifd_"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
ADMIN_NAME = "admin"
NO_DIGEST = hashlib.sha256(b"no key").hexdigest()


class KeyRefused(ValueError):
    """What was asked of a key cannot be; the message says which field, and how it would be right."""


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What may be shown of a key. Times are seconds since the epoch."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] | None = None
    lane: Lane = "interactive"
    priority: int = 0
    limits: Limits = Limits()
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def principal(self) -> Principal:
        return Principal(
            name=self.name,
            scopes=frozenset(self.scopes),
            key_id=self.id,
            models=None if self.models is None else frozenset(self.models),
            lane=self.lane,
            priority=self.priority,
            limits=self.limits,
        )


class KeyStore:
    """Safe to use from any thread. Every key is looked at in memory; a change is on disk before it counts."""

    def __init__(self, database: LibraryDatabase) -> None:
        self._database = database
        with database.reading() as db:
            rows = db.conn.execute("SELECT digest, info FROM api_keys ORDER BY rowid").fetchall()
        infos = [(digest, msgspec.json.decode(info, type=KeyInfo)) for digest, info in rows]
        self._digests = {info.id: digest for digest, info in infos}
        self._infos = {info.id: info for _, info in infos}

    def list_keys(self) -> list[KeyInfo]:
        """Oldest first, revoked ones too."""
        return list(self._infos.values())

    def create(
        self,
        name: str,
        scopes: tuple[str, ...] = ("infer",),
        *,
        models: tuple[str, ...] | None = None,
        lane: Lane = "interactive",
        priority: int = 0,
        limits: Limits | None = None,
        expires_at: float | None = None,
    ) -> tuple[str, KeyInfo]:
        """The key itself, which nobody can ever read again, and what may be shown of it. Raises `KeyRefused`."""
        self._check(name, scopes, expires_at)
        key_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
        info = KeyInfo(
            id=key_id,
            name=name,
            scopes=tuple(scope for scope in SCOPES if scope in scopes),
            models=models,
            lane=lane,
            priority=priority,
            limits=limits or Limits(),
            created_at=time.time(),
            expires_at=expires_at,
        )
        self._store(_digest(secret), info)
        return f"ifd_{key_id}_{secret}", info

    def revoke(self, name_or_id: str) -> KeyInfo:
        """From this moment on the key is refused. Raises `KeyRefused` when there is no such valid key."""
        found = [info for info in self._infos.values() if name_or_id in (info.id, info.name) and not info.revoked_at]
        if not found:
            raise KeyRefused(f"there is no key {name_or_id[:80]!r}; `inferd keys list` shows them")
        revoked = msgspec.structs.replace(found[-1], revoked_at=time.time())
        self._store(self._digests[revoked.id], revoked)
        return revoked

    def find(self, key: str) -> Principal | None:
        """Whose key that is; None for one that is not, no longer, or never was valid. Takes as long for each."""
        match = KEY.fullmatch(key)
        key_id, secret = match.groups() if match else ("", "")
        is_right = hmac.compare_digest(self._digests.get(key_id, NO_DIGEST), _digest(secret))
        info = self._infos.get(key_id)
        return info.principal() if is_right and info is not None and info.is_valid(time.time()) else None

    def has_admin(self) -> bool:
        now = time.time()
        return any("admin" in info.scopes and info.is_valid(now) for info in self._infos.values())

    def reset_admin(self) -> str:
        """A new admin key; those of that name stop to count."""
        for info in list(self._infos.values()):
            if info.name == ADMIN_NAME and not info.revoked_at:
                self.revoke(info.id)
        return self.create(ADMIN_NAME, ("admin",))[0]

    def _check(self, name: str, scopes: tuple[str, ...], expires_at: float | None) -> None:
        if not NAME.fullmatch(name):
            raise KeyRefused("name: letters, digits and . _ @ - only, at most 64, beginning with a letter or digit")
        if any(info.name == name and not info.revoked_at for info in self._infos.values()):
            raise KeyRefused(f"name: there is a key {name!r} already; revoke it or choose another name")
        if not scopes or (unknown := [scope for scope in scopes if scope not in SCOPES]):
            what = f"there is no scope {unknown[0][:40]!r}" if scopes else "a key needs at least one"
            raise KeyRefused(f"scopes: {what}; scopes are {', '.join(SCOPES)}")
        if expires_at is not None and expires_at <= time.time():
            raise KeyRefused("expires_at: that time is over already")

    def _store(self, digest: str, info: KeyInfo) -> None:
        with self._database.writing() as db:
            values: list[Any] = [info.id, digest, msgspec.json.encode(info).decode()]
            db.conn.execute("INSERT OR REPLACE INTO api_keys (id, digest, info) VALUES (?, ?, ?)", values)
        self._digests[info.id], self._infos[info.id] = digest, info


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
