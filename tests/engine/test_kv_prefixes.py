"""The choice of shared prefixes over plain block tables."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.core.kv.prefixes import choose_shared_prefixes
from inferd.engine.core.output import SharedPrefix

tables = st.lists(st.lists(st.integers(1, 3), max_size=6), max_size=12)


def choose(*tables: list[int], unfilled: tuple[int, ...] = ()) -> list[SharedPrefix]:
    members = [(table, f"r{index}") for index, table in enumerate(tables)]
    return choose_shared_prefixes(members, set(unfilled))


def saved(prefixes: list[SharedPrefix]) -> int:
    return sum(prefix.num_blocks * (len(prefix.request_ids) - 1) for prefix in prefixes)


def test_nothing_is_shared_by_strangers_or_alone():
    assert choose() == []
    assert choose([1, 2]) == []
    assert choose([1, 2], [3, 4], []) == []


def test_equal_later_blocks_are_no_prefix():
    assert choose([1, 5, 6], [2, 5, 6]) == []


def test_one_system_prompt():
    assert choose([1, 2, 3], [1, 2, 4, 5], [1, 2]) == [SharedPrefix(2, ["r0", "r1", "r2"])]


def test_two_system_prompts():
    assert choose([1, 2], [7, 8], [1, 2], [7, 9]) == [SharedPrefix(2, ["r0", "r2"]), SharedPrefix(1, ["r1", "r3"])]


def test_those_who_share_much_more_form_a_group_of_their_own():
    long = [1, *range(10, 20)]
    assert choose([1, 2], long, [1, 3], long) == [SharedPrefix(11, ["r1", "r3"]), SharedPrefix(1, ["r0", "r2"])]


def test_those_who_share_little_more_stay_with_the_others():
    assert choose([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]) == [SharedPrefix(3, ["r0", "r1", "r2", "r3"])]


def test_no_prefix_reaches_into_unfilled_blocks():
    assert choose([1, 2, 3], [1, 2, 3], unfilled=(2,)) == [SharedPrefix(1, ["r0", "r1"])]
    assert choose([1, 2, 3], [1, 2, 3], unfilled=(1,)) == []


@settings(deadline=None, max_examples=300)
@given(tables, st.sets(st.integers(1, 3)))
def test_groups_are_valid_disjoint_and_save_no_less_than_the_best_single_group(tables, unfilled):
    prefixes = choose(*tables, unfilled=tuple(unfilled))
    members = [request_id for prefix in prefixes for request_id in prefix.request_ids]
    assert len(members) == len(set(members))
    for prefix in prefixes:
        leading = [tables[int(request_id[1:])][: prefix.num_blocks] for request_id in prefix.request_ids]
        assert len(leading) > 1
        assert all(blocks == leading[0] for blocks in leading)
        assert len(leading[0]) == prefix.num_blocks > 0
        assert not unfilled & set(leading[0])
    assert saved(prefixes) >= best_single_group(tables, unfilled)


def best_single_group(tables: list[list[int]], unfilled: set[int]) -> int:
    best = 0
    for table in tables:
        for length in range(1, min(len(table), 3) + 1):  # deeper levels of nesting than three are not looked at
            if not unfilled & set(table[:length]):
                sharers = sum(other[:length] == table[:length] for other in tables)
                best = max(best, length * (sharers - 1))
    return best
