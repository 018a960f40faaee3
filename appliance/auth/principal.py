"""Who asks, and what that one may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from inferd.appliance.schemas import Lane

Scope = Literal["infer", "metrics", "read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
IMPLIED: dict[Scope, frozenset[Scope]] = {
    "infer": frozenset({"infer"}),
    "metrics": frozenset({"metrics"}),
    "read": frozenset({"read", "metrics"}),  # sees what administrators see, changes nothing
    "admin": frozenset(SCOPES),
}


@dataclass(frozen=True)
class Limits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    tokens_per_day: int | None = None
    max_running: int | None = None  # at once, waiting ones among them


@dataclass(frozen=True)
class Principal:
    name: str  # a key's name, or "local"
    scopes: frozenset[Scope]
    key_id: str | None = None
    models: frozenset[str] | None = None  # None: all
    lane: Lane = "interactive"
    priority: int = 0
    limits: Limits = Limits()

    def may(self, scope: Scope) -> bool:
        return any(scope in IMPLIED[own] for own in self.scopes)

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


LOCAL = Principal("local", frozenset({"infer"}))
LOCAL_ADMIN = Principal("local", frozenset({"admin"}))
