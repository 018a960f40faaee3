"""Full attention and sliding windows over one pool: hits that are good for all groups, and windows that move.

Blocks hold 4 tokens, the window 8.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from inferd.engine.core.kv.coordinator import ComputedBlocks, KVCacheCoordinator, make_coordinator
from inferd.engine.core.kv.events import KVEventLog
from inferd.engine.core.kv.group import GroupManager
from inferd.engine.core.kv.hashing import make_block_key
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.kv.pool import BlockPool, KVCacheBlock
from inferd.engine.core.kv.prefixes import cut_to_common
from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup, KVSpec, SlidingWindowSpec
from inferd.engine.core.output import SharedPrefix
from inferd.engine.errors import NotSupported
from inferd.engine.messages import KVBlocksRemoved, KVBlocksStored, KVCacheCleared
from inferd.engine.request import Request

BLOCK, WINDOW = 4, 8
FULL = KVSpec(BLOCK, num_kv_heads=1, head_size=2, dtype="float32")
SLIDING = SlidingWindowSpec(BLOCK, num_kv_heads=1, head_size=2, dtype="float32", window=WINDOW)
MakeRequest = Callable[..., Request]


def make_kv(*specs: KVSpec, num_blocks: int = 200, max_step_tokens: int = 16, **options: Any) -> KVCacheManager:
    groups = tuple(KVCacheGroup((f"layers.{index}",), spec) for index, spec in enumerate(specs or (FULL, SLIDING)))
    return KVCacheManager(
        KVCacheConfig(num_blocks, groups),
        hash_block_size=BLOCK,
        max_model_len=400,
        max_step_tokens=max_step_tokens,
        **(dict(enable_prefix_caching=True) | options),
    )


def compute(kv: KVCacheManager, request: Request, chunk: int = 1000) -> None:
    """All that is known of the request, in chunks, a step each."""
    computed: ComputedBlocks | None = kv.get_computed_blocks(request)
    while (done := request.num_computed_tokens + (computed.num_tokens if computed else 0)) < request.num_tokens:
        kv.begin_step()
        count = min(chunk, request.num_tokens - done)
        assert kv.allocate_slots(request, count, computed) is not None
        request.num_computed_tokens, computed = done + count, None


def decode(kv: KVCacheManager, request: Request, token_id: int) -> None:
    request.append_token(token_id)
    assert kv.allocate_slots(request, 1) is not None
    request.num_computed_tokens += 1


def test_a_window_keeps_few_blocks(make_request: MakeRequest) -> None:
    kv = make_kv(SLIDING)
    request = make_request(prompt=range(10, 15))
    compute(kv, request)
    for token_id in range(100):
        decode(kv, request, token_id % 50)
        assert kv.num_blocks_held("a") <= -(-WINDOW // BLOCK) + 1
        position = request.num_tokens - 1
        table = kv.block_ids("a")[0]
        seen = {place // BLOCK for place in range(max(0, position - WINDOW + 1), position + 1)}
        assert all(table[place] != 0 for place in seen)
    kv.free(request)
    assert kv.num_free_blocks == kv.num_total_blocks


def test_only_processed_tokens_move_the_window(make_request: MakeRequest) -> None:
    """Of 16 computed tokens 4 are a guess that may be taken back: positions from 12 - 8 + 1 on stay in reach."""
    kv = make_kv(SLIDING)
    request = make_request(prompt=range(10, 26))
    compute(kv, request)
    request.num_output_placeholders = 4
    kv.allocate_slots(request, 1)
    assert kv.block_ids("a")[0][:3] == [0, 2, 3]
    request.num_output_placeholders = 0
    kv.allocate_slots(request, 1)
    assert kv.block_ids("a")[0][:3] == [0, 0, 3]


def test_what_a_step_under_way_looks_at_is_kept(make_request: MakeRequest) -> None:
    """Two steps may run: at the third chunk only the first one's 8 tokens are computed for sure."""
    kv = make_kv(SLIDING, max_steps_under_way=2)
    request = make_request(prompt=range(10, 58))
    computed = kv.get_computed_blocks(request)
    released = []
    for _ in range(5):
        kv.begin_step()
        kv.allocate_slots(request, 8, computed)
        kv.allocate_slots(request, 8) if computed is None else None  # tried again in the same step, nothing changes
        computed = None
        request.num_computed_tokens += 8
        released.append(kv.block_ids("a")[0].count(0))
    assert released == [0, 0, 0, 2, 4]


