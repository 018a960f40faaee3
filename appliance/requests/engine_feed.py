"""Follows each engine's feed while somebody looks, and joins what it tells with this daemon's requests.

An engine speaks of its own requests; one of ours may be several of them. What is shown is ours: its ids, its counts
added up, and the state of the part that is furthest behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from inferd.appliance.events.hub import EventHub
from inferd.appliance.requests.live import LiveRequest
from inferd.appliance.requests.registry import RequestRegistry
from inferd.appliance.schemas import StepRecord, StepShare, StepTokens
from inferd.appliance.supervisor.served import ServedModel
from inferd.appliance.supervisor.supervisor import Supervisor
from inferd.engine.errors import EngineError
from inferd.engine.insight.mirror import FeedMirror
from inferd.engine.insight.records import RequestRecord, RequestState
from inferd.engine.insight.records import StepRecord as EngineStep
from inferd.engine.messages import FeedUpdate

SUMMED = (
    "cached_tokens",
    "computed_tokens",
    "output_tokens",
    "kv_blocks",
    "kv_blocks_peak",
    "preemptions",
    "spec_accepted",
    "spec_drafted",
)
OF_THE_LAST = (
    "reason_text",
    "position",
    "max_tokens",
    "context_limit",
    "diverged_at",
    "batch_size",
    "priority",
    "first_scheduled_at",
    "eta_s",
)
BEHIND = (  # the first is furthest behind
    RequestState.PAUSED,
    RequestState.PREEMPTED,
    RequestState.WAITING,
    RequestState.PREFILL,
    RequestState.DECODE,
)
log = logging.getLogger(__name__)


class EngineFeeds:
    """`look` after anything that may have changed: who looks, and which engines there are."""

    def __init__(self, hub: EventHub, registry: RequestRegistry, supervisor: Supervisor[ServedModel]) -> None:
        self._hub = hub
        self._registry = registry
        self._supervisor = supervisor
        self._tasks: dict[ServedModel, asyncio.Task[None]] = {}
        hub.on_demand(self.look)

    def look(self) -> None:
        wanted = self._hub.is_wanted("requests") or self._hub.is_wanted("steps")
        engines = {slot.process: slot.model for slot in self._supervisor.slots if slot.process} if wanted else {}
        for served in [served for served in self._tasks if served not in engines]:
            self._tasks.pop(served).cancel()
        for served, model in engines.items():
            if served not in self._tasks:
                self._tasks[served] = asyncio.create_task(self._follow(model, served), name=f"feed of {model}")

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, model: str, served: ServedModel) -> None:
        feed = _ModelFeed(model, self._hub, self._registry)
        try:
            async for update in served.llm.feed():
                feed.apply(update)
        except EngineError as error:
            log.info("the feed of %s ended: %s", model, error)
        except Exception:
            log.exception("the feed of %s failed", model)


class _ModelFeed:
    def __init__(self, model: str, hub: EventHub, registry: RequestRegistry) -> None:
        self._model = model
        self._hub = hub
        self._registry = registry
        self._mirror = FeedMirror()

    def apply(self, update: FeedUpdate) -> None:
        self._mirror.apply(update)
        owners = {name: live for live in self._registry.live for name in live.names}
        parts: dict[str, list[RequestRecord]] = {}
        ours: dict[str, LiveRequest] = {}
        for record in self._mirror.records.values():
            if (live := owners.get(record.name)) is not None:
                parts.setdefault(live.id, []).append(record)
                ours[record.id] = live
        for records in parts.values():
            live = ours[records[0].id]
            live.engine_fields = joined(records, {name: other.id for name, other in ours.items()}, self._names())
            self._registry.publish(live)
        if self._hub.is_wanted("steps"):
            for step in update.steps:
                self._hub.append("steps", self._step(step, ours))

    def _names(self) -> dict[str, str]:
        """Engine id → the name by which an engine's sentences call it."""
        return {record.id: record.name or record.id for record in self._mirror.records.values()}

    def _step(self, step: EngineStep, ours: dict[str, LiveRequest]) -> StepRecord:
        def name(engine_id: str) -> str:
            return ours[engine_id].id if engine_id in ours else engine_id

        return StepRecord(
            model=self._model,
            step=step.step,
            at=step.at,
            duration_ms=step.duration_ms,
            tokens=StepTokens(prefill=step.tokens.prefill, decode=step.tokens.decode, spec=step.tokens.spec),
            budget=step.budget,
            requests=tuple(StepShare(id=name(share.id), tokens=share.tokens) for share in step.requests),
            graph=f"{step.graph_mode} {step.graph_size}" if step.graph_mode else "",
            preempted=tuple(name(engine_id) for engine_id in step.preempted),
            running=step.running,
            waiting=step.waiting,
            kv_used=step.kv_used,
            kv_cached=step.kv_cached,
            evictions=step.evictions,
        )


def joined(records: Sequence[RequestRecord], ours: dict[str, str], names: dict[str, str]) -> dict[str, Any]:
    """The fields of a daemon's request whose parts are `records`.

    `ours`: engine id → our id. `names`: engine id → how a sentence calls it.
    """
    last = min(records, key=lambda record: _rank(record.state))
    fields: dict[str, Any] = {name: sum(getattr(record, name) for record in records) for name in SUMMED}
    fields |= {name: getattr(last, name) for name in OF_THE_LAST}
    fields |= {"state": last.state.value, "reason": last.reason.value if last.reason is not None else None}
    fields["tokens_per_s"] = sum(record.tokens_per_s for record in records)
    if last.diverged_from is not None:
        fields["diverged_from"] = ours.get(last.diverged_from, last.diverged_from)
    if last.blocked_by is not None and last.blocked_by in ours:
        called = names.get(last.blocked_by, last.blocked_by)
        fields["reason_text"] = last.reason_text.replace(called, ours[last.blocked_by])
    return fields


def _rank(state: RequestState) -> int:
    return BEHIND.index(state) if state in BEHIND else len(BEHIND)
