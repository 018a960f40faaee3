"""The states of a model, and which may follow which."""

from __future__ import annotations

import enum


class ModelState(enum.Enum):
    ON_DISK = "on_disk"  # no process
    LOADING = "loading"  # a process starts, or is about to start again after one died
    READY = "ready"  # answers
    STOPPING = "stopping"  # finishes what runs, then exits
    FAILED = "failed"  # the last start failed or the engine died; waits for its next try


TRANSITIONS: dict[ModelState, frozenset[ModelState]] = {
    ModelState.ON_DISK: frozenset({ModelState.LOADING}),
    ModelState.LOADING: frozenset({ModelState.READY, ModelState.FAILED, ModelState.STOPPING}),
    ModelState.READY: frozenset({ModelState.FAILED, ModelState.STOPPING}),
    ModelState.STOPPING: frozenset({ModelState.ON_DISK}),
    ModelState.FAILED: frozenset({ModelState.LOADING, ModelState.STOPPING}),
}


class IllegalTransition(AssertionError):
    """A bug in the supervisor, never a user's mistake."""


def check_transition(model: str, before: ModelState, after: ModelState) -> None:
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"{model} cannot go from {before.value} to {after.value}")
