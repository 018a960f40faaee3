"""The block pool: order of reuse, reference counts, and what can still be found."""

from __future__ import annotations

import random

import pytest

from inferd.engine.core.kv.hashing import BlockKey
from inferd.engine.core.kv.pool import BlockPool, KVCacheBlock


def key(name: object) -> BlockKey:
    return BlockKey(str(name).encode())


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def cached_pool(num_blocks: int = 5) -> tuple[BlockPool, list[KVCacheBlock]]:
    """A pool all of whose blocks are in use and hashed under their id."""
    pool = BlockPool(num_blocks)
    blocks = pool.get_new_blocks(pool.num_total_blocks)
    pool.cache_full_blocks(blocks, [key(block.block_id) for block in blocks])
    return pool, blocks


def test_the_null_block_is_in_no_count_and_never_given_away():
    pool = BlockPool(4)
    assert (pool.num_total_blocks, pool.num_free_blocks, pool.usage) == (3, 3, 0.0)
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert (pool.num_free_blocks, pool.usage) == (0, 1.0)
    assert pool.null_block.block_id == 0


def test_a_pool_needs_the_null_block_and_no_other():
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)
    pool = BlockPool(1)
    assert (pool.num_total_blocks, pool.num_free_blocks, pool.usage) == (0, 0, 0.0)
    with pytest.raises(RuntimeError, match="1 free KV blocks wanted"):
        pool.get_new_blocks(1)


def test_unhashed_blocks_freed_in_reverse_come_back_tail_first():
    pool = BlockPool(10)
    a, b, c = pool.get_new_blocks(3)
    pool.free_blocks([c, b, a])
    assert pool.get_new_blocks(2) == [c, b]


def test_hashed_blocks_freed_in_reverse_come_back_tail_first():
    pool, blocks = cached_pool()
    pool.free_blocks(reversed(blocks))
    assert pool.get_new_blocks(2) == [blocks[3], blocks[2]]


def test_unhashed_blocks_are_reused_before_hashed_ones():
    pool = BlockPool(4)
    hashed, unhashed, _ = pool.get_new_blocks(3)
    pool.cache_full_blocks([hashed], [key("h")])
    pool.free_blocks([hashed])
    pool.free_blocks([unhashed])
    assert pool.get_new_blocks(2) == [unhashed, hashed]


def test_a_touched_block_leaves_the_middle_of_the_free_queue():
    pool, blocks = cached_pool()
    pool.free_blocks(blocks)
    pool.touch([blocks[1]])
    assert pool.free_block_ids() == ids([blocks[0], blocks[2], blocks[3]])
    pool.touch([blocks[1]])
    pool.free_blocks([blocks[1]])
    assert pool.num_free_blocks == 3
    pool.free_blocks([blocks[1]])
    assert pool.free_block_ids()[-1] == blocks[1].block_id


def test_content_is_found_until_its_block_is_given_away():
    pool, blocks = cached_pool()
    pool.free_blocks(blocks)
    assert pool.get_cached_block(key(1)) is blocks[0]
    pool.get_new_blocks(1)
    assert pool.get_cached_block(key(1)) is None
    assert pool.get_cached_block(key(2)) is blocks[1]


def test_equal_blocks_stay_two_and_the_second_steps_forward():
    pool = BlockPool(4)
    first, second, third = pool.get_new_blocks(3)
    pool.cache_full_blocks([first, second, third], [key("same")] * 3)
    assert pool.get_cached_block(key("same")) is first
    pool.free_blocks([first, third])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(key("same")) is second
    pool.get_new_blocks(1)
    assert pool.get_cached_block(key("same")) is second
    pool.free_blocks([second])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(key("same")) is None


def test_a_double_free_raises():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free_blocks(blocks)


def test_the_null_block_cannot_be_freed():
    pool = BlockPool(4)
    with pytest.raises(RuntimeError, match="null block"):
        pool.free_blocks([pool.null_block])


def test_a_hash_is_given_once():
    pool, blocks = cached_pool()
    with pytest.raises(RuntimeError, match="already has a hash"):
        pool.cache_full_blocks(blocks[:1], [key("other")])


