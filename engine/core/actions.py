"""What may be done to one request while it is on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferd.engine.core.clock import Clock
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.errors import InvalidRequest, NotSupported
from inferd.engine.messages import EngineOutput
from inferd.engine.request import Request

MAX_PRIORITY = 2**31 - 1


class Actions:
    """Each returns whether there was such an unfinished request. `emit` takes the last words of those that end."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        emit: Callable[[list[EngineOutput]], None],
        *,
        has_priorities: bool,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._emit = emit
        self._has_priorities = has_priorities

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        return {
            "cancel": self.cancel,
            "pause_request": self.pause_request,
            "resume_request": self.resume_request,
            "set_priority": self.set_priority,
        }

    def cancel(self, request_id: str) -> bool:
        """It ends as aborted, and its stream hears of it."""
        found = request_id in self._scheduler.requests
        self._emit(self._scheduler.abort([request_id]))
        return found

    def set_priority(self, request_id: str, priority: int) -> bool:
        """The smaller, the sooner; among all requests or, with the policy "fair", among those of its client and lane.

        Raises `NotSupported` under a policy that has no priorities, `InvalidRequest` for what is no whole number.
        """
        if not self._has_priorities:
            raise NotSupported(
                "scheduling_policy=fcfs has no priorities; start the engine with priority or fair", param="priority"
            )
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            raise InvalidRequest(f"a priority is a whole number of 32 bits, got {priority!r}", param="priority")
        request = self._find(request_id)
        if request is not None:
            self._scheduler.set_priority(request, priority)
        return request is not None

    def pause_request(self, request_id: str, by: str = "admin") -> bool:
        """It gives up its blocks and its place until `resume_request`; others go on. `by`: who wants it, to be shown.

        What the prefix cache still holds of it then need not be computed again.
        """
        request = self._find(request_id)
        if request is not None:
            self._scheduler.preempt(request)
            self._scheduler.waiting.hold(request, by, self._clock())
        return request is not None

    def resume_request(self, request_id: str) -> bool:
        """Of no effect on one that is not paused."""
        self._scheduler.waiting.let_go(request_id)
        return request_id in self._scheduler.requests

    def _find(self, request_id: str) -> Request | None:
        return self._scheduler.requests.get(request_id)
