"""The block tables of one KV group: hit search, growth, release."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.core.kv.hashing import make_block_key
from inferd.engine.core.kv.pool import BlockPool, KVCacheBlock
from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.errors import ConfigError


class BlockTable:
    """The blocks of one request, in the order of its tokens; grows at the end only."""

    __slots__ = ("blocks", "ids", "num_cached")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.ids: list[int] = []  # of `blocks`; the same int objects, so that comparing tables is cheap
        self.num_cached = 0  # leading blocks that have a hash

    def extend(self, blocks: Sequence[KVCacheBlock]) -> list[int]:
        ids = [block.block_id for block in blocks]
        self.blocks += blocks
        self.ids += ids
        return ids


class FullAttentionManager:
    """Tables of a group whose layers attend to everything before: a request keeps all its blocks to the end.

    A page (`spec.block_size` tokens) may span several hash blocks; its key is the hash of the last of them, which the
    chain makes a hash of everything up to there.
    """

    def __init__(self, spec: KVSpec, pool: BlockPool, group_id: int, hash_block_size: int) -> None:
        if spec.block_size % hash_block_size:
            raise ConfigError(
                f"block_size ({spec.block_size}) must be a multiple of hash_block_size ({hash_block_size}); "
                f"set block_size to a multiple of {hash_block_size}"
            )
        self.block_size = spec.block_size
        self._pool = pool
        self._group_id = group_id
        self._hashes_per_block = spec.block_size // hash_block_size
        self._tables: dict[str, BlockTable] = {}

    def find_hits(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[KVCacheBlock]:
        """The longest run of cached blocks from the first one on, within `max_tokens`. Changes nothing."""
        hits: list[KVCacheBlock] = []
        last_hashes = range(self._hashes_per_block - 1, len(block_hashes), self._hashes_per_block)
        for index in last_hashes[: max_tokens // self.block_size]:
            block = self._pool.get_cached_block(make_block_key(block_hashes[index], self._group_id))
            if block is None:
                break
            hits.append(block)
        return hits

    def num_blocks_to_take(self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock] = ()) -> int:
        """How many blocks the free queue loses when the request grows to `num_tokens`, hits adopted.

        A hit that nobody uses sits in the free queue, so adopting it takes a block too.
        """
        table = self._tables.get(request_id)
        held = len(table.ids) if table is not None else 0
        missing = (num_tokens + self.block_size - 1) // self.block_size - held - len(hits)
        unused_hits = sum(block.ref_count == 0 for block in hits) if hits else 0
        return (missing if missing > 0 else 0) + unused_hits

    def adopt_hits(self, request_id: str, hits: Sequence[KVCacheBlock]) -> None:
        """Begin the table of a request with found blocks. Before any `grow` of the same step: that could evict them."""
        self._pool.touch(hits)
        table = self._tables[request_id] = BlockTable()
        table.extend(hits)
        table.num_cached = len(hits)

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Append new blocks until `num_tokens` have room; returns their ids."""
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = BlockTable()
        missing = (num_tokens + self.block_size - 1) // self.block_size - len(table.ids)
        return table.extend(self._pool.get_new_blocks(missing)) if missing > 0 else []

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Let others find the blocks that are full once `num_tokens` are stored; returns the ids of those new to it."""
        table = self._tables[request_id]
        num_full = num_tokens // self.block_size
        if num_full <= table.num_cached:
            return []
        full = slice(table.num_cached, num_full)
        first, step = (table.num_cached + 1) * self._hashes_per_block - 1, self._hashes_per_block
        last_hashes = block_hashes[first : num_full * step : step]
        self._pool.cache_full_blocks(table.blocks[full], [make_block_key(h, self._group_id) for h in last_hashes])
        table.num_cached = num_full
        return table.ids[full]

    def free(self, request_id: str, *, forget: bool = False) -> None:
        """Release in reverse: a tail is of use to few, the shared head to many, so the tail is evicted first.

        With `forget` the blocks cannot be found again.
        """
        table = self._tables.pop(request_id, None)
        if table is not None:
            if forget:
                self._pool.forget(table.blocks)
            self._pool.free_blocks(reversed(table.blocks))

    def block_ids(self, request_id: str) -> list[int]:
        """The table itself, to read: whoever keeps it copies it."""
        table = self._tables.get(request_id)
        return table.ids if table is not None else []
