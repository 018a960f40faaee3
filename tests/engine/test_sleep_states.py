"""The table of states: complete, and nothing in it that cannot be left again."""

from __future__ import annotations

import pytest

from inferd.engine.core.sleep_states import TRANSITIONS, SleepEvent, SleepRefused, SleepState, next_state

ASKED_FOR = {SleepEvent.SLEEP_1, SleepEvent.SLEEP_2, SleepEvent.WAKE, SleepEvent.PAUSE, SleepEvent.RESUME}


@pytest.mark.parametrize("state", SleepState)
def test_whatever_is_asked_for_has_an_answer(state: SleepState) -> None:
    assert TRANSITIONS[state].keys() >= ASKED_FOR


@pytest.mark.parametrize("state", SleepState)
def test_every_state_leads_back_to_every_other(state: SleepState) -> None:
    reached, before = {state}, set[SleepState]()
    while reached != before:
        before = set(reached)
        reached |= {after for at in before for after in TRANSITIONS[at].values() if isinstance(after, SleepState)}
    assert reached == set(SleepState)


def test_only_a_pause_can_be_refused() -> None:
    refused = {
        event for row in TRANSITIONS.values() for event, after in row.items() if not isinstance(after, SleepState)
    }
    assert refused == {SleepEvent.PAUSE, SleepEvent.RESUME}
    with pytest.raises(SleepRefused, match=r"resume is refused: .* wake it first"):
        next_state(SleepState.SLEEPING_2, SleepEvent.RESUME)


def test_what_cannot_happen_is_a_fault_of_ours() -> None:
    with pytest.raises(RuntimeError, match="awake cannot meet asleep_1"):
        next_state(SleepState.AWAKE, SleepEvent.ASLEEP_1)
