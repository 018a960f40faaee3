"""Drafts get shorter, stop and come back, by how they fared and what they cost."""

from __future__ import annotations

import pytest

from inferd.engine.spec.length import (
    FIRST_PAUSE,
    LEAST_SHARE,
    LONGEST_PAUSE,
    PROBE_TOKENS,
    Confidence,
    after_check,
    break_even_share,
    draft_length,
)

LONGEST = 5


def lengths(outcomes: list[float], break_even: float, num_output_tokens: int = 10_000) -> list[int]:
    """Of the drafts that come one after the other, of which these shares stand."""
    confidence, found = Confidence(), []
    for share in outcomes:
        length = draft_length(confidence, LONGEST, num_output_tokens)
        found.append(length)
        if length:
            accepted = round(share * length)
            confidence = after_check(confidence, length, accepted, num_output_tokens, break_even)
    return found


def test_drafts_that_stand_stay_long() -> None:
    assert lengths([1.0] * 6, 0.3) == [LONGEST] * 6


def test_drafts_that_fail_get_shorter_and_stop() -> None:
    found = lengths([0.0] * 8, 0.3)
    assert found == sorted(found, reverse=True)
    assert found[0] == LONGEST
    assert 0 in found
    assert sum(found) <= 3 * LONGEST


def test_they_stop_sooner_where_a_row_costs_more() -> None:
    cheap, dear = (lengths([0.4] * 12, break_even_share(rows, 10)) for rows in (1, 32))
    assert 0 not in cheap
    assert 0 in dear


@pytest.mark.parametrize(("rows", "share"), [(1, LEAST_SHARE), (10, 0.5), (32, 0.762)])
def test_what_must_stand_grows_with_the_load(rows: int, share: float) -> None:
    assert break_even_share(rows, 10) == pytest.approx(share, abs=1e-3)


def test_a_pause_ends_with_a_short_probe_and_grows_when_that_fails() -> None:
    confidence, now, pauses = Confidence(), 0, []
    for _ in range(12):
        while draft_length(confidence, LONGEST, now):
            length = draft_length(confidence, LONGEST, now)
            assert length == PROBE_TOKENS or not confidence.is_probe
            confidence = after_check(confidence, length, 0, now, 0.3)
            now += 1
        began = now
        while not draft_length(confidence, LONGEST, now):
            now += 1
        pauses.append(now - began)
    assert pauses[0] == FIRST_PAUSE - 1  # its last draft was followed by a token
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE - 1


def test_after_a_probe_that_stood_drafts_grow_again_and_the_next_pause_is_short() -> None:
    confidence = Confidence(share=0.3, is_probe=True, next_pause=LONGEST_PAUSE)
    found = []
    for _ in range(8):
        found.append(draft_length(confidence, LONGEST, 0))
        confidence = after_check(confidence, found[-1], found[-1], 0, 0.3)
    assert found[0] == PROBE_TOKENS
    assert found == sorted(found)
    assert found[-1] == LONGEST
    assert confidence.next_pause == FIRST_PAUSE


def test_a_draft_is_never_longer_than_asked() -> None:
    assert draft_length(Confidence(is_probe=True), 1, 0) == 1
