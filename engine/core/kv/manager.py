"""The scheduler's view of KV memory: how much of a request is there already, and room for its next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferd.engine.core.clock import Clock, steady_time
from inferd.engine.core.kv.continuations import Continuations
from inferd.engine.core.kv.coordinator import ComputedBlocks, make_coordinator
from inferd.engine.core.kv.events import KVEventLog, Listeners
from inferd.engine.core.kv.group import FullAttentionManager, GroupManager
from inferd.engine.core.kv.pool import BlockPool, KVCacheBlock
from inferd.engine.core.kv.prefixes import choose_shared_prefixes, cut_to_common
from inferd.engine.core.kv.spec import KVCacheConfig
from inferd.engine.core.output import BlockIds, SharedPrefix
from inferd.engine.insight.life import Divergence
from inferd.engine.request import Request


@dataclass(frozen=True, slots=True)
class _PrefixMemo:
    """An answer of `shared_prefixes`. It stands while no table goes: tables change by growing at their unshared end."""

    request_ids: list[str]
    prefixes: list[SharedPrefix]


class KVCacheManager:
    """Facade over the groups and their one pool. Owned by the scheduler; not thread-safe."""

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        hash_block_size: int,
        enable_prefix_caching: bool,
        max_model_len: int,
        max_step_tokens: int | None = None,
        max_steps_under_way: int = 1,
        events: KVEventLog | None = None,
        clock: Clock = steady_time,
    ) -> None:
        """`max_step_tokens`: see `plan_kv_cache`. `max_steps_under_way`: the one being scheduled, and those before it
        that may still run then. `events` hears of every block that can be found, or no longer.
        """
        self._continuations = Continuations(0, config.groups[0].spec.block_size) if config.groups else None
        listeners = [listener for listener in (events, self._continuations) if listener is not None]
        self._pool = BlockPool(config.num_blocks, Listeners(listeners), clock)
        self._coordinator = make_coordinator(
            config, self._pool, hash_block_size=hash_block_size, enable_prefix_caching=enable_prefix_caching
        )
        full = [group for group in self._coordinator.groups if isinstance(group, FullAttentionManager)]
        # Attention reads a shared prefix once; layers with a window never do, and pages must be of one length.
        self._sharing = full if len({group.block_size for group in full}) == 1 else []
        self._enable_prefix_caching = enable_prefix_caching
        self._events = events
        self._max_model_len = max_model_len
        self._max_step_tokens = max_model_len if max_step_tokens is None else max_step_tokens
        self._unfilled: set[int] = set()  # blocks findable already, whose content this very step computes
        self._shared_unfilled: set[int] = set()  # those of them that a second request has found
        self._prefix_memo: _PrefixMemo | None = None
        self._room: dict[str, tuple[int, int]] = {}  # by request: see `_needs_nothing`
        self._step = 0
        self._max_steps_under_way = max_steps_under_way
        self._computed_before: dict[str, list[tuple[int, int]]] = {}  # by request: step, tokens computed before it

    @property
    def num_total_blocks(self) -> int:
        return self._pool.num_total_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_idle_cached_blocks(self) -> int:
        """Of the free ones: those whose content can be found."""
        return self._pool.num_idle_cached_blocks

    @property
    def num_evictions(self) -> int:
        """Since the start: blocks given away although their content could be found."""
        return self._pool.num_evictions

    @property
    def blocks(self) -> Sequence[KVCacheBlock]:
        """All, in the order of their ids; to read."""
        return self._pool.blocks

    @property
    def usage(self) -> float:
        return self._pool.usage

    @property
    def num_cached_blocks(self) -> int:
        """Different contents that can be found."""
        return self._pool.num_cached_hashes

    def begin_step(self) -> None:
        """A new step is being scheduled: what the last one was to compute counts as computed from here on."""
        self._step += 1
        self._unfilled.clear()
        self._shared_unfilled.clear()

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Cached blocks of the request's beginning, for a request without blocks.

        The last known token is never among them: its logits are wanted, so it has to run.
        """
        max_tokens = 0 if request.needs_whole_prompt else request.num_tokens - 1
        return self._coordinator.find_hits(request.block_hashes, max_tokens)

    def can_fit(self, request: Request, computed: ComputedBlocks) -> bool:
        """Whether everything known of a request without blocks fits, not only its first chunk."""
        return self.num_blocks_needed(request, computed) <= self._pool.num_free_blocks

    def num_blocks_needed(self, request: Request, computed: ComputedBlocks) -> int:
        """Free blocks that a request without any takes at most while everything known of it is computed."""
        return self._coordinator.num_blocks_for_all(request.num_tokens, self._max_step_tokens, computed.blocks)

    def num_blocks_missing(self, request: Request) -> int:
        """Free blocks that a request with some still takes, at most, until everything known of it is computed."""
        return self._coordinator.num_blocks_missing(request.request_id, request.num_tokens, self._max_step_tokens)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed: ComputedBlocks | None = None,
        num_lookahead_tokens: int = 0,
    ) -> BlockIds | None:
        """Room for the next tokens. Returns the blocks that are new in the request's table after its hits, or the
        empty tuple when those it has suffice; None when the pool cannot give them, with nothing changed but that
        blocks out of every window's sight have been given back.

        `computed` is given exactly once, with the first chunk. Blocks that the step fills can be hit from now on:
        every layer stores keys and values before it attends.
        """
        coordinator, request_id = self._coordinator, request.request_id
        num_tokens = request.num_computed_tokens + num_new_tokens
        if computed is not None:
            num_tokens += computed.num_tokens
        elif coordinator.has_windows:
            coordinator.release_unseen(request_id, self._num_processed_tokens(request))
        num_slots = min(num_tokens + num_lookahead_tokens, self._max_model_len)
        if computed is None and self._needs_nothing(request, num_tokens, num_slots):
            return ()
        num_taken = coordinator.num_blocks_to_take(request_id, num_slots, computed.blocks if computed else None)
        if num_taken > self._pool.num_free_blocks:
            return None
        if computed is not None:
            self._adopt(request, computed)
        new_block_ids: BlockIds = coordinator.grow(request_id, num_slots) if num_taken else ()
        request.life.num_blocks_peak = max(request.life.num_blocks_peak, self.num_blocks_held(request_id))
        if self._enable_prefix_caching:
            self._cache_full_blocks(request, num_tokens)
        self._room[request_id] = coordinator.room(request_id)
        return new_block_ids

    def free(self, request: Request, *, forget: bool = False) -> None:
        """Give up the request's blocks; nothing happens for a request without any.

        What the last steps filled can be found from then on, now that its tokens are known. With `forget` nobody will
        find any of them: what made this request fail may lie in them.
        """
        self._prefix_memo = None
        if self._enable_prefix_caching and request.num_computed_tokens and not forget:
            self._cache_full_blocks(request, request.num_computed_tokens)
        self._coordinator.free(request.request_id, forget=forget)
        self._computed_before.pop(request.request_id, None)
        self._room.pop(request.request_id, None)

    def block_ids(self, request_id: str) -> BlockIds:
        """A copy of the request's block tables."""
        return self._coordinator.block_ids(request_id)

    def num_blocks_held(self, request_id: str) -> int:
        """Blocks that the request has now, in all groups."""
        held = 0
        for group in self._coordinator.groups:
            held += group.num_blocks_held(request_id)
        return held

    def num_blocks_of_its_own(self, request_id: str) -> int:
        """Blocks that become free when the request ends."""
        return sum(group.num_blocks_of_its_own(request_id) for group in self._coordinator.groups)

    def find_divergence(self, request: Request, num_cached_tokens: int) -> Divergence | None:
        """Where the prompt leaves what is cached, when its first tokens are and the rest is not."""
        if self._continuations is None or not self._enable_prefix_caching:
            return None
        hashes = self._coordinator.groups[0].table_hashes(request.block_hashes)
        return self._continuations.find_divergence(request, hashes, num_cached_tokens)

    def shared_prefixes(self, request_ids: list[str]) -> list[SharedPrefix]:
        """Groups of the given requests that begin with equal blocks, all computed before this step.

        Called every step, so the last answer is kept for as long as the same requests run.
        """
        if not self._sharing:
            return []
        memo = self._prefix_memo
        if memo is None or memo.request_ids != request_ids:
            memo = _PrefixMemo(list(request_ids), self._find_shared_prefixes(request_ids))
            self._prefix_memo = None if self._shared_unfilled else memo  # cut short now, longer in the next step
        return [SharedPrefix(prefix.num_blocks, list(prefix.request_ids)) for prefix in memo.prefixes]

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while any request holds blocks."""
        return self._pool.reset_prefix_cache()

    def _needs_nothing(self, request: Request, num_tokens: int, num_slots: int) -> bool:
        """Whether the blocks that a request has suffice and none of them becomes full: so it is in most steps."""
        room = self._room.get(request.request_id)
        if room is None or num_slots > room[0]:
            return False
        return min(num_tokens, len(request.token_ids)) < room[1] or not self._enable_prefix_caching

    def _num_processed_tokens(self, request: Request) -> int:
        """Tokens that no step under way computes: what they alone look at is seen no more, and they are here to stay.

        A step that samples may compute a guess, which is taken back when it turns out wrong.
        """
        processed = request.num_computed_tokens - request.num_output_placeholders
        if self._max_steps_under_way == 1:
            return processed
        oldest = self._step - self._max_steps_under_way
        history = [entry for entry in self._computed_before.get(request.request_id, []) if entry[0] > oldest]
        if not history or history[-1][0] != self._step:
            history.append((self._step, request.num_computed_tokens))
        self._computed_before[request.request_id] = history
        return min(processed, history[0][1])

    def _find_shared_prefixes(self, request_ids: list[str]) -> list[SharedPrefix]:
        first, *others = self._sharing
        members = [(first.block_ids(request_id), request_id) for request_id in request_ids]
        prefixes = choose_shared_prefixes(members, self._shared_unfilled)
        for group in others:
            tables = {request_id: group.block_ids(request_id) for request_id in request_ids}
            prefixes = cut_to_common(prefixes, tables, self._shared_unfilled)
        return prefixes

    def _adopt(self, request: Request, computed: ComputedBlocks) -> None:
        self._coordinator.adopt_hits(request.request_id, computed.blocks)
        if self._unfilled:
            for hits in computed.blocks:
                self._shared_unfilled.update(self._unfilled.intersection([block.block_id for block in hits]))

    def _cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Known tokens only: a draft may still be rejected, and a placeholder has no hash."""
        known = min(num_tokens, request.num_tokens)
        for group in self._coordinator.groups:
            places = group.cache_full_blocks(request.request_id, request.block_hashes, known)
            if places:
                table = group.block_ids(request.request_id)
                self._unfilled.update(table[places.start : places.stop])
                if self._continuations is not None and group.group_id == 0:
                    self._continuations.stored(request, group.table_hashes(request.block_hashes), places)
                if self._events is not None:
                    self._tell_stored(self._events, request, group, places)

    def _tell_stored(self, events: KVEventLog, request: Request, group: GroupManager, places: range) -> None:
        hashes, size = request.block_hashes, group.block_size
        parent = hashes[group.last_hash(places.start - 1)] if places.start else None
        token_ids = request.token_ids[places.start * size : places.stop * size]
        events.stored(group.group_id, [hashes[group.last_hash(place)] for place in places], parent, token_ids)
