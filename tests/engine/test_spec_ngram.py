"""Prompt lookup against the definition of it, however the text came."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.core.output import KnownRequests, SchedulerOutput
from inferd.engine.spec.base import DraftRow
from inferd.engine.spec.ngram import MAX_CANDIDATES, NgramDrafter, NgramIndex


def continuation_by_definition(text: Sequence[int], shortest: int, longest: int, count: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for place in range(len(text) - 1, length - 1, -1):
            if list(text[place - length : place]) == list(text[len(text) - length :]):
                found = list(text)
                for index in range(count):
                    found.append(found[place + index])
                return found[len(text) :]
    return []


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_it_is_the_last_place_of_the_longest_match(
    parts: list[list[int]], shortest: int, more: int, count: int
) -> None:
    """At every stage of a growing text; texts here are short enough for all places to be compared."""
    index, text = NgramIndex(shortest, shortest + more), []
    for part in parts:
        index.extend(part)
        text += part
        if len(text) <= MAX_CANDIDATES:
            expected = continuation_by_definition(text, shortest, shortest + more, count)
            assert index.continuation(count) == expected


def test_of_many_places_the_last_ones_are_compared() -> None:
    rare = [7, 1, 2, 9]
    text = [*rare, *([3, 1, 2, 4] * MAX_CANDIDATES), 7, 1, 2]
    index = NgramIndex(2, 3)
    index.extend(text)
    assert index.continuation(1) == [4]
    assert continuation_by_definition(text, 2, 3, 1) == [9]


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3, 4]])
def test_a_text_without_repetition_has_no_continuation(text: list[int]) -> None:
    index = NgramIndex(1, 3)
    index.extend(text)
    assert index.continuation(3) == []


def row(token_ids: Sequence[int], num_wanted: int = 2, request_id: str = "a") -> DraftRow:
    return DraftRow(request_id, np.array(token_ids, np.int32), np.zeros(0, np.int32), num_wanted)


def step(finished: Sequence[str] = (), preempted: Sequence[str] = ()) -> SchedulerOutput:
    return SchedulerOutput(1, [], KnownRequests(), {}, 0, [], list(finished), list(preempted))


def test_each_request_has_a_text_of_its_own() -> None:
    drafter = NgramDrafter(2, 3)
    text = [5, 6, 7, 8, 5, 6]
    assert drafter.propose([row(text), row([5, 6], request_id="b")]) == {"a": [7, 8]}
    assert drafter.propose([row([*text, 9, 7, 8], num_wanted=1)]) == {"a": [5]}
    assert drafter.propose([row(text, num_wanted=0)]) == {}


@pytest.mark.parametrize("gone", [dict(finished=["a"]), dict(preempted=["a"])])
def test_a_text_goes_with_its_request(gone: dict[str, list[str]]) -> None:
    """Another request may come with its id."""
    drafter = NgramDrafter(2, 2)
    drafter.propose([row([5, 6, 7, 8, 5, 6])])
    drafter.follow(step(**gone))
    assert drafter.propose([row([9, 5, 6])]) == {}
