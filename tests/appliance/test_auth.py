"""Keys, scopes, limits and the audit log."""

from __future__ import annotations

import itertools
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.appliance.auth.access import Denied, decide, needed
from inferd.appliance.auth.audit import AuditLog
from inferd.appliance.auth.keys import KeyRefused, KeyStore
from inferd.appliance.auth.limiter import Limiter, LimitReached
from inferd.appliance.auth.principal import LOCAL, SCOPES, Limits, Principal
from inferd.appliance.auth.usage import UsageStore, today
from inferd.appliance.library.db import LibraryDatabase


@pytest.fixture
def database(tmp_path: Path) -> Any:
    opened = LibraryDatabase(tmp_path / "library.db")
    yield opened
    opened.close()


def test_a_key_is_known_after_a_restart_and_only_as_a_digest(database: LibraryDatabase, tmp_path: Path) -> None:
    key, info = KeyStore(database).create("ci", ("infer",), models=("m",))
    principal = KeyStore(database).find(key)
    assert principal is not None
    assert (principal.name, principal.may_use("m"), principal.may_use("other")) == ("ci", True, False)
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key[13:].encode() not in raw
    assert key not in repr(info)


@pytest.mark.parametrize(
    "spoil", [lambda key: key[:-1], lambda key: key + "x", lambda key: "", lambda key: key.upper()]
)
def test_a_wrong_key_is_nobody(database: LibraryDatabase, spoil: Any) -> None:
    store = KeyStore(database)
    key, _ = store.create("ci")
    assert store.find(spoil(key)) is None


def test_two_keys_do_not_open_each_other(database: LibraryDatabase) -> None:
    store = KeyStore(database)
    one, other = store.create("a")[0], store.create("b")[0]
    assert store.find(one[:13] + other[13:]) is None


def test_expired_and_revoked_keys_are_nobody(database: LibraryDatabase) -> None:
    store = KeyStore(database)
    short, _ = store.create("short", expires_at=time.time() + 0.05)
    gone, _ = store.create("gone")
    assert store.find(short) is not None
    store.revoke("gone")
    time.sleep(0.06)
    assert store.find(short) is None
    assert store.find(gone) is None
    assert KeyStore(database).find(gone) is None


def test_a_new_admin_key_ends_the_old_one(database: LibraryDatabase) -> None:
    store = KeyStore(database)
    assert not store.has_admin()
    first, second = store.reset_admin(), store.reset_admin()
    assert store.find(first) is None
    assert store.find(second) is not None
    assert store.has_admin()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "taken"}, "already"),
        ({"name": "x", "scopes": ()}, "at least one"),
        ({"name": "x", "scopes": ("root",)}, "infer, metrics, read, admin"),
        ({"name": "x", "expires_at": 5.0}, "over already"),
    ],
)
def test_what_cannot_be_a_key_is_refused(database: LibraryDatabase, fields: dict[str, Any], word: str) -> None:
    store = KeyStore(database)
    store.create("taken")
    with pytest.raises(KeyRefused, match=word):
        store.create(**fields)


def who(*scopes: str, **fields: Any) -> Principal:
    return Principal("k", frozenset(scopes), key_id="k", **fields)  # type: ignore[arg-type]


WAYS = {
    "infer": {"infer"},
    "metrics": {"metrics"},
    "read": {"read", "metrics"},
    "admin": {"infer", "metrics", "read", "admin"},
}


@pytest.mark.parametrize(("scope", "need"), list(itertools.product(SCOPES, SCOPES)))
def test_a_scope_opens_what_it_is_for(scope: str, need: Any) -> None:
    verdict = decide(need, who(scope), has_wrong_key=False, is_loopback=False, loopback_inference=True)
    assert isinstance(verdict, Principal) == (need in WAYS[scope])


@pytest.mark.parametrize(("need", "allowed"), [("infer", True), ("metrics", False), ("read", False), ("admin", False)])
def test_without_a_key_this_machine_gets_answers_only(need: Any, allowed: bool) -> None:
    def verdict(**changes: bool) -> Any:
        facts = {"has_wrong_key": False, "is_loopback": True, "loopback_inference": True, **changes}
        return decide(need, None, **facts)

    assert (verdict() == LOCAL) == allowed
    assert isinstance(verdict(is_loopback=False), Denied)
    assert isinstance(verdict(loopback_inference=False), Denied)
    assert isinstance(verdict(has_wrong_key=True), Denied)


