"""The whole engine paused, and going on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from inferd.engine.core.admission import PauseState
from inferd.engine.core.calls import Later
from inferd.engine.core.clock import Clock, steady_time
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.core.sleep_states import SleepEvent
from inferd.engine.errors import InvalidRequest
from inferd.engine.messages import EngineOutput

PAUSE_STATES = {"abort": PauseState.NOTHING, "keep": PauseState.NOTHING, "wait": PauseState.NO_NEW}
"""What goes on after `Pausing.pause`, by its mode."""


class Pausing:
    """`num_under_way` tells how many steps are on their way; `emit` takes outputs of requests that a pause ended.

    `check` raises for what an engine that sleeps cannot do.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_under_way: Callable[[], int],
        emit: Callable[[list[EngineOutput]], None],
        check: Callable[[SleepEvent], None],
        clock: Clock = steady_time,
    ) -> None:
        self._scheduler = scheduler
        self._num_under_way = num_under_way
        self._emit = emit
        self._check = check
        self._clock = clock
        self.paused_by = ""  # who wanted it, the last time
        self._paused_at = 0.0

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        return {"is_paused": self.is_paused, "pause": self.pause, "resume": self.resume}

    @property
    def paused_for_s(self) -> float:
        """Since the last pause was asked for."""
        return self._clock() - self._paused_at

    def pause(self, mode: str = "abort", clear_cache: bool = False, by: str = "admin") -> Later:
        """Stop scheduling. Requests that come meanwhile wait for `resume`. `by`: who wants it, to be shown.

        "abort" ends what is there; "wait" lets what has begun finish first; "keep" leaves everything where it is.
        Answered when no step is on its way any more and nothing is left to do: True, or False when `resume` came
        first. With `clear_cache` the prefix cache is empty then, and requests that were kept compute everything again.
        """
        if mode not in PAUSE_STATES:
            raise InvalidRequest(f"unknown pause mode {mode!r}; there are: {', '.join(PAUSE_STATES)}", param="mode")
        self._check(SleepEvent.PAUSE)
        if mode == "abort":
            self._emit(self._scheduler.abort(self._scheduler.request_ids))
        if not self.is_paused():
            self.paused_by, self._paused_at = by, self._clock()
        self._scheduler.waiting.pause_state = PAUSE_STATES[mode]
        return Later(lambda: not self.is_paused() or self._is_quiet, partial(self._finish, clear_cache))

    def resume(self) -> bool:
        """Whether the engine was paused."""
        self._check(SleepEvent.RESUME)
        was_paused = self.is_paused()
        self._scheduler.waiting.pause_state = PauseState.RUNNING
        return was_paused

    def is_paused(self) -> bool:
        """Also while requests that have begun still run."""
        return self._scheduler.waiting.pause_state is not PauseState.RUNNING

    @property
    def _is_quiet(self) -> bool:
        return not (self._num_under_way() or self._scheduler.has_work)

    def _finish(self, clear_cache: bool) -> bool:
        if not self.is_paused():
            return False
        if clear_cache:
            self._scheduler.preempt_all()
            self._scheduler.reset_prefix_cache()
        return True
