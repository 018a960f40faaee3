"""The scheduler's view of KV memory: how much of a request is there already, and room for its next tokens."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.core.kv.group import FullAttentionManager
from inferd.engine.core.kv.pool import BlockPool, KVCacheBlock
from inferd.engine.core.kv.prefixes import choose_shared_prefixes
from inferd.engine.core.kv.spec import KVCacheConfig
from inferd.engine.core.output import BlockIds, SharedPrefix
from inferd.engine.errors import NotSupported
from inferd.engine.request import Request


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """What the cache holds of a request's beginning. Good until the next allocation."""

    num_tokens: int  # whole blocks
    blocks: tuple[list[KVCacheBlock], ...]  # one list per group


@dataclass(frozen=True, slots=True)
class _PrefixMemo:
    """An answer of `shared_prefixes`. It stands while no table goes: tables change by growing at their unshared end."""

    request_ids: list[str]
    prefixes: list[SharedPrefix]


class KVCacheManager:
    """Facade over the groups and their one pool. Owned by the scheduler; not thread-safe."""

    def __init__(
        self, config: KVCacheConfig, *, hash_block_size: int, enable_prefix_caching: bool, max_model_len: int
    ) -> None:
        if len(config.groups) != 1:
            raise NotSupported(f"a model with {len(config.groups)} KV groups is not supported; exactly one is")
        self._pool = BlockPool(config.num_blocks)
        self._groups = tuple(
            FullAttentionManager(group.spec, self._pool, group_id, hash_block_size)
            for group_id, group in enumerate(config.groups)
        )
        self._enable_prefix_caching = enable_prefix_caching
        self._max_model_len = max_model_len
        self._unfilled: set[int] = set()  # blocks findable already, whose content this very step computes
        self._shared_unfilled: set[int] = set()  # those of them that a second request has found
        self._prefix_memo: _PrefixMemo | None = None

    @property
    def num_total_blocks(self) -> int:
        return self._pool.num_total_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def usage(self) -> float:
        return self._pool.usage

    def begin_step(self) -> None:
        """A new step is being scheduled: what the last one was to compute counts as computed from here on."""
        self._unfilled.clear()
        self._shared_unfilled.clear()

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Cached blocks of the request's beginning, for a request without blocks.

        The last known token is never among them: its logits are wanted, so it has to run.
        """
        if not self._enable_prefix_caching:
            return ComputedBlocks(0, tuple([] for _ in self._groups))
        hits = tuple(group.find_hits(request.block_hashes, request.num_tokens - 1) for group in self._groups)
        return ComputedBlocks(len(hits[0]) * self._groups[0].block_size, hits)

    def can_fit(self, request: Request, computed: ComputedBlocks) -> bool:
        """Whether everything known of a request without blocks fits, not only its first chunk."""
        return self._num_blocks_to_take(request, request.num_tokens, computed) <= self._pool.num_free_blocks

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed: ComputedBlocks | None = None,
        num_lookahead_tokens: int = 0,
    ) -> BlockIds | None:
        """Room for the next tokens. Returns the blocks that are new in the request's table after its hits, or the
        empty tuple when those it has suffice; None, with nothing changed, when the pool cannot give them.

        `computed` is given exactly once, with the first chunk. Blocks that the step fills can be hit from now on:
        every layer stores keys and values before it attends.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens
        if computed is not None:
            num_tokens += computed.num_tokens
        num_slots = min(num_tokens + num_lookahead_tokens, self._max_model_len)
        num_taken = self._num_blocks_to_take(request, num_slots, computed)
        if num_taken > self._pool.num_free_blocks:
            return None
        if computed is not None:
            self._adopt(request, computed)
        new_block_ids: BlockIds = ()
        if num_taken:
            new_block_ids = tuple(group.grow(request.request_id, num_slots) for group in self._groups)
        if self._enable_prefix_caching:
            self._cache_full_blocks(request, num_tokens)
        return new_block_ids

    def free(self, request: Request, *, forget: bool = False) -> None:
        """Give up the request's blocks; nothing happens for a request without any.

        With `forget` nobody will find them: what made this request fail may lie in them.
        """
        self._prefix_memo = None
        for group in self._groups:
            group.free(request.request_id, forget=forget)

    def block_ids(self, request_id: str) -> BlockIds:
        """A copy of the request's block tables."""
        return tuple(list(group.block_ids(request_id)) for group in self._groups)

    def shared_prefixes(self, request_ids: list[str]) -> list[SharedPrefix]:
        """Groups of the given requests that begin with equal blocks, all computed before this step.

        Called every step, so the last answer is kept for as long as the same requests run.
        """
        memo = self._prefix_memo
        if memo is None or memo.request_ids != request_ids:
            tables = self._groups[0]
            members = [(tables.block_ids(request_id), request_id) for request_id in request_ids]
            memo = _PrefixMemo(list(request_ids), choose_shared_prefixes(members, self._shared_unfilled))
            self._prefix_memo = None if self._shared_unfilled else memo  # cut short now, longer in the next step
        return [SharedPrefix(prefix.num_blocks, list(prefix.request_ids)) for prefix in memo.prefixes]

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while any request holds blocks."""
        return self._pool.reset_prefix_cache()

    def _num_blocks_to_take(self, request: Request, num_tokens: int, computed: ComputedBlocks | None) -> int:
        total = 0
        for group_id, group in enumerate(self._groups):
            hits = computed.blocks[group_id] if computed is not None else ()
            total += group.num_blocks_to_take(request.request_id, num_tokens, hits)
        return total

    def _adopt(self, request: Request, computed: ComputedBlocks) -> None:
        for group, hits in zip(self._groups, computed.blocks, strict=True):
            group.adopt_hits(request.request_id, hits)
            self._shared_unfilled.update(self._unfilled.intersection([block.block_id for block in hits]))

    def _cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Known tokens only: a draft may still be rejected, and a placeholder has no hash."""
        known = min(num_tokens, request.num_tokens)
        for group in self._groups:
            cached_ids = group.cache_full_blocks(request.request_id, request.block_hashes, known)
            if cached_ids:
                self._unfilled.update(cached_ids)
