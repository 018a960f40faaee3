"""Requests as everybody may see them: from arrival to end, why they wait, and how they are cancelled."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from inferd.appliance.events.hub import EventHub
from inferd.appliance.events.mirror import Mirror
from inferd.appliance.requests.errors import RequestCancelled
from inferd.appliance.requests.live import Caller, LiveRequest
from inferd.appliance.requests.reasons import ModelWait, explain
from inferd.appliance.requests.registry import KEPT_ENDED, RequestRegistry
from inferd.appliance.supervisor.failure import Failure
from inferd.appliance.supervisor.states import ModelState

CALLER = Caller(client="ci", lane="batch", peer="127.0.0.1")


@pytest.fixture
def hub() -> EventHub:
    return EventHub(interval_s=0.001)


def states(hub: EventHub) -> dict[str, str]:
    return {row["id"]: row["state"] for row in hub.records("requests")}


async def test_a_request_is_seen_from_arrival_to_end(hub: EventHub) -> None:
    registry = RequestRegistry(hub)
    with registry.serving("r1", "m", "chat", CALLER) as live:
        (row,) = hub.records("requests")
        assert (row["state"], row["client"], row["lane"], row["api"]) == ("queued", "ci", "batch", "chat")
        assert registry.live == [live]
    assert states(hub) == {"r1": "finished"}
    assert registry.live == []
    assert registry.find("r1") is live


async def test_an_error_is_told_with_its_text(hub: EventHub) -> None:
    with pytest.raises(ValueError, match="bad"), RequestRegistry(hub).serving("r1", "m", "chat", CALLER):
        raise ValueError("bad")
    (row,) = hub.records("requests")
    assert (row["state"], row["error"]) == ("failed", "bad")


async def test_a_client_that_leaves_is_no_failure(hub: EventHub) -> None:
    registry = RequestRegistry(hub)

    async def serve() -> None:
        with registry.serving("r1", "m", "chat", CALLER):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (row,) = hub.records("requests")
    assert (row["state"], row["error"]) == ("cancelled", "the client left")


async def test_one_that_waits_is_cancelled_with_an_error_of_its_own(hub: EventHub) -> None:
    registry = RequestRegistry(hub)

    async def serve() -> None:
        with registry.serving("r1", "m", "chat", CALLER):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    live = registry.find("r1")
    assert live is not None
    await live.cancel("root")
    with pytest.raises(RequestCancelled, match="root"):
        await task
    assert states(hub) == {"r1": "cancelled"}
    await live.cancel("root")  # again is nothing


async def test_an_id_that_a_client_sends_twice_stays_two_requests(hub: EventHub) -> None:
    registry = RequestRegistry(hub)
    with registry.serving("r", "m", "chat", CALLER), registry.serving("r", "m", "chat", CALLER) as second:
        assert second.id == "r.2"
    assert set(states(hub)) == {"r", "r.2"}


async def test_only_the_last_that_ended_are_kept(hub: EventHub) -> None:
    registry = RequestRegistry(hub)
    for number in range(KEPT_ENDED + 5):
        with registry.serving(f"r{number}", "m", "chat", CALLER):
            pass
    assert len(hub.records("requests")) == KEPT_ENDED
    assert registry.find("r0") is None


async def test_reasons_are_fresh_while_somebody_looks(hub: EventHub) -> None:
    def why(live: LiveRequest) -> None:
        live.reason, live.reason_text = "model_loading", "m is loading: 10 %"

    registry = RequestRegistry(hub, why)
    mirror = Mirror()
    with registry.serving("r1", "m", "chat", CALLER):
        async with aclosing(hub.subscribe(["requests"])) as events, asyncio.timeout(5):
            while not any(record.reason for record in mirror.requests):
                mirror.apply(await anext(events))
    await registry.close()
    assert mirror.requests[0].reason_text == "m is loading: 10 %"


LOADING = ModelWait(
    model="m",
    state=ModelState.LOADING,
    since=100.0,
    expected_load_s=10.0,
    expected_wake_s=2.0,
    waits_for=(),
    states={},
    failure=None,
    held_for=None,
)


@pytest.mark.parametrize(
    ("changes", "now", "expected"),
    [
        ({}, 106.2, ("model_loading", "m is loading: 62 %, about 4 s")),
        ({}, 130.0, ("model_loading", "m is loading, 30 s so far")),
        ({"state": ModelState.WAKING}, 101.0, ("model_waking", "m wakes up: 50 %, about 1 s")),
        (
            {"state": ModelState.ON_DISK, "waits_for": ("b",), "states": {"b": ModelState.DRAINING}},
            101.0,
            ("evicting", "making room: b goes to sleep"),
        ),
        (
            {"state": ModelState.ON_DISK, "waits_for": ("b",), "states": {"b": ModelState.READY}},
            101.0,
            ("evicting", "making room: b is in use"),
        ),
        (
            {"state": ModelState.READY, "held_for": "b"},
            101.0,
            ("evicting", "m makes room for b and comes back after it"),
        ),
        (
            {"state": ModelState.FAILED, "failure": Failure("engine_died", 0.0, by_itself=True)},
            101.0,
            ("cool_down", "its engine process ended; next try in 0 s"),
        ),
        ({"state": ModelState.READY}, 101.0, None),
    ],
)
def test_every_reason_names_its_cause(changes: dict[str, Any], now: float, expected: object) -> None:
    assert explain(replace(LOADING, **changes), now) == expected
