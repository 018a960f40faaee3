"""What a scheduler has done: counters of the engine, and in each request's life when it happened."""

from __future__ import annotations

from msgspec.structs import replace

from inferd.engine.core.clock import Clock
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.insight.histogram import count
from inferd.engine.messages import SchedulerStats
from inferd.engine.request import Request


class Ledger:
    """The one owner of the counters. The scheduler tells it of everything at the moment it happens."""

    def __init__(self, kv: KVCacheManager, clock: Clock) -> None:
        self._kv = kv
        self._clock = clock
        self._stats = SchedulerStats(blocks_total=kv.num_total_blocks)
        self._ended: list[Request] | None = None

    @property
    def step(self) -> int:
        """The last one that was scheduled."""
        return self._stats.step

    def now(self) -> float:
        return self._clock()

    def added(self, request: Request) -> None:
        request.added_at_step = self._stats.step
        request.life.queued_at = self._clock()

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """A preempted request that finds its own blocks again is no hit that the client paid less for."""
        if request.life.first_scheduled_at is not None:
            return
        request.life.first_scheduled_at = self._clock()
        request.life.divergence = self._kv.find_divergence(request, num_cached_tokens)
        request.num_cached_tokens = num_cached_tokens
        self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.prefix_queried_tokens += request.num_prompt_tokens
        self._stats.prefix_hit_tokens += num_cached_tokens

    def preempted(self, request: Request) -> None:
        request.num_preemptions += 1
        request.life.interrupt(self._clock())
        self._stats.preemptions += 1

    def gained(self, request: Request, num_tokens: int, now: float) -> None:
        """Output tokens that stand."""
        if num_tokens:
            self._stats.generated_tokens += num_tokens
            request.life.gain(now, request.num_output_tokens)

    def checked(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Draft tokens of one request, and how many of them stood."""
        request.life.num_drafted += num_drafts
        request.life.num_accepted += num_accepted
        for counts, number in ((self._stats.drafted, num_drafts), (self._stats.accepted, num_accepted)):
            counts.extend([0] * (num_drafts - len(counts)))
            for place in range(number):
                counts[place] += 1

    def failed(self, num_corrupted: int) -> None:
        """Requests for which the model computed logits that are no numbers."""
        self._stats.corrupted += num_corrupted

    def finished(self, request: Request) -> None:
        request.life.finished_at = self._clock()
        if self._ended is not None:
            self._ended.append(request)

    def keep_ended(self, wanted: bool) -> None:
        """Whether requests that end are kept for `take_ended`."""
        self._ended = [] if wanted else None

    @property
    def has_ended(self) -> bool:
        """Whether there are any."""
        return bool(self._ended)

    def take_ended(self) -> list[Request]:
        """Those that have ended since the last call."""
        ended = self._ended or []
        if self._ended is not None:
            self._ended = []
        return ended

    def scheduled(self, num_tokens: int) -> int:
        """A step of that many tokens; its number."""
        self._stats.step += 1
        if num_tokens:
            self._stats.step_tokens_sum += num_tokens
            count(self._stats.step_tokens, num_tokens)
        return self._stats.step

    def snapshot(self, *, running: int, waiting: int, deferred: int, paused: int) -> SchedulerStats:
        stats, kv = self._stats, self._kv
        return replace(
            stats,
            running=running,
            waiting=waiting,
            deferred=deferred,
            paused=paused,
            blocks_free=kv.num_free_blocks,
            blocks_cached=kv.num_idle_cached_blocks,
            evictions=kv.num_evictions,
            step_tokens=list(stats.step_tokens),
            drafted=list(stats.drafted),
            accepted=list(stats.accepted),
        )