@pytest.mark.parametrize(
    ("method", "path", "need"),
    [
        ("GET", "/health", "open"),
        ("POST", "/v1/chat/completions", "infer"),
        ("GET", "/admin/v1/models", "read"),
        ("POST", "/admin/v1/load/x", "admin"),
        ("DELETE", "/admin/v1/models/x", "admin"),
        ("GET", "/metrics", "metrics"),
        ("GET", "//v1/models", None),
        ("GET", "/V1/models", None),
        ("GET", "/health/", None),
        ("GET", "/anything", None),
    ],
)
def test_each_path_needs_what_the_table_says(method: str, path: str, need: str | None) -> None:
    assert needed(method, path) == need


def test_running_requests_are_limited() -> None:
    limiter, one = Limiter(), who(limits=Limits(max_running=2))
    limiter.begin(one, 0.0)
    limiter.begin(one, 0.0)
    with pytest.raises(LimitReached, match="runs 2 of 2"):
        limiter.begin(one, 0.0)
    limiter.end(one, 0, 0.0)
    limiter.begin(one, 0.0)


def test_requests_a_minute_come_back_when_it_says() -> None:
    limiter, one = Limiter(), who(limits=Limits(requests_per_minute=6))
    for _ in range(6):
        limiter.begin(one, 100.0)
    with pytest.raises(LimitReached) as told:
        limiter.begin(one, 100.0)
    assert told.value.retry_after_s == pytest.approx(10.0)
    limiter.begin(one, 100.0 + told.value.retry_after_s)


def test_tokens_are_taken_afterwards_and_paid_back_with_time() -> None:
    limiter, one = Limiter(), who(limits=Limits(tokens_per_minute=60))
    limiter.begin(one, 0.0)
    limiter.end(one, 90, 0.0)
    with pytest.raises(LimitReached) as told:
        limiter.begin(one, 0.0)
    assert told.value.retry_after_s == pytest.approx(31.0)
    limiter.begin(one, 31.0)


def test_a_days_tokens_wait_for_the_next_day() -> None:
    with pytest.raises(LimitReached) as told:
        Limiter().begin(who(limits=Limits(tokens_per_day=10)), 0.0, tokens_today=10, seconds_of_day_left=55.0)
    assert told.value.retry_after_s == 55.0


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=40), st.integers(1, 20))
def test_no_minute_sees_more_requests_than_two_fills(gaps: list[tuple[float, int]], limit: int) -> None:
    limiter, one, now = Limiter(), who(limits=Limits(requests_per_minute=limit)), 0.0
    taken: list[float] = []
    for gap, burst in gaps:
        now += gap
        for _ in range(burst):
            try:
                limiter.begin(one, now)
            except LimitReached:
                break
            taken.append(now)
    for start in taken:
        assert sum(start <= when < start + 60.0 for when in taken) <= 2 * limit


def test_the_audit_chain_shows_every_change(database: LibraryDatabase, tmp_path: Path) -> None:
    seen: list[Any] = []
    log = AuditLog(database, seen.append)
    for number in range(4):
        log.append("admin", "model.load", f"m{number}")
    assert [entry.target for entry in log.latest(2)] == ["m2", "m3"]
    assert seen == log.latest()
    assert log.first_broken() is None
    for statement in (
        "UPDATE audit SET entry = replace(entry, 'm1', 'm9') WHERE id = 2",
        "DELETE FROM audit WHERE id = 3",
    ):
        with sqlite3.connect(tmp_path / "library.db") as other:
            before = other.execute("SELECT * FROM audit").fetchall()
            other.execute(statement)
        assert log.first_broken() in (2, 4)
        with sqlite3.connect(tmp_path / "library.db") as other:
            other.execute("DELETE FROM audit")
            other.executemany("INSERT INTO audit VALUES (?, ?, ?)", before)
        assert log.first_broken() is None


def test_usage_adds_up_over_restarts(database: LibraryDatabase) -> None:
    store = UsageStore(database)
    for _ in range(2):
        store.add("k", "m", prompt_tokens=3, cached_tokens=1, output_tokens=2)
    store.flush()
    again = UsageStore(database)
    again.add("k", "m", prompt_tokens=1, cached_tokens=0, output_tokens=1)
    assert again.tokens_today("k") == 12
    (usage,) = again.since(today())
    assert (usage.requests, usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (3, 7, 2, 5)
