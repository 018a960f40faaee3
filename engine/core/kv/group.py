"""The block tables of one KV group: hit search, growth, release."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from inferd.engine.core.kv.hashing import BlockKey, make_block_key
from inferd.engine.core.kv.pool import BlockPool, KVCacheBlock
from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.errors import ConfigError


class BlockTable:
    """The blocks of one request, in the order of its tokens; grows at the end only.

    The null block stands where a layer looks no more.
    """

    __slots__ = ("blocks", "ids", "num_cached", "num_released")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.ids: list[int] = []  # of `blocks`; the same int objects, so that comparing tables is cheap
        self.num_cached = 0  # leading blocks that need no hash any more
        self.num_released = 0  # leading blocks that are the null block

    def extend(self, blocks: Sequence[KVCacheBlock]) -> list[int]:
        ids = [block.block_id for block in blocks]
        self.blocks += blocks
        self.ids += ids
        return ids


class GroupManager(ABC):
    """The tables of one group. A kind of layer says which cached blocks it can start from and which it gives back.

    A page (`spec.block_size` tokens) may span several hash blocks; its key is the hash of the last of them, which the
    chain makes a hash of everything up to there.
    """

    def __init__(self, spec: KVSpec, pool: BlockPool, group_id: int, hash_block_size: int) -> None:
        if spec.block_size % hash_block_size:
            raise ConfigError(
                f"block_size ({spec.block_size}) must be a multiple of hash_block_size ({hash_block_size}); "
                f"set block_size to a multiple of {hash_block_size}"
            )
        self.spec = spec
        self.block_size = spec.block_size
        self.group_id = group_id
        self._pool = pool
        self._hashes_per_block = spec.block_size // hash_block_size
        self._tables: dict[str, BlockTable] = {}

    @abstractmethod
    def find_hits(self, block_hashes: Sequence[bytes], max_tokens: int, alignment_tokens: int) -> list[KVCacheBlock]:
        """The first blocks of a table for the longest cached beginning within `max_tokens` that this group can go on
        from; a whole number of `alignment_tokens`, which is a multiple of the block size. Changes nothing."""

    @abstractmethod
    def release_unseen(self, request_id: str, num_processed_tokens: int) -> None:
        """Give back what no query after `num_processed_tokens` looks at."""

    def num_blocks_to_take(self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock] = ()) -> int:
        """How many blocks the free queue loses when the request grows to `num_tokens`, hits adopted.

        A hit that nobody uses sits in the free queue, so adopting it takes a block too.
        """
        table = self._tables.get(request_id)
        held = len(table.ids) if table is not None else 0
        missing = (num_tokens + self.block_size - 1) // self.block_size - held - len(hits)
        return (missing if missing > 0 else 0) + _num_unused(hits)

    def num_blocks_for_all(self, num_tokens: int, max_step_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        """How many blocks the free queue loses at most while a request without blocks is computed up to `num_tokens`.

        No step computes more than `max_step_tokens` of it.
        """
        held = sum(not block.is_null for block in hits)
        return max(self.spec.max_blocks(num_tokens, max_step_tokens) - held, 0) + _num_unused(hits)

    def num_blocks_missing(self, request_id: str, num_tokens: int, max_step_tokens: int) -> int:
        """The same for a request that has blocks."""
        return max(self.spec.max_blocks(num_tokens, max_step_tokens) - self.num_blocks_held(request_id), 0)

    def adopt_hits(self, request_id: str, hits: Sequence[KVCacheBlock]) -> None:
        """Begin the table of a request with found blocks. Before any `grow` of the same step: that could evict them."""
        self._pool.touch(hits)
        table = self._tables[request_id] = BlockTable()
        table.extend(hits)
        table.num_cached = len(hits)
        table.num_released = sum(block.is_null for block in hits)

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Append new blocks until `num_tokens` have room; returns their ids."""
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = BlockTable()
        missing = (num_tokens + self.block_size - 1) // self.block_size - len(table.ids)
        return table.extend(self._pool.get_new_blocks(missing)) if missing > 0 else []

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> range:
        """Let others find the blocks that are full once `num_tokens` are stored; the places in the table of those new
        to it."""
        table = self._tables.get(request_id)
        if table is None:
            return range(0)
        num_full = num_tokens // self.block_size
        if num_full <= table.num_cached:
            return range(0)
        places = range(max(table.num_cached, table.num_released), num_full)
        hashes = [block_hashes[self.last_hash(place)] for place in places]
        self._pool.cache_full_blocks(table.blocks[places.start : num_full], self._keys(hashes))
        table.num_cached = num_full
        return places

    def last_hash(self, place: int) -> int:
        """Which of a request's block hashes names the block at `place` of its table."""
        return (place + 1) * self._hashes_per_block - 1

    def table_hashes(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Of a request's block hashes, those that name the full blocks of its table."""
        return (
            block_hashes
            if self._hashes_per_block == 1
            else block_hashes[self._hashes_per_block - 1 :: self._hashes_per_block]
        )

    def take_table(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks, the null block not among them; whoever takes them frees them."""
        table = self._tables.pop(request_id, None)
        return table.blocks[table.num_released :] if table is not None else []

    def block_ids(self, request_id: str) -> list[int]:
        """The table itself, to read: whoever keeps it copies it."""
        table = self._tables.get(request_id)
        return table.ids if table is not None else []

    def num_blocks_of_its_own(self, request_id: str) -> int:
        """Blocks of the request that nobody else uses."""
        table = self._tables.get(request_id)
        return sum(block.ref_count == 1 for block in table.blocks[table.num_released :]) if table is not None else 0

    def room(self, request_id: str) -> tuple[int, int]:
        """Tokens that the request's blocks hold, and how many fill the first of them that is not hashed yet."""
        table = self._tables[request_id]
        return len(table.ids) * self.block_size, (table.num_cached + 1) * self.block_size

    def num_blocks_held(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        return len(table.ids) - table.num_released if table is not None else 0

    def _cached(self, block_hashes: Sequence[bytes], place: int) -> KVCacheBlock | None:
        return self._pool.get_cached_block(make_block_key(block_hashes[self.last_hash(place)], self.group_id))

    def _keys(self, hashes: Sequence[bytes]) -> list[BlockKey]:
        return [make_block_key(block_hash, self.group_id) for block_hash in hashes]


class FullAttentionManager(GroupManager):
    """Layers that attend to everything before: a request keeps all its blocks to the end."""

    def find_hits(self, block_hashes: Sequence[bytes], max_tokens: int, alignment_tokens: int) -> list[KVCacheBlock]:
        hits: list[KVCacheBlock] = []
        num_hashed = len(block_hashes) // self._hashes_per_block
        for place in range(min(max_tokens // self.block_size, num_hashed)):
            block = self._cached(block_hashes, place)
            if block is None:
                break
            hits.append(block)
        per_alignment = alignment_tokens // self.block_size
        return hits[: len(hits) // per_alignment * per_alignment]

    def release_unseen(self, request_id: str, num_processed_tokens: int) -> None:
        """Everything stays in sight."""


def _num_unused(hits: Sequence[KVCacheBlock]) -> int:
    return sum(block.ref_count == 0 and not block.is_null for block in hits) if hits else 0