def test_a_hit_needs_only_the_window(make_request: MakeRequest) -> None:
    """The first blocks of the windowed group are gone, yet the whole prompt but its last token is found."""
    kv = make_kv(num_blocks=40)
    first = make_request("first", range(10, 43))
    compute(kv, first, chunk=4)
    kv.free(first)
    computed = kv.get_computed_blocks(make_request("again", range(10, 43)))
    assert computed.num_tokens == 32
    full, sliding = computed.blocks
    assert [block.is_null for block in full] == [False] * 8
    assert [block.is_null for block in sliding] == [True] * 6 + [False] * 2


@dataclass
class Cache:
    """Groups over a pool, with every full block of one request in it and nobody using them."""

    pool: BlockPool
    coordinator: KVCacheCoordinator
    hashes: list[bytes]
    tables: tuple[list[int], ...]

    def find(self, group: GroupManager, place: int) -> KVCacheBlock | None:
        key = make_block_key(self.hashes[group.last_hash(place)], group.group_id)
        return self.pool.get_cached_block(key)

    def lose(self, group: GroupManager, place: int) -> None:
        block = self.find(group, place)
        assert block is not None
        self.pool.forget([block])


def make_cache(specs: list[KVSpec], request: Request) -> Cache:
    pool = BlockPool(300)
    groups = tuple(KVCacheGroup((f"layers.{index}",), spec) for index, spec in enumerate(specs))
    coordinator = make_coordinator(KVCacheConfig(300, groups), pool, hash_block_size=BLOCK, enable_prefix_caching=True)
    coordinator.grow("first", request.num_tokens)
    for group in coordinator.groups:
        group.cache_full_blocks("first", request.block_hashes, request.num_tokens)
    tables = coordinator.block_ids("first")
    coordinator.free("first")
    return Cache(pool, coordinator, request.block_hashes, tables)


def test_a_hit_is_as_long_as_every_group_allows(make_request: MakeRequest) -> None:
    """Without one of the last window's blocks, the next shorter beginning whose window is whole is taken."""
    cache = make_cache([FULL, SLIDING], make_request(prompt=range(33)))
    cache.lose(cache.coordinator.groups[1], 6)
    computed = cache.coordinator.find_hits(cache.hashes, 32)
    assert computed.num_tokens == 24
    assert [block.block_id for block in computed.blocks[0]] == cache.tables[0][:6]
    assert [block.block_id for block in computed.blocks[1]] == [0] * 4 + cache.tables[1][4:6]


