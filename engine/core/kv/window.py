"""The block tables of layers with a sliding window."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.core.kv.group import GroupManager
from inferd.engine.core.kv.pool import BlockPool, KVCacheBlock
from inferd.engine.core.kv.spec import SlidingWindowSpec


class SlidingWindowManager(GroupManager):
    """A request keeps the blocks that its next query looks into; the null block stands in place of those before."""

    def __init__(self, spec: SlidingWindowSpec, pool: BlockPool, group_id: int, hash_block_size: int) -> None:
        super().__init__(spec, pool, group_id, hash_block_size)
        self._window = spec.window
        self._num_window_blocks = spec.num_window_blocks

    def find_hits(self, block_hashes: Sequence[bytes], max_tokens: int, alignment_tokens: int) -> list[KVCacheBlock]:
        """Only the window's blocks before the end must be there, so the search goes from right to left."""
        num_hashed = len(block_hashes) // self._hashes_per_block
        num_places = min(max_tokens // self.block_size, num_hashed)
        per_alignment = alignment_tokens // self.block_size
        end = num_places // per_alignment * per_alignment
        found: list[KVCacheBlock] = []  # the blocks before `end`, last one first
        place = end
        while place > 0 and len(found) < self._num_window_blocks:
            place -= 1
            block = self._cached(block_hashes, place)
            if block is None:  # no end above this place will do
                end = place = place // per_alignment * per_alignment
                found.clear()
            else:
                found.append(block)
        return [self._pool.null_block] * (end - len(found)) + found[::-1]

    def release_unseen(self, request_id: str, num_processed_tokens: int) -> None:
        """The oldest is evicted first: what lies later serves a longer beginning."""
        table = self._tables.get(request_id)
        num_unseen = max(num_processed_tokens - self._window + 1, 0) // self.block_size
        if table is None or num_unseen <= table.num_released:
            return
        places = slice(table.num_released, num_unseen)
        released = table.blocks[places]
        null = self._pool.null_block
        table.blocks[places] = [null] * len(released)
        table.ids[places] = [null.block_id] * len(released)
        table.num_released = num_unseen
        self._pool.free_blocks(released)
