"""A person's stay in the web console: begun with a key, kept in a cookie that no script can read.

Sessions live in memory: a daemon that starts again asks for the key again.
"""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass

from inferd.appliance.auth.principal import Principal

COOKIE = "inferd_session"
CSRF_HEADER = "x-csrf-token"
LIFE_S = 12 * 3600.0
LINK_LIFE_S = 120.0
MAX_SESSIONS = 1000


@dataclass(frozen=True)
class Session:
    principal: Principal
    csrf: str  # what a page sends with every act, to show that the act comes from a page of ours
    expires_at: float  # monotonic seconds


class Sessions:
    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._links: dict[str, tuple[Principal, float]] = {}

    def begin(self, principal: Principal) -> str:
        """The cookie's value."""
        self._sweep()
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        token = secrets.token_urlsafe(32)
        self._sessions[token] = Session(principal, secrets.token_urlsafe(32), time.monotonic() + LIFE_S)
        return token

    def find(self, token: str) -> Session | None:
        session = self._sessions.get(token)
        return session if session is not None and session.expires_at > time.monotonic() else None

    def end(self, token: str) -> None:
        self._sessions.pop(token, None)

    def end_of_key(self, key_id: str) -> None:
        """A key that is revoked takes its sessions along."""
        for token in [token for token, one in self._sessions.items() if one.principal.key_id == key_id]:
            del self._sessions[token]

    def make_link(self, principal: Principal) -> str:
        """A token that begins one session, once, within two minutes."""
        self._sweep()
        token = secrets.token_urlsafe(32)
        self._links[token] = (principal, time.monotonic() + LINK_LIFE_S)
        return token

    def redeem(self, link: str) -> Principal | None:
        principal, expires_at = self._links.pop(link, (None, 0.0))
        return principal if expires_at > time.monotonic() else None

    def _sweep(self) -> None:
        now = time.monotonic()
        self._sessions = {token: one for token, one in self._sessions.items() if one.expires_at > now}
        self._links = {token: link for token, link in self._links.items() if link[1] > now}


def is_csrf_right(session: Session, sent: str) -> bool:
    return hmac.compare_digest(session.csrf.encode(), sent.encode())
