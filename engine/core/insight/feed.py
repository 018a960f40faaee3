"""What has changed since a subscriber was told last: at most ten times a second, and for a small share of the time.

Nothing is computed for anybody unless somebody subscribes.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferd.engine.core.clock import Clock
from inferd.engine.core.insight.portrait import catch_up, decodes_on, draw
from inferd.engine.core.insight.scene import Place, Scene
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.insight.records import Fields, RequestRecord, as_fields, changed_fields
from inferd.engine.request import Request

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 2.0  # however long a look takes
MAX_SHARE = 0.004  # of the engine's time that looks may take


class Pace:
    """When the next look is due: a look that took long is followed by a longer wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_at = 0.0
        self.next_at = 0.0
        self.interval_s = MIN_INTERVAL_S

    @property
    def is_due(self) -> bool:
        return self._clock() >= self.next_at

    def begin(self) -> float:
        """The time of a look that begins now."""
        self._began_at = self._clock()
        return self._began_at

    def end(self) -> float:
        """How long it took."""
        took_s = self._clock() - self._began_at
        self.interval_s = min(max(took_s / MAX_SHARE, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self.next_at = self._began_at + self.interval_s
        return took_s


class RequestChanges:
    """The records as they were told last, one a request."""

    def __init__(self, kv: KVCacheManager, context_limit: int) -> None:
        self._kv = kv
        self._context_limit = context_limit
        self._told: dict[str, RequestRecord] = {}
        self._places: dict[str, Place | None] = {}  # at that time

    def take(self, requests: Iterable[Request], ended: Iterable[Request], scene: Scene) -> list[Fields]:
        """What has changed in all of them, and for the last time in those that have ended."""
        changes = [fields for request in ended if (fields := self._last_words(request, scene))]
        last = scene.last_step
        in_step = last.num_scheduled_tokens if last is not None else {}
        num_in_step = len(in_step)
        may_decode_on = not scene.is_halted
        for request in requests:
            told = self._told.get(request.request_id)
            place = scene.place(request)
            if place is not None and place == self._places.get(request.request_id):
                continue
            self._places[request.request_id] = place
            kv_blocks = self._kv.num_blocks_held(request.request_id)
            if told is not None and may_decode_on and told.id in in_step and decodes_on(told, request):
                fields = catch_up(told, request, kv_blocks=kv_blocks, batch_size=num_in_step)
            else:
                record = draw(request, scene, kv_blocks=kv_blocks, context_limit=self._context_limit)
                fields = as_fields(record) if told is None else changed_fields(told, record)
                self._told[request.request_id] = record
            if fields:
                changes.append(fields)
        return changes

    def _last_words(self, request: Request, scene: Scene) -> Fields:
        record = draw(request, scene, kv_blocks=0, context_limit=self._context_limit)
        told = self._told.pop(request.request_id, None)
        self._places.pop(request.request_id, None)
        return as_fields(record) if told is None else changed_fields(told, record)
