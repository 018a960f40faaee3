"""Publishes every model of the library as it stands: its file, its engine, its memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from inferd.appliance.events.hub import EventHub
from inferd.appliance.library.records import ModelRecord
from inferd.appliance.memory.planner import MemoryPlanner, model_memory
from inferd.appliance.schemas import KvUse, MemoryEstimate, ModelMemory, ModelStatus
from inferd.appliance.supervisor.catalog import Catalog
from inferd.appliance.supervisor.served import ServedModel
from inferd.appliance.supervisor.slot import EngineSlot
from inferd.appliance.supervisor.states import ModelState
from inferd.appliance.supervisor.supervisor import Supervisor
from inferd.engine.messages import SchedulerStats

Slot = EngineSlot[ServedModel]


class ModelBoard:
    """`refresh` publishes what changed; it is cheap enough for every change and for a tick while somebody looks."""

    def __init__(
        self, hub: EventHub, catalog: Catalog, supervisor: Supervisor[ServedModel], planner: MemoryPlanner
    ) -> None:
        self._hub = hub
        self._catalog = catalog
        self._supervisor = supervisor
        self._planner = planner
        self._rates: dict[str, _Rate] = {}
        self._shown: set[str] = set()

    def refresh(self) -> None:
        records = self._catalog.list_models()
        for record in records:
            self._hub.put("models", self.status(record))
        gone = self._shown - {record.id for record in records}
        for model in gone:
            self._hub.drop("models", model)
        self._shown = {record.id for record in records}

    def status(self, record: ModelRecord) -> ModelStatus:
        slot = self._supervisor.slot(record.id)
        needs = self._planner.needs(record.id)
        facts = self._planner.facts(record.id)
        values: dict[str, Any] = {} if slot is None else self._of_slot(slot, needs.keep_alive_s, needs.pinned)
        expects = {"expected_load_s": needs.load_s, "expected_wake_s": needs.wake_s if needs.asleep else None}
        return ModelStatus(
            id=record.id,
            aliases=record.aliases,
            source=record.source,
            revision=record.revision,
            size_bytes=record.size_bytes,
            format=record.format,
            quantisation=record.quantisation,
            architecture=record.architecture,
            pinned=needs.pinned,
            keep_alive_s=needs.keep_alive_s,
            estimate=MemoryEstimate(bytes=needs.estimate.total, error_ratio=facts.error_ratio),
            **{"context_limit": record.context_limit, **expects, **values},
        )

    def _of_slot(self, slot: Slot, keep_alive_s: float | None, pinned: bool) -> dict[str, Any]:
        ago_s = time.monotonic() - slot.since
        values: dict[str, Any] = {
            "state": slot.state.value,
            "since": round(time.time() - ago_s, 3),
            "why": slot.why or slot.refusal,
            "running": slot.door.num_open,
            "waiting": slot.door.num_waiting,
            "progress": self._progress(slot, ago_s),
        }
        if slot.failure is not None:
            values["last_error"] = str(slot.failure.error or slot.failure.reason)[:500]
            values["retry_at"] = round(time.time() + slot.failure.retry_in_s, 1)
        if slot.process is None:
            return values
        values |= self._of_process(slot.model, slot.process)
        if slot.state is ModelState.READY and keep_alive_s is not None and not pinned and not slot.door.num_open:
            left_s = max(slot.door.last_used, slot.since) + keep_alive_s - time.monotonic()
            values["expires_at"] = round(time.time() + left_s)
        return values

    def _of_process(self, model: str, served: ServedModel) -> dict[str, Any]:
        stats, memory = served.llm.stats, model_memory(served.memory)
        rate = self._rates.setdefault(model, _Rate())
        return {
            "context_limit": served.max_model_len,
            "pid": served.pid,
            "devices": ("gpu",) if self._planner.uses_gpus else ("host",),
            "tensor_parallel": max(len(served.memory), 1),
            "tokens_per_s": round(rate.of(stats.generated_tokens), 1),
            "kv": _kv(stats),
            "memory": memory if served.memory else ModelMemory(),
        }

    def _progress(self, slot: Slot, ago_s: float) -> float | None:
        """By the clock: a share of what the last load or wake took. It never says that it is through."""
        needs = self._planner.needs(slot.model)
        expected: Mapping[ModelState, float] = {ModelState.LOADING: needs.load_s, ModelState.WAKING: needs.wake_s}
        if slot.state not in expected:
            return None
        return round(min(ago_s / max(expected[slot.state], 0.1), 0.99), 2)


class _Rate:
    """Of a counter, over the last second or more."""

    def __init__(self) -> None:
        self._count = 0
        self._at = time.monotonic()
        self._value = 0.0

    def of(self, count: int) -> float:
        elapsed_s = time.monotonic() - self._at
        if elapsed_s >= 1.0 or count < self._count:
            self._value = max(count - self._count, 0) / max(elapsed_s, 1e-3)
            self._count, self._at = count, time.monotonic()
        return self._value


def _kv(stats: SchedulerStats) -> KvUse:
    queried = stats.prefix_queried_tokens
    return KvUse(
        blocks_total=stats.blocks_total,
        blocks_used=stats.blocks_total - stats.blocks_free,
        hit_rate=round(stats.prefix_hit_tokens / queried, 4) if queried else 0.0,
    )
