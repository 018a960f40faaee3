"""Why an engine as a whole is halted."""

from __future__ import annotations

from inferd.engine.core.insight import reasons
from inferd.engine.core.insight.reasons import Why
from inferd.engine.core.pausing import Pausing
from inferd.engine.core.sleep_states import SleepState


def find_standstill(sleep_state: SleepState, pausing: Pausing) -> Why | None:
    if sleep_state is not SleepState.AWAKE:
        return reasons.engine_sleeps(sleep_state)
    return reasons.engine_paused(pausing.paused_by, pausing.paused_for_s) if pausing.is_paused() else None
