"""An engine's answers to whoever wants to know what is going on in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from inferd.engine.config import SchedulerConfig
from inferd.engine.core.clock import Clock
from inferd.engine.core.insight.blocks import draw_blocks
from inferd.engine.core.insight.feed import Pace, RequestChanges
from inferd.engine.core.insight.portrait import draw
from inferd.engine.core.insight.reasons import Why
from inferd.engine.core.insight.scene import Scene
from inferd.engine.core.insight.steps import draw_step
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.output import SchedulerOutput
from inferd.engine.core.pipeline import Landed
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.errors import InvalidRequest
from inferd.engine.insight.records import BlockMap, RequestRecord, StepRecord
from inferd.engine.messages import FeedUpdate, SchedulerStats
from inferd.engine.request import Request


class Insight:
    """Looks, and changes nothing but its own memory of what it has told. The engine's thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        config: SchedulerConfig,
        clock: Clock,
        standstill: Callable[[], Why | None],
    ) -> None:
        """`standstill` says why the engine as a whole is halted, when it is."""
        self._scheduler = scheduler
        self._kv = kv
        self._config = config
        self._clock = clock
        self._standstill = standstill
        self._launched: SchedulerOutput | None = None  # the newest step that computes anything
        self._landed: Landed | None = None  # the newest that has not been told of
        self._num_evictions_told = 0
        self._pace = Pace(clock)
        self._changes: RequestChanges | None = None  # None: nobody has subscribed
        self._is_first = False  # the next update is a snapshot
        self._is_last = False  # nobody wants one after it

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        return {
            "batch_mates": self.batch_mates,
            "block_map": lambda: msgspec.to_builtins(self.block_map()),
            "records": lambda: msgspec.to_builtins(self.records()),
            "subscribe": self.subscribe,
            "unsubscribe": self.unsubscribe,
        }

    def launched(self, output: SchedulerOutput) -> None:
        if output.num_scheduled_tokens:
            self._launched = output

    def landed(self, step: Landed) -> None:
        if step.output.num_scheduled_tokens:
            self._landed = step

    def records(self) -> list[RequestRecord]:
        """Of all unfinished requests, oldest first, as they are now."""
        scene, requests = self._look(self._clock()), self._scheduler.requests.values()
        return [self._draw(request, scene) for request in requests]

    def batch_mates(self, request_id: str) -> list[str]:
        """The other requests of the last step, if this one was in it. Raises `InvalidRequest` for an unknown id."""
        request = self._scheduler.requests.get(request_id)
        if request is None:
            raise InvalidRequest(f"there is no unfinished request {request_id!r}", param="request_id")
        step = self._launched
        if step is None or request.added_at_step >= step.step or request_id not in step.num_scheduled_tokens:
            return []
        return [name for name in step.num_scheduled_tokens if name != request_id]

    def block_map(self) -> BlockMap:
        return draw_blocks(self._kv, self._scheduler.running, self._clock())

    def subscribe(self) -> None:
        """From now on `take_update` has something; the next update is a snapshot, also for one who had subscribed."""
        self._changes = RequestChanges(self._kv, self._config.max_model_len)
        self._scheduler.ledger.keep_ended(True)
        self._num_evictions_told = self._kv.num_evictions
        self._pace.next_at = 0.0
        self._is_first, self._is_last = True, False

    def unsubscribe(self) -> None:
        """`take_update` has the rest once more, at once."""
        self._pace.next_at = 0.0
        self._is_last = True

    @property
    def due_in_s(self) -> float | None:
        """When there may be something to tell although no step runs; None: never."""
        if self._changes is None or not (self._is_first or self._scheduler.requests or self._has_news):
            return None
        return max(self._pace.next_at - self._clock(), 0.0)

    def take_update(self) -> FeedUpdate | None:
        """None when nobody has subscribed, when it is too early, and when nothing has changed."""
        if self._changes is None or not self._pace.is_due:
            return None
        now = self._pace.begin()
        ended = self._scheduler.ledger.take_ended()
        stats = self._scheduler.stats()
        steps = self._take_step(ended, stats)
        requests = self._changes.take(self._scheduler.requests.values(), ended, self._look(now))
        took_s = self._pace.end()
        if self._is_last:
            self._changes = None
            self._scheduler.ledger.keep_ended(False)
        is_snapshot, self._is_first = self._is_first, False
        if not (is_snapshot or requests or steps):
            return None
        return FeedUpdate(now, is_snapshot, requests, steps, stats, self._pace.interval_s, took_s)

    @property
    def _has_news(self) -> bool:
        return self._landed is not None or self._scheduler.ledger.has_ended

    def _look(self, now: float) -> Scene:
        return Scene(
            self._scheduler,
            self._kv,
            self._config,
            last_step=self._launched,
            standstill=self._standstill(),
            now=now,
        )

    def _draw(self, request: Request, scene: Scene) -> RequestRecord:
        blocks = self._kv.num_blocks_held(request.request_id)
        return draw(request, scene, kv_blocks=blocks, context_limit=self._config.max_model_len)

    def _take_step(self, ended: list[Request], stats: SchedulerStats) -> list[StepRecord]:
        """That of the newest step; those between it and the one told before are left out."""
        landed, self._landed = self._landed, None
        if landed is None:
            return []
        evictions, self._num_evictions_told = stats.evictions - self._num_evictions_told, stats.evictions
        requests = {**self._scheduler.requests, **{request.request_id: request for request in ended}}
        budget = self._config.max_num_batched_tokens
        return [draw_step(landed, requests, stats, budget=budget, evictions=evictions)]
