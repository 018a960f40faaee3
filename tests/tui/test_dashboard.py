"""The terminal dashboard, driven by keys over a daemon that is played by an event hub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot

from inferd.appliance.admin_client import ActFailed, Unreachable
from inferd.appliance.events.hub import EventHub
from inferd.appliance.events.messages import Delta, EventId, Snapshot
from inferd.appliance.schemas import (
    DeviceMemory,
    DeviceStatus,
    IncidentRecord,
    KvUse,
    ModelStatus,
    RequestRecord,
    StepRecord,
    StepShare,
    StepTokens,
    Topic,
)
from inferd.tui.app import Top
from inferd.tui.screens.confirm import Confirm
from inferd.tui.screens.dashboard import Dashboard
from inferd.tui.screens.life import Life
from inferd.tui.screens.listing import Listing
from inferd.tui.widgets.record_table import RecordTable

GIB = 1 << 30


class PlayedDaemon:
    """Stands where the admin client stands; notes every act."""

    address = "http://127.0.0.1:4633"

    def __init__(self) -> None:
        self.hub = EventHub(interval_s=0.001)
        self.acts: list[tuple[Any, ...]] = []
        self.refuses = ""
        self.is_down = False

    def __getattr__(self, name: str) -> Any:
        async def act(*args: Any, **fields: Any) -> Any:
            self.acts.append((name, *args, *fields.items()))
            if self.refuses:
                raise ActFailed(409, self.refuses)
            return {"keys": [], "mates": ["b"], "blocks": BLOCKS}.get(name, {})

        return act

    async def close(self) -> None:
        self.is_down = True

    async def events(
        self, topics: Collection[Topic] = (), last_id: EventId | None = None
    ) -> AsyncGenerator[tuple[EventId | None, Snapshot | Delta], None]:
        if self.is_down:
            raise Unreachable("no daemon answers")
        async for event in self.hub.subscribe(topics, last_id):
            if self.is_down:
                raise Unreachable("no daemon answers")
            yield EventId(self.hub.epoch, event.seq), event


BLOCKS = {"num_blocks": 8, "runs": [{"owner": "used", "count": 5, "request_id": "a"}, {"owner": "free", "count": 3}]}
READY = ModelStatus(
    id="llama",
    state="ready",
    context_limit=16384,
    running=2,
    kv=KvUse(blocks_total=100, blocks_used=61),
    tokens_per_s=1640.0,
    keep_alive_s=600.0,
)
ASLEEP = ModelStatus(id="qwen", state="sleeping_1", context_limit=32768, expected_wake_s=0.9)


def request(name: str, **fields: Any) -> RequestRecord:
    return RequestRecord(**{"id": name, "client": "zed", "model": "llama", "arrived_at": time.time(), **fields})


@asynccontextmanager
async def running(daemon: PlayedDaemon, size: tuple[int, int] = (80, 24), **options: Any) -> AsyncIterator[Pilot[None]]:
    app = Top(daemon, **options)  # type: ignore[arg-type]
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        yield pilot


async def settle(pilot: Pilot[None]) -> None:
    """Until what happened has been drawn."""
    await pilot.pause(0.3)
    await pilot.pause()


def lines(pilot: Pilot[None], table: str) -> list[str]:
    widget = pilot.app.screen.query_one(f"#{table}", RecordTable)
    return [widget.render_line(y).text.rstrip() for y in range(len(widget.rows) + 1)]


@pytest.fixture
async def daemon() -> PlayedDaemon:
    played = PlayedDaemon()
    played.hub.put("models", READY)
    played.hub.put("models", ASLEEP)
    played.hub.put("devices", DeviceStatus(id="host", util=0.5, memory=DeviceMemory(total=24 * GIB, free=20 * GIB)))
    played.hub.put("requests", request("a", state="decode", tokens_per_s=48.0, kv_blocks=83, output_tokens=212))
    played.hub.put(
        "requests",
        request("b", client="ci-bot", state="waiting", reason="kv_full", reason_text="needs 64 blocks, 12 free"),
    )
    return played


async def test_every_request_says_what_it_does_or_why_not(daemon: PlayedDaemon) -> None:
    async with running(daemon) as pilot:
        _, first, second = lines(pilot, "requests")
        assert first.split()[:4] == ["▸a", "zed", "llama", "decode"]
        assert "48 tok/s, 83 blocks" in first
        assert "212" in first
        assert "waiting   needs 64 blocks, 12 free" in second


async def test_models_show_state_memory_and_what_comes_next(daemon: PlayedDaemon) -> None:
    async with running(daemon) as pilot:
        _, ready, asleep = lines(pilot, "models")
        assert "ready" in ready
        assert "16k ▓▓▓▓▓░░░  61%" in ready
        assert "sleeping 1" in asleep
        assert "wakes ~0.9s" in asleep


async def test_no_line_is_wider_than_the_screen(daemon: PlayedDaemon) -> None:
    daemon.hub.put("requests", request("c" * 40, client="x" * 50, state="failed", error="e" * 300))
    for width in (80, 120, 200):
        async with running(daemon, (width, 24)) as pilot:
            for table in ("models", "requests"):
                assert all(len(line) <= width for line in lines(pilot, table))


async def test_names_cannot_move_the_cursor(daemon: PlayedDaemon) -> None:
    daemon.hub.put("models", ModelStatus(id="[b]\x1b[2J\n", state="ready"))
    async with running(daemon) as pilot:
        text = "".join(lines(pilot, "models"))
        assert "\x1b" not in text
        assert "[b] [2J" in text


@pytest.mark.parametrize(
    ("keys", "act"),
    [
        (["space"], ("pause", "a")),
        (["plus"], ("set_priority", "a", -1)),
        (["minus"], ("set_priority", "a", 1)),
        (["x", "y"], ("cancel", "a")),
        (["down", "x", "enter"], ("cancel", "b")),
        (["z"], ("sleep", "llama", 1)),
        (["Z"], ("sleep", "llama", 2)),
        (["u", "y"], ("unload", "llama")),
        (["p"], ("change_options", "llama", ("pinned", True))),
        (["shift+tab", "down", "w"], ("load", "qwen")),
        (["shift+tab", "down", "l"], ("load", "qwen")),
    ],
)
async def test_each_key_does_its_act(daemon: PlayedDaemon, keys: list[str], act: tuple[Any, ...]) -> None:
    async with running(daemon) as pilot:
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        await settle(pilot)
    assert act in daemon.acts


async def test_a_question_comes_before_what_cannot_be_taken_back(daemon: PlayedDaemon) -> None:
    async with running(daemon) as pilot:
        await pilot.press("x")
        assert isinstance(pilot.app.screen, Confirm)
        await pilot.press("n")
        await settle(pilot)
        assert isinstance(pilot.app.screen, Dashboard)
    assert not [act for act in daemon.acts if act[0] == "cancel"]


async def test_read_only_does_nothing(daemon: PlayedDaemon) -> None:
    async with running(daemon, read_only=True) as pilot:
        for key in ("x", "space", "plus", "z", "u", "p", "l"):
            await pilot.press(key)
        await settle(pilot)
        assert isinstance(pilot.app.screen, Dashboard)
    assert not daemon.acts


async def test_a_refusal_is_shown_with_its_reason(daemon: PlayedDaemon) -> None:
    daemon.refuses = "a is in use [by b]"
    async with running(daemon) as pilot:
        await pilot.press("z")
        await settle(pilot)
        assert [note.message for note in pilot.app._notifications] == [daemon.refuses]


async def test_a_filter_hides_the_others_and_escape_shows_them(daemon: PlayedDaemon) -> None:
    async with running(daemon) as pilot:
        await pilot.press("slash", *"client:ci", "enter")
        await settle(pilot)
        assert len(lines(pilot, "requests")) == 2
        await pilot.press("escape")
        await settle(pilot)
        assert len(lines(pilot, "requests")) == 3


async def test_the_cursor_stays_on_its_request(daemon: PlayedDaemon) -> None:
    async with running(daemon) as pilot:
        await pilot.press("down")
        daemon.hub.put("requests", request("c", state="decode"))
        daemon.hub.drop("requests", "a")
        await settle(pilot)
        assert pilot.app.screen.query_one("#requests", RecordTable).chosen == "b"


async def test_enter_opens_the_life_of_a_request(daemon: PlayedDaemon) -> None:
    async with running(daemon) as pilot:
        await pilot.press("down", "enter")
        await settle(pilot)
        assert isinstance(pilot.app.screen, Life)
        assert pilot.app.screen.request_id == "b"
        await pilot.press("escape")
        await settle(pilot)
        assert isinstance(pilot.app.screen, Dashboard)


async def test_every_page_opens(daemon: PlayedDaemon) -> None:
    step = StepRecord(
        model="llama",
        step=1,
        at=time.time(),
        tokens=StepTokens(prefill=30, decode=2),
        budget=64,
        requests=(StepShare(id="a", tokens=32),),
    )
    daemon.hub.append("steps", step)
    daemon.hub.append("incidents", IncidentRecord(id="i", at=time.time(), model="llama", kind="engine_died"))
    async with running(daemon, (120, 36)) as pilot:
        for key in "2345612":
            await pilot.press(key)
            await settle(pilot)
        await pilot.pause(1.2)  # the block map comes once a second
        await pilot.press("3")
        await settle(pilot)
        assert isinstance(pilot.app.screen, Listing)
        assert "engine died" in lines(pilot, "list")[1]
        await pilot.press("question_mark")
        await settle(pilot)
        await pilot.press("escape")
    assert ("blocks", "llama") in daemon.acts


async def test_a_daemon_that_goes_is_told_and_found_again(daemon: PlayedDaemon) -> None:
    async with running(daemon) as pilot:
        follower = pilot.app.follower  # type: ignore[attr-defined]
        assert follower.link == "live"
        daemon.is_down = True
        daemon.hub.put("requests", request("c"))
        await settle(pilot)
        assert follower.link in ("stale", "down")
        assert len(lines(pilot, "requests")) == 3  # what was known last
        daemon.is_down = False
        async with asyncio.timeout(10):
            while follower.link != "live":  # noqa: ASYNC110 - it tries again after a while
                await asyncio.sleep(0.05)
        await settle(pilot)
        assert len(lines(pilot, "requests")) == 4
