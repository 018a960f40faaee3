"""That no adapter waits for a slot forever while others run one request after the other."""

from __future__ import annotations

MAX_OVERTAKEN = 32


class SlotLine:
    """Requests whose adapter runs already may overtake one that waits for a slot, which makes for fuller batches.

    Not for long: once so many have, no newcomer with an adapter starts before it, so that a slot becomes free.
    """

    def __init__(self) -> None:
        self._first: str | None = None  # the request that has waited longest
        self._num_overtaken = 0

    def wait(self, request_id: str) -> None:
        """It found no slot."""
        if self._first is None:
            self._first, self._num_overtaken = request_id, 0

    def may_pass(self, request_id: str) -> bool:
        return self._first in (None, request_id) or self._num_overtaken < MAX_OVERTAKEN

    def started(self, request_id: str) -> None:
        if self._first == request_id:
            self._first = None
        elif self._first is not None:
            self._num_overtaken += 1

    def left(self, request_id: str) -> None:
        if self._first == request_id:
            self._first = None
