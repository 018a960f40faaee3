"""Joins a waiting request with what the supervisor knows of its model."""

from __future__ import annotations

from typing import Any

from inferd.appliance.memory.planner import MemoryPlanner
from inferd.appliance.requests.live import LiveRequest
from inferd.appliance.requests.reasons import ModelWait, explain
from inferd.appliance.supervisor.supervisor import Supervisor


class WaitReasons:
    """Call it with a request: it writes why that one is not in its engine yet, and its place in the queue."""

    def __init__(self, supervisor: Supervisor[Any], planner: MemoryPlanner) -> None:
        self._supervisor = supervisor
        self._planner = planner

    def __call__(self, live: LiveRequest) -> None:
        slot = self._supervisor.slot(live.model)
        if slot is None or live.state != "queued":
            return
        live.position = slot.door.position(live) or None
        live.reason, live.reason_text = self._why(live.model) or (None, "")

    def _why(self, model: str) -> tuple[str, str] | None:
        slot = self._supervisor.slot(model)
        assert slot is not None
        needs, blockers = self._planner.needs(model), self._supervisor.waits_for.get(model, ())
        states = {name: other.state for name in blockers if (other := self._supervisor.slot(name)) is not None}
        return explain(
            ModelWait(
                model=model,
                state=slot.state,
                since=slot.since,
                expected_load_s=needs.load_s,
                expected_wake_s=needs.wake_s,
                waits_for=blockers,
                states=states,
                failure=slot.failure,
                held_for=slot.door.held_for,
            )
        )
