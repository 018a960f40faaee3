"""Every block of KV memory: who uses it, what it holds, and which one is given away next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from inferd.engine.core.clock import Clock, steady_time
from inferd.engine.core.kv.events import CacheListener
from inferd.engine.core.kv.hashing import BlockKey


class KVCacheBlock:
    """One page. A block that nobody uses keeps its content, and its hash, until it is given away."""

    __slots__ = ("block_hash", "block_id", "freed_at", "is_null", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int, *, is_null: bool = False) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockKey | None = None
        self.is_null = is_null
        self.freed_at = 0.0  # when the last user left, of a block that nobody uses and that has a hash
        self.prev_free: KVCacheBlock | None = None  # links of the free queue; both None outside it
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        state = "hashed" if self.block_hash is not None else "unhashed"
        return f"KVCacheBlock({self.block_id}, refs={self.ref_count}, {state})"


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they are given away.

    The links live in the blocks, so that a cache hit takes its block out of the middle in constant time and without
    an allocation. Iterating yields the blocks in order.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self._size = 0
        self.append_all(blocks)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = _linked(self._head.next_free)
        while block is not self._tail:
            yield block
            block = _linked(block.next_free)

    def pop_first(self, count: int) -> list[KVCacheBlock]:
        if count > self._size:
            raise RuntimeError(f"{count} free KV blocks wanted, {self._size} there")
        taken: list[KVCacheBlock] = []
        block = _linked(self._head.next_free)
        for _ in range(count):
            after = _linked(block.next_free)
            block.prev_free = block.next_free = None
            taken.append(block)
            block = after
        self._head.next_free, block.prev_free = block, self._head
        self._size -= count
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        before, after = _linked(block.prev_free), _linked(block.next_free)
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._size -= 1

    def append_all(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put `blocks` at the end, in their order."""
        self._insert_after(_linked(self._tail.prev_free), blocks)

    def prepend_all(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put `blocks` at the front: the first of them is given away next."""
        self._insert_after(self._head, blocks)

    def _insert_after(self, before: KVCacheBlock, blocks: Iterable[KVCacheBlock]) -> None:
        after = _linked(before.next_free)
        for block in blocks:
            before.next_free, block.prev_free = block, before
            before = block
            self._size += 1
        before.next_free, after.prev_free = after, before


class BlockPool:
    """All blocks of one engine; the one owner of reference counts, hashes and the free queue.

    Block 0 is the null block: padding points at it, nobody owns it, and it is in no count.
    """

    def __init__(self, num_blocks: int, events: CacheListener | None = None, clock: Clock = steady_time) -> None:
        """`events` is told what can no longer be found; what can, those say who know the tokens. With the null block
        alone nothing can be kept, and nothing is by a model whose layers keep nothing."""
        if num_blocks < 1:
            raise ValueError(f"a block pool needs the null block, got num_blocks={num_blocks}")
        self._events = events
        self._clock = clock
        self.num_evictions = 0  # since the start: blocks given away although their content could be found
        self.num_idle_cached_blocks = 0  # that nobody uses, and whose content can be found
        self._blocks = [KVCacheBlock(block_id, is_null=block_id == 0) for block_id in range(num_blocks)]
        self.null_block = self._blocks[0]
        self._free = FreeKVCacheBlockQueue(self._blocks[1:])
        self._cached: dict[BlockKey, KVCacheBlock] = {}
        # Two requests may compute equal blocks. They stay two, because a block table only ever grows at its end; the
        # later ones wait here and step forward when the first is given away.
        self._duplicates: dict[BlockKey, list[KVCacheBlock]] = {}

    @property
    def num_total_blocks(self) -> int:
        return len(self._blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a user, cached ones included."""
        return len(self._free)

    @property
    def num_cached_hashes(self) -> int:
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_total_blocks if self.num_total_blocks else 0.0

    def free_block_ids(self) -> list[int]:
        """In the order in which they will be given away."""
        return [block.block_id for block in self._free]

    @property
    def blocks(self) -> Sequence[KVCacheBlock]:
        """All, the null block too, in the order of their ids; to read."""
        return self._blocks

    def get_cached_block(self, key: BlockKey) -> KVCacheBlock | None:
        return self._cached.get(key)

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Blocks for one user each, their old content forgotten. Raises `RuntimeError` when there are not enough."""
        blocks = self._free.pop_first(count)
        for block in blocks:
            block.ref_count = 1
            if block.block_hash is not None:
                self.num_evictions += 1
                self.num_idle_cached_blocks -= 1
                self._forget(block, block.block_hash)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more user for each: a free block leaves the queue, and keeps its content. Null blocks are passed over."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_count == 0:
                self._free.remove(block)
                self.num_idle_cached_blocks -= block.block_hash is not None
            block.ref_count += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One user less for each, given in the order in which they may be reused.

        Unhashed blocks go to the front, because nothing can be found in them; hashed ones to the end, least recently
        used first. Raises `RuntimeError` for a block that has no user.
        """
        unhashed: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        for block in blocks:
            if block.ref_count == 0:
                raise RuntimeError(f"KV block {block.block_id} was freed twice, or is the null block")
            block.ref_count -= 1
            if block.ref_count == 0:
                (unhashed if block.block_hash is None else hashed).append(block)
        self._free.prepend_all(unhashed)
        if hashed:
            now = self._clock()
            for block in hashed:
                block.freed_at = now
            self.num_idle_cached_blocks += len(hashed)
            self._free.append_all(hashed)

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], keys: Sequence[BlockKey]) -> None:
        """From now on `blocks[i]` can be found under `keys[i]`. A block is cached once in its life with a user."""
        for block, key in zip(blocks, keys, strict=True):
            if block.block_hash is not None:
                raise RuntimeError(f"KV block {block.block_id} already has a hash")
            block.block_hash = key
            if self._cached.setdefault(key, block) is not block:
                self._duplicates.setdefault(key, []).append(block)

    def forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Nobody finds the content of these from now on; those who use it already go on."""
        for block in blocks:
            if block.block_hash is not None:
                self.num_idle_cached_blocks -= block.ref_count == 0
                self._forget(block, block.block_hash)

    def reset_prefix_cache(self) -> bool:
        """Forget all content, as after a change of weights. False, and nothing done, while any block is in use."""
        if self.num_free_blocks != self.num_total_blocks:
            return False
        for block in self._blocks:
            block.block_hash = None
        self.num_idle_cached_blocks = 0
        self._cached.clear()
        self._duplicates.clear()
        if self._events is not None:
            self._events.cleared()
        return True

    def _forget(self, block: KVCacheBlock, key: BlockKey) -> None:
        block.block_hash = None
        later = self._duplicates.get(key)
        if later is None:
            del self._cached[key]
            if self._events is not None:
                self._events.removed(key)
            return
        if self._cached[key] is block:
            self._cached[key] = later.pop(0)
        else:
            later.remove(block)
        if not later:
            del self._duplicates[key]


def _linked(block: KVCacheBlock | None) -> KVCacheBlock:
    if block is None:
        raise RuntimeError("a KV block that is not in the free queue was taken out of it")
    return block
