"""`/admin/v1/keys`, `/admin/v1/usage`, `/admin/v1/audit`: who may ask, who asked for how much, and who changed what."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.errors import ApiError, bad_request
from inferd.appliance.api.state import principal_of, state_of
from inferd.appliance.auth.keys import KeyInfo, KeyRefused
from inferd.appliance.auth.principal import Limits
from inferd.appliance.auth.usage import today
from inferd.appliance.schemas import Lane

router = APIRouter()
KEYS_PATH = "/admin/v1/keys"


class NewKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    scopes: tuple[str, ...] = ("infer",)
    models: tuple[str, ...] | None = None
    lane: Lane = "interactive"
    priority: int = 0
    limits: Limits = Limits()
    expires_at: float | None = None


class CreatedKey(msgspec.Struct, kw_only=True):
    key: str  # here, and nowhere else again
    info: KeyInfo


@router.get(KEYS_PATH)
async def list_keys(request: Request) -> Response:
    return _json(state_of(request).keys.list_keys())


@router.post(KEYS_PATH)
async def create_key(request: Request) -> Response:
    state = state_of(request)
    body = await state.read_json(request)
    try:
        new = msgspec.convert(body, NewKey)
        key, info = state.keys.create(
            new.name,
            new.scopes,
            models=new.models,
            lane=new.lane,
            priority=new.priority,
            limits=new.limits,
            expires_at=new.expires_at,
        )
    except (msgspec.ValidationError, KeyRefused) as error:
        raise bad_request(f"The key cannot be made: {error}.") from None
    state.audited(request, "key.create", info.name, detail=f"scopes {', '.join(info.scopes)}")
    return _json(CreatedKey(key=key, info=info))


@router.delete(KEYS_PATH + "/{name}")
async def revoke_key(request: Request, name: str) -> Response:
    state = state_of(request)
    try:
        info = state.keys.revoke(name)
    except KeyRefused as error:
        raise ApiError(404, f"{error}.", code="not_found", param="name") from None
    state.sessions.end_of_key(info.id)
    state.audited(request, "key.revoke", info.name)
    return _json(info)


@router.post("/admin/v1/console-link")
async def console_link(request: Request) -> Response:
    """Opens the console once, in the caller's name, within two minutes."""
    state = state_of(request)
    token = state.sessions.make_link(principal_of(request))
    state.audited(request, "console.link")
    return _json({"token": token})


@router.get("/admin/v1/usage")
async def usage(request: Request, days: int = 30) -> Response:
    if not 1 <= days <= 3660:
        raise bad_request(f"days is between 1 and 3660, not {days}.", param="days")
    return _json(state_of(request).usage.since(today() - days + 1))


@router.get("/admin/v1/incidents")
async def incidents(request: Request, limit: int = 50) -> Response:
    if not 1 <= limit <= 1000:
        raise bad_request(f"limit is between 1 and 1000, not {limit}.", param="limit")
    return _json(state_of(request).incidents.latest(limit))


@router.get("/admin/v1/audit")
async def audit(request: Request, limit: int = 200) -> Response:
    if not 1 <= limit <= 10_000:
        raise bad_request(f"limit is between 1 and 10000, not {limit}.", param="limit")
    log = state_of(request).audit
    return _json({"entries": log.latest(limit), "first_broken": log.first_broken()})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
