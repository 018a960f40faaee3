"""A reader's side of an engine's feed: the records as the engine has them, and what a slow reader has yet to see."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from inferd.engine.insight.records import Fields, RequestRecord, StepRecord, apply_fields, as_fields
from inferd.engine.messages import FeedUpdate

MAX_STEPS = 300  # kept for a slow reader: half a minute
MAX_ENDED = 10_000  # requests, likewise


class FeedMirror:
    """The unfinished requests of an engine, from its updates in their order."""

    def __init__(self) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.last: FeedUpdate | None = None

    def apply(self, update: FeedUpdate) -> None:
        """Raises `msgspec.ValidationError` for fields of another version."""
        if update.is_snapshot:
            self.records = {}
        for fields in update.requests:
            record = apply_fields(self.records.get(fields["id"]), fields)
            if record.state.has_ended:
                self.records.pop(record.id, None)
            else:
                self.records[record.id] = record
        self.last = update

    def snapshot(self) -> FeedUpdate | None:
        """All there is, as one update; None before the first one."""
        if self.last is None:
            return None
        return replace(self.last, is_snapshot=True, requests=[as_fields(r) for r in self.records.values()], steps=[])


class PendingFeed:
    """Updates merged into one: what lies between is lost, the last state never is."""

    def __init__(self, first: FeedUpdate) -> None:
        self._is_snapshot = False
        self._requests: dict[str, Fields] = {}
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._last = first
        self.put(first)

    def put(self, update: FeedUpdate) -> None:
        if update.is_snapshot:
            self._requests.clear()
            self._is_snapshot = True
        for fields in update.requests:
            self._requests.setdefault(fields["id"], {}).update(fields)
        self._steps.extend(update.steps)
        self._last = update
        self._forget_ended()

    def merged(self) -> FeedUpdate:
        requests, steps = list(self._requests.values()), list(self._steps)
        return replace(self._last, is_snapshot=self._is_snapshot, requests=requests, steps=steps)

    def _forget_ended(self) -> None:
        """A reader that does not read must not cost more and more memory: the longest ended are dropped."""
        if len(self._requests) <= 2 * MAX_ENDED:
            return
        ended = [name for name, fields in self._requests.items() if "finished_at" in fields]
        for name in ended[: max(len(ended) - MAX_ENDED, 0)]:
            del self._requests[name]
