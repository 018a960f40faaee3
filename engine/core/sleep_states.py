"""Every state of an engine's sleep, and what may follow it."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from inferd.engine.errors import InvalidRequest


class SleepState(enum.StrEnum):
    AWAKE = "awake"
    DRAINING = "draining"  # falling asleep: what has begun may still run
    SLEEPING_1 = "sleeping_1"  # neither keys and values nor weights; what the weights are made of is at hand
    SLEEPING_2 = "sleeping_2"  # nothing is left
    WAKING = "waking"  # some memory is back; requests are held until all of it is


class SleepEvent(enum.StrEnum):
    SLEEP_1 = "sleep(1)"  # asked for
    SLEEP_2 = "sleep(2)"  # asked for
    WAKE = "wake"  # asked for
    ASLEEP_1 = "asleep_1"  # all memory has been given back
    ASLEEP_2 = "asleep_2"
    COMPLETE = "complete"  # all memory is there
    PAUSE = "pause"  # asked for
    RESUME = "resume"  # asked for


class SleepRefused(InvalidRequest):
    """The engine's state of sleep does not allow what was asked for."""

    code = "sleep_refused"


_FALLING = "the engine is falling asleep and will stop scheduling by itself; wake it to go on"
_SLEEPING = "the engine is asleep and schedules nothing; wake it first"

_S, _E = SleepState, SleepEvent
TRANSITIONS: Mapping[SleepState, Mapping[SleepEvent, SleepState | str]] = {
    _S.AWAKE: {
        _E.SLEEP_1: _S.DRAINING,
        _E.SLEEP_2: _S.DRAINING,
        _E.WAKE: _S.AWAKE,
        _E.PAUSE: _S.AWAKE,
        _E.RESUME: _S.AWAKE,
    },
    _S.DRAINING: {
        _E.SLEEP_1: _S.DRAINING,  # of two calls the deeper level and the harsher mode count
        _E.SLEEP_2: _S.DRAINING,
        _E.WAKE: _S.AWAKE,
        _E.ASLEEP_1: _S.SLEEPING_1,
        _E.ASLEEP_2: _S.SLEEPING_2,
        _E.PAUSE: _FALLING,
        _E.RESUME: _FALLING,
    },
    _S.SLEEPING_1: {
        _E.SLEEP_1: _S.SLEEPING_1,
        _E.SLEEP_2: _S.SLEEPING_2,
        _E.WAKE: _S.WAKING,
        _E.PAUSE: _SLEEPING,
        _E.RESUME: _SLEEPING,
    },
    _S.SLEEPING_2: {
        _E.SLEEP_1: _S.SLEEPING_2,  # what level 1 keeps is gone
        _E.SLEEP_2: _S.SLEEPING_2,
        _E.WAKE: _S.WAKING,
        _E.PAUSE: _SLEEPING,
        _E.RESUME: _SLEEPING,
    },
    _S.WAKING: {
        _E.SLEEP_1: _S.SLEEPING_1,
        _E.SLEEP_2: _S.SLEEPING_2,
        _E.WAKE: _S.WAKING,
        _E.COMPLETE: _S.AWAKE,
        _E.PAUSE: _SLEEPING,
        _E.RESUME: _SLEEPING,
    },
}
"""Where each event leads, or the words in which it is refused. What is not listed cannot happen."""


def next_state(state: SleepState, event: SleepEvent) -> SleepState:
    """Raises SleepRefused for what a caller asks for at the wrong time, RuntimeError for what cannot happen."""
    after = TRANSITIONS[state].get(event)
    if after is None:
        raise RuntimeError(f"an engine that is {state} cannot meet {event}")
    if not isinstance(after, SleepState):
        raise SleepRefused(f"{event} is refused: {after}")
    return after
