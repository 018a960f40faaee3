"""Why a request is not in its engine yet: one reason, and a sentence that names the thing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from inferd.appliance.supervisor.failure import Failure
from inferd.appliance.supervisor.states import ModelState

Reason = Literal["model_loading", "model_waking", "evicting", "cool_down"]


@dataclass(frozen=True)
class ModelWait:
    """What the supervisor knows of the model that is waited for. Seconds; `since` is monotonic."""

    model: str
    state: ModelState
    since: float
    expected_load_s: float
    expected_wake_s: float
    waits_for: tuple[str, ...]
    states: Mapping[str, ModelState]  # of those
    failure: Failure | None
    held_for: str | None


def explain(wait: ModelWait, now: float | None = None) -> tuple[Reason, str] | None:
    """None while nothing is known to hold it up."""
    elapsed_s = (time.monotonic() if now is None else now) - wait.since
    match wait.state:
        case ModelState.LOADING:
            return "model_loading", f"{wait.model} is loading{_progress(elapsed_s, wait.expected_load_s)}"
        case ModelState.WAKING:
            return "model_waking", f"{wait.model} wakes up{_progress(elapsed_s, wait.expected_wake_s)}"
        case ModelState.FAILED if wait.failure is not None:
            return "cool_down", f"{wait.failure.reason}; next try in {wait.failure.retry_in_s:.0f} s"
        case ModelState.READY if wait.held_for is not None:
            return "evicting", f"{wait.model} makes room for {wait.held_for} and comes back after it"
        case ModelState.DRAINING | ModelState.STOPPING:
            return "evicting", f"{wait.model} is just being put away, and comes back for this request"
    if wait.waits_for:
        return "evicting", f"making room: {', '.join(_leaves(name, wait.states.get(name)) for name in wait.waits_for)}"
    return None


def _progress(elapsed_s: float, expected_s: float) -> str:
    """Nothing is promised beyond what it took before."""
    if elapsed_s >= expected_s:
        return f", {elapsed_s:.0f} s so far"
    return f": {100 * elapsed_s / expected_s:.0f} %, about {expected_s - elapsed_s:.0f} s"


def _leaves(model: str, state: ModelState | None) -> str:
    if state in (ModelState.DRAINING, ModelState.STOPPING):
        return f"{model} goes to sleep"
    return f"{model} is in use"
