"""The KV cache manager: prefix hits, room for tokens, and who shares what. Blocks hold 4 tokens."""

from __future__ import annotations

import pytest

from inferd.engine.core.output import SharedPrefix
from inferd.engine.errors import ConfigError

TWELVE = list(range(10, 22))


def admit(kv, request, num_tokens=None):
    """Admission as the scheduler does it; returns the number of cached tokens."""
    computed = kv.get_computed_blocks(request)
    num_new_tokens = (num_tokens or request.num_tokens) - computed.num_tokens
    assert kv.allocate_slots(request, num_new_tokens, computed) is not None
    request.num_computed_tokens = computed.num_tokens + num_new_tokens
    return computed.num_tokens


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_token_is_always_computed_again(make_kv, make_request, length, cached):
    kv = make_kv()
    first = make_request("first", TWELVE[:length])
    assert admit(kv, first) == 0
    kv.free(first)
    assert admit(kv, make_request("second", TWELVE[:length])) == cached


def test_a_page_of_several_hash_blocks_is_hit_as_a_whole(make_kv, make_request):
    kv = make_kv(block_size=8, hash_block_size=4)
    admit(kv, make_request("first", range(20)))
    assert kv.get_computed_blocks(make_request("same", range(20))).num_tokens == 16
    assert kv.get_computed_blocks(make_request("shorter", range(15))).num_tokens == 8
    assert kv.get_computed_blocks(make_request("half", [*range(12), *range(40, 48)])).num_tokens == 8
    assert kv.get_computed_blocks(make_request("other", [*range(4), *range(40, 48)])).num_tokens == 0


def test_a_page_is_a_multiple_of_a_hash_block(make_kv):
    with pytest.raises(ConfigError, match=r"block_size \(6\) must be a multiple of hash_block_size \(4\)"):
        make_kv(block_size=6)


def test_salts_never_share(make_kv, make_request):
    kv = make_kv()
    admit(kv, make_request("a", TWELVE, cache_salt="x"))
    assert kv.get_computed_blocks(make_request("b", TWELVE, cache_salt="y")).num_tokens == 0
    assert kv.get_computed_blocks(make_request("c", TWELVE)).num_tokens == 0
    assert kv.get_computed_blocks(make_request("d", TWELVE, cache_salt="x")).num_tokens == 8


def test_without_prefix_caching_nothing_is_found(make_kv, make_request):
    kv = make_kv(enable_prefix_caching=False)
    admit(kv, make_request("a", TWELVE))
    assert admit(kv, make_request("b", TWELVE)) == 0


def test_generated_tokens_can_be_hit(make_kv, make_request):
    kv = make_kv()
    first = make_request("first", TWELVE[:5])
    admit(kv, first)
    for token_id in TWELVE[5:9]:
        first.append_token(token_id)
        assert kv.allocate_slots(first, 1) is not None
        first.num_computed_tokens += 1
    assert admit(kv, make_request("turn two", [*TWELVE[:9], 90, 91])) == 8


def test_new_blocks_are_returned_once_and_only_when_needed(make_kv, make_request):
    kv = make_kv()
    request = make_request(prompt=TWELVE[:4])
    computed = kv.get_computed_blocks(request)
    assert kv.allocate_slots(request, 3, computed) == ([1],)
    request.num_computed_tokens = 3
    assert kv.allocate_slots(request, 1) == ()
    request.num_computed_tokens = 4
    assert kv.allocate_slots(request, 1) == ([2],)
    assert kv.block_ids("a") == ([1, 2],)


def test_hits_are_not_among_the_new_blocks(make_kv, make_request):
    kv = make_kv()
    admit(kv, make_request("first", TWELVE))
    second = make_request("second", TWELVE)
    computed = kv.get_computed_blocks(second)
    assert kv.allocate_slots(second, 4, computed) == ([4],)
    assert kv.block_ids("second") == ([1, 2, 4],)


def test_block_ids_are_a_copy(make_kv, make_request):
    kv = make_kv()
    admit(kv, make_request(prompt=TWELVE))
    kv.block_ids("a")[0].clear()
    assert kv.block_ids("a") == ([1, 2, 3],)


def test_a_refused_allocation_changes_nothing(make_kv, make_request):
    kv = make_kv(num_blocks=5)
    first = make_request("first", TWELVE)
    admit(kv, first)
    kv.free(first)
    admit(kv, make_request("other", range(50, 57)))
    third = make_request("third", [*TWELVE, 70, 71])
    computed = kv.get_computed_blocks(third)
    assert computed.num_tokens == 8
    before = kv.num_free_blocks
    assert not kv.can_fit(third, computed)
    assert kv.allocate_slots(third, 6, computed) is None
    assert kv.num_free_blocks == before
    assert kv.block_ids("third") == ([],)
    assert kv.get_computed_blocks(third) == computed


def test_hits_in_the_free_queue_count_against_free_blocks(make_kv, make_request):
    kv = make_kv(num_blocks=4)
    first = make_request("first", TWELVE[:9])
    admit(kv, first)
    kv.free(first)
    longer = make_request("longer", [*TWELVE[:9], *range(60, 67)])  # 4 blocks: 2 hits, both free, and 2 new of 3 - 2
    computed = kv.get_computed_blocks(longer)
    assert (computed.num_tokens, kv.num_free_blocks) == (8, 3)
    assert not kv.can_fit(longer, computed)


def test_hits_in_use_cost_nothing(make_kv, make_request):
    kv = make_kv(num_blocks=5)
    admit(kv, make_request("first", TWELVE[:9]))
    second = make_request("second", TWELVE[:9])
    assert kv.num_free_blocks == 1
    assert kv.can_fit(second, kv.get_computed_blocks(second))
    assert admit(kv, second) == 8