def test_asking_for_too_much_changes_nothing():
    pool = BlockPool(4)
    with pytest.raises(RuntimeError, match="4 free KV blocks wanted, 3 there"):
        pool.get_new_blocks(4)
    assert pool.free_block_ids() == [1, 2, 3]


def test_the_cache_is_reset_only_when_nobody_uses_a_block():
    pool, blocks = cached_pool()
    pool.free_blocks(blocks[1:])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(key(2)) is blocks[1]
    pool.free_blocks(blocks[:1])
    assert pool.reset_prefix_cache()
    assert pool.num_cached_hashes == 0
    assert all(block.block_hash is None for block in blocks)


def test_forgotten_content_is_not_found_and_its_users_go_on():
    pool = BlockPool(4)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first, second], [key(1), key(1)])
    pool.touch([first])
    pool.forget([first])
    assert pool.get_cached_block(key(1)) is second
    pool.forget([first, second])
    assert pool.num_cached_hashes == 0
    pool.free_blocks([first, second])
    assert pool.num_free_blocks == 2
    pool.free_blocks([first])
    assert pool.free_block_ids()[0] == first.block_id


class NaivePool:
    """The same contract over plain lists."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(self.free, 0)
        self.hashes: dict[int, BlockKey] = {}
        self.found: dict[BlockKey, list[int]] = {}

    def get(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            self.refs[block_id] = 1
            if block_id in self.hashes:
                self.found[self.hashes.pop(block_id)].remove(block_id)
        return taken

    def touch(self, block_id: int) -> None:
        if self.refs[block_id] == 0:
            self.free.remove(block_id)
        self.refs[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        unused = []
        for block_id in block_ids:
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                unused.append(block_id)
        front = [block_id for block_id in unused if block_id not in self.hashes]
        self.free = front + self.free + [block_id for block_id in unused if block_id in self.hashes]

    def cache(self, block_id: int, name: BlockKey) -> None:
        self.hashes[block_id] = name
        self.found.setdefault(name, []).append(block_id)

    def forget(self, block_id: int) -> None:
        if block_id in self.hashes:
            self.found[self.hashes.pop(block_id)].remove(block_id)


def test_ten_thousand_random_operations_agree_with_plain_lists():
    rng = random.Random(4)
    pool, naive = BlockPool(24), NaivePool(24)
    blocks: dict[int, KVCacheBlock] = {}
    names = [key(name) for name in range(12)]  # few, so that duplicates happen
    for _ in range(10_000):
        used = [block_id for block_id, refs in naive.refs.items() if refs]
        choice = rng.random()
        if choice < 0.35:
            count = rng.randint(0, min(4, len(naive.free)))
            taken = pool.get_new_blocks(count)
            assert ids(taken) == naive.get(count)
            blocks |= {block.block_id: block for block in taken}
        elif choice < 0.6 and used:
            freed = rng.sample(used, rng.randint(1, min(5, len(used))))
            pool.free_blocks([blocks[block_id] for block_id in freed])
            naive.release(freed)
        elif choice < 0.8:
            unhashed = [block_id for block_id in used if block_id not in naive.hashes]
            if unhashed:
                block_id, name = rng.choice(unhashed), rng.choice(names)
                pool.cache_full_blocks([blocks[block_id]], [name])
                naive.cache(block_id, name)
        elif choice < 0.83 and used:
            block_id = rng.choice(used)
            pool.forget([blocks[block_id]])
            naive.forget(block_id)
        else:
            hit = pool.get_cached_block(rng.choice(names))
            if hit is not None:
                pool.touch([hit])
                naive.touch(hit.block_id)
        assert pool.free_block_ids() == naive.free
        assert {block_id: block.ref_count for block_id, block in blocks.items()} == {
            block_id: naive.refs[block_id] for block_id in blocks
        }
        for name in names:
            found = pool.get_cached_block(name)
            assert (found.block_id if found else None) == next(iter(naive.found.get(name, [])), None)
