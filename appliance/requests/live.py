"""One API request from its arrival to its end, as everybody may see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from inferd.appliance.requests.errors import RequestCancelled
from inferd.appliance.schemas import ENDED, Lane, RequestRecord, RequestState
from inferd.engine.frontend.inputs import PreparedRequest
from inferd.engine.frontend.outputs import RequestOutput

UNSEEN_S = 0.01


class RequestActs(Protocol):
    """What an engine can do with one of its own requests; False: it has none of that id."""

    async def set_priority(self, request_id: str, priority: int) -> bool: ...

    async def pause_request(self, request_id: str, by: str = "admin") -> bool: ...

    async def resume_request(self, request_id: str) -> bool: ...

    async def batch_mates(self, request_id: str) -> list[str]: ...


class Engine(Protocol):
    """As far as a request needs it. It is named there by `PreparedRequest.request_id`."""

    @property
    def insight(self) -> RequestActs: ...

    async def abort(self, request_id: str) -> None: ...

    def engine_ids(self, request_id: str) -> list[str]: ...


@dataclass(frozen=True)
class Caller:
    """Who asks, as far as that is known."""

    client: str = "local"  # the key's name
    lane: Lane = "interactive"
    priority: int = 0
    peer: str = ""
    user_agent: str = ""
    session: str = ""
    salt: str | None = None  # prefixes are shared among the requests of one key only

    def salted(self, cache_salt: str | None) -> str | None:
        """With the salt that the client chose itself."""
        return cache_salt if self.salt is None else f"{self.salt}/{cache_salt or ''}"


@dataclass(eq=False)
class LiveRequest:
    """Written by the route that serves it; read through `record`.

    An API request may be several of the engine's (prompts, choices): tokens are added up, and the engine's state is
    that of the one that is furthest behind.
    """

    id: str
    model: str
    api: str
    caller: Caller
    arrived_at: float = field(default_factory=time.time)
    state: RequestState = "queued"
    reason: str | None = None
    reason_text: str = ""
    position: int | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()
    cancelled_by: str | None = None
    engine_fields: dict[str, Any] = field(default_factory=dict)  # what the engine tells beside what is counted here
    _prepared: list[PreparedRequest] = field(default_factory=list)
    _outputs: dict[int, RequestOutput] = field(default_factory=dict)
    _engine: Engine | None = None
    _broken_by: Exception | None = None
    _task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def names(self) -> list[str]:
        """Under which the engine knows its parts."""
        return [prepared.request_id for prepared in self._prepared]

    def begin(self, prepared: Iterable[PreparedRequest], engine: Engine) -> None:
        """It goes into the engine."""
        self._prepared = list(prepared)
        self._engine = engine
        self.state, self.reason, self.reason_text, self.position = "waiting", None, "", None
        warnings = dict.fromkeys(warning for one in self._prepared for warning in one.warnings)
        self.warnings = (*self.warnings, *warnings)

    def count(self, index: int, output: RequestOutput) -> None:
        """Of the `index`-th prompt."""
        self._outputs[index] = output
        if self.first_token_at is None and output.num_output_tokens:
            self.first_token_at = time.time()
            self.state, self.reason, self.reason_text = "decode", None, ""
        for choice in output.outputs:
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason.value

    async def cancel(self, by: str) -> None:
        """Its route then raises `RequestCancelled`, before or after the first byte. Idempotent."""
        if self.is_over or self.cancelled_by is not None:
            return
        self.cancelled_by = by
        if self._engine is not None:
            for name in self.names:
                await self._engine.abort(name)
        elif self._task is not None:
            self._task.cancel()

    async def pause(self, by: str) -> bool:
        """False: it is not in its engine."""
        return any([await acts.pause_request(part, by) for acts, part in self._parts()])

    async def resume(self) -> bool:
        return any([await acts.resume_request(part) for acts, part in self._parts()])

    async def set_priority(self, priority: int) -> bool:
        """Smaller runs sooner."""
        self.caller = replace(self.caller, priority=priority)
        self.engine_fields = {**self.engine_fields, "priority": priority}
        return any([await acts.set_priority(part, priority) for acts, part in self._parts()])

    async def batch_mates(self) -> set[str]:
        """Engine ids of the requests that the last step computed together with this one."""
        return {mate for acts, part in self._parts() for mate in await acts.batch_mates(part)}

    @property
    def parts(self) -> list[str]:
        """Engine ids of what it became there and is not through."""
        engine = self._engine
        return [] if engine is None else [part for name in self.names for part in engine.engine_ids(name)]

    def _parts(self) -> list[tuple[RequestActs, str]]:
        engine = self._engine
        return [] if engine is None else [(engine.insight, part) for part in self.parts]

    def raise_if_cancelled(self) -> None:
        if self.cancelled_by is not None:
            raise RequestCancelled(self.cancelled_by)

    def broke(self, error: Exception) -> None:
        """Its stream ends with that error, which its client is told inside the stream."""
        self._broken_by = self._broken_by or error

    def end_as_it_went(self) -> None:
        error = self._broken_by
        if error is None:
            self.end("finished")
        else:
            self.end("cancelled" if isinstance(error, RequestCancelled) else "failed", str(error)[:500])

    def end(self, state: RequestState, error: str | None = None) -> None:
        self.state, self.error, self.finished_at = state, error, time.time()
        self.reason, self.reason_text, self.position = None, "", None

    @property
    def output_tokens(self) -> int:
        return sum(output.num_output_tokens for output in self._outputs.values())

    def record(self) -> RequestRecord:
        caller, output_tokens = self.caller, self.output_tokens
        values: dict[str, Any] = {
            "computed_tokens": output_tokens and self._prompt_tokens + output_tokens,
            "cached_tokens": sum(output.num_cached_tokens for output in self._outputs.values()),
            "max_tokens": self._prepared[0].add.params.max_tokens if self._prepared else None,
            "tokens_per_s": self._tokens_per_s(output_tokens),
            **self.engine_fields,
            "id": self.id,
            "client": caller.client,
            "lane": caller.lane,
            "model": self.model,
            "api": self.api,
            "peer": caller.peer,
            "user_agent": caller.user_agent,
            "session": caller.session,
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": max(output_tokens, self.engine_fields.get("output_tokens", 0)),
            "arrived_at": self.arrived_at,
            "admitted_at": self.admitted_at,
            "first_token_at": self.first_token_at,
            "finished_at": self.finished_at,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "warnings": self.warnings,
        }
        mine = {"state": self.state, "reason": self.reason, "reason_text": self.reason_text, "position": self.position}
        if self.is_over or not self._prepared:
            values |= mine | {"tokens_per_s": self._tokens_per_s(output_tokens)}
        return msgspec.convert({"priority": caller.priority, **mine, **values}, RequestRecord)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prepared.add.prompt_token_ids) for prepared in self._prepared)

    def _tokens_per_s(self, output_tokens: int) -> float:
        if self.first_token_at is None or output_tokens < 2:
            return 0.0
        since, end = self.first_token_at, self.finished_at or time.time()
        if end - since < UNSEEN_S:  # it came in one piece: when its first token was there, nobody saw
            since = self.admitted_at or self.arrived_at
        seconds = end - since
        return (output_tokens - 1) / seconds if seconds > 0 else 0.0
