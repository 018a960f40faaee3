"""What must hold for all KV groups of an engine at once: a hit's length, room, and the order of release."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import lcm

from inferd.engine.core.kv.group import FullAttentionManager, GroupManager
from inferd.engine.core.kv.pool import BlockPool, KVCacheBlock
from inferd.engine.core.kv.spec import KVCacheConfig, KVSpec, SlidingWindowSpec
from inferd.engine.core.kv.window import SlidingWindowManager
from inferd.engine.core.output import BlockIds
from inferd.engine.errors import NotSupported

NO_LIMIT = 2**62  # tokens that fit without any block
Hits = tuple[list[KVCacheBlock], ...]  # first blocks of a table, one list a group


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """What the cache holds of a request's beginning. Good until the next allocation."""

    num_tokens: int  # a whole number of blocks in every group
    blocks: Hits


class KVCacheCoordinator(ABC):
    """The groups over their one pool. Its kinds differ in how they look for a beginning that all groups have."""

    def __init__(self, groups: Sequence[GroupManager], pool: BlockPool) -> None:
        self.groups = tuple(groups)
        self._pool = pool
        self._windowed = tuple(group for group in groups if isinstance(group, SlidingWindowManager))

    @abstractmethod
    def find_hits(self, block_hashes: Sequence[bytes], max_tokens: int) -> ComputedBlocks:
        """The longest beginning within `max_tokens` from which every group can go on. Changes nothing."""

    def num_blocks_to_take(self, request_id: str, num_tokens: int, hits: Hits | None) -> int:
        """How many blocks the free queue loses when the request grows to `num_tokens`."""
        total = 0
        for index, group in enumerate(self.groups):
            total += group.num_blocks_to_take(request_id, num_tokens, hits[index] if hits is not None else ())
        return total

    def num_blocks_for_all(self, num_tokens: int, max_step_tokens: int, hits: Hits) -> int:
        """How many it loses at most until all `num_tokens` of a request without blocks are computed."""
        pairs = zip(self.groups, hits, strict=True)
        return sum(group.num_blocks_for_all(num_tokens, max_step_tokens, own) for group, own in pairs)

    def num_blocks_missing(self, request_id: str, num_tokens: int, max_step_tokens: int) -> int:
        """How many it still loses at most until all `num_tokens` of a request that has blocks are computed."""
        return sum(group.num_blocks_missing(request_id, num_tokens, max_step_tokens) for group in self.groups)

    @property
    def has_windows(self) -> bool:
        return bool(self._windowed)

    def release_unseen(self, request_id: str, num_processed_tokens: int) -> None:
        for group in self._windowed:
            group.release_unseen(request_id, num_processed_tokens)

    def adopt_hits(self, request_id: str, hits: Hits) -> None:
        """All groups before any of them grows: growth could evict another group's hits."""
        for group, own in zip(self.groups, hits, strict=True):
            group.adopt_hits(request_id, own)

    def grow(self, request_id: str, num_tokens: int) -> BlockIds:
        return tuple(group.grow(request_id, num_tokens) for group in self.groups)

    def room(self, request_id: str) -> tuple[int, int]:
        """Tokens that a request's blocks hold, and how many it takes until one more of them is full, in any group."""
        rooms = [group.room(request_id) for group in self.groups] or [(NO_LIMIT, NO_LIMIT)]
        return min(slots for slots, _ in rooms), min(full for _, full in rooms)

    def free(self, request_id: str, *, forget: bool = False) -> None:
        """Release in reverse: a tail is of use to few, the shared head to many, so the tail is evicted first.

        Groups take turns, because a beginning is worth nothing without its blocks in all of them. With `forget` the
        blocks cannot be found again.
        """
        tables = [group.take_table(request_id) for group in self.groups]
        if forget:
            for blocks in tables:
                self._pool.forget(blocks)
        rounds = zip_longest(*map(reversed, tables))
        self._pool.free_blocks([block for blocks in rounds for block in blocks if block is not None])

    def block_ids(self, request_id: str) -> BlockIds:
        """A copy of the request's block tables."""
        return tuple(list(group.block_ids(request_id)) for group in self.groups)


class NoPrefixCacheCoordinator(KVCacheCoordinator):
    """Nothing is ever found; for any number of groups, none included."""

    def find_hits(self, block_hashes: Sequence[bytes], max_tokens: int) -> ComputedBlocks:
        return ComputedBlocks(0, tuple([] for _ in self.groups))


class UnitaryCoordinator(KVCacheCoordinator):
    """One group: what it finds is the answer."""

    def find_hits(self, block_hashes: Sequence[bytes], max_tokens: int) -> ComputedBlocks:
        (group,) = self.groups
        hits = group.find_hits(block_hashes, max_tokens, group.block_size)
        return ComputedBlocks(len(hits) * group.block_size, (hits,))


class HybridCoordinator(KVCacheCoordinator):
    """Several groups: each may shorten the candidate, and what another group found for a longer one may then not do."""

    def __init__(self, groups: Sequence[GroupManager], pool: BlockPool) -> None:
        super().__init__(groups, pool)
        self._alignment_tokens = lcm(*(group.block_size for group in groups))

    def find_hits(self, block_hashes: Sequence[bytes], max_tokens: int) -> ComputedBlocks:
        """Full attention is asked first, and once: of what it found, any shorter beginning is good as well."""
        num_tokens = max_tokens // self._alignment_tokens * self._alignment_tokens
        found: dict[int, list[KVCacheBlock]] = {}
        for group in self.groups:
            if group not in self._windowed:
                found[group.group_id] = group.find_hits(block_hashes, num_tokens, self._alignment_tokens)
                num_tokens = len(found[group.group_id]) * group.block_size
        asked_for = None
        while num_tokens != asked_for:
            asked_for = num_tokens
            for group in self._windowed:
                if len(found.get(group.group_id, ())) * group.block_size != num_tokens:
                    found[group.group_id] = group.find_hits(block_hashes, num_tokens, self._alignment_tokens)
                    num_tokens = len(found[group.group_id]) * group.block_size
        blocks = tuple(found.get(group.group_id, [])[: num_tokens // group.block_size] for group in self.groups)
        return ComputedBlocks(num_tokens, blocks)


def make_coordinator(
    config: KVCacheConfig, pool: BlockPool, *, hash_block_size: int, enable_prefix_caching: bool
) -> KVCacheCoordinator:
    """Raises `ConfigError` for a block size that is no multiple of `hash_block_size`, `NotSupported` for a kind of
    spec that nothing manages."""
    groups = [_manager(group.spec, pool, group_id, hash_block_size) for group_id, group in enumerate(config.groups)]
    if not enable_prefix_caching or not groups:
        return NoPrefixCacheCoordinator(groups, pool)
    return UnitaryCoordinator(groups, pool) if len(groups) == 1 else HybridCoordinator(groups, pool)


def _manager(spec: KVSpec, pool: BlockPool, group_id: int, hash_block_size: int) -> GroupManager:
    if type(spec) is SlidingWindowSpec:
        return SlidingWindowManager(spec, pool, group_id, hash_block_size)
    if type(spec) is KVSpec:
        return FullAttentionManager(spec, pool, group_id, hash_block_size)
    raise NotSupported(f"a KV cache of kind {type(spec).__name__} is not supported; full attention and windows are")
