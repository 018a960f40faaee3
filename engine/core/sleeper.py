"""Puts an engine to sleep and wakes it: what still runs, what waits, and which memory is there.

Requests that come while it is not awake are held, as in a pause, and run when all memory is back; an engine that was
told to refuse them says so to each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import asdict

from inferd.engine.core.admission import PauseState
from inferd.engine.core.calls import Later
from inferd.engine.core.canary import Canary
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.core.sleep_states import SleepEvent, SleepRefused, SleepState, next_state
from inferd.engine.errors import EngineAsleep, EngineError, InvalidRequest, NotSupported
from inferd.engine.executor.base import Executor
from inferd.engine.messages import KV_CACHE, EngineOutput, SleepReport, WakeReport


class _LevelEvents(NamedTuple):
    asked: SleepEvent
    done: SleepEvent


LEVELS = {
    1: _LevelEvents(SleepEvent.SLEEP_1, SleepEvent.ASLEEP_1),
    2: _LevelEvents(SleepEvent.SLEEP_2, SleepEvent.ASLEEP_2),
}
MODES = ("wait", "keep", "abort", "refuse")
REQUESTS = ("hold", "refuse")


class Sleeper:
    """Owns the state of sleep. The engine's thread calls it.

    `is_quiet` says whether no step is on its way and none is left to be done, `emit` takes outputs of requests that a
    sleep ended. `canary` tells whether what was loaded again is what was there before.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        is_quiet: Callable[[], bool],
        emit: Callable[[list[EngineOutput]], None],
        canary: Canary | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._is_quiet = is_quiet
        self._emit = emit
        self._canary = canary
        self._song: list[int] | None = None  # of the canary, before the first sleep
        self._state = SleepState.AWAKE
        self._level = 0  # that the engine falls asleep to
        self._tags: frozenset[str] = frozenset()  # of all memory, known from the first sleep on
        self._missing: dict[str, int] = {}  # tag of memory that is not there → level at which it was given back
        self._refuses = False
        self._paused_before = PauseState.RUNNING  # what a wake goes back to
        self._report = SleepReport()

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        return {
            "is_sleeping": self.is_sleeping,
            "memory": self.memory,
            "sleep": self.sleep,
            "sleep_state": lambda: str(self._state),
            "wake": self.wake,
        }

    @property
    def state(self) -> SleepState:
        return self._state

    def is_sleeping(self) -> bool:
        """Whether any memory is missing."""
        return bool(self._missing)

    def admit(self) -> None:
        """Raises EngineAsleep when a new request is not to wait for the engine to wake."""
        if self._refuses and self._state is not SleepState.AWAKE:
            raise EngineAsleep(f"the engine is {self._state}; wake it, or try again later")

    def check(self, event: SleepEvent) -> None:
        """Raises SleepRefused when that cannot be asked for now."""
        next_state(self._state, event)

    def sleep(self, level: int = 1, mode: str = "wait", requests: str = "hold") -> dict[str, Any] | Later:
        """Give memory back: at level 1 what can be had again soon, at level 2 all of it. A `SleepReport`, once it is.

        What runs is finished first ("wait"), kept to be computed again ("keep"), ended ("abort"), or in the way
        ("refuse"); what waits is held unless it is ended. `requests` that come later are held, or refused. The prefix
        cache is empty afterwards. A wake that comes first cancels it: the report says level 0.

        Raises InvalidRequest, SleepRefused, and NotSupported where the executor's memory cannot be given back.
        """
        _check_choice("level", level, LEVELS)
        _check_choice("mode", mode, MODES)
        _check_choice("requests", requests, REQUESTS)
        refusal = self._executor.sleep_refusal()
        if refusal is not None:
            raise NotSupported(refusal, param="sleep")
        before, after = self._state, next_state(self._state, LEVELS[level].asked)
        num_unfinished = len(self._scheduler.request_ids)
        if mode == "refuse" and num_unfinished and not self._missing:
            raise SleepRefused(f"sleep is refused: {num_unfinished} requests are not finished; choose another mode")
        self._refuses = requests == "refuse"
        if mode == "abort":
            self._emit(self._scheduler.abort(self._scheduler.request_ids))
        if self._missing:
            return asdict(self._report if after is before else self._give_back(level))
        if before is SleepState.AWAKE:
            self._level, self._paused_before = 0, self._scheduler.waiting.pause_state
        self._state, self._level = after, max(level, self._level)
        self._hold(finish=mode == "wait")
        return self._when_quiet(self._set_down)

    def wake(self, tags: Iterable[str] | None = None) -> dict[str, Any]:
        """Get memory back, that with these tags or all that is missing. A `WakeReport`; the engine runs when none is.

        Of no effect on an engine that is awake. Everything sleeps on when any of it cannot be had: raises what the
        executor raises, and EngineError when the engine no longer gives the answer that it gave before.
        """
        wanted = list(self._missing) if tags is None else list(dict.fromkeys(tags))
        unknown = [tag for tag in wanted if self._tags and tag not in self._tags]
        if unknown:
            names = ", ".join(sorted(self._tags))
            raise InvalidRequest(f"there is no memory with the tag {unknown[0]!r}; there are: {names}", param="tags")
        found = [tag for tag in wanted if tag in self._missing]
        if self._missing and not found:
            return asdict(WakeReport(still_asleep=list(self._missing)))
        self._state = next_state(self._state, SleepEvent.WAKE)
        if not self._missing:
            self._go_on()
            return asdict(WakeReport(is_awake=True))
        level = max(self._missing.values())
        try:
            return asdict(self._restore(found))
        except BaseException:
            self._give_back(level)
            raise

    def memory(self) -> list[dict[str, Any]]:
        """A `MemoryRecord` a rank."""
        return [asdict(record) for record in self._executor.memory()]

    def _restore(self, tags: list[str]) -> WakeReport:
        began_s = time.monotonic()
        report = self._executor.wake(tags)
        self._missing = {tag: level for tag, level in self._missing.items() if tag not in tags}
        if not self._missing:
            self._listen()
            self._state = next_state(self._state, SleepEvent.COMPLETE)
            self._go_on()
        report.still_asleep = list(self._missing)
        report.is_awake = not self._missing
        report.seconds = time.monotonic() - began_s
        return report

    def _set_down(self) -> Later:
        """Requests that have begun and are to be kept give up their blocks; workers hear of it in another step."""
        self._scheduler.preempt_all()
        self._hold(finish=False)
        return self._when_quiet(self._fall_asleep)

    def _fall_asleep(self) -> dict[str, Any]:
        try:
            if not self._scheduler.reset_prefix_cache():
                raise RuntimeError("KV blocks are in use while nothing runs")
            if self._song is None and self._canary is not None:
                self._song = self._canary.sing(self._executor)
            return asdict(self._give_back(self._level))
        except BaseException:
            self._state = next_state(self._state, SleepEvent.WAKE)
            self._go_on()
            raise

    def _give_back(self, level: int) -> SleepReport:
        """All that is there, and of what is not, what a lighter sleep has kept."""
        began_s = time.monotonic()
        report = self._executor.sleep(level)
        self._tags = frozenset(report.released_bytes)
        self._missing = {tag: max(level, self._missing.get(tag, 0)) for tag in report.released_bytes}
        report.level = max(level, self._depth())
        self._state = next_state(self._state, self._asleep_event(report.level))
        report.seconds = time.monotonic() - began_s
        self._report = report
        return report

    def _asleep_event(self, level: int) -> SleepEvent:
        return LEVELS[level].done if self._state is SleepState.DRAINING else LEVELS[level].asked

    def _depth(self) -> int:
        """At which level the weights sleep; keys and values are gone at either."""
        return max((level for tag, level in self._missing.items() if tag != KV_CACHE), default=0)

    def _listen(self) -> None:
        if self._song is None or self._canary is None:
            return
        song = self._canary.sing(self._executor)
        if song != self._song:
            raise EngineError(
                f"the engine answers {song} where it answered {self._song} before it slept: what was loaded again is "
                "not what was there. It sleeps on; load the model anew"
            )

    def _hold(self, *, finish: bool) -> None:
        """An engine that was paused with all it had is not set going in order to finish it."""
        room = self._scheduler.waiting
        if finish and room.pause_state is not PauseState.NOTHING:
            room.pause_state = PauseState.NO_NEW
        else:
            room.pause_state = PauseState.NOTHING

    def _go_on(self) -> None:
        self._refuses = False
        self._scheduler.waiting.pause_state = self._paused_before

    def _when_quiet(self, work: Callable[[], Any]) -> Later:
        return Later(lambda: self._is_over() or self._is_quiet(), partial(self._unless_over, work))

    def _unless_over(self, work: Callable[[], Any]) -> Any:
        """Another call may have ended what this one waited for."""
        if not self._is_over():
            return work()
        return asdict(self._report if self._missing else SleepReport())

    def _is_over(self) -> bool:
        return self._state is not SleepState.DRAINING


def _check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    if value not in choices:
        known = ", ".join(map(str, choices))
        raise InvalidRequest(f"unknown {name} of sleep: {value!r}; there are: {known}", param=name)