def test_allocation_never_evicts_its_own_hits(make_kv, make_request):
    kv = make_kv(num_blocks=4)
    first = make_request("first", TWELVE)
    admit(kv, first)
    kv.free(first)
    again = make_request("again", TWELVE)
    computed = kv.get_computed_blocks(again)
    assert kv.allocate_slots(again, 4, computed) is not None
    blocks = kv.block_ids("again")[0]
    assert blocks[:2] == [1, 2]
    assert len(set(blocks)) == 3


def test_a_tail_is_evicted_before_its_head(make_kv, make_request):
    kv = make_kv(num_blocks=4)
    first = make_request("first", TWELVE)
    admit(kv, first)
    kv.free(first)
    admit(kv, make_request("other", range(50, 57)))
    assert kv.get_computed_blocks(make_request("again", TWELVE)).num_tokens == 4


def test_lookahead_takes_room_up_to_the_longest_context(make_kv, make_request):
    kv = make_kv(max_model_len=10)
    request = make_request(prompt=TWELVE[:7])
    assert kv.allocate_slots(request, 7, kv.get_computed_blocks(request), num_lookahead_tokens=2) == ([1, 2, 3],)
    assert kv.allocate_slots(request, 7, num_lookahead_tokens=50) == ()


def test_slots_beyond_the_known_tokens_are_not_cached(make_kv, make_request):
    kv = make_kv()
    request = make_request(prompt=TWELVE[:6])
    kv.allocate_slots(request, 8, kv.get_computed_blocks(request))  # two of them drafts
    assert kv.get_computed_blocks(make_request("same", TWELVE)).num_tokens == 4


def test_a_block_can_be_hit_by_the_step_that_fills_it(make_kv, make_request):
    kv = make_kv()
    kv.begin_step()
    admit(kv, make_request("first", TWELVE))
    assert admit(kv, make_request("second", TWELVE)) == 8


def test_a_block_can_be_hit_as_soon_as_its_last_token_is_scheduled(make_kv, make_request):
    kv = make_kv()
    admit(kv, make_request("first", TWELVE[:8]))
    assert kv.get_computed_blocks(make_request("longer", TWELVE)).num_tokens == 8


def test_only_the_part_of_a_chunked_prompt_that_is_scheduled_can_be_hit(make_kv, make_request):
    kv = make_kv()
    admit(kv, make_request("first", TWELVE), num_tokens=7)
    assert kv.get_computed_blocks(make_request("second", TWELVE)).num_tokens == 4


def test_free_returns_everything_and_is_idempotent(make_kv, make_request):
    kv = make_kv()
    request = make_request(prompt=TWELVE)
    admit(kv, request)
    assert kv.usage == pytest.approx(3 / 16)
    kv.free(request)
    kv.free(request)
    assert kv.num_free_blocks == kv.num_total_blocks == 16


def test_reset_waits_for_the_last_user(make_kv, make_request):
    kv = make_kv()
    request = make_request(prompt=TWELVE)
    admit(kv, request)
    assert not kv.reset_prefix_cache()
    kv.free(request)
    assert kv.reset_prefix_cache()
    assert kv.get_computed_blocks(make_request("again", TWELVE)).num_tokens == 0


def test_a_prefix_is_shared_from_the_step_after_it_was_filled(make_kv, make_request):
    kv = make_kv()
    kv.begin_step()
    for name in ("a", "b"):
        admit(kv, make_request(name, TWELVE))
    assert kv.shared_prefixes(["a", "b"]) == []
    kv.begin_step()
    assert kv.shared_prefixes(["a", "b"]) == [SharedPrefix(2, ["a", "b"])]


def test_a_prefix_is_shared_as_far_as_it_was_filled_before_the_step(make_kv, make_request):
    kv = make_kv()
    first = make_request("a", TWELVE)
    kv.begin_step()
    admit(kv, first, num_tokens=6)
    kv.begin_step()
    kv.allocate_slots(first, 6)
    admit(kv, make_request("b", TWELVE))
    admit(kv, make_request("c", TWELVE))
    assert kv.shared_prefixes(["a", "b", "c"]) == [SharedPrefix(1, ["a", "b", "c"])]


def test_sharing_follows_those_who_come_and_go(make_kv, make_request):
    kv = make_kv(num_blocks=40)
    requests = {name: make_request(name, [*TWELVE[:8], ord(name)]) for name in "abc"}
    for name in "abc":
        kv.begin_step()
        admit(kv, requests[name])
    kv.begin_step()
    assert kv.shared_prefixes(["a", "b", "c"]) == [SharedPrefix(2, ["a", "b", "c"])]
    assert kv.shared_prefixes(["a", "c"]) == [SharedPrefix(2, ["a", "c"])]
    kv.free(requests["b"])
    kv.free(requests["c"])
    assert kv.shared_prefixes(["a"]) == []


def test_a_table_that_was_given_up_is_not_remembered(make_kv, make_request):
    kv = make_kv()
    requests = {name: make_request(name, TWELVE) for name in "ab"}
    for name in "ab":
        admit(kv, requests[name])
    kv.begin_step()
    assert kv.shared_prefixes(["a", "b"]) == [SharedPrefix(2, ["a", "b"])]
    kv.free(requests["b"])
    admit(kv, make_request("b", range(50, 60)))
    assert kv.shared_prefixes(["a", "b"]) == []


def test_shared_prefixes_are_fresh_values(make_kv, make_request):
    kv = make_kv()
    for name in ("a", "b"):
        kv.begin_step()
        admit(kv, make_request(name, TWELVE))
    kv.begin_step()
    kv.shared_prefixes(["a", "b"])[0].request_ids.clear()
    assert kv.shared_prefixes(["a", "b"]) == [SharedPrefix(2, ["a", "b"])]
