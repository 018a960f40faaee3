"""Who may do what, over every route that the daemon has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from inferd.appliance.app import create_app
from inferd.appliance.auth.access import needed

OPEN = {
    "/",
    "/health",
    "/ping",
    "/ready",
    "/readyz",
    "/version",
    "/console",
    "/console/login",
    "/console/static/{name}",
}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def routes_of(daemon: Any) -> list[tuple[str, str]]:
    """Method and path template of every route, the console's too."""
    return sorted(set(_walk(create_app(daemon.state).routes)))


def _walk(routes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for route in routes:
        if (included := getattr(route, "original_router", None)) is not None:
            yield from _walk(included.routes)
        else:
            assert isinstance(route, APIRoute | Route), route
            yield from ((method, route.path) for method in route.methods or ())


def filled(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


async def status(http: httpx.AsyncClient, method: str, path: str, **headers: str) -> int:
    """Only the head: some of these streams never end."""
    json = {} if method in ("POST", "PATCH", "PUT", "DELETE") else None
    async with http.stream(method, filled(path), json=json, headers=headers) as answer:
        return answer.status_code


async def test_every_route_is_shut_without_the_right_key(start_daemon: Any) -> None:
    daemon = await start_daemon(loopback_inference=False)
    keys = daemon.state.keys
    infer = {"authorization": f"Bearer {keys.create('i', ('infer',))[0]}"}
    read = {"x-api-key": keys.create("r", ("read",))[0]}
    wrong = {"authorization": "Bearer ifd_00000000_" + "x" * 43}
    async with httpx.AsyncClient(base_url=daemon.address, trust_env=False) as http:
        for method, path in routes_of(daemon):
            need = needed(method, filled(path))
            assert need is not None, f"{path} is in no table"
            without = await status(http, method, path)
            if path in OPEN:
                assert without != 401, path
                continue
            is_page = path.startswith("/console/") and method in ("GET", "HEAD") and "stream" not in path
            assert without == (303 if is_page else 401), path
            for key, opens in ((infer, {"infer"}), (read, {"read", "metrics"})):
                assert (await status(http, method, path, **key) in (401, 403)) == (need not in opens), (method, path)
        assert await status(http, "GET", "/v1/models", **wrong) == 401


async def test_this_machine_gets_answers_without_a_key_and_nothing_else(start_daemon: Any) -> None:
    daemon = await start_daemon()
    async with httpx.AsyncClient(base_url=daemon.address, trust_env=False) as http:
        body = {"model": daemon.model, **CHAT}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        dummy = {"authorization": "Bearer -", "x-api-key": "sk-anything"}
        assert (await http.post("/v1/chat/completions", json=body, headers=dummy)).status_code == 200
        forwarded = {"x-forwarded-for": "203.0.113.9"}
        assert (await http.post("/v1/chat/completions", json=body, headers=forwarded)).status_code == 401
        refused = await http.get("/admin/v1/models")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "authentication_error"


async def test_a_key_is_held_to_its_models_and_its_limits(start_daemon: Any) -> None:
    daemon = await start_daemon()
    create = daemon.http.post
    made = (await create("/admin/v1/keys", json={"name": "ci", "limits": {"requests_per_minute": 2}})).json()
    other = (await create("/admin/v1/keys", json={"name": "other", "models": ["another"]})).json()
    body = {"model": daemon.model, **CHAT}
    async with httpx.AsyncClient(base_url=daemon.address, trust_env=False) as http:
        headers = {"authorization": f"Bearer {made['key']}"}
        codes = [(await http.post("/v1/chat/completions", json=body, headers=headers)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        refused = await http.post("/v1/chat/completions", json=body, headers={"x-api-key": other["key"]})
        assert refused.status_code == 403
        assert "may not use the model" in refused.json()["error"]["message"]
    usage = (await daemon.http.get("/admin/v1/usage")).json()
    assert {(row["key"], row["requests"]) for row in usage} == {("ci", 2)}
    assert (await daemon.http.delete("/admin/v1/keys/ci")).status_code == 200
    async with httpx.AsyncClient(base_url=daemon.address, trust_env=False) as http:
        assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 401


async def test_two_keys_never_share_a_prefix(start_daemon: Any) -> None:
    daemon = await start_daemon()
    body = {"model": daemon.model, "messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 1}
    one, other = (daemon.state.keys.create(name)[0] for name in "ab")
    cached = []
    for key in (one, one, other):
        answer = await daemon.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


async def test_ten_wrong_keys_are_enough(start_daemon: Any) -> None:
    daemon = await start_daemon()
    wrong = {"authorization": "Bearer ifd_00000000_" + "x" * 43}
    async with httpx.AsyncClient(base_url=daemon.address, trust_env=False) as http:
        codes = [(await http.get("/v1/models", headers=wrong)).status_code for _ in range(12)]
    assert codes[:9] == [401] * 9
    assert codes[-1] == 429


@pytest.mark.parametrize("path", ["//v1/models", "/V1/models", "/v1%2fmodels/", "/admin/v1/../v1/models", "/metrics/"])
async def test_odd_paths_open_nothing(start_daemon: Any, path: str) -> None:
    daemon = await start_daemon(loopback_inference=False)
    async with httpx.AsyncClient(base_url=daemon.address, trust_env=False) as http:
        assert (await http.get(path)).status_code in (401, 404)


async def test_no_error_holds_a_key(start_daemon: Any) -> None:
    daemon = await start_daemon()
    key, _ = daemon.state.keys.create("ci")
    secret = key[13:]
    async with httpx.AsyncClient(base_url=daemon.address, trust_env=False) as http:
        for path in ("/admin/v1/models", f"/v1/models/{key}", "/metrics"):
            answer = await http.get(path, headers={"authorization": f"Bearer {key}"})
            assert secret not in answer.text or path.endswith(key)
    assert secret not in (await daemon.http.get("/metrics")).text
    assert secret not in (await daemon.http.get("/admin/v1/keys")).text
