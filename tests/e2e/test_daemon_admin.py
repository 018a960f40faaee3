"""The admin API over a real daemon with scripted models: what goes on, and what can be done about it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from inferd.appliance.events.messages import Delta, Snapshot, decode_event
from inferd.appliance.events.mirror import Mirror

CHAT = "/v1/chat/completions"


def question(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "x"}], **fields}


@asynccontextmanager
async def following(http: httpx.AsyncClient, topics: str) -> AsyncIterator[AsyncIterator[Snapshot | Delta]]:
    async with http.stream("GET", f"/admin/v1/events?topics={topics}") as response:
        assert response.status_code == 200

        async def events() -> AsyncIterator[Snapshot | Delta]:
            name = ""
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: ") and (event := decode_event(name, line.removeprefix("data: "))):
                    yield event

        yield events()


async def test_a_request_is_followed_and_cancelled_while_it_runs(start_daemon: Any) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.01, "replies": {}})
    mirror = Mirror()
    async with following(daemon.http, "requests") as events, asyncio.timeout(20):
        mirror.apply(await anext(events))
        asking = asyncio.create_task(
            daemon.http.post(CHAT, json=question(daemon.model, stream=True, max_tokens=400, ignore_eos=True))
        )
        while not [live for live in mirror.requests if live.output_tokens > 2]:
            mirror.apply(await anext(events))
        (live,) = mirror.requests
        assert (live.state, live.model, live.api, live.client) == ("decode", daemon.model, "chat", "admin")
        told = await daemon.http.post(f"/admin/v1/requests/{live.id}/cancel")
        assert told.status_code == 200
        while mirror.requests[0].state != "cancelled":
            mirror.apply(await anext(events))
    answer = (await asking).text
    assert "request_cancelled" in answer
    assert answer.rstrip().endswith("data: [DONE]")


async def test_the_engines_view_of_a_request_is_joined_with_ours(start_daemon: Any) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.01, "replies": {}})
    mirror = Mirror()
    async with following(daemon.http, "requests,steps") as events, asyncio.timeout(20):
        mirror.apply(await anext(events))
        body = question(daemon.model, max_tokens=150, ignore_eos=True, n=2)
        asking = asyncio.create_task(daemon.http.post(CHAT, json=body))
        while not (mirror.steps and any(live.batch_size == 2 for live in mirror.requests)):
            mirror.apply(await anext(events))
        (live,) = mirror.requests
        assert live.state in ("prefill", "decode")
        assert live.kv_blocks_peak >= live.kv_blocks >= 2
        step = next(step for step in mirror.steps if step.requests)
        assert {share.id for share in step.requests} == {live.id}
        assert step.model == daemon.model
        await asking
        while mirror.requests[0].state != "finished":
            mirror.apply(await anext(events))
    assert mirror.requests[0].output_tokens == 300


async def test_a_cancelled_answer_in_one_piece_is_an_error(start_daemon: Any) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.01, "replies": {}})
    asking = asyncio.create_task(daemon.http.post(CHAT, json=question(daemon.model, max_tokens=400, ignore_eos=True)))
    async with asyncio.timeout(20):
        while not (live := (await daemon.http.get("/admin/v1/requests")).json()):  # noqa: ASYNC110 - the daemon's state
            await asyncio.sleep(0.01)
        await daemon.http.post(f"/admin/v1/requests/{live[0]['id']}/cancel")
        answer = await asking
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "request_cancelled"
    assert answer.headers["x-should-retry"] == "false"


async def test_a_request_is_paused_seen_so_and_resumed(start_daemon: Any) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.01, "replies": {}})
    mirror = Mirror()
    async with following(daemon.http, "requests") as events, asyncio.timeout(20):
        mirror.apply(await anext(events))
        body = question(daemon.model, max_tokens=100, ignore_eos=True)
        asking = asyncio.create_task(daemon.http.post(CHAT, json=body))
        while not [live for live in mirror.requests if live.state == "decode"]:
            mirror.apply(await anext(events))
        path = f"/admin/v1/requests/{mirror.requests[0].id}"
        assert (await daemon.http.post(f"{path}/pause")).status_code == 200
        while mirror.requests[0].state != "paused":
            mirror.apply(await anext(events))
        assert mirror.requests[0].reason == "paused_by"
        blocks = (await daemon.http.get(f"/admin/v1/blocks/{daemon.model}")).json()
        assert sum(run["count"] for run in blocks["runs"]) == blocks["num_blocks"]
        moved = await daemon.http.post(f"{path}/priority", json={"priority": -3})
        assert moved.json()["priority"] == -3
        assert not asking.done()
        assert (await daemon.http.post(f"{path}/resume")).status_code == 200
        assert (await asking).json()["usage"]["completion_tokens"] == 100
        assert (await daemon.http.post(f"{path}/pause")).status_code == 409


async def test_acts_are_noted_in_the_audit_log(start_daemon: Any) -> None:
    daemon = await start_daemon()
    await daemon.http.post(f"/admin/v1/unload/{daemon.model}")
    log = (await daemon.http.get("/admin/v1/audit")).json()
    assert [(entry["action"], entry["target"]) for entry in log["entries"]] == [("model.unload", daemon.model)]
    assert log["first_broken"] is None


async def test_a_full_queue_is_refused_at_once_with_a_time(start_daemon: Any) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.01, "replies": {}}, max_open_requests=6)
    body = question(daemon.model, max_tokens=50, ignore_eos=True)
    answers = await asyncio.gather(*(daemon.http.post(CHAT, json=body) for _ in range(50)))
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) == 6
    assert codes.count(429) == 44
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_model_is_put_to_sleep_woken_and_unloaded(start_daemon: Any) -> None:
    daemon = await start_daemon()
    http, name = daemon.http, daemon.model
    mirror = Mirror()
    async with following(http, "models,devices") as events, asyncio.timeout(30):
        mirror.apply(await anext(events))
        assert mirror.models[0].state == "ready"
        assert mirror.devices[0].memory.total > 0
        assert (await http.post(f"/admin/v1/unload/{name}")).json()["state"] == "on_disk"
        while mirror.models[0].state != "on_disk":
            mirror.apply(await anext(events))
    assert (await http.get("/ready")).status_code == 200
    assert (await http.post(CHAT, json=question(name, max_tokens=2))).status_code == 200
    assert (await http.get(f"/admin/v1/models/{name}")).json()["state"] == "ready"


async def test_fit_says_what_a_load_would_cost(start_daemon: Any) -> None:
    daemon = await start_daemon()
    answer = (await daemon.http.get(f"/admin/v1/fit/{daemon.model}")).json()
    assert answer["fits"]
    assert answer["is_loaded"]
    assert answer["total"] == answer["weights"] + answer["kv"] + answer["workspace"]


async def test_options_are_changed_field_by_field(start_daemon: Any) -> None:
    daemon = await start_daemon()
    path = f"/admin/v1/options/{daemon.model}"
    changed = await daemon.http.patch(path, json={"pinned": True, "keep_alive": "2h"})
    assert changed.json() == {"pinned": True, "keep_alive": "2h"}
    assert (await daemon.http.get(f"/admin/v1/models/{daemon.model}")).json()["pinned"]
    assert (await daemon.http.patch(path, json={"keep_alive": None})).json() == {"pinned": True}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "word"),
    [
        ("GET", "/admin/v1/models/nope", None, 404, "does not exist"),
        ("GET", "/admin/v1/requests/nope", None, 404, "no request"),
        ("GET", "/admin/v1/events?topics=nope", None, 400, "requests, models"),
        ("POST", "/admin/v1/sleep/{model}?level=3", None, 400, "level"),
        ("GET", "/admin/v1/fit/{model}?context=0", None, 400, "context"),
        ("PATCH", "/admin/v1/options/{model}", {"keep_alive": "soon"}, 400, "keep_alive"),
        ("PATCH", "/admin/v1/options/{model}", {"pined": True}, 400, "pinned"),
        ("PATCH", "/admin/v1/options/{model}", {"sampling": {"temperature": -1}}, 400, "temperature"),
    ],
)
async def test_mistakes_are_named(
    start_daemon: Any, method: str, path: str, body: dict[str, Any] | None, status: int, word: str
) -> None:
    daemon = await start_daemon()
    answer = await daemon.http.request(method, path.format(model=daemon.model), json=body)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


async def test_a_dead_engine_leaves_an_incident(start_daemon: Any) -> None:
    daemon = await start_daemon()
    mirror = Mirror()
    async with following(daemon.http, "incidents,models") as events, asyncio.timeout(20):
        mirror.apply(await anext(events))
        os.kill(mirror.models[0].pid or 0, signal.SIGKILL)
        while not mirror.incidents:
            mirror.apply(await anext(events))
    (incident,) = mirror.incidents
    assert (incident.kind, incident.model, incident.signal) == ("engine_died", daemon.model, "SIGKILL")
    assert incident.ledger["host"].total > 0
    assert (await daemon.http.post(CHAT, json=question(daemon.model, max_tokens=1))).status_code == 200