@pytest.mark.parametrize("seed", range(60))
def test_hits_equal_a_search_through_every_length(make_request: MakeRequest, seed: int) -> None:
    """Against the definition: the longest length at which every group has all that its next query looks at."""
    rng = random.Random(seed)
    wide = SlidingWindowSpec(2 * BLOCK, num_kv_heads=1, head_size=1, dtype="float32", window=rng.choice([1, 5, 17]))
    cache = make_cache([FULL, SLIDING, wide][: rng.choice([2, 3])], make_request(prompt=range(rng.randrange(60, 80))))
    groups = cache.coordinator.groups
    for group, table in zip(groups, cache.tables, strict=True):
        for place in range(len(cache.hashes) * BLOCK // group.block_size):
            if place < len(table) and rng.random() < 0.15:
                cache.lose(group, place)

    def is_good(num_tokens: int) -> bool:
        for group in groups:
            window = getattr(group.spec, "window", num_tokens + 1)
            seen = range(max(0, num_tokens - window + 1), num_tokens)
            places = {position // group.block_size for position in seen}
            if num_tokens % group.block_size or any(cache.find(group, place) is None for place in places):
                return False
        return True

    most = rng.randrange(50, 60)
    computed = cache.coordinator.find_hits(cache.hashes, most)
    assert computed.num_tokens == max(length for length in range(most + 1) if is_good(length))
    for group, blocks in zip(groups, computed.blocks, strict=True):
        assert len(blocks) * group.block_size == computed.num_tokens
        for place, block in enumerate(blocks):
            assert block.is_null or block is cache.find(group, place)


def test_admission_counts_what_a_window_gives_back(make_request: MakeRequest) -> None:
    """A prompt of 100 tokens takes 25 blocks of full attention, and of the window ceil((7 + 16) / 4) + 1."""
    request = make_request(prompt=range(100))
    nothing = ComputedBlocks(0, ([], []))
    assert not make_kv(num_blocks=1 + 25 + 6).can_fit(request, nothing)
    kv = make_kv(num_blocks=1 + 25 + 7)
    assert kv.can_fit(request, nothing)
    compute(kv, request, chunk=16)


def test_without_prefix_caching_no_group_finds_anything(make_request: MakeRequest) -> None:
    kv = make_kv(enable_prefix_caching=False)
    compute(kv, make_request("first", range(10, 43)))
    assert kv.get_computed_blocks(make_request("again", range(10, 43))).num_tokens == 0


def test_equal_tokens_in_two_groups_are_two_blocks(make_request: MakeRequest) -> None:
    kv = make_kv()
    compute(kv, make_request("first", range(10, 19)))
    full, sliding = kv.get_computed_blocks(make_request("again", range(10, 19))).blocks
    assert not {block.block_id for block in full} & {block.block_id for block in sliding}


def test_groups_take_turns_when_a_request_is_evicted(make_request: MakeRequest) -> None:
    """With room for two more blocks, the tail of both groups goes, not all of one."""
    kv = make_kv(num_blocks=1 + 8)
    first = make_request("first", range(10, 26))
    compute(kv, first)
    kv.free(first)
    compute(kv, make_request("other", range(60, 64)))
    assert kv.get_computed_blocks(make_request("again", [*range(10, 26), 1])).num_tokens == 12


def test_prefixes_are_shared_among_full_layers_only(make_request: MakeRequest) -> None:
    kv = make_kv()
    for name in "ab":
        compute(kv, make_request(name, range(10, 27)))
    assert kv.shared_prefixes(["a", "b"]) == [SharedPrefix(4, ["a", "b"])]
    windows_only = make_kv(SLIDING)
    for name in "ab":
        compute(windows_only, make_request(name, range(10, 27)))
    assert windows_only.shared_prefixes(["a", "b"]) == []


def test_a_prefix_is_shared_as_far_as_in_all_full_groups() -> None:
    prefixes = [SharedPrefix(3, ["a", "b"]), SharedPrefix(2, ["c", "d"]), SharedPrefix(2, ["e", "f"])]
    tables = {"a": [1, 2, 3], "b": [1, 2, 9, 4], "c": [5, 6], "d": [7, 6], "e": [8, 10, 11], "f": [8, 10]}
    assert cut_to_common(prefixes, tables, {10}) == [SharedPrefix(2, ["a", "b"]), SharedPrefix(1, ["e", "f"])]


def test_events_tell_what_can_be_found(make_request: MakeRequest) -> None:
    """A follower that believes the events knows at every moment exactly the hashes that the pool knows."""
    log = KVEventLog()
    kv = make_kv(num_blocks=40, events=log)
    rng = random.Random(2)
    known: set[tuple[int, bytes]] = set()
    kinds = set()
    for index in range(60):
        start = rng.randrange(4)
        request = make_request(f"r{index}", range(start, start + rng.randrange(1, 60)))
        compute(kv, request, chunk=16)
        kv.free(request, forget=index % 7 == 0)
        if index == 40:
            assert kv.reset_prefix_cache()
        for event in log.take():
            kinds.add(type(event))
            match event:
                case KVBlocksStored():
                    known |= {(event.group, block_hash) for block_hash in event.block_hashes}
                    assert len(event.token_ids) == BLOCK * len(event.block_hashes)
                    assert (event.parent_hash is None) == (event.token_ids[0] == start)
                case KVBlocksRemoved():
                    known -= {(event.group, block_hash) for block_hash in event.block_hashes}
                case KVCacheCleared():
                    known.clear()
        assert len(known) == kv.num_cached_blocks
    assert kinds == {KVBlocksStored, KVBlocksRemoved, KVCacheCleared}


def test_a_kind_that_nothing_manages_is_refused_by_name() -> None:
    class LatentSpec(KVSpec):
        pass

    with pytest.raises(NotSupported, match="LatentSpec"):
        make_kv(LatentSpec(4, 1, 2, "float32"))
