"""The typed client of the admin API, for screens and scripts: every record and every act.

Asynchronous, because whoever shows a stream also waits for keys. `client.Client` is its plain sibling for one-shot
commands.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from inferd.appliance.events.messages import Delta, EventId, Snapshot, decode_event
from inferd.appliance.schemas import AuditEntry, ModelStatus, RequestRecord, Topic

TIMEOUT = httpx.Timeout(30.0, connect=3.0)
LOAD_TIMEOUT = httpx.Timeout(600.0, connect=3.0)  # an act that answers when the model does
SILENCE_S = 25.0  # the daemon says something at least every ten seconds
RecordT = TypeVar("RecordT")


class Unreachable(Exception):
    """Nobody answers there, or what answers is not inferd."""


class NotAllowed(Exception):
    """401 or 403: the key is missing, wrong, or not enough."""


class ActFailed(Exception):
    """The daemon refused, with its reason."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AdminClient:
    """`address`: "http://127.0.0.1:4633". `socket`: the daemon's admin socket on this machine, which needs no key.

    Every method raises `Unreachable`, `NotAllowed` or `ActFailed`.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        socket: Path | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`transport` and `headers`: for whoever asks from inside the daemon."""
        self.address = address
        if socket is not None:
            transport = httpx.AsyncHTTPTransport(uds=str(socket))
        headers = {**(headers or {}), **({"authorization": f"Bearer {key}"} if key else {})}
        self._http = httpx.AsyncClient(
            base_url=address, timeout=TIMEOUT, transport=transport, headers=headers, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def version(self) -> str:
        return str((await self._ask("GET", "/version"))["version"])

    async def models(self) -> list[ModelStatus]:
        return msgspec.convert(await self._ask("GET", "/admin/v1/models"), list[ModelStatus])

    async def load(self, model: str) -> ModelStatus:
        """Also wakes. Answers when the model does."""
        return await self._act("load", model)

    async def unload(self, model: str) -> ModelStatus:
        return await self._act("unload", model)

    async def sleep(self, model: str, level: int = 1) -> ModelStatus:
        return await self._act("sleep", model, params={"level": level})

    async def options(self, model: str) -> dict[str, Any]:
        return dict(await self._ask("GET", f"/admin/v1/options/{quote(model)}"))

    async def change_options(self, model: str, **changes: Any) -> dict[str, Any]:
        """None sets one back."""
        return dict(await self._ask("PATCH", f"/admin/v1/options/{quote(model)}", json=changes))

    async def fit(self, model: str, context: int | None = None) -> dict[str, Any]:
        params = {} if context is None else {"context": context}
        return dict(await self._ask("GET", f"/admin/v1/fit/{quote(model)}", params=params))

    async def requests(self) -> list[RequestRecord]:
        return msgspec.convert(await self._ask("GET", "/admin/v1/requests"), list[RequestRecord])

    async def cancel(self, request_id: str) -> RequestRecord:
        return await self._request_act(request_id, "cancel")

    async def mates(self, request_id: str) -> list[str]:
        """The requests that the last step computed together with this one."""
        return list(await self._ask("GET", f"/admin/v1/requests/{quote(request_id)}/mates"))

    async def pause(self, request_id: str) -> RequestRecord:
        return await self._request_act(request_id, "pause")

    async def resume(self, request_id: str) -> RequestRecord:
        return await self._request_act(request_id, "resume")

    async def set_priority(self, request_id: str, priority: int) -> RequestRecord:
        """Smaller runs sooner."""
        return await self._request_act(request_id, "priority", json={"priority": priority})

    async def keys(self) -> list[dict[str, Any]]:
        return list(await self._ask("GET", "/admin/v1/keys"))

    async def create_key(self, name: str, **fields: Any) -> dict[str, Any]:
        """`key` in the answer is the key itself: this is the only time that anybody can read it."""
        return dict(await self._ask("POST", "/admin/v1/keys", json={"name": name, **fields}))

    async def revoke_key(self, name: str) -> dict[str, Any]:
        return dict(await self._ask("DELETE", f"/admin/v1/keys/{quote(name)}"))

    async def usage(self, days: int = 30) -> list[dict[str, Any]]:
        return list(await self._ask("GET", "/admin/v1/usage", params={"days": days}))

    async def audit(self, limit: int = 200) -> list[AuditEntry]:
        answer = await self._ask("GET", "/admin/v1/audit", params={"limit": limit})
        return msgspec.convert(answer["entries"], list[AuditEntry])

    async def blocks(self, model: str) -> dict[str, Any]:
        """Who owns each block of a model's KV cache, as runs."""
        return dict(await self._ask("GET", f"/admin/v1/blocks/{quote(model)}"))

    async def events(
        self, topics: Collection[Topic] = (), last_id: EventId | None = None
    ) -> AsyncGenerator[tuple[EventId | None, Snapshot | Delta], None]:
        """One connection's worth of the stream; ends with an error, also when the daemon has gone silent."""
        headers = {} if last_id is None else {"last-event-id": str(last_id)}
        params = {"topics": ",".join(topics)} if topics else {}
        timeout = httpx.Timeout(SILENCE_S, connect=3.0)
        try:
            stream = self._http.stream("GET", "/admin/v1/events", params=params, headers=headers, timeout=timeout)
            async with stream as response:
                if response.is_error:
                    await response.aread()
                    raise _failure(response)
                name, identity = "", None
                async for line in response.aiter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "id":
                        identity = EventId.parse(value)
                    elif field == "data" and (event := decode_event(name, value)) is not None:
                        yield identity, event
        except httpx.HTTPError as error:
            raise Unreachable(f"no daemon answers at {self.address}: {error or type(error).__name__}") from None
        except msgspec.DecodeError as error:
            raise Unreachable(f"what answers at {self.address} is not this version of inferd: {error}") from None

    async def _act(self, act: str, model: str, **options: Any) -> ModelStatus:
        answer = await self._ask("POST", f"/admin/v1/{act}/{quote(model)}", timeout=LOAD_TIMEOUT, **options)
        return msgspec.convert(answer, ModelStatus)

    async def _request_act(self, request_id: str, act: str, **options: Any) -> RequestRecord:
        answer = await self._ask("POST", f"/admin/v1/requests/{quote(request_id)}/{act}", **options)
        return msgspec.convert(answer, RequestRecord)

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise Unreachable(f"no daemon answers at {self.address}: {error or type(error).__name__}") from None
        if response.is_error:
            raise _failure(response)
        try:
            return response.json()
        except json.JSONDecodeError:
            raise Unreachable(f"what answers at {self.address} is not inferd") from None


def _failure(response: httpx.Response) -> Exception:
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError):
        message, code = f"the daemon answered with status {response.status_code}", None
    if response.status_code in (401, 403):
        return NotAllowed(message)
    return ActFailed(response.status_code, message, code)
