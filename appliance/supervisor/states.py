"""The states of a model, and which may follow which."""

from __future__ import annotations

import enum


class ModelState(enum.Enum):
    ON_DISK = "on_disk"  # no process
    LOADING = "loading"  # a process starts, or is about to start again after one died
    READY = "ready"  # answers
    DRAINING = "draining"  # finishes what runs, then sleeps or stops
    SLEEPING_1 = "sleeping_1"  # a process with its weights in main memory or mapped, no keys and values
    SLEEPING_2 = "sleeping_2"  # a process without weights
    WAKING = "waking"
    STOPPING = "stopping"  # its process ends
    FAILED = "failed"  # the last start failed or the engine died; waits for its next try


_S = ModelState
TRANSITIONS: dict[ModelState, frozenset[ModelState]] = {
    _S.ON_DISK: frozenset({_S.LOADING}),
    _S.LOADING: frozenset({_S.READY, _S.FAILED, _S.STOPPING}),
    _S.READY: frozenset({_S.DRAINING, _S.FAILED, _S.STOPPING}),
    _S.DRAINING: frozenset({_S.READY, _S.SLEEPING_1, _S.SLEEPING_2, _S.STOPPING, _S.FAILED}),
    _S.SLEEPING_1: frozenset({_S.WAKING, _S.SLEEPING_2, _S.STOPPING, _S.FAILED}),
    _S.SLEEPING_2: frozenset({_S.WAKING, _S.STOPPING, _S.FAILED}),
    _S.WAKING: frozenset({_S.READY, _S.FAILED, _S.STOPPING}),
    _S.STOPPING: frozenset({_S.ON_DISK}),
    _S.FAILED: frozenset({_S.LOADING, _S.STOPPING, _S.ON_DISK}),
}
RESTING = frozenset({_S.ON_DISK, _S.FAILED, _S.SLEEPING_1, _S.SLEEPING_2})  # nothing moves by itself
MOVING = frozenset({_S.LOADING, _S.WAKING, _S.DRAINING, _S.STOPPING})


class IllegalTransition(AssertionError):
    """A bug in the supervisor, never a user's mistake."""


def check_transition(model: str, before: ModelState, after: ModelState) -> None:
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"{model} cannot go from {before.value} to {after.value}")
