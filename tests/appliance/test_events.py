"""The event stream: what a reader has is what the daemon has, however slow the reader is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.appliance.events.hub import EventHub
from inferd.appliance.events.messages import Delta, EventId, Snapshot, decode_event, encode_sse
from inferd.appliance.events.mirror import Mirror
from inferd.appliance.schemas import TOPICS, DownloadRecord, LogLine, ModelStatus, RequestRecord

Stream = AsyncGenerator[Snapshot | Delta, None]


def line(text: str) -> LogLine:
    return LogLine(at=0.0, level="info", source="daemon", text=text)


async def next_event(stream: Stream) -> Snapshot | Delta:
    async with asyncio.timeout(5):
        return await anext(stream)


@asynccontextmanager
async def subscribed(hub: EventHub, *topics: Any, last_id: EventId | None = None) -> AsyncIterator[Stream]:
    async with aclosing(hub.subscribe(topics or TOPICS, last_id)) as stream:
        yield stream


async def test_snapshot_then_only_changed_fields() -> None:
    hub = EventHub(interval_s=0.001)
    hub.put("requests", RequestRecord(id="a", state="waiting"))
    async with subscribed(hub, "requests") as stream:
        first = await next_event(stream)
        assert isinstance(first, Snapshot)
        assert first.tables["requests"][0]["state"] == "waiting"
        hub.put("requests", RequestRecord(id="a", state="decode", output_tokens=3))
        second = await next_event(stream)
        assert isinstance(second, Delta)
        assert second.tables["requests"].set == [{"id": "a", "state": "decode", "output_tokens": 3}]


def test_records_may_come_before_the_loop_runs() -> None:
    hub = EventHub()
    hub.append("logs", line("early"))

    async def look() -> Snapshot | Delta:
        async with subscribed(hub, "logs") as stream:
            return await next_event(stream)

    event = asyncio.run(look())
    assert isinstance(event, Snapshot)
    assert event.journals["logs"][0]["text"] == "early"


async def test_an_unchanged_record_is_no_event() -> None:
    hub = EventHub(interval_s=0.001)
    hub.put("models", ModelStatus(id="m"))
    async with subscribed(hub) as stream:
        first = await next_event(stream)
        hub.put("models", ModelStatus(id="m"))
        hub.append("logs", line("later"))
        second = await next_event(stream)
        assert isinstance(second, Delta)
        assert (second.seq, second.tables) == (first.seq + 1, {})


async def test_changes_of_one_interval_are_one_delta() -> None:
    hub = EventHub(interval_s=0.05)
    async with subscribed(hub, "requests") as stream:
        await next_event(stream)
        hub.put("requests", RequestRecord(id="first"))
        await next_event(stream)  # the interval begins here
        for count in range(100):
            hub.put("requests", RequestRecord(id="a", output_tokens=count))
        delta = await next_event(stream)
        assert isinstance(delta, Delta)
        (fields,) = delta.tables["requests"].set
        assert fields["output_tokens"] == 99


async def test_a_record_that_goes_and_comes_again_is_whole() -> None:
    hub = EventHub(interval_s=0.02)
    mirror = Mirror()
    async with subscribed(hub, "downloads") as stream:
        hub.put("downloads", DownloadRecord(id="d", source="x", error="old"))
        mirror.apply(await next_event(stream))
        hub.drop("downloads", "d")
        hub.put("downloads", DownloadRecord(id="d", source="y"))
        mirror.apply(await next_event(stream))
    assert mirror.downloads == [DownloadRecord(id="d", source="y")]


async def test_resumes_after_the_last_id() -> None:
    hub = EventHub(interval_s=0.001)
    async with subscribed(hub, "logs") as stream:
        seen = await next_event(stream)
    for text in ("one", "two"):
        hub.append("logs", line(text))
        await asyncio.sleep(0.01)
    async with subscribed(hub, "logs", last_id=EventId(hub.epoch, seen.seq)) as stream:
        events = [await next_event(stream), await next_event(stream)]
    assert [event.journals["logs"].add[0]["text"] for event in events if isinstance(event, Delta)] == ["one", "two"]


@pytest.mark.parametrize("make_id", [lambda hub: EventId("another", 0), lambda hub: EventId(hub.epoch, 99)])
async def test_an_id_of_another_run_gets_a_snapshot(make_id: Any) -> None:
    hub = EventHub(interval_s=0.001)
    hub.append("logs", line("one"))
    async with subscribed(hub, "logs", last_id=make_id(hub)) as stream:
        assert isinstance(await next_event(stream), Snapshot)


async def test_a_slow_reader_loses_deltas_but_not_the_last_state() -> None:
    hub = EventHub(interval_s=0.001, ring_length=3)
    mirror = Mirror()
    async with subscribed(hub, "requests") as stream:
        mirror.apply(await next_event(stream))
        for count in range(10):
            hub.put("requests", RequestRecord(id="a", output_tokens=count))
            await asyncio.sleep(0.004)
        event = await next_event(stream)
        assert isinstance(event, Snapshot)
        mirror.apply(event)
    assert mirror.requests[0].output_tokens == 9


async def test_demand_is_told_when_the_first_reader_comes_and_the_last_one_goes() -> None:
    hub = EventHub()
    told: list[bool] = []
    hub.on_demand(lambda: told.append(hub.is_wanted("requests")))
    async with subscribed(hub, "requests") as one:
        await next_event(one)
        async with subscribed(hub, "requests") as two:
            await next_event(two)
    assert told == [True, False]


async def test_wire_form_reads_back() -> None:
    hub = EventHub(interval_s=0.001)
    hub.append("logs", line("two\nlines"))
    event = hub.snapshot(frozenset(TOPICS))
    text = encode_sse(event, hub.epoch)
    name, identity, data, *rest = text.decode().split("\n")
    assert rest == ["", ""]
    assert EventId.parse(identity.removeprefix("id: ")) == EventId(hub.epoch, event.seq)
    assert decode_event(name.removeprefix("event: "), data.removeprefix("data: ")) == event


@pytest.mark.parametrize("text", ["", "5", "-5", "a-", "a-x", "a-1e3", "a-" + "9" * 40, "a-²"])
def test_foreign_ids_are_no_ids(text: str) -> None:
    assert EventId.parse(text) is None


acts = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 3)),
        st.tuples(st.just("drop"), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.just("pause"), st.just(""), st.just(0)),
        st.tuples(st.just("read"), st.just(""), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(acts)
def test_a_mirror_equals_the_daemon(todo: list[tuple[str, str, int]]) -> None:
    async def play() -> None:
        hub, mirror = EventHub(interval_s=0.0, ring_length=2), Mirror()
        async with subscribed(hub, "requests") as stream:
            mirror.apply(await next_event(stream))
            for act, key, value in todo:
                match act:
                    case "put":
                        hub.put("requests", RequestRecord(id=key, output_tokens=value))
                    case "drop":
                        hub.drop("requests", key)
                    case "pause":
                        await asyncio.sleep(0.001)
                    case "read" if mirror.seq < hub.snapshot(frozenset()).seq:
                        mirror.apply(await next_event(stream))
            end = hub.snapshot(frozenset({"requests"}))
            while mirror.seq < end.seq:
                mirror.apply(await next_event(stream))
        by_id = {row["id"]: row for row in end.tables["requests"]}
        assert {record.id: record.output_tokens for record in mirror.requests} == {
            key: row["output_tokens"] for key, row in by_id.items()
        }

    asyncio.run(play())
